"""Decompositions of ops that take strides, offsets or unchecked indices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from npu_sim.module.own_decompositions.table import decomposes


@decomposes("aten.as_strided_copy.default")
def as_strided_copy(x: Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None = None) -> Tensor:
    place = _places(x, size, stride, offset)
    return torch.index_select(x.reshape(-1), 0, place.reshape(-1)).reshape(size)


@decomposes("aten.as_strided_scatter.default")
def as_strided_scatter(
    x: Tensor, source: Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None = None
) -> Tensor:
    place = _places(x, size, stride, offset)
    return torch.scatter(x.reshape(-1), 0, place.reshape(-1), source.reshape(-1)).reshape(x.shape)


def _places(x: Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None) -> Tensor:
    """Return the positions in memory of the elements of a view with these sizes, strides and offset."""
    if not x.is_contiguous() or x.storage_offset() != 0:
        raise NotImplementedError("the tensor is not all of its memory, in the order of its dimensions")
    place = torch.full((), offset or 0, dtype=torch.int64, device=x.device)
    for count, step in zip(size, stride, strict=True):
        place = place.unsqueeze(-1) + torch.arange(count, device=x.device) * step
    return place


@decomposes("aten.empty_strided.default")
def empty_strided(size: Sequence[int], stride: Sequence[int], **options: Any) -> Tensor:
    return torch.empty(size, **options)


@decomposes("aten.new_empty_strided.default")
def new_empty_strided(x: Tensor, size: Sequence[int], stride: Sequence[int], **options: Any) -> Tensor:
    """Return an uninitialized tensor; the strides are ignored, since the result has no values to lay out."""
    return x.new_empty(size, **options)


@decomposes("aten._unsafe_masked_index.default")
def unsafe_masked_index(x: Tensor, mask: Tensor, indices: Sequence[Tensor | None], fill: float) -> Tensor:
    """Return the indexed elements where the mask is true, else `fill`; masked indices may be out of range."""
    inside = [
        None if index is None else torch.clamp(index, 0, size - 1)
        for index, size in zip(indices, x.shape, strict=False)
    ]
    return torch.masked_fill(torch.ops.aten.index(x, inside), torch.logical_not(mask), fill)
