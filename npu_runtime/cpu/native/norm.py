"""Normalizations along the last dimension."""

from __future__ import annotations

import ctypes

import torch

from npu_runtime.cpu.native.bindings import DTYPES, NativeLaunch, View, available, launch, operand
from npu_runtime.cpu.native.shapes import as_rows


class _NormArgs(ctypes.Structure):
    _fields_ = [
        ("x", View),
        ("addend", View),
        ("sum", View),
        ("weight", View),
        ("bias", View),
        ("out", View),
        ("subtracts_mean", ctypes.c_int64),
        ("eps", ctypes.c_float),
        ("weight_offset", ctypes.c_float),
    ]


class _SoftmaxArgs(ctypes.Structure):
    _fields_ = [("x", View), ("out", View), ("scale", ctypes.c_float)]


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, weight_offset: float, out: torch.Tensor
) -> NativeLaunch | None:
    """out = x / sqrt(mean(x²) + eps) * (weight + weight_offset), along the last dimension."""
    return _norm(x, None, None, weight, None, False, eps, weight_offset, out)


def add_rms_norm(
    x: torch.Tensor,
    addend: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    weight_offset: float,
    sum_out: torch.Tensor,
    out: torch.Tensor,
) -> NativeLaunch | None:
    """sum_out = x + addend, then `rms_norm` of sum_out as stored; sum_out may be x or addend."""
    return _norm(x, addend, sum_out, weight, None, False, eps, weight_offset, out)


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float, out: torch.Tensor
) -> NativeLaunch | None:
    """out = (x - mean) / sqrt(variance + eps) * weight + bias, along the last dimension."""
    return _norm(x, None, None, weight, bias, True, eps, 0.0, out)


def add_layer_norm(
    x: torch.Tensor,
    addend: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    sum_out: torch.Tensor,
    out: torch.Tensor,
) -> NativeLaunch | None:
    """sum_out = x + addend, then `layer_norm` of sum_out as stored; sum_out may be x or addend."""
    return _norm(x, addend, sum_out, weight, bias, True, eps, 0.0, out)


def softmax(x: torch.Tensor, scale: float, out: torch.Tensor) -> NativeLaunch | None:
    """out = softmax(scale * x) along the last dimension."""
    if not available() or x.shape != out.shape or x.numel() == 0 or not {x.dtype, out.dtype} <= DTYPES.keys():
        return None
    x_rows, out_rows = as_rows(x), as_rows(out)
    if x_rows is None or out_rows is None:
        return None
    return launch("softmax", _SoftmaxArgs(operand(x_rows), operand(out_rows), scale), x, out)


def _norm(
    x: torch.Tensor,
    addend: torch.Tensor | None,
    sum_out: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    subtracts_mean: bool,
    eps: float,
    weight_offset: float,
    out: torch.Tensor,
) -> NativeLaunch | None:
    matrices, vectors = (x, addend, sum_out, out), (weight, bias)
    if not available() or x.numel() == 0 or any(t is not None and t.dtype not in DTYPES for t in matrices + vectors):
        return None
    if any(t is not None and t.shape != x.shape for t in matrices):
        return None
    if any(t is not None and (t.shape != x.shape[-1:] or not t.is_contiguous()) for t in vectors):
        return None
    rows = [None if t is None else as_rows(t) for t in matrices]
    if any(row is None and t is not None for row, t in zip(rows, matrices, strict=True)):
        return None
    args = _NormArgs(
        *(operand(t) for t in (rows[0], rows[1], rows[2], weight, bias, rows[3])), subtracts_mean, eps, weight_offset
    )
    # Without a weight there is nothing to offset: the factor is 1.
    if weight is None:
        args.weight_offset = 0.0
    return launch("norm", args, *matrices, *vectors)
