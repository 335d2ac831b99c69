"""Ops that compare every element with every entry of a list: histograms, membership, positions among boundaries.

They need memory for one flag per pair; a node with more than `MOST_FLAGS` pairs is refused.
"""

from __future__ import annotations

from collections.abc import Mapping

from npu_compiler.graph.dtypes import HALF_DTYPES
from npu_compiler.graph.model import IRGraph, OpNode
from npu_compiler.ops.lowering import Lowering
from npu_compiler.ops.reductions import reduce
from npu_compiler.ops.registry import Range, register_op
from npu_compiler.ops.tensor import emit_arange
from npu_compiler.program.views import Shape, View

MOST_FLAGS = 2**24


def too_many_flags(places: int, indices: int, what: str) -> str | None:
    """The reason to refuse a node that needs a flag for each pair of a place and an index; None if they are few enough.

    Args:
        what: Noun for the node's operation, with which the reason begins.
    """
    return f"{what} of {indices} indices over {places} places" if places * indices > MOST_FLAGS else None


def counted(ctx: Lowering, count: int, dtype: str = "int32") -> View:
    """A vector of the integers 0, 1, … count - 1."""
    view = ctx.temp((count,), dtype)
    emit_arange(ctx, view, 0, 1)
    return view


def compared(ctx: Lowering, op: str, left: View, right: View, shape: Shape) -> View:
    """The boolean result of a comparison of two views that are broadcast to `shape`."""
    flags = ctx.temp(shape, "bool")
    ctx.elementwise(op, [left.expand(shape), right.expand(shape)], flags)
    return flags


def _histc_unsupported(node: OpNode, graph: IRGraph) -> str | None:
    bins, low, high = _histogram(node)
    if low >= high:
        return "a histogram whose limits are those of the data"
    if graph.tensors[node.inputs[0]].dtype in HALF_DTYPES:
        return "a histogram of 16-bit elements, whose bins PyTorch computes in 16 bits"
    return too_many_flags(bins, graph.tensors[node.inputs[0]].numel, "histogram")


def _histogram(node: OpNode) -> tuple[int, float, float]:
    """The number of bins of a `histc` node, and its lower and upper limit."""
    return node.attrs.get("bins", 100), node.attrs.get("min", 0), node.attrs.get("max", 0)


@register_op(
    "aten.histc",
    unsupported=_histc_unsupported,
    integer_range=lambda node, graph, operands: (0, graph.tensors[node.inputs[0]].numel),
)
def lower_histc(ctx: Lowering, node: OpNode) -> None:
    """Count the elements in each bin.

    The last bin includes the upper limit, and elements outside the limits do not count.
    """
    bins, low, high = _histogram(node)
    view, out = ctx.view(node.inputs[0]), ctx.output()
    values = ctx.reshaped(ctx.cast(view, "float32"), (view.numel,))
    steps: tuple[tuple[str, float], ...] = (("sub", low), ("true_divide", high - low), ("mul", bins))
    position = values
    for op, operand in steps:
        moved = ctx.temp(values.shape, "float32")
        ctx.elementwise(op, [position, float(operand)], moved)
        position = moved
    whole, last = ctx.temp(values.shape, "float32"), ctx.temp(values.shape, "float32")
    ctx.elementwise("floor", [position], whole)
    ctx.elementwise("minimum", [whole, float(bins - 1)], last)
    inside, named = ctx.temp(values.shape, "bool"), ctx.temp(values.shape, "float32")
    ctx.elementwise("le", [values, float(high)], inside)
    ctx.elementwise("where", [inside, last, -1.0], named)
    numbers = counted(ctx, bins, "float32").unsqueeze(1)
    flags = compared(ctx, "eq", named, numbers, (bins, view.numel))
    reduce(ctx, "sum", ctx.cast(flags, "float32"), -1, out)


def _listed_unsupported(node: OpNode, graph: IRGraph) -> str | None:
    if len(node.inputs) != 2:
        return f"{node.base} of a number"
    elements, listed = (graph.tensors[name] for name in node.inputs)
    if elements.dtype != listed.dtype:
        return f"{node.base} of {elements.dtype} among {listed.dtype}"
    return too_many_flags(elements.numel, listed.numel, "comparison")


def _with_each(ctx: Lowering, op: str, elements: View, listed: View) -> View:
    """The result [*elements, listed] of comparing every element with every entry of a list."""
    flat = ctx.reshaped(listed, (listed.numel,))
    return compared(ctx, op, elements.unsqueeze(elements.rank), flat, (*elements.shape, listed.numel))


@register_op("aten.isin.Tensor_Tensor", tensors=("elements", "test_elements"), unsupported=_listed_unsupported)
def lower_isin(ctx: Lowering, node: OpNode) -> None:
    elements, listed = (ctx.view(name) for name in node.inputs)
    out = ctx.output()
    is_listed = ctx.temp(out.shape, "bool") if node.attrs.get("invert") else out
    reduce(ctx, "any", _with_each(ctx, "eq", elements, listed), -1, is_listed)
    if node.attrs.get("invert"):
        ctx.elementwise("logical_not", [is_listed], out)


def _place_range(node: OpNode, graph: IRGraph, operands: Mapping[str, Range]) -> Range:
    return 0, graph.tensors[node.inputs[1]].numel


@register_op(
    "aten.bucketize.Tensor",
    tensors=("self", "boundaries"),
    unsupported=_listed_unsupported,
    integer_range=_place_range,
)
def lower_bucketize(ctx: Lowering, node: OpNode) -> None:
    """Count the boundaries below each element (with `right`, those not above it)."""
    elements, boundaries = (ctx.view(name) for name in node.inputs)
    # Not "gt" and "ge": NaN comes after all boundaries.
    above = _with_each(ctx, "lt" if node.attrs.get("right") else "le", elements, boundaries)
    below = ctx.temp(above.shape, "bool")
    ctx.elementwise("logical_not", [above], below)
    out = ctx.output()
    reduce(ctx, "sum", ctx.cast(below, out.dtype), -1, out)
