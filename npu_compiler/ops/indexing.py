"""Ops that select elements by index tensors, and the in-place row update that KV caches use."""

from __future__ import annotations

from collections.abc import Sequence

from npu_compiler.graph.model import IRGraph, OpNode
from npu_compiler.ops import ranges
from npu_compiler.ops.lowering import Lowering
from npu_compiler.ops.registry import QuantizedRule, Range, register_op
from npu_compiler.ops.sharding import shard_embedding, shard_rows_update
from npu_compiler.program.kernels import Family, Grid, declare_kernel, distinct_bytes
from npu_compiler.program.views import MAX_RANK, Shape, View, broadcast_shapes, numel


def _with_size(shape: Shape, dim: int, size: int) -> Shape | None:
    """A shape with the size of one dimension replaced; None if it has no such dimension."""
    return (*shape[:dim], size, *shape[dim + 1 :]) if dim < len(shape) else None


def _replaces_rows(whole: Shape, rows: Shape, dim: int, index: Shape) -> bool:
    """Whether `rows` has the shape of one row of `whole` for each entry of a vector or scalar of indices."""
    return len(index) <= 1 and rows == _with_size(whole, dim, numel(index))


declare_kernel(
    "embedding_kernel",
    Family.INDEXING,
    "table[rows,.width] ids:i[*s] -> out[*s,width]",
    source="embedding.metal",
    grid=Grid.TABLE_ROWS,
    index_limit=lambda call: call.rows,
    rows="I",
    width="I",
    checked="?",
)
declare_kernel(
    "index_select_kernel",
    Family.INDEXING,
    "x[*whole] index:i[n] -> out[*picked]",
    source="tensor_ops.metal",
    where=lambda call: call.picked == _with_size(call.whole, call.dim, call.n),
    dim="I",
)
declare_kernel(
    "gather_kernel",
    Family.INDEXING,
    "x[*whole] index:i[*picked] -> out[*picked]",
    source="tensor_ops.metal",
    where=lambda call: (
        len(call.picked) == len(call.whole)
        and call.dim < len(call.whole)
        and all(a <= b for d, (a, b) in enumerate(zip(call.picked, call.whole, strict=True)) if d != call.dim)
    ),
    dim="I",
)
declare_kernel(
    "index_kernel",
    Family.INDEXING,
    "x[*whole] index0:i[*s] " + " ".join(f"index{i}?:i[*s]" for i in range(1, MAX_RANK)) + " -> out[*picked]",
    source="tensor_ops.metal",
    where=lambda call: (
        call.first + call.count <= len(call.whole)
        and getattr(call, f"index{call.count - 1}", None) is not None
        and getattr(call, f"index{call.count}", None) is None
        and call.picked == call.whole[: call.first] + call.s + call.whole[call.first + call.count :]
    ),
    counted=True,
    first="I",
    count="I",
)
declare_kernel(
    "index_copy_kernel",
    Family.INDEXING,
    "index:i[*n] source[*rows] -> out[*whole]",
    source="index_copy.metal",
    grid=Grid.SOURCE_ELEMENTS,
    where=lambda call: _replaces_rows(call.whole, call.rows, call.dim, call.n),
    index_limit=lambda call: call.whole[call.dim],
    dim="I",
    checked="?",
)
declare_kernel(
    "index_copy_pair_kernel",
    Family.INDEXING,
    "index:i[*n] source0[*rows] source1[*rows] -> out0[*whole] out1[*whole]",
    source="index_copy.metal",
    grid=Grid.SOURCE_ELEMENTS,
    where=lambda call: _replaces_rows(call.whole, call.rows, call.dim, call.n),
    index_limit=lambda call: call.whole[call.dim],
    dim="I",
    checked="?",
)


def is_checked_index(ctx: Lowering, name: str) -> int:
    """1 if every value of an index tensor is known to be in range, as inputs are checked on entry; else 0."""
    return int(name in ctx.graph.inputs and ctx.spec(name).bounds is not None)


def rows_along_dim(node: OpNode, graph: IRGraph) -> dict[str, Range]:
    """An `Op.index_bound` rule: the second input holds row numbers along a dimension of the first.

    A scalar is one row.
    """
    shape = graph.tensors[node.inputs[0]].shape
    return {node.inputs[1]: (0, shape[node.attrs["dim"]] - 1 if shape else 0)}


def indexed_dims(node: OpNode, indices: int) -> list[int]:
    """The dimensions to which a node's index tensors (`indices` of them) apply.

    All other dimensions are taken whole.
    """
    masks = node.attrs.get("_tensor_list_none_masks")
    given = [not is_none for is_none in masks[0]] if masks else [True] * indices
    return [dim for dim, is_given in enumerate(given) if is_given]


def counted_from_both_ends(node: OpNode, graph: IRGraph, indices: Sequence[str]) -> dict[str, Range]:
    """The bounds of index tensors, each along one dimension of the first input; negative indices count from the end."""
    shape = graph.tensors[node.inputs[0]].shape
    bounds: dict[str, Range] = {}
    for dim, name in zip(indexed_dims(node, len(indices)), indices, strict=True):
        if graph.tensors[name].dtype not in ("bool", "uint8"):
            low, high = bounds.get(name, (-shape[dim], shape[dim] - 1))
            bounds[name] = (max(low, -shape[dim]), min(high, shape[dim] - 1))
    return bounds


