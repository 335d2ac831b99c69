"""Ops that write at indices: each place looks for the indices that name it, so no two threads write one place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from npu_compiler.graph.dtypes import is_float
from npu_compiler.graph.model import IRGraph, OpNode
from npu_compiler.ops import ranges
from npu_compiler.ops.indexing import counted_from_both_ends, indexed_dims, rows_along_dim
from npu_compiler.ops.lowering import Lowering
from npu_compiler.ops.registry import Args, Range, register_op
from npu_compiler.program.kernels import Family, declare_kernel
from npu_compiler.program.views import Shape, View, broadcast_shapes, numel

# Where several indices name one place, the last one counts, or all are joined; `mean` is for floats.
declare_kernel(
    "scatter_kernel",
    Family.INDEXING,
    "base[*s,size] index:i[*s,n] source[*s,n] -> out[*s,size]",
    source="scatter.metal",
    reduce="s last sum prod mean amax amin",
    include_self="?",
)
_REDUCTIONS = {
    "sum": "sum",
    "add": "sum",
    "prod": "prod",
    "multiply": "prod",
    "mean": "mean",
    "amax": "amax",
    "amin": "amin",
}


def _scattered_range(node: OpNode, graph: IRGraph, operands: Mapping[str, Range]) -> Range:
    """The range of a scatter's result: old and new values, and their sums or products if it adds or multiplies."""
    tensors = Args(node).ranges(operands, ranges.of_scalar)
    base, source = tensors[0], tensors[-1]
    assert base is not None and source is not None
    reduction, count = _reduction(node), numel(graph.tensors[node.inputs[1]].shape)
    if reduction == "sum":
        factor = ranges.of_scalar(node.attrs.get("alpha", 1))
        return ranges.hull(base, ranges.add(base, ranges.total(ranges.mul(source, factor), count)))
    if reduction == "prod":
        return ranges.hull(base, source, ranges.mul(base, ranges.product(source, count)), ranges.product(source, count))
    return ranges.hull(base, source)


def _reduction(node: OpNode) -> str:
    """The mode of `scatter_kernel` that a node needs: `last` (overwrite), `sum` or another reduction."""
    if node.base in ("aten.scatter_add", "aten.index_add"):
        return "sum"
    if node.base in ("aten.index_put", "aten._unsafe_index_put"):
        return "sum" if node.attrs.get("accumulate") else "last"
    name = node.attrs.get("reduce")
    return "last" if name is None else _REDUCTIONS[name]


def _scatter_unsupported(node: OpNode, graph: IRGraph) -> str | None:
    base, dtype = graph.tensors[node.inputs[0]], graph.tensors[node.outputs[0]].dtype
    reduction = _reduction(node)
    if reduction != "last" and dtype == "bool":
        return f"{node.base} of booleans"
    if reduction == "mean" and not is_float(dtype):
        return "a mean of integers"
    index, *source = (graph.tensors[name].shape for name in node.inputs[1:])
    if len(base.shape) != len(index):
        return "scatter between a scalar and a vector"
    if source and any(few < many for few, many in zip(source[0], index, strict=True)):
        return "scatter from a tensor with fewer elements than there are indices"
    return None


def _scatter(
    ctx: Lowering,
    base: View,
    index: View,
    source: View,
    out: View,
    dim: int,
    reduction: str,
    includes_self: bool = True,
) -> None:
    """Emit a scatter: write `source` to places of `out` along `dim`; all other elements are those of `base`.

    Args:
        index: Places along `dim`. Along other dimensions it may be smaller than the base; it then covers the first
            elements.
        source: Values; it may be larger than the index, whose shape counts.
        reduction: How several values for one place are combined; `last` keeps the last one.
        includes_self: Whether the element of `base` takes part in the reduction.
    """
    if base.rank == 0:
        base, index, source, out = (view.unsqueeze(0) for view in (base, index, source, out))
    last = base.rank - 1
    base_window, window = base, out
    for d, size in enumerate(index.shape):
        source = source.slice(d, 0, size)
        if d != dim:
            base_window, window = base_window.slice(d, 0, size), window.slice(d, 0, size)
    if window.shape != out.shape or index.numel == 0:
        ctx.copy(base, out)
    if index.numel == 0:
        return
    views = [view.transpose(dim, last) for view in (base_window, index, source)]
    params = {"reduce": reduction, "include_self": includes_self}
    ctx.emit("scatter_kernel", views, [window.transpose(dim, last)], params, flops=index.numel)


