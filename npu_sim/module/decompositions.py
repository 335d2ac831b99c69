"""Decomposition of ops that the device lacks into ops that it has, before the graph is divided among devices.

Given:   y = aten.addr(x, a, b)                       # no row in the op table
Result:  u = unsqueeze(a, 1);  v = mul(u, b);  y = add(v, x)

Only that node changes. Ops that the device can run are left as written, since fusions look for them; in-place ops,
views, names and symbolic sizes around the node stay too. A decomposition is used only if all of its ops run on the
device; otherwise the node stays, and PyTorch runs it on the CPU. For that reason, ops that draw random numbers stay.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._decomp import decomposition_table
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from npu_compiler.errors import IRError
from npu_compiler.graph.model import IRGraph, OpNode, TensorSpec
from npu_compiler.graph.symbolic import specialize
from npu_compiler.graph.weight_recipe import from_key
from npu_compiler.op_support import unsupported_reason
from npu_compiler.ops.registry import find_op, is_assertion, is_in_place
from npu_sim.module.own_decompositions import OWN, STAYS

LARGEST = 4000  # ops in a decomposition; a longer one, such as an LSTM's over many steps, takes too long to compile
DECOMPOSITION = "npu_sim.decomposition"  # key of a node's metadata, in a decomposition: the graph that replaces it
_NAMED_TUPLES = "torch._prims_common.wrappers"  # calls of its functions make a named tuple of a decomposition's results
_DEEPEST = 8  # levels of decompositions within decompositions

Function = Callable[..., Any]


class TooLong(Exception):
    """Raised when a decomposition has more ops than `LARGEST`."""


@dataclass
class Decompositions:
    """Decompositions of the nodes of one graph; equal calls share one.

    Attributes:
        describe: Returns a call as IR, or raises `IRError` if IR cannot express it.
    """

    describe: Callable[[Node], dict[str, Any]]
    _traced: dict[Any, GraphModule | None] = field(default_factory=dict)

    def find(self, node: Node, description: Mapping[str, Any], weights: frozenset[str]) -> GraphModule | None:
        """Return the graph that replaces a call, or None if the call stays.

        The graph's placeholders correspond to the nodes that `operands` lists. A call stays if the device can run it,
        or cannot run any of its decompositions.

        Args:
            node: The call.
            description: The call as IR.
            weights: The names of the call's inputs that are weights.
        """
        if DECOMPOSITION in node.meta:
            replacement: GraphModule | None = node.meta[DECOMPOSITION]
            return replacement
        if not _is_dense(node) or not _is_lacking(node, description, weights):
            return None
        return self._decomposition(node, ())

    def _decomposition(self, node: Node, within: tuple[Any, ...]) -> GraphModule | None:
        key = _key(node)
        if key not in self._traced:
            self._traced[key] = self._first_that_runs(node, (*within, node.target))
        return self._traced[key]

    def _first_that_runs(self, node: Node, within: tuple[Any, ...]) -> GraphModule | None:
        if len(within) > _DEEPEST or _stays(node):
            return None
        for function, is_composite in _functions(node.target):
            graph_module = _trace(function, node, pre_dispatch=not is_composite)
            if graph_module is not None and self._runs(graph_module, within):
                return graph_module
        return None

    def _runs(self, graph_module: GraphModule, within: tuple[Any, ...]) -> bool:
        """Whether the device can run all nodes of a graph, where nodes that it lacks may be decomposed further."""
        nodes = [node for node in graph_module.graph.nodes if node.op == "call_function"]
        return len(nodes) <= LARGEST and all(self._runs_node(node, within) for node in nodes)

    def _runs_node(self, node: Node, within: tuple[Any, ...]) -> bool:
        if node.target is operator.getitem or not isinstance(node.meta.get("val"), (torch.Tensor, list, tuple)):
            return not isinstance(node.target, torch._ops.HigherOrderOperator)
        if not isinstance(node.target, torch._ops.OpOverload):
            return False
        try:
            description = self.describe(node)
        except IRError:
            return False
        if not _is_lacking(node, description, frozenset()):
            return True
        if node.target in within:
            return False
        node.meta[DECOMPOSITION] = self._decomposition(node, within)
        return node.meta[DECOMPOSITION] is not None


def _stays(node: Node) -> bool:
    """Whether a call is never decomposed."""
    args, kwargs = pytree.tree_map_only(Node, lambda x: x.meta.get("val"), (node.args, node.kwargs))
    return node.target in STAYS and STAYS[node.target](*args, **kwargs)


def operands(node: Node) -> list[Node]:
    """Return the nodes that a call reads, each once."""
    leaves = pytree.tree_leaves((node.args, node.kwargs))
    return list(dict.fromkeys(leaf for leaf in leaves if isinstance(leaf, Node)))


def _functions(target: Any) -> Iterator[tuple[Function, bool]]:
    """Yield functions that compute an op by other ops, and whether the function is the op itself.

    They are, in order: this package's own decompositions, those of PyTorch's tables, the implementation of PyTorch's
    primitive ops, the op itself if PyTorch composes it of other ops, and the out-of-place form of an in-place op.
    """
    if target in OWN:
        yield OWN[target], False
    if target in decomposition_table:
        yield decomposition_table[target], False
    if callable(impl := getattr(target, "impl_aten", None)):
        yield impl, False
    if target._can_decompose():
        yield target, True
    if is_in_place(str(target)) and torch.Tag.inplace_view not in target.tags:
        plain = getattr(torch.ops.aten, target._schema.name.removeprefix("aten::")[:-1], None)
        overload = getattr(plain, target._overloadname, None)
        if overload is not None:
            yield lambda x, *args, **kwargs: x.copy_(overload(x, *args, **kwargs)), False


def _is_lacking(node: Node, description: Mapping[str, Any], weights: frozenset[str]) -> bool:
    """Whether the device lacks the op of a call, or cannot run it with the dtypes and the traced example's sizes."""
    op_type = str(node.target)
    if is_assertion(op_type):
        return False
    if find_op(op_type) is None:
        return True
    try:
        hints = _hints(node)
        call = specialize(description, hints) if hints else description
        tensors = {x["name"]: _spec(x) for x in (*call["inputs"], *call["outputs"])}
        inputs = [x["name"] for x in call["inputs"]]
        call_node = OpNode(
            call["name"], op_type, tuple(inputs), tuple(x["name"] for x in call["outputs"]), dict(call["attrs"])
        )
        given = [x for x in dict.fromkeys(inputs) if x not in weights]
        recipes = {name: from_key(name) for name in weights}
        outputs = list(call_node.outputs)
        graph = IRGraph(call["name"], [call_node], tensors, given, outputs, outputs, recipes, {})
        return unsupported_reason(call_node, graph) is not None
    except IRError:
        return False  # whoever compiles the call says what is wrong with it


