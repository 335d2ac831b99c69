"""Ops that move nothing: the output is another view of the input. A reshape copies only where strides cannot say it."""

from __future__ import annotations

from npu_compiler.graph.model import OpNode
from npu_compiler.ops.lowering import Lowering
from npu_compiler.ops.registry import find_op, register_op
from npu_compiler.program.views import View


def _dims(value: object) -> list[int]:
    return [value] if isinstance(value, int) else list(value)  # type: ignore[call-overload]


@register_op(
    "aten.alias",
    "aten.detach",
    "aten.dropout",
    "aten.feature_dropout",
    "aten.contiguous",
    "aten.positive",
    "aten.alpha_dropout",
    tensors=("self",),
    unsupported=lambda node, graph: "dropout in training mode" if node.attrs.get("train") else None,
)
def lower_identity(ctx: Lowering, node: OpNode) -> None:
    ctx.finish(ctx.view(node.inputs[0]))


@register_op(
    "aten.view",
    "aten.reshape",
    "aten._unsafe_view",
    "aten.flatten",
    "aten.unflatten",
    "aten.view_as",
    "aten.reshape_as",
    "aten.ravel",
    "npu.reshape",
    tensors=("self", "other"),
    unsupported=lambda node, graph: "view as another dtype" if node.op_type == "aten.view.dtype" else None,
)
def lower_reshape(ctx: Lowering, node: OpNode) -> None:
    ctx.finish(ctx.reshaped(ctx.view(node.inputs[0]), ctx.spec(node.outputs[0]).shape))


@register_op("aten.unsqueeze")
def lower_unsqueeze(ctx: Lowering, node: OpNode) -> None:
    ctx.finish(ctx.view(node.inputs[0]).unsqueeze(node.attrs["dim"]))


@register_op("aten.squeeze")
def lower_squeeze(ctx: Lowering, node: OpNode) -> None:
    view = ctx.view(node.inputs[0])
    dims = range(view.rank) if "dim" not in node.attrs else _dims(node.attrs["dim"])
    for dim in sorted((view.dim(d) for d in dims), reverse=True):
        view = view.squeeze(dim)
    ctx.finish(view)


@register_op("aten.transpose", "aten.swapaxes", "aten.swapdims")
def lower_transpose(ctx: Lowering, node: OpNode) -> None:
    first = node.attrs.get("dim0", node.attrs.get("axis0"))
    second = node.attrs.get("dim1", node.attrs.get("axis1"))
    ctx.finish(ctx.view(node.inputs[0]).transpose(int(first), int(second)))  # type: ignore[arg-type]


@register_op("aten.permute")
def lower_permute(ctx: Lowering, node: OpNode) -> None:
    ctx.finish(ctx.view(node.inputs[0]).permute(node.attrs["dims"]))


@register_op("aten.t", "aten.mT", "aten.adjoint", "aten.mH", "aten.matrix_H")
def lower_matrix_transpose(ctx: Lowering, node: OpNode) -> None:
    view = ctx.view(node.inputs[0])
    ctx.finish(view.transpose(-1, -2) if view.rank >= 2 else view)


@register_op("aten.numpy_T")
def lower_reverse_dims(ctx: Lowering, node: OpNode) -> None:
    view = ctx.view(node.inputs[0])
    ctx.finish(view.permute(range(view.rank - 1, -1, -1)))


@register_op("aten.movedim", "aten.moveaxis")
def lower_movedim(ctx: Lowering, node: OpNode) -> None:
    view = ctx.view(node.inputs[0])
    sources = [view.dim(d) for d in _dims(node.attrs["source"])]
    targets = [view.dim(d) for d in _dims(node.attrs["destination"])]
    order = [d for d in range(view.rank) if d not in sources]
    for target, source in sorted(zip(targets, sources, strict=True)):
        order.insert(target, source)
    ctx.finish(view.permute(order))


@register_op("aten.expand", "aten.expand_as", "aten.broadcast_to", tensors=("self", "other"))
def lower_expand(ctx: Lowering, node: OpNode) -> None:
    ctx.finish(ctx.view(node.inputs[0]).expand(ctx.spec(node.outputs[0]).shape))


def slice_bounds(size: int, start: int | None, end: int | None) -> tuple[int, int]:
    """Python's clamping of slice bounds: `None` is the far end, negatives count from the back."""
    low = 0 if start is None else start + size if start < 0 else start
    high = size if end is None else end + size if end < 0 else end
    low = min(max(low, 0), size)
    return low, min(max(high, low), size)


@register_op("aten.slice")
def lower_slice(ctx: Lowering, node: OpNode) -> None:
    view = ctx.view(node.inputs[0])
    dim = view.dim(node.attrs.get("dim", 0))
    start, end = slice_bounds(view.shape[dim], node.attrs.get("start"), node.attrs.get("end"))
    ctx.finish(view.slice(dim, start, end, node.attrs.get("step", 1)))


@register_op("aten.narrow", unsupported=lambda node, graph: None if "start" in node.attrs else "narrow from a tensor")
def lower_narrow(ctx: Lowering, node: OpNode) -> None:
    view = ctx.view(node.inputs[0])
    dim = view.dim(node.attrs["dim"])
    start, length = node.attrs["start"], node.attrs["length"]
    start = start + view.shape[dim] if start < 0 else start
    ctx.finish(view.slice(dim, start, start + length))