@register_op(
    "aten.scatter.value aten.scatter.value_reduce",
    tensors=("self", "index", "value"),
    unsupported=_scatter_unsupported,
    index_bound=rows_along_dim,
    one_dtype=True,
    integer_range=_scattered_range,
)
def lower_scatter_value(ctx: Lowering, node: OpNode) -> None:
    base, index = (ctx.view(name) for name in node.inputs)
    out = ctx.output()
    value = ctx.temp((), out.dtype)
    ctx.elementwise("copy", [node.attrs["value"]], value)
    dim = base.dim(node.attrs["dim"]) if base.rank else 0
    _scatter(ctx, base, index, value.expand(index.shape), out, dim, _reduction(node))


@register_op(
    "aten.scatter.src aten.scatter.reduce aten.scatter_add aten.scatter_reduce.two",
    tensors=("self", "index", "src"),
    unsupported=_scatter_unsupported,
    index_bound=rows_along_dim,
    one_dtype=True,
    integer_range=_scattered_range,
)
def lower_scatter(ctx: Lowering, node: OpNode) -> None:
    """Lower a scatter; of several values for one place the last is kept, or all are reduced."""
    base, index, source = (ctx.view(name) for name in node.inputs)
    dim = base.dim(node.attrs["dim"]) if base.rank else 0
    includes_self = bool(node.attrs.get("include_self", True))
    _scatter(ctx, base, index, source, ctx.output(), dim, _reduction(node), includes_self)


def _rows_unsupported(node: OpNode, graph: IRGraph) -> str | None:
    base, _, source = (graph.tensors[name] for name in node.inputs)
    if _reduction(node) != "last" and base.dtype == "bool":
        return f"{node.base} of booleans"
    if _reduction(node) == "mean" and not is_float(base.dtype):
        return "a mean of integers"
    if len(base.shape) != len(source.shape):
        return "rows of another rank"
    alpha = node.attrs.get("alpha", 1)
    if not is_float(base.dtype) and alpha != int(alpha):
        return f"integers times {alpha}"
    return None


@register_op(
    "aten.index_add aten.index_reduce",
    tensors=("self", "index", "source"),
    unsupported=_rows_unsupported,
    index_bound=rows_along_dim,
    one_dtype=True,
    integer_range=_scattered_range,
)
def lower_index_add(ctx: Lowering, node: OpNode) -> None:
    """Lower the reduction of rows of `source` into the rows of `self` that a vector of indices names."""
    base, index, source = (ctx.view(name) for name in node.inputs)
    out = ctx.output()
    dim = base.dim(node.attrs["dim"]) if base.rank else 0
    alpha = node.attrs.get("alpha", 1)
    if alpha != 1:
        scaled = ctx.temp(source.shape, "float32" if is_float(source.dtype) else source.dtype)
        ctx.elementwise("mul", [source, alpha], scaled)
        source = scaled
    if base.rank == 0:
        base, source, out = (view.unsqueeze(0) for view in (base, source, out))
    index = index.unsqueeze(0) if index.rank == 0 else index
    for _ in range(base.rank - 1 - dim):
        index = index.unsqueeze(index.rank)
    includes_self = bool(node.attrs.get("include_self", True))
    _scatter(ctx, base, index.expand(source.shape), source, out, dim, _reduction(node), includes_self)


def _index_put_unsupported(node: OpNode, graph: IRGraph) -> str | None:
    whole, *indices, values = (graph.tensors[name] for name in node.inputs)
    masks = [index for index in indices if index.dtype in ("bool", "uint8")]
    if node.attrs.get("accumulate") and whole.dtype == "bool":
        return "index_put that accumulates booleans"
    if not masks:
        return None if indices else "index_put without indices"
    if len(indices) > 1:
        return "index_put with a mask among several indices"
    if masks[0].dtype == "uint8":
        return "index_put with a mask of bytes"
    first = indexed_dims(node, len(node.inputs) - 2)[0]
    rest = whole.shape[first + len(masks[0].shape) :]
    # The values of a mask are as many as its true elements: known only where one value, or row, stands for all.
    if len(values.shape) > len(rest) and (first or numel(values.shape[: len(values.shape) - len(rest)]) != 1):
        return "index_put with a mask and a value for each of its elements"
    return None


def _index_put_range(node: OpNode, graph: IRGraph, operands: Mapping[str, Range]) -> Range:
    base, values = operands[node.inputs[0]], operands[node.inputs[-1]]
    if not node.attrs.get("accumulate"):
        return ranges.hull(base, values)
    count = max(numel(graph.tensors[name].shape) for name in node.inputs[1:])
    return ranges.hull(base, ranges.add(base, ranges.total(values, count)))


