"""`IRBuilder`: small IR dicts, written as one writes the calls.

    g = IRBuilder()
    x = g.input("x", 2, 3)
    w = g.weight("fc.weight", 4, 3)
    y = g("aten.linear.default", x, w)
    g.output(g("aten.relu.default", y))
    program = compile(g.ir())

Arguments are those of the op's schema, in order or by name; a tensor is the name that an earlier call returned. Shapes
and dtypes of results come from PyTorch's meta kernels; an op that PyTorch does not have takes them as
`out=(shape, dtype)`, or as a list of such pairs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

GETITEM = "<built-in function getitem>"
OutSpec = tuple[Sequence[int], str]


class Tensor(str):
    """A tensor's name. Its own type, so that an op's string attributes are not taken for tensors."""


class IRBuilder:
    """Collects a graph in the form that `torch_ir` writes."""

    def __init__(self, name: str = "test") -> None:
        self.name = name
        self.metas: dict[str, dict[str, Any]] = {}
        self.inputs: list[str] = []
        self.outputs: list[str] = []
        self.weights: dict[str, str] = {}
        self.constants: dict[str, np.ndarray] = {}
        self.nodes: list[dict[str, Any]] = []
        self.composites: list[dict[str, Any]] = []
        self._names: set[str] = set()

    def input(self, name: str, *shape: int, dtype: str = "float32") -> Tensor:
        self.inputs.append(name)
        return self._tensor(name, shape, dtype, name, 0)

    def weight(self, key: str, *shape: int, dtype: str = "float32") -> Tensor:
        """A weight under its `state_dict` key; in the graph it is called `p_<key>`, as `torch.export` does."""
        name = "p_" + key.replace(".", "_")
        self.weights[name] = key
        return self._tensor(name, shape, dtype, None, 0)

    def constant(self, key: str, value: Any) -> Tensor:
        """A lifted tensor constant: an array, or numbers that get the dtype which PyTorch gives them."""
        array = value if isinstance(value, np.ndarray) else torch.tensor(value).numpy()
        name = self.weight(key, *array.shape, dtype=array.dtype.name)
        self.constants[key] = array
        return name

    def __call__(
        self,
        op_type: str,
        /,  # ops have an argument called `self`
        *args: Any,
        name: str | None = None,
        out: OutSpec | list[OutSpec] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Add a node; returns its output, or the tuple of its outputs if it has several."""
        schema = _schema(op_type)
        given = _by_name(schema, args, kwargs)
        tensors = [x for _, value in given for x in _tensors(value)]
        if out is None:
            results = _infer(op_type, [(key, self._meta_tensors(value)) for key, value in given])
        else:
            results = [(tuple(shape), dtype) for shape, dtype in (out if isinstance(out, list) else [out])]
        node = self._unique(name or op_type.split(".")[1 if "." in op_type else 0].strip("<>").split(" ")[-1])
        names = [node] if len(results) == 1 else [f"{node}_{index}" for index in range(len(results))]
        made = tuple(self._tensor(x, *results[index], node, index) for index, x in enumerate(names))
        self.nodes.append(
            {
                "name": node,
                "op_type": op_type,
                "inputs": [self.metas[x] for x in tensors],
                "outputs": [self._bare(x) for x in made],
                "attrs": _attributes(given, _required(schema)),
            }
        )
        return made[0] if len(made) == 1 else made

    def getitem(self, pieces: Sequence[Tensor], index: int) -> Tensor:
        """One output of a node that has several, the way `torch.export` takes it."""
        meta = self.metas[pieces[index]]
        spec = (meta["shape"], meta["dtype"])
        return self(GETITEM, *pieces, index=index, out=spec)  # type: ignore[no-any-return]

    @contextmanager
    def composite(self, op_type: str, *args: Any, **kwargs: Any) -> Iterator[list[Tensor]]:
        """The nodes made within compute a call of an op; the block appends the op's results to the list."""
        results: list[Tensor] = []
        first = len(self.nodes)
        yield results
        parts = [node["name"] for node in self.nodes[first:]]
        whole = IRBuilder()
        whole.metas, whole._names = dict(self.metas), set(self._names)
        whole(op_type, *args, **kwargs)
        (node,) = whole.nodes
        self._names.add(node["name"])
        self.composites.append({"node": {**node, "outputs": [self.metas[x] for x in results]}, "parts": parts})

    def output(self, *tensors: Tensor) -> IRBuilder:
        self.outputs += tensors
        return self

    def ir(self) -> dict[str, Any]:
        """The IR dict."""
        return {
            "model_name": self.name,
            "graph_inputs": [self._bare(x) for x in self.inputs],
            "graph_outputs": [self.metas[x] for x in self.outputs],
            "weights": [{**self._bare(name), "name": key} for name, key in self.weights.items()],
            "weight_name_mapping": dict(self.weights),
            "constants": {k: {"data": v.tolist(), "dtype": v.dtype.name} for k, v in self.constants.items()},
            "nodes": list(self.nodes),
            "composites": list(self.composites),
        }

    def shape(self, tensor: str) -> tuple[int, ...]:
        return tuple(self.metas[tensor]["shape"])

    def dtype(self, tensor: str) -> str:
        return str(self.metas[tensor]["dtype"])

    def _unique(self, stem: str) -> str:
        name, suffix = stem, 0
        while name in self._names or name in self.metas:
            suffix += 1
            name = f"{stem}_{suffix}"
        self._names.add(name)
        return name

    def _tensor(self, name: str, shape: Sequence[int], dtype: str, producer: str | None, index: int) -> Tensor:
        assert name not in self.metas, f"tensor '{name}' is there already"
        self.metas[name] = {"name": name, "shape": list(shape), "dtype": dtype}
        if producer is not None:
            self.metas[name] |= {"producer_node": producer, "producer_output_idx": index}
        return Tensor(name)

    def _bare(self, name: str) -> dict[str, Any]:
        return {key: self.metas[name][key] for key in ("name", "shape", "dtype")}

    def _meta_tensors(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            meta = self.metas[value]
            return torch.empty(meta["shape"], dtype=getattr(torch, meta["dtype"]), device="meta")
        return [self._meta_tensors(x) for x in value] if isinstance(value, (list, tuple)) else value


def _function(op_type: str) -> Any:
    namespace, name, overload = op_type.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), name), overload)


