"""From the graph of `torch.export` to IR: the schema of torch_ir, and beside it what that cannot say.

Beyond torch_ir's own converter this reads keyword tensors, regions under `no_grad` and `autocast`, symbolic sizes,
which of several optional tensors a call gave, and which inputs a graph changes in place.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch.fx import GraphModule, Node

from npu_compiler.errors import IRError
from npu_compiler.graph.model import TENSOR_NAMES, unique_name
from npu_compiler.graph.reader import normalize_attr
from npu_compiler.graph.symbolic import symbolic
from npu_runtime.torch_arrays import tensor_to_numpy
from npu_sim.module.decompositions import Decompositions, operands

UNBACKED = ("u", "zuf")  # how the names of sizes begin that depend on data
_GETITEM = "<built-in function getitem>"
_ASSERTIONS = ("_assert", "sym_constrain_range")


@dataclass(frozen=True)
class Reference:
    """A tensor of the IR, and where it comes from: a node's output, a graph input, or (no producer) a weight."""

    name: str
    value: torch.Tensor
    producer: str | None
    index: int = 0

    def meta(self, *, as_input: bool = True) -> dict[str, Any]:
        made = {"producer_node": self.producer, "producer_output_idx": self.index} if as_input else {}
        return {"name": self.name, "shape": sizes_of(self.value), "dtype": dtype_of(self.value), **made}


# What a node of the FX graph stands for: a tensor, several, or a number, flag, string or None.
Value: TypeAlias = Any