@register_op(
    "aten.index_put aten._unsafe_index_put",
    tensors=("self", "*indices_and_values"),
    unsupported=_index_put_unsupported,
    index_bound=lambda node, graph: counted_from_both_ends(node, graph, node.inputs[1:-1]),
    one_dtype=True,
    integer_range=_index_put_range,
)
def lower_index_put(ctx: Lowering, node: OpNode) -> None:
    """Lower the assignment of values at the places of index tensors, which are broadcast together, or of a mask.

    A negative index counts from the end.
    """
    base, *indices, values = (ctx.view(name) for name in node.inputs)
    used = indexed_dims(node, len(node.inputs) - 2)
    if indices[0].dtype == "bool":
        _put_where(ctx, node, base, indices[0], values, used[0])
        return
    out, shape = ctx.output(), broadcast_shapes(*(index.shape for index in indices))
    rest = [dim for dim in range(base.rank) if dim not in used]
    order, sizes = [*rest, *used], [base.shape[dim] for dim in used]
    rows: Shape = (*(base.shape[dim] for dim in rest), numel(tuple(sizes)))
    place = _linear_index(ctx, [index.expand(shape) for index in indices], sizes)
    # Indexed dimensions that lie side by side are replaced by those of the indices, others come first.
    before = used[0] if used == list(range(used[0], used[-1] + 1)) else 0
    picked = (*rows[:before], *shape, *rows[before:-1])
    moved = [d for d in range(len(picked)) if not before <= d < before + len(shape)]
    source = values.expand(picked).permute([*moved, *range(before, before + len(shape))])
    source = ctx.reshaped(source, (*rows[:-1], numel(shape)))
    index = ctx.reshaped(place, (numel(shape),))
    for _ in rest:
        index = index.unsqueeze(0)
    target = out.permute(order).reshape(rows)
    written = ctx.temp(rows, out.dtype) if target is None else target
    old = ctx.reshaped(base.permute(order), rows)
    _scatter(ctx, old, index.expand(source.shape), source, written, len(rows) - 1, _reduction(node))
    if target is None:
        back = written.reshape(tuple(base.shape[dim] for dim in order))
        assert back is not None
        ctx.copy(back, out.permute(order))


def _linear_index(ctx: Lowering, indices: Sequence[View], sizes: Sequence[int]) -> View:
    """The row-major number of the place that index tensors name in dimensions of `sizes`; -1 if it is out of range.

    Negative indices count from the end.
    """
    total: View | None = None
    for index, size in zip(indices, sizes, strict=True):
        wrapped, counted, is_low, is_high, is_outside = (
            ctx.temp(index.shape, dtype) for dtype in ("int32", "int32", "bool", "bool", "bool")
        )
        ctx.elementwise("add", [index, size], wrapped)
        ctx.elementwise("lt", [index, 0], is_low)
        ctx.elementwise("where", [is_low, wrapped, index], counted)
        ctx.elementwise("lt", [counted, 0], is_low)
        ctx.elementwise("ge", [counted, size], is_high)
        ctx.elementwise("logical_or", [is_low, is_high], is_outside)
        place = counted
        if total is not None:
            scaled, place = ctx.temp(index.shape, "int32"), ctx.temp(index.shape, "int32")
            ctx.elementwise("mul", [total, size], scaled)
            ctx.elementwise("add", [scaled, counted], place)
            was_outside = ctx.temp(index.shape, "bool")
            ctx.elementwise("lt", [total, 0], was_outside)
            ctx.elementwise("logical_or", [was_outside, is_outside], is_low)
            is_outside = is_low
        total = ctx.temp(index.shape, "int32")
        ctx.elementwise("where", [is_outside, -1, place], total)
    assert total is not None
    return total


def _put_where(ctx: Lowering, node: OpNode, base: View, mask: View, values: View, first: int) -> None:
    """Write (or add) one value, or one row of values, wherever a mask over the dimensions from `first` on is true."""
    rest = base.rank - first - mask.rank
    row = ctx.reshaped(values, values.shape[max(values.rank - rest, 0) :])
    for _ in range(rest):
        mask = mask.unsqueeze(mask.rank)
    out = ctx.output()
    value: View = row
    if node.attrs.get("accumulate"):
        value = ctx.temp(base.shape, out.dtype)
        ctx.elementwise("add", [base, row], value)
    ctx.elementwise("where", [mask, value, base], out)
