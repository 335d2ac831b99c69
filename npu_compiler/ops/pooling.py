"""Max pooling with indices; and pooling and resampling of volumes, first within planes, then along the depth."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from npu_compiler.graph.dtypes import FLOAT_DTYPES
from npu_compiler.graph.model import IRGraph, OpNode
from npu_compiler.ops import ranges
from npu_compiler.ops.conv import MAX_POOL
from npu_compiler.ops.lowering import Lowering
from npu_compiler.ops.registry import Range, register_op
from npu_compiler.ops.tensor import emit_arange
from npu_compiler.ops.windows import fits_pooling
from npu_compiler.program.kernels import Family, Grid, declare_kernel
from npu_compiler.program.views import View

declare_kernel(
    "max_pool2d_index_kernel",
    Family.POOL,
    "x:f[n,c,h,w] -> out:i[n,c,p,q]",
    source="pool.metal",
    grid=Grid.PLANES,
    where=lambda call: fits_pooling(call) and 0 not in (call.h, call.w),
    **MAX_POOL,
)

Params = Mapping[str, Any]


def _spatial(node: OpNode) -> int:
    """Number of dimensions over which a pooling or resampling op works, read from its name."""
    return next(rank for rank in (1, 2, 3) if f"{rank}d" in node.base)


def _per_axis(value: Any, spatial: int, default: int) -> list[int]:
    """An attribute as [depth, height, width].

    With fewer dimensions, the leading entries are `default`, without effect.
    """
    listed = [value] if isinstance(value, int) else list(value or [default])
    listed = listed * spatial if len(listed) == 1 else listed
    return [default] * (3 - spatial) + listed


def _windows(node: OpNode) -> dict[str, Any]:
    """The parameters of a pooling, each as [depth, height, width]."""
    attrs, spatial = node.attrs, _spatial(node)
    window = _per_axis(attrs["kernel_size"], spatial, 1)
    return {
        "window": window,
        "stride": _per_axis(attrs["stride"], spatial, 1) if attrs.get("stride") else window,
        "padding": _per_axis(attrs.get("padding", 0), spatial, 0),
        "dilation": _per_axis(attrs.get("dilation", 1), spatial, 1),
        "ceil_mode": int(bool(attrs.get("ceil_mode"))),
    }


def _as_volumes(view: View, spatial: int) -> View:
    """A view as [batch, channels, depth, height, width], with sizes of 1 for missing dimensions."""
    view = view.unsqueeze(0) if view.rank == spatial + 1 else view
    for _ in range(3 - spatial):
        view = view.unsqueeze(2)
    return view


def _planes(ctx: Lowering, volumes: View) -> View:
    """Volumes as planes, [batch, channels · depth, height, width]."""
    batch, channels, depth, height, width = volumes.shape
    return ctx.reshaped(volumes, (batch, channels * depth, height, width))


def _columns(ctx: Lowering, volumes: View) -> View:
    """Volumes as columns along the depth, [batch, channels, depth, height · width]."""
    batch, channels, depth, height, width = volumes.shape
    return ctx.reshaped(volumes, (batch, channels, depth, height * width))


def _plane_params(params: Params) -> dict[str, Any]:
    return {key: value[1:] if isinstance(value, list) else value for key, value in params.items()}


def _depth_params(params: Params) -> dict[str, Any]:
    """The parameters of a pooling along the depth, as a 2-D window one column wide over `_columns`."""
    return {
        key: [value[0], int(key != "padding")] if isinstance(value, list) else value for key, value in params.items()
    }


def _pooling_unsupported(node: OpNode, graph: IRGraph) -> str | None:
    x, out = (graph.tensors[name] for name in (node.inputs[0], node.outputs[0]))
    if x.dtype not in FLOAT_DTYPES:
        return "pooling of integers"
    if x.numel == 0 and out.numel:
        return "pooling of an empty tensor"
    if node.base.endswith("3d") and len(x.shape) not in (4, 5):
        return f"volumes of rank {len(x.shape)}"
    if "kernel_size" in node.attrs and len(x.shape) > 3:
        depth, padded = x.shape[-3], x.shape[-3] + 2 * _windows(node)["padding"][0]
        return "pooling with more padding than depth" if padded > 4 * (depth + out.shape[-3]) else None
    return None


def _plane_indices(node: OpNode, graph: IRGraph, operands: Mapping[str, Range]) -> tuple[Range, ...]:
    x = graph.tensors[node.inputs[0]].shape
    return operands.get(node.inputs[0], (0, 0)), ranges.index_below(math.prod(x[len(x) - _spatial(node) :]))


@register_op(
    "aten.max_pool1d_with_indices aten.max_pool2d_with_indices",
    unsupported=_pooling_unsupported,
    integer_range=_plane_indices,
)
def lower_max_pool_with_indices(ctx: Lowering, node: OpNode) -> None:
    spatial = _spatial(node)
    x = _planes(ctx, _as_volumes(ctx.view(node.inputs[0]), spatial))
    x, params = ctx.inner_contiguous(x, 3), _plane_params(_windows(node))
    for kernel, index in (("max_pool2d_kernel", 0), ("max_pool2d_index_kernel", 1)):
        out = _planes(ctx, _as_volumes(ctx.output(index), spatial))
        ctx.emit(kernel, [x], [out], params, flops=out.numel * math.prod(params["window"]))


@register_op("aten.max_pool3d", unsupported=_pooling_unsupported)
def lower_max_pool3d(ctx: Lowering, node: OpNode) -> None:
    _max_of_planes(ctx, node, _as_volumes(ctx.view(node.inputs[0]), 3))


@register_op("aten.max_pool3d_with_indices", unsupported=_pooling_unsupported, integer_range=_plane_indices)
def lower_max_pool3d_with_indices(ctx: Lowering, node: OpNode) -> None:
    """Lower a max pooling of volumes with the index of each maximum.

    The index is found in two steps: which plane has the greatest of the planes' maxima, and where that plane has it.
    """
    x, params = _as_volumes(ctx.view(node.inputs[0]), 3), _windows(node)
    planes, columns = _max_of_planes(ctx, node, x)
    out = _columns(ctx, _as_volumes(ctx.output(1), 3))
    within = ctx.temp(planes.shape, "int32")
    window = _plane_params(params)
    ctx.emit("max_pool2d_index_kernel", [ctx.inner_contiguous(_planes(ctx, x), 3)], [within], window)
    winners = ctx.temp(out.shape, "int32")
    ctx.emit("max_pool2d_index_kernel", [columns], [winners], _depth_params(params))
    batch, channels, depth, area = columns.shape
    picked = ctx.temp((batch, channels, out.shape[2] * area), "int32")
    sources, places = (
        ctx.reshaped(view, (batch, channels, view.numel // (batch * channels) if view.numel else 0))
        for view in (within, winners)
    )
    ctx.emit("gather_kernel", [sources, places], [picked], {"dim": 2})
    plane = ctx.temp(picked.shape, "int32")
    ctx.elementwise("floor_divide", [places, max(area, 1)], plane)
    ctx.elementwise("add", [picked, plane], ctx.reshaped(out, picked.shape), {"alpha": x.shape[3] * x.shape[4]})


def _max_of_planes(ctx: Lowering, node: OpNode, x: View) -> tuple[View, View]:
    """Emit the first output of a max pooling; returns the maxima within planes, viewed as planes and as columns."""
    params, out = _windows(node), _as_volumes(ctx.output(), 3)
    shape = (*x.shape[:3], *out.shape[3:])
    maxima = ctx.temp(shape, x.dtype)
    planes, columns = _planes(ctx, maxima), _columns(ctx, maxima)
    flops = maxima.numel * math.prod(params["window"][1:])
    source = ctx.inner_contiguous(_planes(ctx, x), 3)
    ctx.emit("max_pool2d_kernel", [source], [planes], _plane_params(params), flops=flops)
    flops = out.numel * params["window"][0]
    ctx.emit("max_pool2d_kernel", [columns], [_columns(ctx, out)], _depth_params(params), flops=flops)
    return planes, columns


@register_op("aten.avg_pool3d", unsupported=_pooling_unsupported)
def lower_avg_pool3d(ctx: Lowering, node: OpNode) -> None:
    """Lower an average pooling of volumes as a mean along the depth of means within planes.

    That is exact because a window's number of elements is a product of one number per axis.
    """
    params = {key: value for key, value in _windows(node).items() if key != "dilation"}
    include, divisor = node.attrs.get("count_include_pad"), node.attrs.get("divisor_override")
    params["count_include_pad"] = int(True if include is None else bool(include))
    planes = {**_plane_params(params), "divisor": 1 if divisor else 0}
    _in_two_steps(ctx, node, "avg_pool2d_kernel", planes, {**_depth_params(params), "divisor": divisor or 0})


@register_op("aten.adaptive_avg_pool3d aten._adaptive_avg_pool3d", unsupported=_pooling_unsupported)
def lower_adaptive_avg_pool3d(ctx: Lowering, node: OpNode) -> None:
    _in_two_steps(ctx, node, "adaptive_avg_pool2d_kernel", {}, {})


def _scales(node: OpNode, graph: IRGraph) -> list[float]:
    """Input elements per output element along depth, height and width.

    A given scale factor takes precedence over sizes.
    """
    x, out = (graph.tensors[name].shape[2:] for name in (node.inputs[0], node.outputs[0]))
    given = node.attrs.get("scale_factors")
    if not isinstance(given, list):
        given = [node.attrs.get(name) for name in ("scales_d", "scales_h", "scales_w")]
    sizes = zip(x, out, given, strict=True)
    return [1.0 / factor if factor and factor > 0 else source / target for source, target, factor in sizes]


@register_op("aten.upsample_nearest3d aten._upsample_nearest_exact3d")
def lower_upsample_nearest3d(ctx: Lowering, node: OpNode) -> None:
    depth, *plane = _scales(node, ctx.graph)
    exact = int("exact" in node.base)
    planes, columns = ({"scale": scale, "exact": exact} for scale in (plane, [depth, 1.0]))
    _in_two_steps(ctx, node, "upsample_nearest_kernel", planes, columns)


@register_op("aten.upsample_trilinear3d", unsupported=_pooling_unsupported)
def lower_upsample_trilinear3d(ctx: Lowering, node: OpNode) -> None:
    """Lower trilinear resampling: resample within planes, then blend two planes for each output plane by distance."""
    x, out = _as_volumes(ctx.view(node.inputs[0]), 3), ctx.output()
    align_corners, (scale, *plane) = bool(node.attrs.get("align_corners")), _scales(node, ctx.graph)
    between = ctx.temp((*x.shape[:3], *out.shape[3:]), "float32")
    params = {"scale": plane, "align_corners": int(align_corners)}
    source = ctx.inner_contiguous(_planes(ctx, x), 3)
    ctx.emit("upsample_bilinear_kernel", [source], [_planes(ctx, between)], params, flops=8 * between.numel)
    places, weights = _between_planes(ctx, x.shape[2], out.shape[2], None if align_corners else scale)
    terms = []
    for place, weight in zip(places, weights, strict=True):
        picked, term = ctx.temp(out.shape, "float32"), ctx.temp(out.shape, "float32")
        ctx.emit("index_select_kernel", [between, place], [picked], {"dim": 2})
        ctx.elementwise("mul", [picked, weight.unsqueeze(1).unsqueeze(1)], term)
        terms.append(term)
    ctx.elementwise("add", terms, out)


def _between_planes(
    ctx: Lowering, size: int, count: int, scale: float | None
) -> tuple[tuple[View, View], tuple[View, View]]:
    """The two input planes between which each of `count` output planes lies, and the weights of both.

    Args:
        scale: Input planes per output plane; None if the first and the last plane stay in place.
    """

    def of_numbers(op: str, *operands: View | float) -> View:
        result = ctx.temp((count,), "float32")
        ctx.elementwise(op, operands, result)
        return result

    place = ctx.temp((count,), "float32")
    if scale is None:
        emit_arange(ctx, place, 0.0, (size - 1) / (count - 1) if count > 1 else 0.0)
    else:
        emit_arange(ctx, place, 0.5, 1.0)
        place = of_numbers("clamp_min", of_numbers("sub", of_numbers("mul", place, scale), 0.5), 0.0)
    low = of_numbers("clamp_max", of_numbers("floor", place), float(size - 1))
    high = of_numbers("clamp_max", of_numbers("add", low, 1.0), float(size - 1))
    share = of_numbers("sub", place, low)
    return (ctx.cast(low, "int32"), ctx.cast(high, "int32")), (of_numbers("rsub", share, 1.0), share)


def _in_two_steps(ctx: Lowering, node: OpNode, kernel: str, planes: Params, columns: Params) -> None:
    """Run a kernel over the planes of volumes, and then over the columns of its results along the depth."""
    x, out = _as_volumes(ctx.view(node.inputs[0]), 3), _as_volumes(ctx.output(), 3)
    between = ctx.temp((*x.shape[:3], *out.shape[3:]), "float32" if x.dtype in FLOAT_DTYPES else x.dtype)
    source = ctx.inner_contiguous(_planes(ctx, x), 3)
    ctx.emit(kernel, [source], [_planes(ctx, between)], planes, flops=x.numel)
    ctx.emit(kernel, [_columns(ctx, between)], [_columns(ctx, out)], columns, flops=between.numel)
