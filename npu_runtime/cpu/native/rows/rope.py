"""Rotary position embedding."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from npu_runtime.cpu.arrays import expand
from npu_runtime.cpu.native.bindings import NativeLaunch, available, launch, operand
from npu_runtime.cpu.native.extents import ArgumentBlock, Extent, View
from npu_runtime.cpu.native.numbers import DTYPES
from npu_runtime.cpu.native.shapes import has_contiguous_rows


class _RopeArgs(ArgumentBlock):
    _fields_ = [("x", View), ("cos", View), ("sin", View), ("out", View)]

    def extents(self, kernel: str) -> Iterator[Extent]:
        yield self.x.extent("x")
        yield self.out.extent("out", self.x.size)
        angles = (*self.x.size[:3], self.cos.size[3])
        yield self.cos.extent("cos", angles)
        yield self.sin.extent("sin", angles)


def rope(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, out: np.ndarray) -> NativeLaunch | None:
    """Prepare out[B, H, T, D] = x * cos + rotate_half(x) * sin; out may be x. None without a kernel for the operands.

    cos and sin broadcast to [B, H, T, D], or to [B, H, T, D/2] if both halves turn by the same angles. Any of the
    four may be 16-bit.
    """
    arrays = (x, cos, sin, out)
    if not available() or any(t.dtype not in DTYPES or not has_contiguous_rows(t) for t in arrays):
        return None
    if x.ndim != 4 or x.shape != out.shape or x.size == 0 or x.shape[3] % 2 != 0:
        return None
    width = cos.shape[-1]
    if width not in (x.shape[3], x.shape[3] // 2) or sin.shape[-1] != width:
        return None
    tables = [expand(table, (*x.shape[:3], width)) for table in (cos, sin)]
    if any(table is None for table in tables):
        return None
    return launch("rope", _RopeArgs(operand(x), *map(operand, tables), operand(out)), *arrays)
