"""Converters of quantization, dequantization and products of quantized integers.

With constant scales and zero points, they produce the nodes of PyTorch's quantized graphs, which the compiler turns
into integer kernels; otherwise they produce ordinary arithmetic.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.ao.quantization.fx._decomposed  # registers torch.ops.quantized_decomposed
from torch import Tensor

from npu_sim.onnx.dtypes import torch_dtype
from npu_sim.onnx.operators.convolutions import convolve
from npu_sim.onnx.rows import Call, Refusal, converts, number

_BYTES = (torch.int8, torch.uint8)
_OPS = torch.ops.quantized_decomposed  # their results are tensors, which PyTorch's stubs do not say


def _per_axis(value: Tensor, call: Call, x: Tensor) -> Tensor:
    """Reshape or repeat scales or zero points so that they broadcast to the elements of `x`."""
    if value.numel() == 1:
        return value.reshape([1] * x.ndim)
    axis, block = call.attr("axis", 1), call.attr("block_size", 0)
    axis = axis % x.ndim
    if block:
        return value.repeat_interleave(block, axis).narrow(axis, 0, x.shape[axis])
    shape = [1] * x.ndim
    shape[axis] = value.shape[0]
    return value.reshape(shape)


def _are_numbers(*values: Any) -> bool:
    return all(isinstance(value, (int, float)) for value in values)


@converts("DequantizeLinear", hints=(1, 2), folds=False)
def _dequantize(call: Call, x: Tensor, scale: Any, zero_point: Any = None) -> Tensor:
    out = torch_dtype(call.attr("output_dtype")) if call.attr("output_dtype", 0) else call.dtypes[1]
    one, zero = number(scale), 0 if zero_point is None else number(zero_point)
    if x.dtype in _BYTES and _are_numbers(one, zero) and out == torch.float32:
        limits = torch.iinfo(x.dtype)
        whole: Tensor = _OPS.dequantize_per_tensor.default(x, float(one), int(zero), limits.min, limits.max, x.dtype)
        return whole
    zeros = None if zero_point is None else _tensor(zero_point, x.dtype)
    scales = _tensor(scale, torch.float32)
    if x.dtype in _BYTES and scales.ndim == 1 and scales.numel() > 1 and out == torch.float32:
        limits = torch.iinfo(x.dtype)
        zeros = torch.zeros(scales.shape, dtype=torch.int64) if zeros is None else zeros.to(torch.int64)
        axis = call.attr("axis", 1) % x.ndim
        rows: Tensor = _OPS.dequantize_per_channel.default(x, scales, zeros, axis, limits.min, limits.max, x.dtype)
        return rows
    wide = x.to(torch.float32) if zeros is None else x.to(torch.float32) - _per_axis(zeros.to(torch.float32), call, x)
    return (wide * _per_axis(scales.to(torch.float32), call, x)).to(out)


def _tensor(value: Any, dtype: torch.dtype) -> Tensor:
    return value if isinstance(value, Tensor) else torch.tensor(value, dtype=dtype)


@converts("QuantizeLinear", hints=(1, 2), folds=False)
def _quantize(call: Call, x: Tensor, scale: Any, zero_point: Any = None) -> Tensor:
    dtype = _quantized_dtype(call, zero_point)
    one, zero = number(scale), 0 if zero_point is None else number(zero_point)
    limits = torch.iinfo(dtype)
    if dtype in _BYTES and _are_numbers(one, zero) and x.dtype == torch.float32:
        whole: Tensor = _OPS.quantize_per_tensor.default(x, float(one), int(zero), limits.min, limits.max, dtype)
        return whole
    scales = _per_axis(_tensor(scale, torch.float32), call, x)
    codes = torch.round(x.to(torch.float32) / scales.to(torch.float32))
    if zero_point is not None:
        codes = codes + _per_axis(_tensor(zero_point, torch.float32), call, x).to(torch.float32)
    return torch.clamp(codes, limits.min, limits.max).to(dtype)


def _quantized_dtype(call: Call, zero_point: Any) -> torch.dtype:
    dtype = torch.uint8 if zero_point is None else call.dtypes[2]
    if call.attr("output_dtype", 0):
        dtype = torch_dtype(call.attr("output_dtype"))
    if dtype is None or dtype not in (*_BYTES, torch.int16):
        raise Refusal(f"quantizes to {str(dtype).removeprefix('torch.')}; known are int8, uint8 and int16")
    return dtype


@converts("DynamicQuantizeLinear")
def _dynamic_quantize(call: Call, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    low, high = torch.clamp(torch.amin(x), max=0), torch.clamp(torch.amax(x), min=0)
    scale = (high - low) / 255
    zero = torch.clamp(torch.round(-low / scale), 0, 255)
    codes = torch.clamp(torch.round(x / scale) + zero, 0, 255)
    return codes.to(torch.uint8), scale, zero.to(torch.uint8)


def _shifted(x: Tensor, zero_point: Tensor | None, axis: int, dtype: torch.dtype) -> Tensor:
    """Return integers minus their zero point, which is one number or one for each index of `axis`."""
    if zero_point is None:
        return x.to(dtype)
    zero = zero_point.to(dtype)
    if zero.ndim == 1 and zero.numel() > 1:
        shape = [1] * x.ndim
        shape[axis] = zero.numel()
        zero = zero.reshape(shape)
    elif zero.numel() == 1:
        zero = zero.reshape(())
    return x.to(dtype) - zero


@converts("MatMulInteger")
def _matmul_integer(
    call: Call, a: Tensor, b: Tensor, a_zero: Tensor | None = None, b_zero: Tensor | None = None
) -> Tensor:
    # Sums of at most 2^53 are exact in float64, and the products are below 2^16.
    rows, columns = _shifted(a, a_zero, -2, torch.float64), _shifted(b, b_zero, -1, torch.float64)
    return torch.matmul(rows, columns).to(torch.int32)


@converts("ConvInteger")
def _conv_integer(
    call: Call, x: Tensor, w: Tensor, x_zero: Tensor | None = None, w_zero: Tensor | None = None
) -> Tensor:
    return convolve(call, _shifted(x, x_zero, 1, torch.float64), _shifted(w, w_zero, 0, torch.float64)).to(torch.int32)


def _requantized(total: Tensor, scale: Tensor, y_scale: Tensor, y_zero: Tensor) -> Tensor:
    limits = torch.iinfo(y_zero.dtype)
    codes = torch.round(total * (scale / y_scale.to(scale.dtype))) + y_zero.to(torch.float64)
    return torch.clamp(codes, limits.min, limits.max).to(y_zero.dtype)


@converts("QLinearMatMul")
def _qlinear_matmul(call: Call, *given: Tensor) -> Tensor:
    a, a_scale, a_zero, b, b_scale, b_zero, y_scale, y_zero = given
    rows, columns = _shifted(a, a_zero, -2, torch.float64), _shifted(b, b_zero, -1, torch.float64)
    left = a_scale.double()[:, None] if a_scale.ndim == 1 and a_scale.numel() > 1 else a_scale.double().reshape(-1)[:1]
    return _requantized(torch.matmul(rows, columns), left * b_scale.double(), y_scale.double(), y_zero)


@converts("QLinearConv")
def _qlinear_conv(call: Call, *given: Tensor) -> Tensor:
    x, x_scale, x_zero, w, w_scale, w_zero, y_scale, y_zero = given[:8]
    bias = given[8].double() if len(given) > 8 else None
    total = convolve(call, _shifted(x, x_zero, 1, torch.float64), _shifted(w, w_zero, 0, torch.float64), bias)
    scale = (x_scale * w_scale).double().reshape(1, -1, *[1] * (x.ndim - 2))
    return _requantized(total, scale, y_scale.double(), y_zero)
