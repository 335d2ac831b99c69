"""The reference kernels by name. A kernel is a function of operands and parameters; it writes its outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from npu_runtime.cpu.arrays import BFLOAT16, HALVES
from npu_runtime.cpu.bound_call import Params

Arrays: TypeAlias = Sequence[np.ndarray]
Kernel: TypeAlias = Callable[[Arrays, Arrays, Params], None]

CPU_KERNELS: dict[str, Kernel] = {}


def cpu_kernel(*names: str) -> Callable[[Kernel], Kernel]:
    """Return a decorator that registers a function as the reference of these kernels."""

    def add(kernel: Kernel) -> Kernel:
        CPU_KERNELS.update(dict.fromkeys(names, kernel))
        return kernel

    return add


def to_float(array: np.ndarray) -> np.ndarray:
    """An array of 16-bit floats as float32; any other array unchanged."""
    return as_float32(array) if array.dtype in HALVES else array


def as_float32(array: np.ndarray) -> np.ndarray:
    if array.dtype == BFLOAT16:  # whose bits are a float32's upper half: faster than a cast
        return (array.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32, copy=False)


def is_float(dtype: np.dtype) -> bool:
    return dtype == np.float32 or dtype in HALVES


def in_range(index: np.ndarray, size: int) -> np.ndarray:
    """The index, after a check that all of it is in 0..size - 1.

    Raises:
        IndexError: it is not.
    """
    if index.size and not (index.min() >= 0 and index.max() < size):
        worst = index.min() if index.min() < 0 else index.max()
        raise IndexError(f"index {worst} is out of range for {size} rows")
    return index