@register_op(
    "aten.embedding",
    tensors=("weight", "indices"),
    moves=True,
    selects=True,
    index_bound=lambda node, graph: {node.inputs[1]: (0, graph.tensors[node.inputs[0]].shape[0] - 1)},
    quantized=QuantizedRule(0, "npu.quantized_embedding", is_table=True),
    shard_table=shard_embedding,
)
def lower_embedding(ctx: Lowering, node: OpNode) -> None:
    table, ids = (ctx.view(name) for name in node.inputs)
    params = {"rows": table.shape[0], "width": table.shape[1], "checked": is_checked_index(ctx, node.inputs[1])}
    out = ctx.output()
    touched = distinct_bytes(ids) + 2 * distinct_bytes(out)
    ctx.emit("embedding_kernel", [ctx.inner_contiguous(table), ids], [out], params, bytes_moved=touched)


@register_op("aten.index_select", tensors=("self", "index"), moves=True, selects=True, index_bound=rows_along_dim)
def lower_index_select(ctx: Lowering, node: OpNode) -> None:
    source, index = (ctx.view(name) for name in node.inputs)
    if source.rank == 0:
        ctx.finish(source)
        return
    index = index.unsqueeze(0) if index.rank == 0 else index
    ctx.emit("index_select_kernel", [source, index], [ctx.output()], {"dim": source.dim(node.attrs["dim"])})


@register_op(
    "aten.gather",
    tensors=("self", "index"),
    moves=True,
    selects=True,
    index_bound=rows_along_dim,
)
def lower_gather(ctx: Lowering, node: OpNode) -> None:
    source, index = (ctx.view(name) for name in node.inputs)
    if source.rank == 0 or index.rank == 0:
        out = ctx.output()
        lifted = [view.unsqueeze(0) if view.rank == 0 else view for view in (source, index, out)]
        ctx.emit("gather_kernel", lifted[:2], lifted[2:], {"dim": 0})
        return
    ctx.emit("gather_kernel", [source, index], [ctx.output()], {"dim": source.dim(node.attrs["dim"])})


def _index_unsupported(node: OpNode, graph: IRGraph) -> str | None:
    if any(graph.tensors[name].dtype in ("bool", "uint8") for name in node.inputs[1:]):
        return "indexing with a boolean mask: the result's shape depends on the data"
    used = indexed_dims(node, len(node.inputs) - 1)
    if used and used != list(range(used[0], used[-1] + 1)):
        return "indexed dimensions that are not adjacent"
    return None


@register_op(
    "aten.index aten._unsafe_index",
    tensors=("self", "*indices"),
    unsupported=_index_unsupported,
    moves=True,
    selects=True,
    index_bound=lambda node, graph: counted_from_both_ends(node, graph, node.inputs[1:]),
)
def lower_index(ctx: Lowering, node: OpNode) -> None:
    source, *indices = (ctx.view(name) for name in node.inputs)
    used = indexed_dims(node, len(indices))
    if not used:
        ctx.finish(source)
        return
    shape = broadcast_shapes(*(index.shape for index in indices))
    picks = [index.expand(shape) for index in indices]
    ctx.emit("index_kernel", [source, *picks], [ctx.output()], {"first": used[0], "count": len(indices)})


@register_op(
    "aten.index_copy",
    tensors=("self", "index", "source"),
    unsupported=lambda node, graph: "index_copy on a scalar" if not graph.tensors[node.inputs[0]].shape else None,
    index_bound=rows_along_dim,
    one_dtype=True,
    integer_range=lambda node, graph, operands: ranges.hull(operands[node.inputs[0]], operands[node.inputs[2]]),
    shard=shard_rows_update,
)
def lower_index_copy(ctx: Lowering, node: OpNode) -> None:
    """Lower the replacement of rows of `self` by rows of `source`."""
    _update_rows(ctx, node, "index_copy_kernel", bases=node.inputs[:1], sources=node.inputs[2:])


@register_op(
    "npu.index_copy_pair",
    tensors=("self", "index", "source", "other", "other_source"),
    index_bound=rows_along_dim,
)
def lower_index_copy_pair(ctx: Lowering, node: OpNode) -> None:
    """Lower the replacement of the same rows in two tensors of one shape, each from its own source."""
    base, _, source, other, other_source = node.inputs
    _update_rows(ctx, node, "index_copy_pair_kernel", bases=(base, other), sources=(source, other_source))


def _update_rows(ctx: Lowering, node: OpNode, kernel: str, bases: Sequence[str], sources: Sequence[str]) -> None:
    """Replace rows of each base by its source, in place if the base may be overwritten, else in a copy."""
    outputs: list[View] = []
    for position, name in enumerate(bases):
        base = ctx.view(name)
        if ctx.donate(name, node.outputs[position]):
            outputs.append(base)
        else:
            outputs.append(ctx.output(position))
            ctx.copy(base, outputs[-1])
    index, *rows = (ctx.view(name) for name in (node.inputs[1], *sources))
    index = index.unsqueeze(0) if index.rank == 0 else index
    rows = [source.unsqueeze(0) if source.rank == 0 else source for source in rows]
    checked = is_checked_index(ctx, node.inputs[1])
    copy_rows(ctx, kernel, index, rows, outputs, outputs[0].dim(node.attrs["dim"]), checked)


def copy_rows(
    ctx: Lowering,
    kernel: str,
    index: View,
    rows: Sequence[View],
    outputs: Sequence[View],
    dim: int,
    checked: int = 0,
) -> None:
    """Emit the replacement of rows of each output by the rows of its source.

    Args:
        index: The row numbers that are replaced, a vector.
        checked: 1 if every index is known to be in range.
    """
    params = {"dim": dim, "checked": checked}
    touched = distinct_bytes(index) + 2 * sum(distinct_bytes(source) for source in rows)
    ctx.emit(kernel, [index, *rows], outputs, params, bytes_moved=touched)
