"""The op table: one row per op. Support checks, the constraint checker, the partitioner and codegen all read it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

from npu_compiler.errors import IRError
from npu_compiler.graph.dtypes import INT32_MAX, INT32_MIN
from npu_compiler.graph.model import IRGraph, OpNode, base_op
from npu_compiler.ops.lowering import Lowering
from npu_compiler.program.views import MAX_RANK, View

Scalar: TypeAlias = float | int | bool | str
LowerFn: TypeAlias = Callable[[Lowering, OpNode], None]
SupportFn: TypeAlias = Callable[[OpNode, IRGraph], str | None]

NARROW_INTS = frozenset({"int8", "int16", "uint8"})
UNSUPPORTED_DTYPES = frozenset({"complex64", "complex128"})


@dataclass(frozen=True)
class Op:
    """A row of the op table.

    Attributes:
        name: ATen name without overload (`aten.add`), with one where overloads differ (`aten.max.dim`), or a fused
            op's own (`npu.rms_norm`).
        tensors: Names of the schema's tensor arguments, in order; a leading `*` marks a tensor list.
        lower: Emits the node's kernel calls and views.
        unsupported: Says why a given node cannot run on the device, or None.
    """

    name: str
    tensors: tuple[str, ...]
    lower: LowerFn
    unsupported: SupportFn


OPS: dict[str, Op] = {}


def _always(node: OpNode, graph: IRGraph) -> str | None:
    return None


def register_op(
    *names: str, tensors: tuple[str, ...] = ("self",), unsupported: SupportFn = _always
) -> Callable[[LowerFn], LowerFn]:
    """Decorator: add a row for each name, lowered by the decorated function."""

    def add(lower: LowerFn) -> LowerFn:
        for name in names:
            if name in OPS:
                raise ValueError(f"op '{name}' is registered twice")
            OPS[name] = Op(name, tensors, lower, unsupported)
        return lower

    return add


def find_op(op_type: str) -> Op | None:
    """The row of an op type: the exact overload, else the op without it; in-place names find their plain twin."""
    base = base_op(op_type)
    for name in (op_type, base):
        if name in OPS:
            return OPS[name]
    if is_in_place(op_type):
        return find_op(out_of_place(op_type))
    return None


def is_in_place(op_type: str) -> bool:
    """Whether the op mutates its first argument (`aten.add_`; `aten.__and__` does not)."""
    base = base_op(op_type)
    return base.startswith("aten.") and base.endswith("_") and not base.endswith("__")


def out_of_place(op_type: str) -> str:
    """`aten.add.Tensor` of `aten.add_.Tensor`."""
    base = base_op(op_type)
    return base[:-1] + op_type[len(base) :]


def unsupported_reason(node: OpNode, graph: IRGraph) -> str | None:
    """Why the device cannot run a node, in words that name the shape or attribute; None if it can."""
    op = find_op(node.op_type)
    if op is None:
        return f"op '{node.op_type}' is not in the op table"
    for name in (*node.inputs, *node.outputs):
        spec = graph.tensors[name]
        if spec.dtype in UNSUPPORTED_DTYPES:
            return f"tensor '{name}' has dtype {spec.dtype}"
        if len(spec.shape) > MAX_RANK:
            return f"tensor '{name}' has rank {len(spec.shape)}; at most {MAX_RANK} is supported"
    if not node.outputs:
        return f"op '{node.op_type}' has no tensor output"
    for name in node.outputs[:1]:
        if graph.tensors[name].dtype in NARROW_INTS and not _keeps_dtype(node, graph):
            return (
                f"tensor '{name}' has dtype {graph.tensors[name].dtype}: the device's integers do not wrap at its width"
            )
    for name, value in node.attrs.items():
        if isinstance(value, int) and not INT32_MIN <= value <= INT32_MAX and name not in _UNBOUNDED_ATTRS:
            return f"attribute '{name}' = {value} does not fit in int32"
    with well_formed(node):
        return op.unsupported(node, graph)


@contextmanager
def well_formed(node: OpNode) -> Iterator[None]:
    """Whoever reads a node stumbles over what it lacks; that becomes an `IRError` which names the node."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AssertionError, ArithmeticError) as error:
        reason = str(error) or "its inputs, attributes and outputs do not go together"
        if isinstance(error, KeyError):
            reason = f"argument {error} is missing or unknown"
        raise IRError(f"node '{node.name}' ({node.op_type}): {reason}") from error


def _keeps_dtype(node: OpNode, graph: IRGraph) -> bool:
    """Whether the node only moves elements: same dtype in and out, by an op that computes nothing."""
    moves = node.base == "getitem" or node.base.removeprefix("aten.") in _MOVES
    return moves and all(graph.tensors[x].dtype == graph.tensors[node.outputs[0]].dtype for x in node.inputs[:1])


_MOVES = frozenset(
    {
        "view",
        "reshape",
        "flatten",
        "unflatten",
        "unsqueeze",
        "squeeze",
        "transpose",
        "permute",
        "t",
        "expand",
        "slice",
        "select",
        "split",
        "split_with_sizes",
        "chunk",
        "unbind",
        "cat",
        "stack",
        "contiguous",
        "clone",
        "alias",
        "detach",
        "index_select",
        "gather",
        "index",
        "repeat",
        "to",
        "pad",
        "flip",
        "roll",
        "sort",
        "msort",
        "topk",
    }
)
_UNBOUNDED_ATTRS = frozenset({"end", "start", "dim_size"})


class Args:
    """A node's arguments by schema name: tensors as names, the rest from attributes."""

    def __init__(self, node: OpNode) -> None:
        op = find_op(node.op_type)
        assert op is not None, node.op_type
        self.node = node
        self._tensors: dict[str, str | list[str] | None] = {}
        remaining = list(node.inputs)
        for name in op.tensors:
            if name.startswith("*"):
                self._tensors[name[1:]], remaining = remaining, []
            elif name in node.attrs:
                continue
            else:
                self._tensors[name] = remaining.pop(0) if remaining else None

    def tensor(self, name: str) -> str | None:
        """Name of a tensor argument, or None where it was omitted or is a scalar."""
        value = self._tensors.get(name)
        assert not isinstance(value, list)
        return value

    def tensors(self, name: str) -> list[str]:
        value = self._tensors[name]
        assert isinstance(value, list)
        return value

    def attr(self, name: str, default: Any = None) -> Any:
        value = self.node.attrs.get(name)
        return default if value is None else value


def operand(ctx: Lowering, args: Args, name: str) -> View | Scalar:
    """An argument that may be a tensor or a scalar."""
    tensor = args.tensor(name)
    if tensor is not None:
        return ctx.view(tensor)
    value: Scalar = args.node.attrs[name]
    return value