@dataclass
class Nodes:
    """Nodes of the IR, as they are read.

    Attributes:
        nodes: Node descriptions in the IR's form.
        root: Tensor name → the tensor whose memory it shares, for views and in-place ops.
        parent: Tensor name → the node that makes it, and the tensor which that looks into, for the same.
        references: Tensor name → the tensor, for all that nodes make.
        written: The tensors whose memory the graph changes, by their root's name.
    """

    nodes: list[dict[str, Any]] = field(default_factory=list)
    root: dict[str, str] = field(default_factory=dict)
    parent: dict[str, tuple[dict[str, Any], str]] = field(default_factory=dict)
    references: dict[str, Reference] = field(default_factory=dict)
    written: set[str] = field(default_factory=set)
    _names: set[str] = field(default_factory=set)
    _decompositions: Decompositions = field(default_factory=Decompositions)

    def read(self, graph_module: GraphModule, arguments: Sequence[Value], prefix: str = "") -> Value:
        """Add a graph's nodes; returns what its output node returns.

        Args:
            arguments: What its placeholders stand for, in order.
            prefix: What the names of its nodes begin with.

        Raises:
            IRError: it holds control flow that depends on data, or another op that IR has no form for.
        """
        known: dict[Node, Value] = {}
        given = iter(arguments)
        result: Value = None
        for node in graph_module.graph.nodes:
            match node.op:
                case "placeholder":
                    known[node] = next(given)
                case "get_attr":
                    known[node] = _attribute(graph_module, str(node.target))
                case "call_function":
                    known[node] = self._call(node, known, prefix)
                case "output":
                    result = _resolve(node.args[0], known)
                case _:
                    raise IRError(f"node '{node.name}': torch.export left a {node.op} in the graph")
        return result

    def take_name(self, stem: str) -> str:
        """A name that nothing in the graph has yet; tensors and nodes share them."""
        name = unique_name(stem, self._names)
        self._names.add(name)
        return name

    def _call(self, node: Node, known: Mapping[Node, Value], prefix: str) -> Value:
        value, target = node.meta.get("val"), node.target
        args, kwargs = _resolve(node.args, known), _resolve(node.kwargs, known)
        if target is operator.getitem and not _is_references(args[0]):
            return args[0][args[1]]
        if isinstance(target, torch._ops.HigherOrderOperator):
            return self._region(node, args, kwargs)
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool, int, float, bool)):
            # What depends on data may be there only to be asserted; an op that reads it is refused.
            return value if depends_on_data(value) else plain_number(value, f"node '{node.name}'")
        if value is None and any(part in str(target) for part in _ASSERTIONS):
            return None
        if target is operator.getitem:
            return self._element(node, args[0], args[1], prefix)
        if not isinstance(target, torch._ops.OpOverload):
            raise IRError(f"node '{node.name}': {target} is not an op of PyTorch, and IR has no form for it")
        if target is torch.ops.aten.as_strided.default and not _is_packed(args[0].value):
            raise IRError(f"node '{node.name}': as_strided of a tensor that is itself a view, whose strides IR drops")
        if torch.Tag.inplace_view in target.tags and args[0].name not in self.references:
            raise IRError(
                f"node '{node.name}': '{target}' gives argument '{args[0].name}' another shape; do so to a view"
            )
        inputs, attrs = _bind(node.name, target._schema, args, kwargs)
        name = unique_name(prefix + node.name, self._names)
        outputs = _outputs(name, value)
        references = [x for x in outputs if x is not None]
        description = _description(name, str(target), inputs, references, attrs)
        weights = frozenset(x.name for x in inputs if x.producer is None)
        decomposition = self._decompositions.find(node, description, weights)
        if decomposition is not None:
            return self.read(decomposition, [known[x] for x in operands(node)], f"{prefix}{node.name}_")
        self._names.add(name)
        self._append(description, references)
        self._note_memory(target._schema, args, kwargs, outputs)
        if isinstance(value, torch.Tensor):
            return references[0]
        return outputs if outputs else None

    def _element(self, node: Node, sources: Sequence[Reference | None], index: int, prefix: str) -> Reference | None:
        if sources[index] is None:
            return None
        name = self.take_name(prefix + node.name)
        out = Reference(name, node.meta["val"], name)
        source = sources[index]
        assert source is not None
        inputs = [x for x in sources if x is not None]
        self._append(_description(name, _GETITEM, inputs, [out], {"index": source.index}), [out])
        self._note_shared(out.name, source.name)
        return out

    def lineage(self, name: str) -> tuple[dict[str, Any], ...]:
        """The nodes that lead from the tensor whose memory this one shares to it, in order."""
        nodes: list[dict[str, Any]] = []
        while name in self.parent:
            node, name = self.parent[name]
            nodes.append(node)
        return tuple(reversed(nodes))

    def _note_shared(self, name: str, source: str) -> None:
        """Note that the last node's output looks into the memory of a tensor."""
        self.root[name] = self.root.get(source, source)
        self.parent[name] = (self.nodes[-1], source)

    def _append(self, description: dict[str, Any], outputs: Sequence[Reference]) -> None:
        self.nodes.append(description)
        self.references.update({x.name: x for x in outputs})

    def _note_memory(
        self, schema: Any, args: Sequence[Value], kwargs: Mapping[str, Value], outputs: Sequence[Reference | None]
    ) -> None:
        """Note which outputs share an argument's memory and which arguments are changed, as the schema says."""
        values = {argument.name: value for argument, value in zip(schema.arguments, args, strict=False)} | dict(kwargs)
        sources: dict[str, Reference] = {}
        for argument in schema.arguments:
            alias = argument.alias_info
            value = values.get(argument.name)
            for reference in value if isinstance(value, (list, tuple)) else [value]:
                if alias is not None and isinstance(reference, Reference):
                    sources.update(dict.fromkeys(alias.before_set, reference))
                    if alias.is_write:
                        self.written.add(self.root.get(reference.name, reference.name))
        for index, out in enumerate(outputs):
            alias = schema.returns[min(index, len(schema.returns) - 1)].alias_info if schema.returns else None
            if out is None or alias is None or not sources:
                continue
            known = [sources[x] for x in alias.before_set if x in sources]
            source = known[0] if known else next(iter(sources.values()))  # lists of views do not say of which
            if not _is_cast(schema, source, out):
                self._note_shared(out.name, source.name)

    def _region(self, node: Node, args: Sequence[Value], kwargs: Mapping[str, Value]) -> Value:
        """A region of the graph under `no_grad` or `autocast`, read in place."""
        kind = str(node.target)
        if kind.endswith("wrap_with_set_grad_enabled"):
            return self.read(args[1], args[2:])
        if kind.endswith("wrap_with_autocast"):
            device, dtype, enabled, _, region, *operands = args
            if not enabled:
                return self.read(region, operands)
            return self.read(_with_casts(region, operands, device, dtype), operands)
        raise IRError(
            f"node '{node.name}': '{kind}' is control flow that depends on data, or another op that runs a function; "
            "a program is a fixed sequence of ops"
        )