@register_op("aten.select")
def lower_select(ctx: Lowering, node: OpNode) -> None:
    ctx.finish(ctx.view(node.inputs[0]).select(node.attrs["dim"], node.attrs["index"]))


@register_op("aten.split", "aten.split_with_sizes", "aten.chunk", "aten.tensor_split")
def lower_split(ctx: Lowering, node: OpNode) -> None:
    view = ctx.view(node.inputs[0])
    dim = view.dim(node.attrs.get("dim", 0))
    start = 0
    for index, name in enumerate(node.outputs):
        stop = start + ctx.spec(name).shape[dim]
        ctx.finish(view.slice(dim, start, stop), index)
        start = stop


@register_op("aten.unbind")
def lower_unbind(ctx: Lowering, node: OpNode) -> None:
    view = ctx.view(node.inputs[0])
    for index in range(len(node.outputs)):
        ctx.finish(view.select(node.attrs.get("dim", 0), index), index)


@register_op("getitem", tensors=("*outputs",))
def lower_getitem(ctx: Lowering, node: OpNode) -> None:
    ctx.finish(ctx.view(node.inputs[node.attrs["index"]]))


@register_op("aten.unfold")
def lower_unfold(ctx: Lowering, node: OpNode) -> None:
    """Sliding windows: `unfold(dim, size, step)` appends a dimension of overlapping elements."""
    view = ctx.view(node.inputs[0])
    dim, size, step = view.dim(node.attrs["dimension"]), node.attrs["size"], node.attrs["step"]
    windows = (view.shape[dim] - size) // step + 1
    shape = (*view.shape[:dim], windows, *view.shape[dim + 1 :], size)
    strides = (*view.strides[:dim], view.strides[dim] * step, *view.strides[dim + 1 :], view.strides[dim])
    ctx.finish(View(view.buffer, shape, strides, view.offset, view.dtype))


@register_op("aten.diagonal")
def lower_diagonal(ctx: Lowering, node: OpNode) -> None:
    ctx.finish(diagonal_view(ctx.view(node.inputs[0]), node))


def diagonal_view(view: View, node: OpNode) -> View:
    """The diagonal of two dimensions, as the last dimension."""
    offset = node.attrs.get("offset", 0)
    first, second = view.dim(node.attrs.get("dim1", 0)), view.dim(node.attrs.get("dim2", 1))
    start = view.offset + (offset * view.strides[second] if offset >= 0 else -offset * view.strides[first])
    rest = [d for d in range(view.rank) if d not in (first, second)]
    rows, columns = view.shape[first] + min(offset, 0), view.shape[second] - max(offset, 0)
    shape = (*(view.shape[d] for d in rest), max(0, min(rows, columns)))
    strides = (*(view.strides[d] for d in rest), view.strides[first] + view.strides[second])
    return View(view.buffer, shape, strides, start, view.dtype)


def _stages(ctx: Lowering, node: OpNode, stages: list[tuple[int, ...]], order: list[int]) -> None:
    """Reshape, permute, reshape to the output: the shape of every pixel and channel shuffle."""
    view = ctx.view(node.inputs[0])
    for shape in stages:
        view = ctx.reshaped(view, shape)
    ctx.finish(ctx.reshaped(view.permute(order), ctx.spec(node.outputs[0]).shape))


@register_op("aten.pixel_shuffle")
def lower_pixel_shuffle(ctx: Lowering, node: OpNode) -> None:
    *lead, channels, height, width = ctx.view(node.inputs[0]).shape
    r, n = node.attrs["upscale_factor"], len(lead)
    stages = [(*lead, channels // (r * r), r, r, height, width)]
    _stages(ctx, node, stages, [*range(n), n, n + 3, n + 1, n + 4, n + 2])


@register_op("aten.pixel_unshuffle")
def lower_pixel_unshuffle(ctx: Lowering, node: OpNode) -> None:
    *lead, channels, height, width = ctx.view(node.inputs[0]).shape
    r, n = node.attrs["downscale_factor"], len(lead)
    stages = [(*lead, channels, height // r, r, width // r, r)]
    _stages(ctx, node, stages, [*range(n), n, n + 2, n + 4, n + 1, n + 3])


@register_op("aten.channel_shuffle")
def lower_channel_shuffle(ctx: Lowering, node: OpNode) -> None:
    batch, channels, *rest = ctx.view(node.inputs[0]).shape
    groups = node.attrs["groups"]
    order = [0, 2, 1, *range(3, 3 + len(rest))]
    _stages(ctx, node, [(batch, groups, channels // groups, *rest)], order)


def is_alias(node: OpNode) -> bool:
    """Whether the node's op belongs to this file: its output shares memory with its input in PyTorch."""
    op = find_op(node.op_type)
    return op is not None and op.lower.__module__ == __name__


@register_op("aten.broadcast_tensors", tensors=("*tensors",))
def lower_broadcast_tensors(ctx: Lowering, node: OpNode) -> None:
    for index, name in enumerate(node.inputs):
        ctx.finish(ctx.view(name).expand(ctx.spec(node.outputs[index]).shape), index)