def _is_dense(node: Node) -> bool:
    """Whether all tensors that a call reads and returns are dense, that is, stored with strides."""
    values = pytree.tree_leaves([node.meta.get("val"), *(x.meta.get("val") for x in operands(node))])
    return all(x.layout is torch.strided for x in values if isinstance(x, torch.Tensor))


def _spec(described: Mapping[str, Any]) -> TensorSpec:
    return TensorSpec(described["name"], tuple(described["shape"]), described["dtype"])


def _hints(node: Node) -> dict[str, int]:
    """Return symbol → its value in the traced example, for all symbolic sizes; empty if sizes are static."""
    env = _shape_env(node)
    if env is None:
        return {}
    values = env.backed_var_to_val if hasattr(env, "backed_var_to_val") else env.var_to_val
    return {str(symbol): int(value) for symbol, value in values.items()}


def mode_of(node: Node) -> FakeTensorMode | None:
    """The mode of the tensors without data that a call was traced with; None if it has no such tensors."""
    values = pytree.tree_leaves([node.meta.get("val"), *(x.meta.get("val") for x in operands(node))])
    return next((x.fake_mode for x in values if isinstance(x, FakeTensor)), None)


def _shape_env(node: Node) -> Any:
    mode = mode_of(node)
    return None if mode is None else mode.shape_env


def _key(node: Node) -> Any:
    """Return a key that is equal for two calls if they have the same decomposition."""
    positions = {operand: position for position, operand in enumerate(operands(node))}
    leaves, spec = pytree.tree_flatten((node.args, node.kwargs))
    described = tuple(
        (positions[x], _described(x.meta.get("val"))) if isinstance(x, Node) else _described(x) for x in leaves
    )
    return node.target, str(spec), described


