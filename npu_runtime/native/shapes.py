"""Views that put operands into the few forms the kernels take."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def collapse(size: Sequence[int], *strides: Sequence[int]) -> tuple[list[int], list[list[int]]]:
    """Drops dimensions of size 1 and merges neighbours that every operand can walk as one."""
    merged: list[int] = []
    merged_strides: list[list[int]] = [[] for _ in strides]
    for dim, length in enumerate(size):
        if length == 1:
            continue
        step = [stride[dim] for stride in strides]
        if merged and all(own[-1] == length * inner for own, inner in zip(merged_strides, step, strict=True)):
            merged[-1] *= length
            for own, inner in zip(merged_strides, step, strict=True):
                own[-1] = inner
            continue
        merged.append(length)
        for own, inner in zip(merged_strides, step, strict=True):
            own.append(inner)
    return merged, merged_strides


def as_rows(tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor as a matrix of its last dimension's rows, without a copy; None where no row distance fits."""
    if tensor.dim() == 0 or not has_contiguous_rows(tensor):
        return None
    try:
        return tensor.view(-1, tensor.shape[-1])
    except RuntimeError:
        return None


def has_contiguous_rows(tensor: torch.Tensor) -> bool:
    """Whether the elements of the last dimension are neighbours in memory."""
    return tensor.shape[-1] == 1 or tensor.stride(-1) == 1
