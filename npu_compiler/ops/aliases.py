"""View ops, which move no elements: the output is another view of the input. Reshapes copy if no strides express them.

Each is a function from the input's view to the output's, which lowering applies. Functionalization uses the same
function to find the memory that an in-place op changes, and asks each op for the op that writes a changed view back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from npu_compiler.graph.model import IRGraph, OpNode, TensorSpec
from npu_compiler.ops import ranges
from npu_compiler.ops.lowering import Lowering
from npu_compiler.ops.registry import (
    LowerFn,
    RangeFn,
    SupportFn,
    ViewFn,
    ViewRule,
    WriteBack,
    always,
    find_op,
    register_op,
    supported,
)
from npu_compiler.ops.sharding import shard_view
from npu_compiler.program.views import View


def view_rule(node: OpNode) -> ViewRule | None:
    """The rule by which a node's output is a view of its input's memory; None for an op that writes new memory."""
    op = find_op(node.op_type)
    return op.view if op is not None else None


def window(node: OpNode, source: View, out: TensorSpec) -> View | None:
    """The output of a view op as a view of its input's memory; None if no strides express it."""
    rule = view_rule(node)
    assert rule is not None, node.op_type
    return rule.window(node, source, out)


def single_output(node: OpNode, graph: IRGraph, index: int) -> OpNode:
    """The node that computes output `index` of a view op alone: for `split`, a slice."""
    rule = view_rule(node)
    return node if rule is None or rule.part is None else rule.part(node, graph, index)


def lower_view(ctx: Lowering, node: OpNode) -> None:
    for index, name in enumerate(node.outputs):
        step = single_output(node, ctx.graph, index)
        source, out = ctx.view(step.inputs[0]), ctx.spec(name)
        view = window(step, source, out)
        ctx.finish(ctx.reshaped(source, out.shape) if view is None else view, index)


def write_whole(node: OpNode, base: TensorSpec, out: TensorSpec) -> WriteBack | None:
    """The write-back of a view that shows every element once, in order: a reshape; None for any other view."""
    if out.numel != base.numel:
        return None
    return WriteBack("aten.reshape.default", {"shape": list(base.shape)}, keeps_rest=False)


def _write_permuted(node: OpNode, base: TensorSpec, out: TensorSpec) -> WriteBack:
    """The write-back of a permuted view: the inverse permutation.

    It is read from strides that number the dimensions.
    """
    dims = range(len(base.shape))
    turned = window(node, View(base.name, base.shape, tuple(dims), 0, base.dtype), out)
    assert turned is not None
    order = [turned.strides.index(dim) for dim in dims]
    return WriteBack("aten.permute.default", {"dims": order}, keeps_rest=False)


def _write_with(op_type: str) -> Callable[[OpNode, TensorSpec, TensorSpec], WriteBack]:
    """The write-back by a scatter op that takes the view op's own attributes."""
    return lambda node, base, out: WriteBack(op_type, node.attrs, keeps_rest=True)


def _write_narrow(node: OpNode, base: TensorSpec, out: TensorSpec) -> WriteBack:
    dim, start = node.attrs["dim"], node.attrs["start"]
    start, _ = slice_bounds(base.shape[dim], start, None)
    attrs = {"dim": dim, "start": start, "end": start + node.attrs["length"]}
    return WriteBack("aten.slice_scatter.default", attrs, keeps_rest=True)


def _write_nothing(node: OpNode, base: TensorSpec, out: TensorSpec) -> None:
    """Return None for no `WriteBack`: elements of the view overlap, so that the base cannot be rebuilt from it."""


