"""Batched products of two operands that both change from run to run."""

from __future__ import annotations

import ctypes

import torch

from npu_runtime.cpu.native.bindings import DTYPES, NativeLaunch, View, available, launch, operand
from npu_runtime.cpu.native.shapes import has_contiguous_rows


class _MatmulArgs(ctypes.Structure):
    _fields_ = [("a", View), ("b", View), ("out", View)]


def matmul(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> NativeLaunch | None:
    """out[..., M, N] = a[..., M, K] · b[..., K, N] with up to two batch dimensions, which broadcast.

    Rows of a and out are contiguous; b has any strides (a transposed operand is b.transpose(-1, -2)).
    """
    tensors = (a, b, out)
    if not available() or any(not 2 <= t.dim() <= 4 or t.dtype not in DTYPES or t.numel() == 0 for t in tensors):
        return None
    if a.dtype != b.dtype or not has_contiguous_rows(a) or not has_contiguous_rows(out):
        return None
    rows, inner, columns = a.shape[-2], a.shape[-1], b.shape[-1]
    if b.shape[-2] != inner or out.shape[-2:] != (rows, columns):
        return None
    try:
        batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    except RuntimeError:
        return None
    if out.shape[:-2] != batch:
        return None
    args = _MatmulArgs(operand(a.expand(*batch, rows, inner)), operand(b.expand(*batch, inner, columns)), operand(out))
    return launch("matmul", args, *tensors)
