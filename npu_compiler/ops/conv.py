"""Convolutions (1-D ones run as 2-D), batch normalization, pooling, and resampling of images."""

from __future__ import annotations

import math
from typing import Any

from npu_compiler.graph.dtypes import FLOAT_DTYPES
from npu_compiler.graph.model import IRGraph, OpNode
from npu_compiler.ops.conv3d import lower_conv3d, volumes_unsupported
from npu_compiler.ops.elementwise import per_channel
from npu_compiler.ops.image_convolutions import emit_convolution, emit_transposed_convolution
from npu_compiler.ops.lowering import Lowering
from npu_compiler.ops.registry import Args, Layout, register_op
from npu_compiler.ops.windows import (
    convolution_products,
    fits_convolution,
    fits_pooling,
    fits_resampling,
    fits_transposed_convolution,
)
from npu_compiler.program.elementwise import ACTIVATION
from npu_compiler.program.kernels import Family, Grid, declare_kernel
from npu_compiler.program.products import Product
from npu_compiler.program.views import View

declare_kernel(
    "conv2d_kernel",
    Family.CONV,
    "x:f[n,.c,h,w] weight:f[.o,i,kh,kw] bias?:f[.o] residual?:f[n,o,p,q] -> out:f[n,o,p,q]",
    source="conv_bn_relu.metal",
    grid=Grid.PIXELS,
    where=lambda call: (
        call.groups > 0 and call.c == call.i * call.groups and call.o % call.groups == 0 and fits_convolution(call)
    ),
    products=convolution_products,
    stride="2I",
    padding="4i",
    dilation="2I",
    groups="I",
    activation=ACTIVATION,
    direct="?",
)
declare_kernel(
    "conv_transpose2d_kernel",
    Family.CONV,
    "x:f[.n,c,h,w] weight:f[.c,i,kh,kw] bias?:f[.o] -> out:f[n,o,p,q]",
    source="conv_bn_relu.metal",
    where=lambda call: (
        call.groups > 0
        and call.o == call.i * call.groups
        and call.c % call.groups == 0
        and fits_transposed_convolution(call)
    ),
    products=lambda call: (
        Product(call.n * call.h * call.w, call.i * call.kh * call.kw, call.c // call.groups, call.groups),
    ),
    stride="2I",
    padding="2i",
    output_padding="2I",
    dilation="2I",
    groups="I",
)
MAX_POOL: dict[str, Any] = {"window": "2I", "stride": "2I", "padding": "2I", "dilation": "2I", "ceil_mode": "?"}
declare_kernel(
    "max_pool2d_kernel",
    Family.POOL,
    "x[n,c,h,w] -> out[n,c,p,q]",
    source="pool.metal",
    grid=Grid.PLANES,
    where=fits_pooling,
    **MAX_POOL,
)
declare_kernel(
    "avg_pool2d_kernel",
    Family.POOL,
    "x:f[n,c,h,w] -> out:f[n,c,p,q]",
    source="pool.metal",
    grid=Grid.PLANES,
    where=fits_pooling,
    window="2I",
    stride="2I",
    padding="2I",
    ceil_mode="?",
    count_include_pad="?",
    divisor="i",
)
declare_kernel(
    "adaptive_avg_pool2d_kernel",
    Family.POOL,
    "x:f[n,c,h,w] -> out:f[n,c,p,q]",
    source="pool.metal",
    grid=Grid.SHORT_REDUCTIONS,
    where=lambda call: call.h > 0 and call.w > 0,
)
declare_kernel(
    "upsample_nearest_kernel",
    Family.POOL,
    "x[n,c,h,w] -> out[n,c,p,q]",
    source="upsample.metal",
    grid=Grid.PLANES,
    where=fits_resampling,
    scale="2f",
    exact="?",
)
declare_kernel(
    "upsample_bilinear_kernel",
    Family.POOL,
    "x:f[n,c,h,w] -> out:f[n,c,p,q]",
    source="upsample.metal",
    grid=Grid.PLANES,
    where=fits_resampling,
    scale="2f",
    align_corners="?",
)


def _pair(value: Any, default: int = 1) -> list[int]:
    """A per-dimension attribute as [height, width]: scalars and single-element lists repeat."""
    if value is None or value == []:
        return [default, default]
    if isinstance(value, int):
        return [value, value]
    return list(value) if len(value) == 2 else [value[0], value[0]]


def _padding(node: OpNode, kernel: tuple[int, ...], dilation: list[int], rank1: bool) -> list[int]:
    """The padding as [top, bottom, left, right]; for 'same', an odd pixel is at the end, as in PyTorch.

    Args:
        kernel, dilation: For height and width.
        rank1: Whether the node is a 1-D convolution, which has a width only.
    """
    value = node.attrs.get("padding", 0)
    if value == "valid":
        return [0, 0, 0, 0]
    if value == "same":
        totals = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        return [x for total in totals for x in (total // 2, total - total // 2)]
    if isinstance(value, list) and len(value) == 4:
        return list(value)
    height, width = _per_axis(value, 0, rank1)
    return [height, height, width, width]


def _per_axis(value: Any, default: int, rank1: bool) -> list[int]:
    """A conv attribute as [height, width].

    Args:
        default: Value for an axis for which the node has none, such as the height of a 1-D convolution (`rank1`).
    """
    if rank1:
        size = value if isinstance(value, int) else value[0] if value else default
        return [default, size]
    return _pair(value, default)


def _conv_unsupported(node: OpNode, graph: IRGraph) -> str | None:
    if any(graph.tensors[name].dtype not in FLOAT_DTYPES for name in node.inputs):
        return "convolution of integers"
    rank = len(graph.tensors[node.inputs[1]].shape)
    if rank == 5 and node.base in ("aten.convolution", "aten._convolution"):
        return volumes_unsupported(node, graph)
    if rank not in (3, 4):
        return f"convolution with a weight of rank {rank}"
    if node.attrs.get("groups", 1) < 1:
        return f"convolution in {node.attrs['groups']} groups"
    padded = node.base == "aten.convolution" and any(node.attrs.get("output_padding") or [])
    if padded and not node.attrs.get("transposed"):
        return "output_padding on a convolution that is not transposed"
    return None


def _as_2d(view: View) -> View:
    """An image [N, C, L] as [N, C, 1, L]; other ranks are unchanged."""
    return view.unsqueeze(2) if view.rank == 3 else view


def _batched(view: View, spatial: int) -> View:
    """An image with a batch dimension, which is added if it is missing."""
    return view.unsqueeze(0) if view.rank == spatial + 1 else view


def _with_batch(view: View, spatial: int) -> View:
    """An image with batch and channel dimensions, which are added if they are missing."""
    while view.rank < spatial + 2:
        view = view.unsqueeze(0)
    return view


def _channel_axis(node: OpNode) -> int | None:
    """The axis of a weight's output channels, for a factor per channel; None if no axis has all of them.

    Transposed convolutions have their output channels second and, with groups, only a part of them.
    """
    if not node.attrs.get("transposed") and "transpose" not in node.base:
        return 0
    return 1 if node.attrs.get("groups", 1) == 1 else None


@register_op(
    "aten.conv2d aten.conv1d aten.convolution aten._convolution",
    tensors=("input", "weight", "bias"),
    unsupported=_conv_unsupported,
    layout=Layout.CONVOLUTION,
    channel_axis=_channel_axis,
    one_dtype=True,
)
def lower_conv(ctx: Lowering, node: OpNode) -> None:
    if len(ctx.spec(node.inputs[1]).shape) == 5:
        lower_conv3d(ctx, node)
        return
    if node.attrs.get("transposed"):
        lower_conv_transpose(ctx, node)
        return
    x, weight, *bias = (ctx.view(name) for name in node.inputs)
    emit_conv(ctx, node, x, weight, bias[0] if bias else None)


@register_op("npu.conv2d", tensors=("input", "weight", "bias", "residual"), layout=Layout.CONVOLUTION)
def lower_fused_conv(ctx: Lowering, node: OpNode) -> None:
    """Lower act(conv(x) + bias + residual); attributes say which of bias and residual there are."""
    x, weight, *rest = (ctx.view(name) for name in node.inputs)
    bias = rest.pop(0) if node.attrs.get("has_bias") else None
    residual = rest.pop(0) if node.attrs.get("has_residual") else None
    emit_conv(ctx, node, x, weight, bias, residual, node.attrs.get("activation", "none"))


def conv_window(node: OpNode, kernel: tuple[int, ...], rank1: bool = False) -> dict[str, Any]:
    """The parameters of a convolution.

    Args:
        kernel: Height and width of its windows.
        rank1: Whether the node's attributes are of one axis.
    """
    dilation = _per_axis(node.attrs.get("dilation", 1), 1, rank1)
    return {
        "stride": _per_axis(node.attrs.get("stride", 1), 1, rank1),
        "padding": _padding(node, kernel, dilation, rank1),
        "dilation": dilation,
        "groups": node.attrs.get("groups", 1),
    }


def emit_conv(
    ctx: Lowering,
    node: OpNode,
    x: View,
    weight: View,
    bias: View | None,
    residual: View | None = None,
    activation: str = "none",
) -> None:
    rank1 = weight.rank == 3
    x = _batched(x, weight.rank - 2)
    out = _batched(ctx.output(), weight.rank - 2)
    residual = _batched(residual, weight.rank - 2) if residual is not None else None
    x, weight, out = _as_2d(x), _as_2d(weight), _as_2d(out)
    residual = _as_2d(residual) if residual is not None else None
    emit_convolution(ctx, x, weight, bias, out, conv_window(node, weight.shape[2:], rank1), residual, activation)


@register_op(
    "aten.conv_transpose2d aten.conv_transpose1d",
    tensors=("input", "weight", "bias"),
    unsupported=_conv_unsupported,
    layout=Layout.CONVOLUTION,
    channel_axis=_channel_axis,
    one_dtype=True,
)
def lower_conv_transpose(ctx: Lowering, node: OpNode) -> None:
    x, weight, *biases = (ctx.view(name) for name in node.inputs)
    rank1 = weight.rank == 3
    x, out = _batched(x, weight.rank - 2), _batched(ctx.output(), weight.rank - 2)
    attrs = node.attrs
    settings = {
        "stride": _per_axis(attrs.get("stride", 1), 1, rank1),
        "padding": _per_axis(attrs.get("padding", 0), 0, rank1),
        "output_padding": _per_axis(attrs.get("output_padding", 0), 0, rank1),
        "dilation": _per_axis(attrs.get("dilation", 1), 1, rank1),
        "groups": attrs.get("groups", 1),
    }
    bias = biases[0] if biases else None
    emit_transposed_convolution(ctx, _as_2d(x), _as_2d(weight), bias, _as_2d(out), settings)


def _batch_norm_unsupported(node: OpNode, graph: IRGraph) -> str | None:
    if node.attrs.get("training") or node.attrs.get("train"):
        return "batch normalization in training mode"
    if len(node.inputs) not in (3, 5):
        return "batch normalization without running statistics"
    if _reads_statistics(node, graph):
        return "batch normalization that returns its statistics"
    if any(len(graph.tensors[name].shape) != 1 for name in node.inputs[1:]):
        return "batch normalization by parameters that are no vectors"
    return None


def _reads_statistics(node: OpNode, graph: IRGraph) -> bool:
    """Whether an output other than the first one of a node is read."""
    others = set(node.outputs[1:])
    if not others:
        return False
    for user in graph.nodes:
        read = {user.inputs[user.attrs["index"]]} if user.base == "getitem" else set(user.inputs)
        if read & others:
            return True
    return bool(others & set(graph.outputs))


BATCH_NORM_OPS = (
    "aten.batch_norm aten._native_batch_norm_legit_no_training aten.native_batch_norm aten._batch_norm_no_update"
).split()


@register_op(
    " ".join(BATCH_NORM_OPS),
    tensors=("input", "weight", "bias", "running_mean", "running_var"),
    unsupported=_batch_norm_unsupported,
    one_dtype=True,
)
def lower_batch_norm(ctx: Lowering, node: OpNode) -> None:
    """Lower (x - mean) · gamma / sqrt(var + eps) + beta for statistics that are not weights.

    Other batch norms are folded or rewritten by `passes/batch_norm.py`.
    """
    x, *affine, mean, var = (ctx.view(name) for name in node.inputs)
    std = ctx.temp(var.shape, "float32")
    ctx.elementwise("add", [var, float(node.attrs.get("eps", 1e-5))], std)
    scale = ctx.temp(var.shape, "float32")
    ctx.elementwise("rsqrt", [std], scale)
    centered = ctx.temp(x.shape, "float32")
    ctx.elementwise("sub", [x, per_channel(mean, x.rank)], centered)
    if affine:
        scaled = ctx.temp(var.shape, "float32")
        ctx.elementwise("mul", [scale, affine[0]], scaled)
        operands = [centered, per_channel(scaled, x.rank), per_channel(affine[1], x.rank)]
        ctx.elementwise("scale_shift", operands, ctx.output())
    else:
        ctx.elementwise("mul", [centered, per_channel(scale, x.rank)], ctx.output())


@register_op(
    "npu.scale_shift_channels", tensors=("input", "scale", "shift"), layout=Layout.IMAGE, float32_parameters=True
)
def lower_scale_shift(ctx: Lowering, node: OpNode) -> None:
    x, scale, shift = (ctx.view(name) for name in node.inputs)
    ctx.elementwise("scale_shift", [x, per_channel(scale, x.rank), per_channel(shift, x.rank)], ctx.output())


def _pool_views(ctx: Lowering, node: OpNode, spatial: int) -> tuple[View, View]:
    x, out = _batched(ctx.view(node.inputs[0]), spatial), _batched(ctx.output(), spatial)
    return _as_2d(x), _as_2d(out)


def _max_pool_unsupported(node: OpNode, graph: IRGraph) -> str | None:
    return None if graph.tensors[node.inputs[0]].dtype in FLOAT_DTYPES else "max pooling of integers"


@register_op(
    "aten.max_pool2d aten.max_pool1d",
    unsupported=_max_pool_unsupported,
    layout=Layout.IMAGE,
)
def lower_max_pool(ctx: Lowering, node: OpNode) -> None:
    rank1 = node.base.endswith("1d")
    x, out = _pool_views(ctx, node, 1 if rank1 else 2)
    params = max_pool_window(node, rank1)
    flops = out.numel * math.prod(params["window"])
    ctx.emit("max_pool2d_kernel", [ctx.inner_contiguous(x, 3)], [out], params, flops=flops)


def max_pool_window(node: OpNode, rank1: bool = False) -> dict[str, Any]:
    """The parameters of a max pooling; with `rank1`, of one over one dimension, as a window of height 1."""
    attrs = node.attrs
    return {
        "window": _per_axis(attrs["kernel_size"], 1, rank1),
        "stride": _per_axis(attrs.get("stride") or attrs["kernel_size"], 1, rank1),
        "padding": _per_axis(attrs.get("padding", 0), 0, rank1),
        "dilation": _per_axis(attrs.get("dilation", 1), 1, rank1),
        "ceil_mode": int(bool(attrs.get("ceil_mode"))),
    }


def _averages_integers(node: OpNode, graph: IRGraph) -> str | None:
    return None if graph.tensors[node.inputs[0]].dtype in FLOAT_DTYPES else "averages of integers"


@register_op("aten.avg_pool2d aten.avg_pool1d", unsupported=_averages_integers, layout=Layout.IMAGE)
def lower_avg_pool(ctx: Lowering, node: OpNode) -> None:
    rank1 = node.base.endswith("1d")
    x, out = _pool_views(ctx, node, 1 if rank1 else 2)
    kernel = _per_axis(node.attrs["kernel_size"], 1, rank1)
    stride = node.attrs.get("stride") or node.attrs["kernel_size"]
    include = node.attrs.get("count_include_pad")
    padding = _per_axis(node.attrs.get("padding", 0), 0, rank1)
    whole = out.shape[-2:] == (1, 1) and not any(padding) and not node.attrs.get("divisor_override")
    if whole and all(size <= wide for size, wide in zip(x.shape[-2:], kernel, strict=True)):
        # Transformers' EfficientNet has a window as wide as it has channels, to cover images of every size.
        ctx.emit("adaptive_avg_pool2d_kernel", [ctx.inner_contiguous(x, 3)], [out], flops=x.numel)
        return
    params = {
        "window": kernel,
        "stride": _per_axis(stride, 1, rank1),
        "padding": padding,
        "ceil_mode": int(bool(node.attrs.get("ceil_mode"))),
        "count_include_pad": int(True if include is None else bool(include)),
        "divisor": node.attrs.get("divisor_override") or 0,
    }
    covered = math.prod(min(sizes) for sizes in zip(kernel, x.shape[-2:], strict=True))
    ctx.emit("avg_pool2d_kernel", [ctx.inner_contiguous(x, 3)], [out], params, flops=out.numel * covered)


@register_op(
    "aten.adaptive_avg_pool2d aten._adaptive_avg_pool2d aten.adaptive_avg_pool1d",
    unsupported=_averages_integers,
    layout=Layout.IMAGE,
)
def lower_adaptive_avg_pool(ctx: Lowering, node: OpNode) -> None:
    spatial = 1 if node.base.endswith("1d") else 2
    x, out = (_as_2d(_with_batch(view, spatial)) for view in (ctx.view(node.inputs[0]), ctx.output()))
    ctx.emit("adaptive_avg_pool2d_kernel", [ctx.inner_contiguous(x, 3)], [out], flops=x.numel)


def _scales(node: OpNode, x: View, out: View) -> list[float]:
    """Input pixels per output pixel [vertical, horizontal]; a scale factor given by the user wins over the sizes."""
    given = node.attrs.get("scale_factors")
    if not isinstance(given, list):
        names = ("scales",) if node.base.endswith("1d") else ("scales_h", "scales_w")
        given = [node.attrs.get(name) for name in names]
    given = [None, *given] if len(given) == 1 else given
    sizes = zip(x.shape[2:], out.shape[2:], given, strict=True)
    return [1.0 / factor if factor and factor > 0 else source / target for source, target, factor in sizes]


def _scales_but(node: OpNode, x: View, out: View, fixed: tuple[int, ...]) -> list[float]:
    """`_scales`, except for axes that grow by one of the factors `fixed`: there PyTorch ignores a given scale."""
    sizes = zip(x.shape[2:], out.shape[2:], _scales(node, x, out), strict=True)
    return [
        source / target if target in [factor * source for factor in fixed] else scale for source, target, scale in sizes
    ]


@register_op(
    "aten.upsample_nearest2d aten._upsample_nearest_exact2d aten.upsample_nearest1d aten._upsample_nearest_exact1d",
    layout=Layout.IMAGE,
)
def lower_upsample_nearest(ctx: Lowering, node: OpNode) -> None:
    x, out = _as_2d(ctx.view(node.inputs[0])), _as_2d(ctx.output())
    fixed = (1, 2) if node.base == "aten.upsample_nearest2d" else ()
    params = {"scale": _scales_but(node, x, out, fixed), "exact": int("exact" in node.base)}
    ctx.emit("upsample_nearest_kernel", [x], [out], params)


def _blending_unsupported(node: OpNode, graph: IRGraph) -> str | None:
    dtype = graph.tensors[node.inputs[0]].dtype
    return None if dtype in FLOAT_DTYPES else f"PyTorch blends {dtype} in fixed point"


@register_op("aten.upsample_bilinear2d aten.upsample_linear1d", unsupported=_blending_unsupported, layout=Layout.IMAGE)
def lower_upsample_bilinear(ctx: Lowering, node: OpNode) -> None:
    x, out = _as_2d(ctx.view(node.inputs[0])), _as_2d(ctx.output())
    align = bool(Args(node).attr("align_corners", False))
    ctx.emit(
        "upsample_bilinear_kernel",
        [x],
        [out],
        {"scale": _scales_but(node, x, out, (1,)), "align_corners": int(align)},
        flops=8 * out.numel,
    )
