"""Sums, means and norms over dimensions."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import numpy as np

from npu_compiler.program.views import collapse
from npu_runtime.cpu.arrays import address, strides_of
from npu_runtime.cpu.native.bindings import NativeLaunch, available, launch
from npu_runtime.cpu.native.extents import ArgumentBlock, Extent, View
from npu_runtime.cpu.native.numbers import DTYPES

_REDUCTIONS = ("sum", "mean", "norm")  # `Reduction` in reductions.cpp


class _ReductionArgs(ArgumentBlock):
    _fields_ = [("x", View), ("out", View), ("reduction", ctypes.c_int64)]

    def extents(self, kernel: str) -> Iterator[Extent]:
        yield self.x.extent("x", (*self.out.size[1:], self.x.size[3]))
        yield self.out.extent("out")


def reduce_last(reduction: str, x: np.ndarray, count: int, out: np.ndarray) -> NativeLaunch | None:
    """Prepare out = the sums, means or Euclidean norms of x over its last `count` dimensions.

    None without a native kernel for the operands.
    """
    kept = x.ndim - count
    if not available() or not {x.dtype, out.dtype} <= DTYPES.keys() or out.shape != x.shape[:kept] or x.size == 0:
        return None
    strides, out_strides = strides_of(x), strides_of(out)
    terms, (term_stride,) = collapse(x.shape[kept:], strides[kept:])
    # The nearest neighbours last, so that vectors of them can be added.
    order = sorted(range(kept), key=strides.__getitem__, reverse=True)
    sizes, (steps, out_steps) = collapse(
        [x.shape[d] for d in order], [strides[d] for d in order], [out_strides[d] for d in order]
    )
    if len(terms) > 1 or len(sizes) > 3:
        return None
    lead = 3 - len(sizes)
    size = (*[1] * lead, *sizes)
    x_view = View(address(x), DTYPES[x.dtype], (*size, *(terms or [1])), (*[0] * lead, *steps, *(term_stride or [1])))
    out_view = View(address(out), DTYPES[out.dtype], (1, *size), (0, *[0] * lead, *out_steps))
    return launch("reduce", _ReductionArgs(x_view, out_view, _REDUCTIONS.index(reduction)), x, out)
