"""Views that put operands into the few forms the kernels take."""

from __future__ import annotations

import torch


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
