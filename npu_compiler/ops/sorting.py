"""Ops that sort: one kernel computes the order, by which the sorted values are gathered."""

from __future__ import annotations

from collections.abc import Mapping

from npu_compiler.graph.model import IRGraph, OpNode
from npu_compiler.ops import ranges
from npu_compiler.ops.lowering import Lowering
from npu_compiler.ops.registry import Range, register_op
from npu_compiler.program.kernels import Family, declare_kernel
from npu_compiler.program.views import View

# Along the last dimension; equal elements keep their order, zeros of both signs are equal, NaN is above all.
declare_kernel("argsort_kernel", Family.INDEXING, "x[*s,n] -> order:i[*s,n]", source="sort.metal", descending="?")


def _order_range(node: OpNode, graph: IRGraph, operands: Mapping[str, Range]) -> Range:
    dim = 0 if node.base == "aten.msort" else node.attrs.get("dim", -1)
    return ranges.index_below(ranges.along(graph.tensors[node.inputs[0]].shape, dim))


def _sorted_ranges(node: OpNode, graph: IRGraph, operands: Mapping[str, Range]) -> tuple[Range, ...]:
    return operands[node.inputs[0]], _order_range(node, graph, operands)


@register_op("aten.sort aten.msort", moves=True, integer_range=_sorted_ranges)
def lower_sort(ctx: Lowering, node: OpNode) -> None:
    view = ctx.view(node.inputs[0])
    dim = node.attrs.get("dim", -1) if node.base == "aten.sort" else 0
    values = ctx.output(0)
    order = ctx.output(1) if len(node.outputs) > 1 else ctx.temp(view.shape, "int32")
    _argsort(ctx, view, order, dim, bool(node.attrs.get("descending", False)))
    _pick(ctx, view, order, values, dim)


@register_op("aten.argsort", integer_range=_order_range)
def lower_argsort(ctx: Lowering, node: OpNode) -> None:
    descending = bool(node.attrs.get("descending", False))
    _argsort(ctx, ctx.view(node.inputs[0]), ctx.output(), node.attrs.get("dim", -1), descending)


@register_op("aten.topk", moves=True, integer_range=_sorted_ranges)
def lower_topk(ctx: Lowering, node: OpNode) -> None:
    """Lower the first `k` elements in sorted order, with their indices; of equal elements, earlier ones come first."""
    view, dim = ctx.view(node.inputs[0]), node.attrs.get("dim", -1)
    order = ctx.temp(view.shape, "int32")
    _argsort(ctx, view, order, dim, bool(node.attrs.get("largest", True)))
    if view.rank:
        order = order.slice(view.dim(dim), 0, node.attrs["k"])
    _pick(ctx, view, order, ctx.output(0), dim)
    ctx.finish(order, 1)


def _argsort(ctx: Lowering, view: View, order: View, dim: int, descending: bool) -> None:
    if view.rank == 0:
        view, order = view.unsqueeze(0), order.unsqueeze(0)
    last, dim = view.rank - 1, view.dim(dim)
    ctx.emit("argsort_kernel", [view.transpose(dim, last)], [order.transpose(dim, last)], {"descending": descending})


def _pick(ctx: Lowering, view: View, order: View, values: View, dim: int) -> None:
    if view.rank == 0:
        ctx.copy(view, values)
        return
    ctx.emit("gather_kernel", [view, order], [values], {"dim": view.dim(dim)})
