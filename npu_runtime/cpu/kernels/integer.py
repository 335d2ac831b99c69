"""Integer kernels in NumPy: exact sums, in float64, then float32 arithmetic as in torch."""

from __future__ import annotations

import numpy as np

from npu_runtime.cpu.bound_call import Params
from npu_runtime.cpu.kernels.products import activated
from npu_runtime.cpu.kernels.registry import Arrays, as_float32, cpu_kernel
from npu_runtime.cpu.kernels.windows import by_columns

_BYTES = (np.dtype(np.int8), np.dtype(np.uint8))


def _quantized(y: np.ndarray, params: Params) -> np.ndarray:
    inverse = np.float32(1) / np.float32(params["out_scale"])
    codes = np.rint(y * inverse) + np.float32(params["out_zero_point"])
    return np.asarray(np.clip(codes, params["low"], params["high"]))


def _finish(y: np.ndarray, out: np.ndarray, params: Params) -> None:
    out[...] = _quantized(y, params) if out.dtype in _BYTES else y


def _dequantized(x: np.ndarray, scale: float, zero_point: int) -> np.ndarray:
    return np.asarray((x.astype(np.float32) - np.float32(zero_point)) * np.float32(scale))


def _residual(array: np.ndarray, params: Params) -> np.ndarray:
    if array.dtype not in _BYTES:
        return as_float32(array)
    return _dequantized(array, params["residual_scale"], params["residual_zero_point"])


@cpu_kernel("quantize_activation_kernel")
def quantize_activation(inputs: Arrays, outputs: Arrays, params: Params) -> None:
    outputs[0][...] = _quantized(as_float32(inputs[0]), params)


@cpu_kernel("dequantize_activation_kernel")
def dequantize_activation(inputs: Arrays, outputs: Arrays, params: Params) -> None:
    outputs[0][...] = _dequantized(inputs[0], params["x_scale"], params["zero_point"])


def _operands(inputs: Arrays, params: Params) -> tuple[np.ndarray, np.ndarray, Arrays]:
    """x and the weight with their zero points subtracted, and the operands after them, scales first."""
    x, weight, scales, *rest = inputs
    zeros = rest.pop(0) if params["has_weight_zeros"] else np.zeros(len(scales))
    weight = weight.astype(np.float64) - zeros.reshape(-1, *[1] * (weight.ndim - 1))
    return x.astype(np.float64) - params["zero_point"], weight, [scales, *rest]


def _scaled(sums: np.ndarray, rest: Arrays, out: np.ndarray, params: Params) -> None:
    """Write a product's result to `out`, from its sums [..., o, p, q] or, for a linear, [m, o].

    It applies scales, bias, residual, activation and rounding.
    """
    scales, *others = rest
    shape = (-1,) if sums.ndim == 2 else (-1, 1, 1)
    y = sums.astype(np.float32) * (scales * np.float32(params["x_scale"])).reshape(shape)
    if params["has_bias"]:
        y = y + others.pop(0).reshape(shape)
    if params["has_residual"]:
        y = y + _residual(others.pop(0), params)
    _finish(activated(y, params["activation"]), out, params)


@cpu_kernel("integer_conv2d_kernel")
def integer_conv2d(inputs: Arrays, outputs: Arrays, params: Params) -> None:
    x, weight, rest = _operands(inputs, params)
    x = np.pad(x, [(0, 0), (0, 0), params["padding"][:2], params["padding"][2:]])
    _scaled(by_columns(x, weight, params, np.empty(outputs[0].shape)), rest, outputs[0], params)


@cpu_kernel("integer_linear_kernel")
def integer_linear(inputs: Arrays, outputs: Arrays, params: Params) -> None:
    x, weight, rest = _operands(inputs, params)
    _scaled(x @ weight.T, rest, outputs[0], params)


@cpu_kernel("integer_mean_kernel")
def integer_mean(inputs: Arrays, outputs: Arrays, params: Params) -> None:
    (x,) = inputs
    sums = (x.astype(np.float64) - params["zero_point"]).sum((2, 3)).astype(np.float32)
    _finish(sums * (np.float32(params["x_scale"]) / np.float32(x[0, 0].size)), outputs[0], params)


@cpu_kernel("integer_add_kernel")
def integer_add(inputs: Arrays, outputs: Arrays, params: Params) -> None:
    x, residual = inputs
    y = _dequantized(x, params["x_scale"], params["zero_point"]) + _residual(residual, params)
    _finish(activated(y, params["activation"]), outputs[0], params)