def _described(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        sizes = tuple(str(x) for x in (*value.shape, *value.stride(), value.storage_offset()))
        return sizes, str(value.dtype), str(value.device), id(_mode_of_tensor(value))
    if isinstance(value, (list, tuple)):
        return tuple(_described(x) for x in value)
    return type(value).__name__, str(value)


def _mode_of_tensor(value: torch.Tensor) -> FakeTensorMode | None:
    return value.fake_mode if isinstance(value, FakeTensor) else None


def _trace(function: Function, node: Node, *, pre_dispatch: bool) -> GraphModule | None:
    """Trace a function on a call's arguments; None if that fails, or the trace holds only for the example's sizes.

    Args:
        pre_dispatch: Whether to keep ops that PyTorch composes of others, as `torch.export` does.
    """
    mode = mode_of(node)
    if mode is None:
        return None
    given = operands(node)
    leaves, spec = pytree.tree_flatten((node.args, node.kwargs))
    places = {operand: position for position, operand in enumerate(given)}

    def run(*arguments: Any) -> Any:
        args, kwargs = pytree.tree_unflatten([arguments[places[x]] if isinstance(x, Node) else x for x in leaves], spec)
        return function(*args, **kwargs)

    traced = trace_plainly(run, mode, [x.meta["val"] for x in given], pre_dispatch=pre_dispatch)
    return traced if traced is not None and _has_results_of(traced, node) else None


def trace_plainly(
    function: Function, mode: FakeTensorMode, values: Sequence[Any], *, pre_dispatch: bool = True
) -> GraphModule | None:
    """Trace a function on traced values, each with memory of its own, as a graph of ops alone.

    Args:
        pre_dispatch: As in `_trace`.

    Returns:
        None where the function raises an error, does not hold for all sizes, or needs more than ops.
    """
    try:
        with _tracing(mode):
            given = [_alone(_faked(x, mode)) for x in values]
            traced: GraphModule = make_fx(function, pre_dispatch=pre_dispatch)(*given)
    except Exception:  # whatever a decomposition raises; the call stays as it is
        return None
    return traced if _is_plain(traced) else None


def _faked(value: Any, mode: FakeTensorMode) -> Any:
    return pytree.tree_map_only(
        torch.Tensor, lambda x: x if isinstance(x, FakeTensor) else mode.from_tensor(x, static_shapes=True), value
    )


def _alone(value: Any) -> Any:
    """Return a tensor with the same sizes and strides and memory of its own, so that equal calls can share a trace."""
    if not isinstance(value, FakeTensor):
        return value
    last = value.storage_offset() + sum((n - 1) * step for n, step in zip(value.shape, value.stride(), strict=True))
    memory = torch.empty(torch.sym_max(last + 1, 0), dtype=value.dtype, device=value.device)
    return memory.as_strided(value.shape, value.stride(), value.storage_offset())


@contextmanager
def _tracing(mode: FakeTensorMode) -> Iterator[None]:
    """A context for tracing a decomposition, without gradients.

    Within it, a condition on symbolic sizes that only the example's sizes satisfy raises an error, and so do more than
    `LARGEST` ops.
    """
    with ExitStack() as stack:
        stack.enter_context(torch._guards.tracing(None))
        stack.enter_context(torch.no_grad())
        stack.enter_context(mode)
        stack.enter_context(_Count())  # type: ignore[no-untyped-call]
        if mode.shape_env is not None:
            stack.enter_context(_fixed_guards(mode.shape_env))
            stack.enter_context(enable_python_dispatcher())
        yield


@contextmanager
def _fixed_guards(env: Any) -> Iterator[None]:
    """Raise an error within this context if a condition on symbolic sizes depends on the sizes of the example.

    The resulting trace would be wrong for other sizes.
    """
    if hasattr(env, "error_on_new_guards"):
        with env.error_on_new_guards():
            yield
        return

    def refuse(*_: Any) -> None:
        raise IRError("the decomposition depends on the sizes of the example")

    env._check_frozen = refuse  # what a PyTorch before that function calls first for a new condition
    try:
        yield
    finally:
        del env._check_frozen


class _Count(TorchDispatchMode):
    """Counts the ops that run in this context, and raises `TooLong` after `LARGEST` of them."""

    ops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        self.ops += 1
        if self.ops > LARGEST:
            raise TooLong
        return func(*args, **(kwargs or {}))


def _is_plain(traced: GraphModule) -> bool:
    """Rewrite a traced graph so that it consists only of ops on its inputs; return whether that succeeded.

    It fails if the graph holds a tensor of several elements.
    """
    graph = traced.graph
    for inner in list(graph.nodes):
        if inner.target is torch._C._set_grad_enabled:
            graph.erase_node(inner)
        elif inner.op == "get_attr" and not _make_number(traced, inner):
            return False
    (output,) = (x for x in graph.nodes if x.op == "output")
    result = output.args[0]
    if isinstance(result, Node) and getattr(result.target, "__module__", "") == _NAMED_TUPLES:
        output.args = (list(result.args),)
    graph.eliminate_dead_code()
    return True


def _has_results_of(traced: GraphModule, node: Node) -> bool:
    """Whether a graph's results are like a call's."""
    (output,) = (x for x in traced.graph.nodes if x.op == "output")
    wanted, results = pytree.tree_leaves(node.meta.get("val")), pytree.tree_leaves(output.args[0])
    if len(wanted) != len(results):
        return False
    return all(_is_alike(value, result) for value, result in zip(wanted, results, strict=True))


def _is_alike(value: Any, result: Any) -> bool:
    if not isinstance(value, torch.Tensor):
        return not isinstance(result, Node)
    other = result.meta.get("val") if isinstance(result, Node) else None
    return isinstance(other, torch.Tensor) and other.dtype == value.dtype and other.dim() == value.dim()


def _make_number(traced: GraphModule, node: Node) -> bool:
    """Replace a one-element tensor that the graph holds by an op that creates it; return False for any other tensor."""
    value = operator.attrgetter(str(node.target))(traced)
    if isinstance(value, FakeTensor):
        value = value.constant
    if not isinstance(value, torch.Tensor) or value.numel() != 1 or value.dtype.is_complex:
        return False
    with traced.graph.inserting_before(node):
        full = traced.graph.call_function(
            torch.ops.aten.full.default,
            (list(value.shape), value.item()),
            {"dtype": value.dtype, "device": value.device},
        )
    full.meta["val"] = node.meta.get("val", value)
    node.replace_all_uses_with(full)
    traced.graph.erase_node(node)
    return True