def describe_call(node: Node) -> dict[str, Any]:
    """A call of an op as IR, by itself: its inputs are named after the nodes that make them.

    Raises:
        IRError: IR has no form for it.
    """
    known: dict[Node, Value] = {x: _value_of(x) for x in operands(node)}
    target: Any = node.target
    args, kwargs = _resolve(node.args, known), _resolve(node.kwargs, known)
    inputs, attrs = _bind(node.name, target._schema, args, kwargs)
    outputs = [x for x in _outputs(node.name, node.meta.get("val")) if x is not None]
    return _description(node.name, str(target), inputs, outputs, attrs)


def _value_of(node: Node) -> Value:
    """A tensor or a number that a node makes, whatever makes it."""
    value = node.meta.get("val")
    if isinstance(value, (torch.Tensor, list, tuple)):
        outputs = _outputs(node.name, value)
        return outputs[0] if isinstance(value, torch.Tensor) else outputs
    return plain_number(value, f"node '{node.name}'")


def _description(
    name: str, op_type: str, inputs: Sequence[Reference], outputs: Sequence[Reference], attrs: dict[str, Any]
) -> dict[str, Any]:
    """A node in the IR's form."""
    described = [x.meta(as_input=False) for x in outputs]
    return {
        "name": name,
        "op_type": op_type,
        "inputs": [x.meta() for x in inputs],
        "outputs": described,
        "attrs": attrs,
    }


def _is_cast(schema: Any, source: Reference, out: Reference) -> bool:
    """Whether an op that may return its argument itself has made a tensor of another dtype or device."""
    is_same = source.value.dtype == out.value.dtype and source.value.device == out.value.device
    return schema.name == "aten::to" and not is_same


def _is_packed(value: torch.Tensor) -> bool:
    """Whether a tensor is all of its memory, in the order of its dimensions."""
    return value.is_contiguous() and value.storage_offset() == 0


def sizes_of(value: torch.Tensor) -> list[Any]:
    return [plain_number(size, "a tensor's shape") for size in value.shape]


def constant_of(value: torch.Tensor) -> dict[str, Any]:
    """The IR's form of a constant; its data as an array."""
    return {"data": tensor_to_numpy(value.cpu()), "dtype": dtype_of(value), "shape": sizes_of(value)}