def _schema(op_type: str) -> Any:
    return _function(op_type)._schema if op_type.startswith("aten.") and op_type.count(".") == 2 else None


def _by_name(schema: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[tuple[str, Any]]:
    """(argument name, value) in schema order; without a schema, positional arguments are all tensors."""
    if schema is None:
        return [*((f"input{index}", value) for index, value in enumerate(args)), *kwargs.items()]
    names = [argument.name for argument in schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    unknown = given.keys() - set(names)
    assert not unknown and len(args) <= len(names), f"{schema.name} has no argument {unknown or args[len(names) :]}"
    return [(name, given[name]) for name in names if name in given]


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _required(schema: Any) -> set[str]:
    """The arguments without a default that are no tensors: `torch_ir` records them even if they are None."""
    arguments = schema.arguments if schema is not None else ()
    return {x.name for x in arguments if not x.has_default_value() and "Tensor" not in str(x.type)}


def _attributes(given: list[tuple[str, Any]], required: set[str]) -> dict[str, Any]:
    attrs: dict[str, Any] = {}
    sizes, masks = [], []
    for name, value in given:
        tensors = list(_tensors(value))
        if isinstance(value, (list, tuple)) and tensors:
            sizes.append(len(tensors))
            masks += [[x is None for x in value]] if None in value else []
        elif not tensors and (value is not None or name in required):
            attrs[name] = list(value) if isinstance(value, tuple) else value
    if sizes:
        attrs["_tensor_list_sizes"] = sizes
    if masks:
        attrs["_tensor_list_none_masks"] = masks
    return attrs


def _infer(op_type: str, given: list[tuple[str, Any]]) -> list[tuple[tuple[int, ...], str]]:
    function = _function(op_type)
    values = {name: _torch_value(name, value) for name, value in given}
    if not any(isinstance(x, torch.Tensor) for v in values.values() for x in (v if isinstance(v, list) else [v])):
        values["device"] = torch.device("meta")
    result = function(**values)
    results = result if isinstance(result, (tuple, list)) else [result]
    return [(tuple(x.shape), str(x.dtype).removeprefix("torch.")) for x in results if isinstance(x, torch.Tensor)]


def _torch_value(name: str, value: Any) -> Any:
    return getattr(torch, value.removeprefix("torch.")) if name == "dtype" and isinstance(value, str) else value
