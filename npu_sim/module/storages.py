"""Detection of traced tensors that share memory, by the storages that PyTorch gave them in tracing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import GraphModule, Interpreter, Node
from torch.utils import _pytree as pytree

from npu_compiler.errors import IRError

_REGIONS = ("wrap_with_set_grad_enabled", "wrap_with_autocast")


class Storages:
    """Groups of traced tensors that share memory.

    Args:
        replayed: For a trace in which storages are not reliable: identity of a tensor → the tensor of a second trace in
            which they are. None: all storages are reliable.
    """

    def __init__(self, replayed: Mapping[int, torch.Tensor] | None = None) -> None:
        self._replayed = replayed or {}
        self._substitutes: dict[int, int] = {}

    def are_one(self, first: torch.Tensor, second: torch.Tensor) -> bool:
        """Whether two traced tensors share memory."""
        one, other = (self._storage(x) for x in (first, second))
        return one is not None and one == other

    def substitute(self, placeholder: torch.Tensor, argument: torch.Tensor) -> None:
        """Treat the memory of a placeholder, which another trace allocated by itself, as that of its argument here."""
        own, given = _storage(placeholder), self._storage(argument)
        if own is not None and given is not None:
            self._substitutes[own] = given

    def _storage(self, value: torch.Tensor) -> int | None:
        storage = _storage(self._replayed.get(id(value), value))
        return None if storage is None else self._substitutes.get(storage, storage)


def storages_of(graph_module: GraphModule) -> Storages:
    """Return which of a graph's traced tensors share memory.

    The graph is traced again if its own tensors are not reliable. Tensors of a graph read from a file have the right
    strides, but each has memory of its own. In a graph that writes in place, inactive dropout must return its argument
    itself, of which tracing made a copy.
    """
    alike = Storages()
    is_told: bool | None = None
    has_dropout = writes = False
    regions = [x for x in graph_module.modules() if isinstance(x, GraphModule)]
    for node in (node for region in regions for node in region.graph.nodes):
        if isinstance(node.target, torch._ops.HigherOrderOperator) and not str(node.target).endswith(_REGIONS):
            return alike  # which is refused where it is read
        schema = getattr(node.target, "_schema", None) if node.op == "call_function" else None
        if schema is None:
            continue
        has_dropout |= returns_its_argument(node.target, node.args)
        writes |= bool(schema.is_mutable)
        if is_told or not any(x.alias_info is not None for x in schema.returns):
            continue
        inputs = [x.meta["val"] for x in node.all_input_nodes if isinstance(x.meta.get("val"), torch.Tensor)]
        outputs = [x for x in pytree.tree_leaves(node.meta.get("val")) if isinstance(x, torch.Tensor)]
        if inputs and outputs:
            is_told = any(alike.are_one(x, out) for x in inputs for out in outputs)
    return _replay(graph_module) if is_told is False or (has_dropout and writes) else alike


def returns_its_argument(target: Any, args: Sequence[Any]) -> bool:
    """Whether a call is dropout that drops nothing, so that its result is its argument."""
    return target is torch.ops.aten.dropout.default and (args[1] == 0 or not args[2])


def overlaps_itself(value: torch.Tensor) -> bool:
    """Whether elements of a tensor share memory, as those of an expanded tensor do.

    Strides that are not nested in each other count as sharing; symbolic strides count only if they are 0.
    """
    dims = [
        (stride, size)
        for size, stride in zip(value.shape, value.stride(), strict=True)
        if type(size) is not int or size > 1
    ]
    if any(type(stride) is int and stride == 0 for stride, _ in dims):
        return not any(type(size) is int and size == 0 for size in value.shape)
    if any(type(x) is not int for dim in dims for x in dim):
        return False
    reach = 0
    for stride, size in sorted(dims):
        if stride <= reach:
            return 0 not in value.shape
        reach += stride * (size - 1)
    return False


def _replay(graph_module: GraphModule) -> Storages:
    placeholders = [node.meta.get("val") for node in graph_module.graph.nodes if node.op == "placeholder"]
    mode = next((x.fake_mode for x in placeholders if isinstance(x, FakeTensor)), None)
    if mode is None:
        return Storages()
    recorder = _Recorder(graph_module, {})
    try:
        # With its Python forms an op asks for symbolic sizes; its C++ form would fix them to those of the example.
        with mode, torch.no_grad(), enable_python_dispatcher() if mode.shape_env is not None else nullcontext():
            recorder.run(*(x if isinstance(x, FakeTensor) else _without_data(x, mode) for x in placeholders))
    except Exception as error:  # whatever PyTorch's ops raise
        raise IRError("PyTorch cannot trace the exported program again; export it with this version") from error
    return Storages(recorder.replayed)


class _Recorder(Interpreter):
    """Runs a graph on tensors without data, and records the result for each traced tensor."""

    def __init__(self, graph_module: GraphModule, replayed: dict[int, torch.Tensor]) -> None:
        super().__init__(graph_module)
        self.replayed = replayed

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        traced = pytree.tree_leaves(n.meta.get("val"))
        for before, now in zip(traced, pytree.tree_leaves(result), strict=False):
            if isinstance(before, torch.Tensor) and isinstance(now, torch.Tensor):
                self.replayed[id(before)] = now
        return result

    def call_function(self, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        region = next((x for x in args if isinstance(x, GraphModule)), None)
        if region is not None and str(target).endswith(_REGIONS):
            return _Recorder(region, self.replayed).run(*args[list(args).index(region) + 1 :])
        if returns_its_argument(target, args):
            return args[0]
        return super().call_function(target, tuple(args), dict(kwargs))


def _without_data(value: Any, mode: FakeTensorMode) -> Any:
    return mode.from_tensor(value, static_shapes=True) if isinstance(value, torch.Tensor) else value


def _storage(value: torch.Tensor) -> int | None:
    try:
        return int(value.untyped_storage()._cdata)
    except NotImplementedError:  # of a sparse tensor
        return None