def view_op(
    names: str,
    *,
    tensors: tuple[str, ...] = ("self",),
    unsupported: SupportFn = supported,
    may_copy: bool = False,
    write_back: Callable[[OpNode, TensorSpec, TensorSpec], WriteBack | None] = write_whole,
    identity: Callable[[OpNode, str], bool] | None = None,
    is_pure: bool = True,
    lower: LowerFn = lower_view,
) -> Callable[[ViewFn], ViewFn]:
    """Return a decorator that adds rows of ops whose output view the decorated function computes from the input's.

    Args:
        names: The ops' names, separated by spaces.
        may_copy, write_back: Fields of the ops' `ViewRule`.
        tensors, unsupported, identity, is_pure: As for `register_op`.
        lower: The ops' lowering.
    """

    def add(function: ViewFn) -> ViewFn:
        rule = ViewRule(function, may_copy, None, write_back)
        register_op(
            names,
            tensors=tensors,
            unsupported=unsupported,
            view=rule,
            moves=True,
            identity=identity,
            is_pure=is_pure,
            shard=shard_view,
        )(lower)
        return function

    return add


def _dims(value: object) -> list[int]:
    return [value] if isinstance(value, int) else list(value)  # type: ignore[call-overload]


def lower_identity(ctx: Lowering, node: OpNode) -> None:
    ctx.finish(ctx.view(node.inputs[0]))


@view_op("aten.alias aten.detach aten.positive", identity=always)
def _same(node: OpNode, source: View, out: TensorSpec) -> View:
    return source


view_op(
    "aten.dropout aten.feature_dropout aten.alpha_dropout",
    unsupported=lambda node, graph: "dropout in training mode" if node.attrs.get("train") else None,
    identity=lambda node, dtype: not node.attrs.get("train"),
    is_pure=False,
)(_same)


@view_op("aten.contiguous", may_copy=True, identity=always, lower=lower_identity)
def _contiguous(node: OpNode, source: View, out: TensorSpec) -> View | None:
    return source if source.is_contiguous else None


def _reshape(node: OpNode, source: View, out: TensorSpec) -> View | None:
    return source.reshape(out.shape)


view_op(
    "aten.reshape aten.flatten aten.reshape_as aten.ravel", tensors=("self", "other"), may_copy=True, identity=always
)(_reshape)
view_op(
    "aten.view aten._unsafe_view aten.unflatten aten.view_as npu.reshape",
    tensors=("self", "other"),
    unsupported=lambda node, graph: "view as another dtype" if node.op_type == "aten.view.dtype" else None,
    identity=always,
)(_reshape)


@view_op("aten.unsqueeze")
def _unsqueeze(node: OpNode, source: View, out: TensorSpec) -> View:
    return source.unsqueeze(node.attrs["dim"])


@view_op("aten.squeeze", identity=always)
def _squeeze(node: OpNode, source: View, out: TensorSpec) -> View:
    dims = range(source.rank) if "dim" not in node.attrs else _dims(node.attrs["dim"])
    for dim in sorted((source.dim(d) for d in dims), reverse=True):
        source = source.squeeze(dim)
    return source


@view_op("aten.transpose aten.swapaxes aten.swapdims", write_back=_write_permuted)
def _transpose(node: OpNode, source: View, out: TensorSpec) -> View:
    first = node.attrs.get("dim0", node.attrs.get("axis0"))
    second = node.attrs.get("dim1", node.attrs.get("axis1"))
    return source.transpose(int(first), int(second))  # type: ignore[arg-type]


@view_op("aten.permute", write_back=_write_permuted)
def _permute(node: OpNode, source: View, out: TensorSpec) -> View:
    return source.permute(node.attrs["dims"])


@view_op("aten.t aten.mT aten.adjoint aten.mH aten.matrix_H", write_back=_write_permuted)
def _matrix_transpose(node: OpNode, source: View, out: TensorSpec) -> View:
    return source.transpose(-1, -2) if source.rank >= 2 else source


@view_op("aten.numpy_T", write_back=_write_permuted)
def _reverse_dims(node: OpNode, source: View, out: TensorSpec) -> View:
    return source.permute(range(source.rank - 1, -1, -1))


