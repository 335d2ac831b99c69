"""Convolutions, pooling and resampling over NCHW, float32 arithmetic."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from npu_runtime.cpu.torch_kernels.products import activated
from npu_runtime.cpu.torch_kernels.registry import Params, Tensors, to_float, torch_kernel


@torch_kernel("conv2d_kernel")
def conv2d(inputs: Tensors, outputs: Tensors, params: Params) -> None:
    """out = act(conv(x, w) + bias + residual); padding is top, bottom, left, right."""
    x, weight, *rest = (to_float(t) for t in inputs)
    bias = rest.pop(0) if params["has_bias"] else None
    top, bottom, left, right = params["padding"]
    if (top, left) == (bottom, right):
        padding: tuple[int, int] = (top, left)
    else:
        x, padding = F.pad(x, (left, right, top, bottom)), (0, 0)
    stride, dilation = tuple(params["stride"]), tuple(params["dilation"])
    result = F.conv2d(x, weight, bias, stride, padding, dilation, params["groups"])
    if params["has_residual"]:
        result += rest.pop(0)
    outputs[0].copy_(activated(result, params["activation"]))


@torch_kernel("conv_transpose2d_kernel")
def conv_transpose2d(inputs: Tensors, outputs: Tensors, params: Params) -> None:
    x, weight, *bias = (to_float(t) for t in inputs)
    stride, padding, output_padding, dilation = (
        tuple(params[key]) for key in ("stride", "padding", "output_padding", "dilation")
    )
    result = F.conv_transpose2d(
        x, weight, bias[0] if bias else None, stride, padding, output_padding, params["groups"], dilation
    )
    outputs[0].copy_(result)


@torch_kernel("max_pool2d_kernel")
def max_pool2d(inputs: Tensors, outputs: Tensors, params: Params) -> None:
    kernel, stride, padding, dilation = (tuple(params[key]) for key in ("window", "stride", "padding", "dilation"))
    ceil_mode = bool(params["ceil_mode"])
    outputs[0].copy_(F.max_pool2d(to_float(inputs[0]), kernel, stride, padding, dilation, ceil_mode=ceil_mode))


@torch_kernel("max_pool2d_index_kernel")
def max_pool2d_index(inputs: Tensors, outputs: Tensors, params: Params) -> None:
    """Compute the position of each maximum in its plane, counted by rows."""
    kernel, stride, padding, dilation = (tuple(params[key]) for key in ("window", "stride", "padding", "dilation"))
    ceil_mode = bool(params["ceil_mode"])
    result = torch.ops.aten.max_pool2d_with_indices(
        to_float(inputs[0]), kernel, stride, padding, dilation, ceil_mode=ceil_mode
    )
    outputs[0].copy_(result[1])


@torch_kernel("avg_pool2d_kernel")
def avg_pool2d(inputs: Tensors, outputs: Tensors, params: Params) -> None:
    kernel, stride, padding = (tuple(params[key]) for key in ("window", "stride", "padding"))
    result = F.avg_pool2d(
        to_float(inputs[0]),
        kernel,
        stride,
        padding,
        ceil_mode=bool(params["ceil_mode"]),
        count_include_pad=bool(params["count_include_pad"]),
        divisor_override=params["divisor"] or None,
    )
    outputs[0].copy_(result)


@torch_kernel("adaptive_avg_pool2d_kernel")
def adaptive_avg_pool2d(inputs: Tensors, outputs: Tensors, params: Params) -> None:
    outputs[0].copy_(F.adaptive_avg_pool2d(to_float(inputs[0]), (outputs[0].shape[2], outputs[0].shape[3])))


@torch_kernel("upsample_bilinear_kernel")
def upsample_bilinear(inputs: Tensors, outputs: Tensors, params: Params) -> None:
    x, out = to_float(inputs[0]), outputs[0]
    height, width = (1.0 / scale for scale in params["scale"])
    align = bool(params["align_corners"])
    out.copy_(torch.ops.aten.upsample_bilinear2d(x, list(out.shape[2:]), align, height, width))
