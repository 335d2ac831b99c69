"""Views that put operands into the few forms the kernels take."""

from __future__ import annotations

import numpy as np

from npu_runtime.cpu.arrays import reshaped, strides_of


def as_rows(array: np.ndarray) -> np.ndarray | None:
    """The array as a matrix of its last dimension's rows, without a copy; None where no row distance fits."""
    if array.ndim == 0 or not has_contiguous_rows(array):
        return None
    return reshaped(array, (array.size // max(array.shape[-1], 1), array.shape[-1]))


def has_contiguous_rows(array: np.ndarray) -> bool:
    """Whether the elements of the last dimension are neighbours in memory."""
    return array.shape[-1] == 1 or strides_of(array)[-1] == 1
