"""Batched matrix products of two operands that both change from run to run."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from npu_runtime.cpu.arrays import expand
from npu_runtime.cpu.native.bindings import NativeLaunch, available, launch, operand
from npu_runtime.cpu.native.extents import ArgumentBlock, Extent, View
from npu_runtime.cpu.native.numbers import DTYPES
from npu_runtime.cpu.native.shapes import has_contiguous_rows


class _MatmulArgs(ArgumentBlock):
    _fields_ = [("a", View), ("b", View), ("out", View)]

    def extents(self, kernel: str) -> Iterator[Extent]:
        batch, (rows, inner), columns = self.out.size[:2], self.a.size[2:], self.b.size[3]
        yield self.a.extent("a", (*batch, rows, inner))
        yield self.b.extent("b", (*batch, inner, columns))
        yield self.out.extent("out", (*batch, rows, columns))


def matmul(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> NativeLaunch | None:
    """Prepare out[..., M, N] = a[..., M, K] · b[..., K, N] with up to two batch dimensions, which broadcast.

    Rows of a and out are contiguous; b has any strides (a transposed operand is b.transpose(-1, -2)). None if there is
    no native kernel for the operands.
    """
    arrays = (a, b, out)
    if not available() or any(not 2 <= t.ndim <= 4 or t.dtype not in DTYPES or t.size == 0 for t in arrays):
        return None
    if a.dtype != b.dtype or not has_contiguous_rows(a) or not has_contiguous_rows(out):
        return None
    rows, inner, columns = a.shape[-2], a.shape[-1], b.shape[-1]
    if b.shape[-2] != inner or out.shape[-2:] != (rows, columns):
        return None
    try:
        batch = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    except ValueError:
        return None
    if out.shape[:-2] != batch:
        return None
    args = _MatmulArgs(
        operand(expand(a, (*batch, rows, inner))), operand(expand(b, (*batch, inner, columns))), operand(out)
    )
    return launch("matmul", args, *arrays)
