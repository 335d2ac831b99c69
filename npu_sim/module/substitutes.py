"""Replacements, while tracing, of PyTorch functions that `torch.export` cannot trace or traces with a loss.

Some functions read values of tensors only to check them: `torch.cov` warns before a division by zero, and
`torch.combinations` counts the elements of a mask that depends only on the vector's length. On the meta device,
`torch.tensor(0.5)` and the list in `x[:, [0]]` are traced as constants whose values are lost.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_MOST_COMBINATIONS = 2**16


class Substitutes(TorchFunctionMode):
    """A context in which PyTorch's functions are replaced by these, for arguments that these support."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        substitute = _SUBSTITUTES.get(func)
        result = NotImplemented if substitute is None else substitute(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {})) if result is NotImplemented else result


def _cov(
    x: Tensor, *, correction: int = 1, fweights: Tensor | None = None, aweights: Tensor | None = None, **named: Any
) -> Any:
    """Return the covariances of the rows; calls with weights stay with PyTorch, which refuses negative weights."""
    if named or fweights is not None or aweights is not None:
        return NotImplemented
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.dim() > 2 or 0 in x.shape:
        return NotImplemented
    rows = x.reshape(1, -1) if x.dim() < 2 else x
    centered = rows - rows.sum(1, keepdim=True) / rows.shape[1]
    return (torch.mm(centered, centered.T) / max(rows.shape[1] - correction, 0)).squeeze()


def _corrcoef(x: Tensor, **named: Any) -> Any:
    covariances = _cov(x, **named)
    if covariances is NotImplemented:
        return NotImplemented
    if covariances.dim() == 0:
        return covariances / covariances
    deviations = torch.sqrt(covariances.diagonal())
    return torch.clamp(covariances / deviations.unsqueeze(1) / deviations, -1, 1)


def _combinations(x: Tensor, r: int = 2, with_replacement: bool = False, **named: Any) -> Any:
    """Return the combinations of a vector's elements; the positions chosen depend only on the vector's length."""
    if named or not isinstance(x, Tensor) or x.dim() != 1 or not isinstance(x.shape[0], int) or r < 1:
        return NotImplemented
    size = x.shape[0]
    if math.comb(size + (r - 1 if with_replacement else 0), r) > _MOST_COMBINATIONS:
        return NotImplemented
    choose = itertools.combinations_with_replacement if with_replacement else itertools.combinations
    chosen = list(choose(range(size), r))
    if not chosen:
        return x.new_empty((0, r))
    index = torch.tensor(chosen, device=x.device)
    return torch.index_select(x, 0, index.reshape(-1)).reshape(len(chosen), r)


def _tensor(data: Any, *, device: Any = None, dtype: torch.dtype | None = None, **named: Any) -> Any:
    """Return a number as a tensor on the meta device; other calls of `torch.tensor` are not replaced."""
    if named or device is None or torch.device(device).type != "meta" or not isinstance(data, (bool, int, float)):
        return NotImplemented
    return torch.full((), data, device=device, dtype=dtype)


def _getitem(x: Tensor, index: Any) -> Any:
    """Index a meta tensor by slices instead of a list of one number, which tracing would lose."""
    parts = index if isinstance(index, tuple) else (index,)
    if x.device.type != "meta" or sum(isinstance(part, list) for part in parts) != 1:
        return NotImplemented
    if any(isinstance(part, Tensor) for part in parts):
        return NotImplemented
    if not all(len(part) == 1 and type(part[0]) is int for part in parts if isinstance(part, list)):
        return NotImplemented
    return x[tuple(slice(p[0], p[0] + 1 or None) if isinstance(p, list) else p for p in parts)]


_SUBSTITUTES: dict[Any, Callable[..., Any]] = {
    torch.cov: _cov,
    Tensor.cov: _cov,
    torch.corrcoef: _corrcoef,
    Tensor.corrcoef: _corrcoef,
    torch.combinations: _combinations,
    torch.tensor: _tensor,
    Tensor.__getitem__: _getitem,
}
