"""Integer kernels: sums that are exact, in float64, then float32 arithmetic, rounded once more where the result is."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from npu_runtime.cpu.kernels.matmul import activated
from npu_runtime.cpu.kernels.registry import Params, Tensors, cpu_kernel

_BYTES = (torch.int8, torch.uint8)


def _centred(tensor: torch.Tensor, zero_point: int) -> torch.Tensor:
    return tensor.double() - zero_point


def _quantized(y: torch.Tensor, params: Params) -> torch.Tensor:
    """rint(y / out_scale) + out_zero_point, within limits."""
    inverse = torch.tensor(params["out_scale"], dtype=torch.float32).reciprocal()
    return torch.clamp(torch.round(y * inverse) + params["out_zero_point"], params["low"], params["high"])


def _finish(y: torch.Tensor, out: torch.Tensor, params: Params) -> None:
    out.copy_(_quantized(y, params) if out.dtype in _BYTES else y)


def _residual(tensor: torch.Tensor, params: Params) -> torch.Tensor:
    if tensor.dtype not in _BYTES:
        return tensor.float()
    centred: torch.Tensor = tensor.float() - params["residual_zero_point"]
    return centred * float(params["residual_scale"])


@cpu_kernel("quantize_activation_kernel")
def quantize_activation(inputs: Tensors, outputs: Tensors, params: Params) -> None:
    outputs[0].copy_(_quantized(inputs[0].float(), params))


@cpu_kernel("dequantize_activation_kernel")
def dequantize_activation(inputs: Tensors, outputs: Tensors, params: Params) -> None:
    outputs[0].copy_((inputs[0].float() - params["zero_point"]) * params["x_scale"])


def _product(inputs: Tensors, outputs: Tensors, params: Params, multiply: str) -> None:
    """out = act(sum · x_scale · scales[o] + bias[o] + residual), where the sums are those of x and the weight."""
    x, weight, scales, *rest = inputs
    zeros = rest.pop(0) if params["has_weight_zeros"] else torch.zeros_like(scales)
    channels = (-1, *[1] * (weight.ndim - 1))
    integers = _centred(x, params["zero_point"]), weight.double() - zeros.double().reshape(channels)
    if multiply == "linear":
        sums = F.linear(*integers)
        per_channel: tuple[int, ...] = (-1,)
    else:
        top, bottom, left, right = params["padding"]
        stride, dilation = tuple(params["stride"]), tuple(params["dilation"])
        padded = F.pad(integers[0], (left, right, top, bottom))
        sums = F.conv2d(padded, integers[1], None, stride, 0, dilation, params["groups"])
        per_channel = (-1, 1, 1)
    y = sums.float() * (scales * torch.tensor(params["x_scale"], dtype=torch.float32)).reshape(per_channel)
    if params["has_bias"]:
        y = y + rest.pop(0).reshape(per_channel)
    if params["has_residual"]:
        y = y + _residual(rest.pop(0), params)
    _finish(activated(y, params["activation"]), outputs[0], params)


@cpu_kernel("integer_conv2d_kernel")
def integer_conv2d(inputs: Tensors, outputs: Tensors, params: Params) -> None:
    _product(inputs, outputs, params, "conv2d")


@cpu_kernel("integer_linear_kernel")
def integer_linear(inputs: Tensors, outputs: Tensors, params: Params) -> None:
    _product(inputs, outputs, params, "linear")


@cpu_kernel("integer_max_pool2d_kernel")
def integer_max_pool2d(inputs: Tensors, outputs: Tensors, params: Params) -> None:
    kernel, stride, padding, dilation = (tuple(params[key]) for key in ("window", "stride", "padding", "dilation"))
    ceil_mode = bool(params["ceil_mode"])
    outputs[0].copy_(F.max_pool2d(inputs[0].float(), kernel, stride, padding, dilation, ceil_mode=ceil_mode))


@cpu_kernel("integer_mean_kernel")
def integer_mean(inputs: Tensors, outputs: Tensors, params: Params) -> None:
    """The mean of each map."""
    x = inputs[0]
    sums = _centred(x, params["zero_point"]).sum((2, 3)).float()
    _finish(sums * (torch.tensor(params["x_scale"], dtype=torch.float32) / x[0, 0].numel()), outputs[0], params)


@cpu_kernel("integer_add_kernel")
def integer_add(inputs: Tensors, outputs: Tensors, params: Params) -> None:
    x, residual = inputs
    y = (x.float() - params["zero_point"]) * params["x_scale"] + _residual(residual, params)
    _finish(activated(y, params["activation"]), outputs[0], params)
