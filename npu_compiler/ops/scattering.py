"""Ops that write or count at indices: each place asks which of the indices names it, so no two threads write one place.

They need memory for a flag per place and index; beyond `MOST_FLAGS` of them a node is refused.
"""

from __future__ import annotations

from collections.abc import Mapping

from npu_compiler.graph.model import IRGraph, OpNode
from npu_compiler.ops import ranges
from npu_compiler.ops.indexing import copy_rows
from npu_compiler.ops.lowering import Lowering
from npu_compiler.ops.reductions import reduce
from npu_compiler.ops.registry import Args, Range, register_op
from npu_compiler.ops.tensor import emit_arange
from npu_compiler.program.views import Shape, View, numel

MOST_FLAGS = 2**24


def _too_many(places: int, indices: int, what: str) -> str | None:
    return f"{what} of {indices} indices over {places} places" if places * indices > MOST_FLAGS else None


def _places(ctx: Lowering, count: int, dtype: str = "int32") -> View:
    """0, 1, … count - 1."""
    view = ctx.temp((count,), dtype)
    emit_arange(ctx, view, 0, 1)
    return view


def _hits(ctx: Lowering, index: View, size: int) -> View:
    """index[*lead, k] → flags[*lead, size, k]: whether an index names a place."""
    shape = (*index.shape[:-1], size, index.shape[-1])
    flags = ctx.temp(shape, "bool")
    places = _places(ctx, size).unsqueeze(1)
    ctx.elementwise("eq", [index.unsqueeze(index.rank - 1).expand(shape), places.expand(shape)], flags)
    return flags


def _scatter_unsupported(node: OpNode, graph: IRGraph) -> str | None:
    shape, index = (graph.tensors[name].shape for name in node.inputs[:2])
    if not shape or len(index) != len(shape):
        return "scatter to or from a scalar"
    return _too_many(shape[node.attrs["dim"]], numel(index), "scatter")


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
    ctx.elementwise("where", [flags, _places(ctx, index.shape[-1]), -1], chosen)
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


def _histc_unsupported(node: OpNode, graph: IRGraph) -> str | None:
    bins, low, high = _histogram(node)
    if low >= high:
        return "a histogram whose limits are those of the data"
    return _too_many(bins, graph.tensors[node.inputs[0]].numel, "histogram")


def _histogram(node: OpNode) -> tuple[int, float, float]:
    """The number of bins, and the limits."""
    return node.attrs.get("bins", 100), node.attrs.get("min", 0), node.attrs.get("max", 0)


@register_op(
    "aten.histc",
    unsupported=_histc_unsupported,
    integer_range=lambda node, graph, known: (0, graph.tensors[node.inputs[0]].numel),
)
def lower_histc(ctx: Lowering, node: OpNode) -> None:
    """How many elements are in each bin; one at the upper limit is in the last, one outside of the limits in none."""
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
    flags = ctx.temp((bins, view.numel), "bool")
    ctx.elementwise(
        "eq", [named.expand(flags.shape), _places(ctx, bins, "float32").unsqueeze(1).expand(flags.shape)], flags
    )
    reduce(ctx, "sum", ctx.cast(flags, "float32"), -1, out)
