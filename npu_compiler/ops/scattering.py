"""Ops that write at indices: each place asks which of the indices names it, so no two threads write one place."""

from __future__ import annotations

from collections.abc import Mapping

from npu_compiler.graph.model import IRGraph, OpNode
from npu_compiler.ops import ranges
from npu_compiler.ops.comparing import compared, counted, too_many_flags
from npu_compiler.ops.indexing import copy_rows
from npu_compiler.ops.lowering import Lowering
from npu_compiler.ops.reductions import reduce
from npu_compiler.ops.registry import Args, Range, register_op
from npu_compiler.program.views import Shape, View, numel


def _hits(ctx: Lowering, index: View, size: int) -> View:
    """index[*lead, k] → flags[*lead, size, k]: whether an index names a place."""
    shape = (*index.shape[:-1], size, index.shape[-1])
    return compared(ctx, "eq", index.unsqueeze(index.rank - 1), counted(ctx, size).unsqueeze(1), shape)


def _scatter_unsupported(node: OpNode, graph: IRGraph) -> str | None:
    shape, index = (graph.tensors[name].shape for name in node.inputs[:2])
    if not shape or len(index) != len(shape):
        return "scatter to or from a scalar"
    return too_many_flags(shape[node.attrs["dim"]], numel(index), "scatter")


def _scatter_range(node: OpNode, graph: IRGraph, known: Mapping[str, Range]) -> Range:
    base, *_, source = Args(node).ranges(known, ranges.of_scalar)
    assert base is not None and source is not None
    return ranges.hull(base, source)


def _written(ctx: Lowering, node: OpNode, out: View) -> tuple[View, View, View]:
    """What scatter may write of the old value and of the output, and the indices; `dim` is the last dimension of each.

    The rest of the output is the old value.
    """
    base, index = (ctx.view(name) for name in node.inputs[:2])
    dim, last = base.dim(node.attrs["dim"]), base.rank - 1
    base_window, window = base, out
    for d, size in enumerate(index.shape):
        if d != dim:
            base_window, window = base_window.slice(d, 0, size), window.slice(d, 0, size)
    if window.shape != out.shape:
        ctx.copy(base, out)
    return base_window.transpose(dim, last), window.transpose(dim, last), index.transpose(dim, last)


@register_op(
    "aten.scatter.value",
    tensors=("self", "index", "value"),
    unsupported=_scatter_unsupported,
    one_dtype=True,
    integer_range=_scatter_range,
)
def lower_scatter_value(ctx: Lowering, node: OpNode) -> None:
    out = ctx.output()
    base, window, index = _written(ctx, node, out)
    if index.numel == 0:
        ctx.copy(base, window)
        return
    hit = ctx.temp(window.shape, "bool")
    reduce(ctx, "any", _hits(ctx, index, window.shape[-1]), -1, hit)
    ctx.elementwise("where", [hit, node.attrs["value"], base], window)


@register_op(
    "aten.scatter.src",
    tensors=("self", "index", "src"),
    unsupported=_scatter_unsupported,
    one_dtype=True,
    integer_range=_scatter_range,
)
def lower_scatter(ctx: Lowering, node: OpNode) -> None:
    """Where several indices name one place, the last one counts."""
    out = ctx.output()
    base, window, index = _written(ctx, node, out)
    if index.numel == 0:
        ctx.copy(base, window)
        return
    source = ctx.view(node.inputs[2]).transpose(out.dim(node.attrs["dim"]), out.rank - 1)
    for d, size in enumerate(index.shape):
        source = source.slice(d, 0, size)
    flags = _hits(ctx, index, window.shape[-1])
    chosen = ctx.temp(flags.shape, "int32")
    ctx.elementwise("where", [flags, counted(ctx, index.shape[-1]), -1], chosen)
    place = ctx.temp(window.shape, "int32")
    reduce(ctx, "max", chosen, -1, place)
    hit, row = ctx.temp(window.shape, "bool"), ctx.temp(window.shape, "int32")
    ctx.elementwise("ge", [place, 0], hit)
    ctx.elementwise("maximum", [place, 0], row)
    picked = ctx.temp(window.shape, source.dtype)
    ctx.emit("gather_kernel", [source, row], [picked], {"dim": source.rank - 1})
    ctx.elementwise("where", [hit, picked, base], window)


def _index_put_unsupported(node: OpNode, graph: IRGraph) -> str | None:
    if node.attrs.get("accumulate"):
        return "index_put that accumulates"
    if len(node.inputs) != 3 or any(map(any, node.attrs.get("_tensor_list_none_masks") or [])):
        return "index_put with other than one index tensor for the first dimension"
    whole, index, rows = (graph.tensors[name] for name in node.inputs)
    if len(index.shape) != 1 or index.dtype in ("bool", "uint8"):
        return "index_put with other than a vector of integers"
    return None if _row_shape(whole.shape, index.shape) == rows.shape else "index_put that broadcasts"


def _row_shape(whole: Shape, index: Shape) -> Shape:
    return (*index, *whole[1:])


@register_op(
    "aten.index_put",
    tensors=("self", "*indices_and_values"),
    unsupported=_index_put_unsupported,
    one_dtype=True,
    integer_range=lambda node, graph, known: ranges.hull(known[node.inputs[0]], known[node.inputs[-1]]),
)
def lower_index_put(ctx: Lowering, node: OpNode) -> None:
    """Rows are replaced; an index below 0 counts from the end."""
    base, index, rows = (ctx.view(name) for name in node.inputs)
    positive = ctx.temp(index.shape, "int32")
    ctx.elementwise("remainder", [index, max(base.shape[0], 1)], positive)
    out = ctx.output()
    ctx.copy(base, out)
    copy_rows(ctx, "index_copy_kernel", positive, [rows], [out], dim=0)