@view_op("aten.movedim aten.moveaxis", write_back=_write_permuted)
def _movedim(node: OpNode, source: View, out: TensorSpec) -> View:
    if source.rank == 0:
        return source
    sources = [source.dim(d) for d in _dims(node.attrs["source"])]
    targets = [source.dim(d) for d in _dims(node.attrs["destination"])]
    order = [d for d in range(source.rank) if d not in sources]
    for target, dim in sorted(zip(targets, sources, strict=True)):
        order.insert(target, dim)
    return source.permute(order)


@view_op("aten.expand aten.expand_as aten.broadcast_to", tensors=("self", "other"), identity=always)
def _expand(node: OpNode, source: View, out: TensorSpec) -> View:
    return source.expand(out.shape)


def slice_bounds(size: int, start: int | None, end: int | None) -> tuple[int, int]:
    """Python's clamping of slice bounds: `None` is the far end, negatives count from the back."""
    low = 0 if start is None else start + size if start < 0 else start
    high = size if end is None else end + size if end < 0 else end
    low = min(max(low, 0), size)
    return low, min(max(high, low), size)


@view_op(
    "aten.slice",
    write_back=_write_with("aten.slice_scatter.default"),
    identity=lambda node, dtype: node.attrs.get("step", 1) == 1,
)
def _slice(node: OpNode, source: View, out: TensorSpec) -> View:
    dim = source.dim(node.attrs.get("dim", 0))
    start, end = slice_bounds(source.shape[dim], node.attrs.get("start"), node.attrs.get("end"))
    return source.slice(dim, start, end, node.attrs.get("step", 1))


@view_op(
    "aten.narrow",
    unsupported=lambda node, graph: None if "start" in node.attrs else "narrow from a tensor",
    write_back=_write_narrow,
    identity=always,
)
def _narrow(node: OpNode, source: View, out: TensorSpec) -> View:
    dim = source.dim(node.attrs["dim"])
    start, length = node.attrs["start"], node.attrs["length"]
    start = start + source.shape[dim] if start < 0 else start
    return source.slice(dim, start, start + length)


@view_op("aten.select", write_back=_write_with("aten.select_scatter.default"))
def _select(node: OpNode, source: View, out: TensorSpec) -> View:
    return source.select(node.attrs["dim"], node.attrs["index"])


@view_op("aten.unfold", write_back=_write_nothing)
def _unfold(node: OpNode, source: View, out: TensorSpec) -> View:
    """Sliding windows: `unfold(dim, size, step)` appends a dimension of overlapping elements."""
    if source.rank == 0:
        return replace(source, shape=(node.attrs["size"],), strides=(1,))
    dim, size, step = source.dim(node.attrs["dimension"]), node.attrs["size"], node.attrs["step"]
    windows = (source.shape[dim] - size) // step + 1
    shape = (*source.shape[:dim], windows, *source.shape[dim + 1 :], size)
    strides = (*source.strides[:dim], source.strides[dim] * step, *source.strides[dim + 1 :], source.strides[dim])
    return replace(source, shape=shape, strides=strides)


@view_op("aten.diagonal", write_back=_write_with("aten.diagonal_scatter.default"))
def _diagonal(node: OpNode, source: View, out: TensorSpec) -> View:
    return diagonal_view(source, node)


def diagonal_view(source: View, node: OpNode) -> View:
    """A view with two dimensions replaced by their diagonal, which becomes the last dimension."""
    offset = node.attrs.get("offset", 0)
    first, second = source.dim(node.attrs.get("dim1", 0)), source.dim(node.attrs.get("dim2", 1))
    start = source.offset + (offset * source.strides[second] if offset >= 0 else -offset * source.strides[first])
    rest = [d for d in range(source.rank) if d not in (first, second)]
    rows, columns = source.shape[first] + min(offset, 0), source.shape[second] - max(offset, 0)
    shape = (*(source.shape[d] for d in rest), max(0, min(rows, columns)))
    strides = (*(source.strides[d] for d in rest), source.strides[first] + source.strides[second])
    return replace(source, shape=shape, strides=strides, offset=start)


