"""The order of elements: places of extremes, and of all elements of a row when they are sorted."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import numpy as np

from npu_runtime.cpu.arrays import address
from npu_runtime.cpu.native.bindings import NativeLaunch, available, launch
from npu_runtime.cpu.native.extents import ArgumentBlock, Extent, View, packed
from npu_runtime.cpu.native.numbers import DTYPES, NUMBER_DTYPES
from npu_runtime.cpu.native.shapes import as_rows

_INT32 = np.dtype(np.int32)


class _ExtremeArgs(ArgumentBlock):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("dtype", ctypes.c_int64),
        ("least", ctypes.c_int64),
    ]

    def extents(self, kernel: str) -> Iterator[Extent]:
        yield View(self.data, self.dtype, (1, 1, self.rows, self.columns), (0, 0, self.columns, 1)).extent("data")
        yield packed("out", self.out, self.rows * _INT32.itemsize)


class _OrderArgs(ArgumentBlock):
    _fields_ = [("x", View), ("out", View), ("descending", ctypes.c_int64)]

    def extents(self, kernel: str) -> Iterator[Extent]:
        yield self.x.extent("x")
        yield self.out.extent("out", self.x.size)


def argsort(x: np.ndarray, out: np.ndarray, descending: bool) -> NativeLaunch | None:
    """Prepare out = the places of the elements of each row of x in sorted order; None without a native kernel for it.

    Equal elements keep their order, zeros of both signs are equal, and NaN is above all. `out` is int32.
    """
    if not available() or x.dtype not in DTYPES or out.dtype != _INT32 or x.shape != out.shape or x.size == 0:
        return None
    x_rows, out_rows = as_rows(x), as_rows(out)
    if x_rows is None or out_rows is None:
        return None
    return launch("argsort", _OrderArgs(*map(_matrix, (x_rows, out_rows)), descending), x, out)


def _matrix(rows: np.ndarray) -> View:
    count, width = rows.shape
    pitch = rows.strides[0] // rows.itemsize
    return View(address(rows), NUMBER_DTYPES[rows.dtype], (1, 1, count, width), (0, 0, pitch, 1))


def place_of_extreme(x: np.ndarray, out: np.ndarray, least: bool) -> NativeLaunch | None:
    """Prepare the position of the greatest (or least) element in each row of x: of the first, or of the first NaN.

    None if there is no native kernel for the operands.

    Args:
        x: [*rows, *row], contiguous.
        out: [*rows], contiguous int32.
    """
    if not available() or x.dtype not in DTYPES or out.dtype != _INT32 or not out.size or not x.size:
        return None
    if x.size % out.size or not (x.flags.c_contiguous and out.flags.c_contiguous):
        return None
    args = _ExtremeArgs(address(x), address(out), out.size, x.size // out.size, DTYPES[x.dtype], least)
    return launch("place_of_extreme", args, x, out)