def dtype_of(value: torch.Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")


def depends_on_data(value: Any) -> bool:
    """Whether a number is symbolic and depends on the values of a tensor, such as `x.max().item()`."""
    if not isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return False
    return any(str(symbol).startswith(UNBACKED) for symbol in value.node.expr.free_symbols)


def plain_number(value: Any, where: str) -> Any:
    """A number as it is; a symbolic one as an expression.

    Args:
        where: What has the number, as the message's first words.

    Raises:
        IRError: the number depends on data.
    """
    if not isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return value
    expression = value.node.expr
    if depends_on_data(value):
        raise IRError(f"{where}: a size depends on the values of a tensor, so no program of static shapes exists")
    if not expression.free_symbols:
        if isinstance(value, torch.SymBool):
            return bool(expression)
        return float(expression) if isinstance(value, torch.SymFloat) else int(expression)
    return symbolic(str(expression))


def _attribute(graph_module: GraphModule, path: str) -> Any:
    value: Any = graph_module
    for part in path.split("."):
        value = getattr(value, part)
    return value


def _resolve(value: Any, known: Mapping[Node, Value]) -> Value:
    if isinstance(value, Node):
        return known[value]
    if isinstance(value, (list, tuple)):
        return [_resolve(item, known) for item in value]
    if isinstance(value, Mapping):
        return {key: _resolve(item, known) for key, item in value.items()}
    if isinstance(value, slice):
        return slice(*(_resolve(x, known) for x in (value.start, value.stop, value.step)))
    return value


def _is_references(value: Value) -> bool:
    """Whether a value is the outputs of an IR node, not of a region that was read in place."""
    if not isinstance(value, tuple):
        return False
    return all(isinstance(x, Reference) for x in value if x is not None)


def _outputs(name: str, value: Any) -> tuple[Reference | None, ...]:
    """An op's outputs in order; those that are no tensors are None."""
    if isinstance(value, torch.Tensor):
        return (Reference(name, value, name),)
    made: list[Reference | None] = []
    index = 0
    for position, item in enumerate(value if isinstance(value, (list, tuple)) else ()):
        is_tensor = isinstance(item, torch.Tensor)
        made.append(Reference(f"{name}_{position}", item, name, index) if is_tensor else None)
        index += is_tensor
    return tuple(made)


def _bind(
    where: str, schema: Any, args: Sequence[Value], kwargs: Mapping[str, Value]
) -> tuple[list[Reference], dict[str, Any]]:
    """An op's tensors in the schema's order, and its other arguments as attributes."""
    inputs: list[Reference] = []
    attrs: dict[str, Any] = {}
    given: list[str] = []
    sizes: list[int] = []
    masks: list[list[bool]] = []
    tensors = [argument.name for argument in schema.arguments if "Tensor" in str(argument.type)]
    optional = {argument.name for argument in schema.arguments if str(argument.type) == "Optional[Tensor]"}
    for position, argument in enumerate(schema.arguments):
        if position < len(args):
            value = args[position]
        elif argument.name in kwargs:
            value = kwargs[argument.name]
        else:
            continue
        is_list = "Tensor" in str(argument.type) and isinstance(value, (list, tuple))
        if isinstance(value, Reference):
            inputs.append(value)
            given.append(argument.name)
        elif is_list and all(x is None or isinstance(x, Reference) for x in value):
            found = [x for x in value if x is not None]
            inputs += found
            given.append(argument.name)
            sizes.append(len(found))
            if len(found) < len(value):
                masks.append([x is None for x in value])
        elif value is not None or argument.name not in tensors:
            attrs[argument.name] = _plain(value, f"node '{where}': argument '{argument.name}'")
    if sizes:
        attrs["_tensor_list_sizes"] = sizes
    if masks:
        attrs["_tensor_list_none_masks"] = masks
    if 0 < len(optional.intersection(given)) < len(optional):
        attrs[TENSOR_NAMES] = given  # or nobody could tell which
    return inputs, attrs


def _plain(value: Value, where: str) -> Any:
    if isinstance(value, Reference):
        raise IRError(f"{where} depends on the values of a tensor")
    if isinstance(value, Mapping):
        return dict(value)  # a symbolic size
    if isinstance(value, (list, tuple)):
        return [_plain(item, where) for item in value]
    return normalize_attr(plain_number(value, where))


def _with_casts(region: GraphModule, operands: Sequence[Value], device: str, dtype: torch.dtype | None) -> GraphModule:
    """A region under autocast, traced again as ops that cast, which torch.export leaves out."""
    from torch.fx.experimental.proxy_tensor import make_fx

    fakes = [x.value if isinstance(x, Reference) else x for x in operands]

    def run(*tensors: Any) -> Any:
        with torch.autocast(device, dtype, enabled=True, cache_enabled=False):
            return region(*tensors)

    modes = [x.fake_mode for x in fakes if isinstance(x, torch._subclasses.FakeTensor)]
    with modes[0] if modes else torch.no_grad():
        traced: GraphModule = make_fx(run)(*fakes)
    return traced