def _parts_op(
    names: str,
    tensors: tuple[str, ...],
    part: Callable[[OpNode, IRGraph, int], OpNode],
    integer_range: RangeFn | None = None,
) -> None:
    """Add rows of ops with several outputs, each of which another op (given by `part`) computes alone."""
    rule = ViewRule(_same, part=part)
    register_op(names, tensors=tensors, view=rule, moves=True, integer_range=integer_range, shard=shard_view)(
        lower_view
    )


def _slice_of(node: OpNode, graph: IRGraph, index: int) -> OpNode:
    dim = node.attrs.get("dim", 0)
    sizes = [graph.tensors[out].shape[dim] for out in node.outputs]
    start = sum(sizes[:index])
    indices = node.attrs.get("indices")
    if indices is not None and index > 0:  # which need not ascend
        start, _ = slice_bounds(graph.tensors[node.inputs[0]].shape[dim], indices[index - 1], None)
    attrs = {"dim": dim, "start": start, "end": start + sizes[index]}
    return OpNode(node.name, "aten.slice.Tensor", node.inputs[:1], (node.outputs[index],), attrs)


def _row_of(node: OpNode, graph: IRGraph, index: int) -> OpNode:
    attrs = {"dim": node.attrs.get("dim", 0), "index": index}
    return OpNode(node.name, "aten.select.int", node.inputs[:1], (node.outputs[index],), attrs)


def _broadcast_of(node: OpNode, graph: IRGraph, index: int) -> OpNode:
    size = {"size": list(graph.tensors[node.outputs[index]].shape)}
    return OpNode(node.name, "aten.expand.default", (node.inputs[index],), (node.outputs[index],), size)


def _chosen(node: OpNode, graph: IRGraph, index: int) -> OpNode:
    return OpNode(node.name, "aten.alias.default", (node.inputs[node.attrs["index"]],), node.outputs, {})


_parts_op("aten.split aten.split_with_sizes aten.chunk aten.tensor_split", ("self",), _slice_of)
_parts_op("aten.unbind", ("self",), _row_of)
_parts_op("aten.broadcast_tensors", ("*tensors",), _broadcast_of, ranges.each)
_parts_op("getitem", ("*outputs",), _chosen, lambda node, graph, operands: operands[node.inputs[node.attrs["index"]]])


def _shuffle(ctx: Lowering, node: OpNode, split: tuple[int, ...], order: list[int]) -> None:
    """Lower a pixel or channel shuffle: a reshape to `split`, a permutation by `order`, and a reshape to the output."""
    view = ctx.reshaped(ctx.view(node.inputs[0]), split)
    ctx.finish(ctx.reshaped(view.permute(order), ctx.spec(node.outputs[0]).shape))


@register_op("aten.pixel_shuffle", moves=True)
def lower_pixel_shuffle(ctx: Lowering, node: OpNode) -> None:
    *lead, channels, height, width = ctx.view(node.inputs[0]).shape
    r, n = node.attrs["upscale_factor"], len(lead)
    split = (*lead, channels // (r * r), r, r, height, width)
    _shuffle(ctx, node, split, [*range(n), n, n + 3, n + 1, n + 4, n + 2])


@register_op("aten.pixel_unshuffle", moves=True)
def lower_pixel_unshuffle(ctx: Lowering, node: OpNode) -> None:
    *lead, channels, height, width = ctx.view(node.inputs[0]).shape
    r, n = node.attrs["downscale_factor"], len(lead)
    split = (*lead, channels, height // r, r, width // r, r)
    _shuffle(ctx, node, split, [*range(n), n, n + 2, n + 4, n + 1, n + 3])


@register_op("aten.channel_shuffle", moves=True)
def lower_channel_shuffle(ctx: Lowering, node: OpNode) -> None:
    batch, channels, *rest = ctx.view(node.inputs[0]).shape
    groups = node.attrs["groups"]
    order = [0, 2, 1, *range(3, 3 + len(rest))]
    _shuffle(ctx, node, (batch, groups, channels // groups, *rest), order)
