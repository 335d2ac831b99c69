"""Checks of the memory that native kernels touch, when a launch is prepared; a kernel itself checks nothing.

Every argument block computes, from its own fields and nothing else, which memory its kernel reads or writes. So the
final values of sizes and strides are checked, however a binding derived them. That memory must lie within the arrays
that the launch keeps alive.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

import numpy as np

from npu_compiler.errors import DeviceError
from npu_runtime.cpu.arrays import address, memory_span
from npu_runtime.cpu.native.numbers import NUMBER_DTYPES

_ITEM_SIZES: dict[int, int] = {number: dtype.itemsize for dtype, number in NUMBER_DTYPES.items()}
_BYTE = 1  # of any other dtype: codes


class Extent(NamedTuple):
    """The memory that a kernel may touch through one field of its argument block.

    Attributes:
        operand: The field's name.
        address: Address to which the field points; None if the operand is absent.
        begin, end: The range of bytes relative to the address; empty if nothing is touched.
    """

    operand: str
    address: int | None
    begin: int
    end: int


def strided(operand: str, start: int | None, item: int, sizes: Iterable[int], strides: Iterable[int]) -> Extent:
    """The extent of a strided operand with elements of `item` bytes; strides are in elements."""
    begin, end = 0, item
    for size, stride in zip(sizes, strides, strict=True):
        reach = (size - 1) * stride * item
        if size <= 0:
            return Extent(operand, start, 0, 0)
        if reach > 0:
            end += reach
        else:
            begin += reach
    return Extent(operand, start, begin, end)


def packed(operand: str, start: int | None, size: int) -> Extent:
    """The extent of `size` consecutive bytes."""
    return Extent(operand, start, 0, size)


def item_size(dtype: int) -> int:
    """Bytes of an element, by the number of its dtype."""
    return _ITEM_SIZES.get(dtype, _BYTE)


class ArgumentBlock(ctypes.Structure):
    """The argument block of a kernel, with the fields of its C++ declaration."""

    def extents(self, kernel: str) -> Iterable[Extent]:
        """All memory that `kernel` may touch, except its own scratch memory."""
        raise NotImplementedError


class View(ctypes.Structure):
    """A strided operand in the form that the kernels read (`View` in kernel.h)."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("dtype", ctypes.c_int64),
        ("size", ctypes.c_int64 * 4),
        ("stride", ctypes.c_int64 * 4),
    ]

    def extent(self, operand: str, sizes: Sequence[int] | None = None) -> Extent:
        """The extent of a view with the sizes that the kernel goes by; None means the view's own."""
        if not self.data:
            return Extent(operand, None, 0, 0)
        return strided(operand, self.data, item_size(self.dtype), self.size if sizes is None else sizes, self.stride)


def check_extents(kernel: str, extents: Iterable[Extent], kept: object) -> None:
    """Check that the memory a kernel would touch lies within the arrays that its operands begin with.

    Raises:
        DeviceError: it would touch memory beyond one of them, or of no array that the launch keeps alive.
    """
    spans: dict[int, tuple[int, int]] = {}
    for array in arrays_in(kept):
        start = address(array)
        begin, end = memory_span(array)
        first, last = spans.get(start, (0, 0))
        spans[start] = min(begin, first), max(end, last)
    for operand, where, first, last in extents:
        if not where or first == last:
            continue
        if where not in spans:
            raise DeviceError(f"kernel {kernel}: operand '{operand}' is no array that its launch keeps alive")
        begin, end = spans[where]
        if first < begin or last > end:
            raise DeviceError(
                f"kernel {kernel} does not fit its operand '{operand}': it would touch bytes {first} to {last}, and "
                f"there are {begin} to {end}"
            )


def arrays_in(kept: object) -> Iterator[np.ndarray]:
    """The arrays among the objects that a launch keeps, including those in dataclasses (packed weights)."""
    if isinstance(kept, np.ndarray):
        yield kept
    elif isinstance(kept, (tuple, list)):
        for item in kept:
            yield from arrays_in(item)
    elif is_dataclass(kept):
        yield from arrays_in([getattr(kept, field.name) for field in fields(kept)])


def prefixed(prefix: str, extents: Iterable[Extent]) -> Iterator[Extent]:
    """The extents of an argument block within another one, with both names."""
    for extent in extents:
        yield Extent(f"{prefix}.{extent.operand}", extent.address, extent.begin, extent.end)


def floats(operand: str, start: Any, count: int) -> Extent:
    """The extent of `count` consecutive 4-byte elements."""
    return packed(operand, start, 4 * count)
