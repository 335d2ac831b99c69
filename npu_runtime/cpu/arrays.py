"""Strided NumPy arrays over host memory: what the CPU device's kernels read and write. Strides here are in elements."""

from __future__ import annotations

from collections.abc import Sequence

import ml_dtypes
import numpy as np
from numpy.lib.stride_tricks import as_strided

from npu_compiler.program.views import numel, reshape_strides

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
HALVES = (np.dtype(np.float16), BFLOAT16)
_ALIGNMENT = 64  # bytes: a cache line


def host_memory(count: int, dtype: np.dtype) -> np.ndarray:
    """A flat array of any content that begins on a cache line.

    Raises:
        MemoryError: there is not enough memory.
    """
    size = count * dtype.itemsize
    try:
        block = np.empty(size + _ALIGNMENT, np.uint8)
    except ValueError as error:  # more than an address can tell
        raise MemoryError(str(error)) from error
    start = -address(block) % _ALIGNMENT
    return block[start : start + size].view(dtype)


def address(array: np.ndarray) -> int:
    """Of its first element."""
    where: int = array.__array_interface__["data"][0]
    return where


def strides_of(array: np.ndarray) -> tuple[int, ...]:
    size = array.itemsize
    return tuple(step // size for step in array.strides)


def with_strides(array: np.ndarray, shape: Sequence[int], strides: Sequence[int]) -> np.ndarray:
    """The array's memory, from its first element on, under another shape and other strides."""
    return as_strided(array, shape, [step * array.itemsize for step in strides])


def expand(array: np.ndarray, shape: Sequence[int]) -> np.ndarray | None:
    """The array, broadcast to a shape; None where it does not broadcast to it."""
    lead = len(shape) - array.ndim
    if lead < 0 or any(own not in (1, size) for own, size in zip(array.shape, shape[lead:], strict=True)):
        return None
    own_strides = zip(array.shape, strides_of(array), shape[lead:], strict=True)
    return with_strides(array, shape, [*[0] * lead, *(0 if own != size else step for own, step, size in own_strides)])


def reshaped(array: np.ndarray, shape: Sequence[int]) -> np.ndarray | None:
    """The same memory under another shape; None where no strides show it so."""
    if numel(shape) != array.size:
        return None
    strides = reshape_strides(array.shape, strides_of(array), shape)
    return None if strides is None else with_strides(array, shape, strides)
