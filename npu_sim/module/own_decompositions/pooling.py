"""Decompositions of adaptive max pooling and of the gradient of max pooling."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from npu_sim.module.own_decompositions.table import decomposes


@decomposes("aten.adaptive_max_pool1d.default aten.adaptive_max_pool2d.default aten.adaptive_max_pool3d.default")
def adaptive_max_pool(x: Tensor, size: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Compute adaptive max pooling as pooling with equal windows, after repeating elements of overlapping windows."""
    spatial = len(size)
    sources = list(x.shape[-spatial:])
    windows, places = [], []
    for axis, (source, count) in enumerate(zip(sources, size, strict=True), -spatial):
        window, place = _adaptive_places(source, count, x.device)
        windows.append(window)
        places.append(place)
        if place is not None:
            x = torch.index_select(x, axis, place)
    pool = getattr(torch.ops.aten, f"max_pool{spatial}d_with_indices").default
    maxima, index = pool(x, windows, windows)
    return maxima, _original_index(index, list(x.shape[-spatial:]), sources, places)


def _adaptive_places(source: int, count: int, device: torch.device) -> tuple[int, Tensor | None]:
    """Return the size of the largest pooling window, and the source index of each element of all windows.

    A smaller window repeats its last element. The indices are None if all windows have the same size and do not
    overlap.
    """
    if source % count == 0:
        return source // count, None
    window = max(-(-(i + 1) * source // count) - i * source // count for i in range(count))
    number = torch.arange(count, device=device)
    first = torch.div(number * source, count, rounding_mode="floor")
    last = torch.div((number + 1) * source + count - 1, count, rounding_mode="floor") - 1
    taps = torch.arange(window, device=device)
    return window, torch.minimum(first.unsqueeze(1) + taps, last.unsqueeze(1)).reshape(-1)


def _original_index(index: Tensor, sizes: list[int], sources: list[int], places: list[Tensor | None]) -> Tensor:
    """Convert flat positions in a volume of repeated elements to flat positions in the source volume.

    Args:
        index: Flat positions in a volume of `sizes`.
        sources: Sizes of the source volume.
        places: For each dimension, the source index of each element. None: the dimension was not changed.
    """
    if all(place is None for place in places):
        return index
    coordinates = []
    for size, place in zip(reversed(sizes), reversed(places), strict=True):
        coordinate = torch.remainder(index, size)
        index = torch.div(index, size, rounding_mode="floor")
        if place is not None:
            coordinate = torch.index_select(place, 0, coordinate.reshape(-1)).reshape(coordinate.shape)
        coordinates.append(coordinate)
    result = coordinates.pop()
    for source in sources[1:]:
        result = result * source + coordinates.pop()
    return result


@decomposes("aten.max_pool2d_with_indices_backward.default")
def max_pool2d_with_indices_backward(
    grad: Tensor,
    x: Tensor,
    window: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
    indices: Tensor,
) -> Tensor:
    """Return the gradient of max pooling: each window's gradient is added where its maximum was."""
    planes = torch.zeros_like(x).flatten(-2)
    return torch.scatter_add(planes, -1, indices.flatten(-2), grad.flatten(-2)).reshape(x.shape)
