"""Views of operands in the few shapes that the kernels take."""

from __future__ import annotations

import numpy as np

from npu_runtime.cpu.arrays import reshaped, strides_of


def as_rows(array: np.ndarray) -> np.ndarray | None:
    """The array as a matrix of its rows (the last dimension), without a copy.

    None if elements of a row are not contiguous, or rows are not equally far apart.
    """
    if array.ndim == 0 or not has_contiguous_rows(array):
        return None
    return reshaped(array, (array.size // max(array.shape[-1], 1), array.shape[-1]))


def has_contiguous_rows(array: np.ndarray) -> bool:
    """Whether the elements of the last dimension are neighbours in memory."""
    return array.shape[-1] == 1 or strides_of(array)[-1] == 1
