"""Strided NumPy arrays over host memory, which the CPU device's kernels read and write. Strides are in elements."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Sequence

import ml_dtypes
import numpy as np
from numpy.lib.stride_tricks import as_strided

from npu_compiler.program.views import numel, reshape_strides

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
HALVES = (np.dtype(np.float16), BFLOAT16)
HUGE_PAGE = 2 * 2**20  # bytes
_ALIGNMENT = 64  # bytes: a cache line
# Bytes from which NumPy asks for huge pages: the first use of weights on these takes three times as long.
_MAPPED = 4 * 2**20


def host_memory(count: int, dtype: np.dtype) -> np.ndarray:
    """A flat array of `count` elements, not initialized, that begins on a cache line.

    Raises:
        MemoryError: there is not enough memory.
    """
    size = count * dtype.itemsize
    try:
        block = (
            np.frombuffer(private_pages(size), np.uint8) if size >= _MAPPED else np.empty(size + _ALIGNMENT, np.uint8)
        )
    except (OSError, OverflowError, ValueError) as error:
        raise MemoryError(f"{size} bytes: {error}") from error
    start = -address(block) % _ALIGNMENT
    return block[start : start + size].view(dtype)


def private_pages(size: int) -> mmap.mmap:
    """Map memory of this process alone; raises `OSError` if there is not enough.

    Shared memory, which is the default of `mmap`, gets no huge pages unless the machine's owner has allowed them.
    """
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    return mmap.mmap(-1, size, **private)


def huge_pages(size: int) -> np.ndarray:
    """Zero bytes that begin on a huge page, where the system has these.

    Raises:
        MemoryError: there is not enough memory.
    """
    try:
        memory = private_pages(size + HUGE_PAGE)
    except (OSError, OverflowError, ValueError) as error:
        raise MemoryError(f"{size} bytes on huge pages: {error}") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # this kernel has none
            memory.madvise(mmap.MADV_HUGEPAGE)
    data = np.frombuffer(memory, np.uint8)
    skip = -address(data) % HUGE_PAGE
    return data[skip : skip + size]


def address(array: np.ndarray) -> int:
    """Address of the array's first element."""
    where: int = array.__array_interface__["data"][0]
    return where


def memory_span(array: np.ndarray) -> tuple[int, int]:
    """The first byte of an array's elements and the end of the last one, in bytes relative to element 0."""
    if array.flags.c_contiguous:
        return 0, array.nbytes
    if array.size == 0:
        return 0, 0
    reach = [(size - 1) * step for size, step in zip(array.shape, array.strides, strict=True)]
    return sum(min(step, 0) for step in reach), sum(max(step, 0) for step in reach) + array.itemsize


def strides_of(array: np.ndarray) -> tuple[int, ...]:
    size = array.itemsize
    return tuple(step // size for step in array.strides)


def with_strides(array: np.ndarray, shape: Sequence[int], strides: Sequence[int]) -> np.ndarray:
    """The array's memory, from its first element on, with another shape and other strides."""
    return as_strided(array, shape, [step * array.itemsize for step in strides])


def expand(array: np.ndarray, shape: Sequence[int]) -> np.ndarray | None:
    """The array, broadcast to a shape; None if that is impossible."""
    lead = len(shape) - array.ndim
    if lead < 0 or any(own not in (1, size) for own, size in zip(array.shape, shape[lead:], strict=True)):
        return None
    own_strides = zip(array.shape, strides_of(array), shape[lead:], strict=True)
    return with_strides(array, shape, [*[0] * lead, *(0 if own != size else step for own, step, size in own_strides)])


def reshaped(array: np.ndarray, shape: Sequence[int]) -> np.ndarray | None:
    """The array's memory as an array of another shape; None if no strides express it."""
    if numel(shape) != array.size:
        return None
    strides = reshape_strides(array.shape, strides_of(array), shape)
    return None if strides is None else with_strides(array, shape, strides)
