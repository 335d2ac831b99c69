"""Products with a weight that is packed once."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np

from npu_runtime.cpu.arrays import BFLOAT16, address
from npu_runtime.cpu.native.bindings import DTYPES, NativeLaunch, View, available, launch, layout, operand
from npu_runtime.cpu.native.memory import weight_memory
from npu_runtime.cpu.native.shapes import has_contiguous_rows

ACTIVATIONS = {"none": 0, "relu": 1, "gelu": 2, "gelu_tanh": 3, "silu": 4}


@dataclass(frozen=True)
class PackedWeight:
    """A weight [n, k] in the kernels' layout (described in gemm.h)."""

    data: np.ndarray
    n: int
    k: int
    dtype: np.dtype


class _PackArgs(ctypes.Structure):
    _fields_ = [("weight", View), ("packed", ctypes.c_void_p)]


class _LinearArgs(ctypes.Structure):
    _fields_ = [
        ("x", View),
        ("bias", View),
        ("residual", View),
        ("out", View),
        ("weight", ctypes.c_void_p),
        ("weight_dtype", ctypes.c_int64),
        ("n", ctypes.c_int64),
        ("k", ctypes.c_int64),
        ("activation", ctypes.c_int64),
    ]


def pack_linear_weight(weight: np.ndarray) -> PackedWeight | None:
    """Packs weight[N, K], of any strides, for `linear`; None when its dtype has no kernel."""
    if not available() or weight.ndim != 2 or weight.dtype not in DTYPES or weight.size == 0:
        return None
    n, k = weight.shape
    panel, step = layout().panel, 2 if weight.dtype == BFLOAT16 and layout().has_pairs else 1
    size = -(-n // panel) * panel * -(-k // step) * step * weight.itemsize
    data = weight_memory(size)
    launch("pack_weight", _PackArgs(operand(weight), address(data)), weight, data)()
    return PackedWeight(data, n, k, weight.dtype)


def linear(
    x: np.ndarray,
    weight: PackedWeight,
    bias: np.ndarray | None,
    residual: np.ndarray | None,
    activation: str,
    out: np.ndarray,
) -> NativeLaunch | None:
    """out[M, N] = activation(x[M, K] · weightᵀ + bias) + residual, rounded once.

    Rows of x, residual and out may be any distance apart; x has the weight's dtype, the others any. The bias is read
    now, not when the launch runs.
    """
    matrices = [t for t in (x, residual, out) if t is not None]
    if any(t.ndim != 2 or t.dtype not in DTYPES or not has_contiguous_rows(t) for t in matrices):
        return None
    rows, n = x.shape[0], weight.n
    if x.dtype != weight.dtype or x.shape[1] != weight.k or rows == 0 or out.shape != (rows, n):
        return None
    if activation not in ACTIVATIONS or (residual is not None and residual.shape != out.shape):
        return None
    if bias is not None and bias.size != n:
        return None
    bias = _float_vector(bias)
    args = _linear_args(x, weight, bias, residual, activation, out)
    return launch("linear", args, x, weight, bias, residual, out)


def gated_linear(
    x: np.ndarray, weight: PackedWeight, bias: np.ndarray | None, activation: str, out: np.ndarray
) -> NativeLaunch | None:
    """out[1, N] = activation(gate) * up, rounded once, where [gate, up] = x[1, K] · weight[2N, K]ᵀ + bias.

    x has the weight's dtype, out any. The bias is read now, not when the launch runs.
    """
    if any(t.ndim != 2 or t.dtype not in DTYPES or not has_contiguous_rows(t) for t in (x, out)):
        return None
    if x.dtype != weight.dtype or x.shape != (1, weight.k) or out.shape != (1, weight.n // 2) or weight.n % 2:
        return None
    if activation not in ACTIVATIONS or (bias is not None and bias.size != weight.n):
        return None
    bias = _float_vector(bias)
    return launch("gated_linear", _linear_args(x, weight, bias, None, activation, out), x, weight, bias, out)


def _float_vector(bias: np.ndarray | None) -> np.ndarray | None:
    return None if bias is None else bias.reshape(-1).astype(np.float32)


def _linear_args(
    x: np.ndarray,
    weight: PackedWeight,
    bias: np.ndarray | None,
    residual: np.ndarray | None,
    activation: str,
    out: np.ndarray,
) -> _LinearArgs:
    return _LinearArgs(
        operand(x),
        operand(bias),
        operand(residual),
        operand(out),
        address(weight.data),
        DTYPES[weight.dtype],
        weight.n,
        weight.k,
        ACTIVATIONS[activation],
    )
