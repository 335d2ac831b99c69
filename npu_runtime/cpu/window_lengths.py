"""Number of elements in each window of an average pooling."""

from __future__ import annotations

import numpy as np


def window_lengths(
    size: int, count: int, kernel: int, stride: int, before: int, after: int, count_padding: bool
) -> np.ndarray:
    """Number of elements that each of `count` windows averages along one axis of `size`: float32 [count].

    Args:
        before, after: The axis's padding; elements of a window beyond the padding do not count.
        count_padding: Whether padding counts as elements.
    """
    start = np.arange(count) * stride - before
    end = np.minimum(start + kernel, size + after)
    if not count_padding:
        start, end = np.maximum(start, 0), np.minimum(end, size)
    return (end - start).astype(np.float32)
