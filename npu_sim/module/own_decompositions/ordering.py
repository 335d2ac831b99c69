"""Decompositions of ops that sort, search sorted values, or compute running results such as `cummax`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from npu_sim.module.own_decompositions.table import decomposes

MOST_PAIRS = 2**24  # of elements that are compared with one another, for each of which memory is needed

Tensors = tuple[torch.Tensor, ...]


def _check_pairs(count: int) -> None:
    if count > MOST_PAIRS:
        raise NotImplementedError(f"comparing {count} pairs of elements")


def _lifted(x: torch.Tensor, dim: int) -> tuple[torch.Tensor, int]:
    """Return the tensor, a scalar as a vector of one element, and the dimension counted from the front."""
    return (x, dim % x.dim()) if x.dim() else (x.unsqueeze(0), 0)


def _picked(
    x: torch.Tensor, dim: int, keepdim: bool, place: Callable[[torch.Tensor, int], torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return one element of each sorted row and its original index.

    Args:
        place: Function of (rows, dimension) that returns the positions in the sorted rows, with that dimension kept.
    """
    rows, along = _lifted(x, dim)
    if rows.size(along) == 0:
        raise NotImplementedError("no element to pick")
    values, order = torch.sort(rows, dim=along, stable=True)
    places = place(rows, along)
    picked = values.gather(along, places), order.gather(along, places)
    if not x.dim():
        return picked[0].squeeze(0), picked[1].squeeze(0)
    return picked if keepdim else (picked[0].squeeze(along), picked[1].squeeze(along))


def _numbers(rows: torch.Tensor, dim: int) -> torch.Tensor:
    """Count the elements of each row that are not NaN."""
    return torch.isnan(rows).logical_not().sum(dim, keepdim=True)


def _middle(rows: torch.Tensor, dim: int) -> torch.Tensor:
    """Return the position of the median in each sorted row: the lower middle or, if there is a NaN, the first NaN.

    NaNs are sorted last.
    """
    middle = torch.full_like(rows.narrow(dim, 0, 1), (rows.size(dim) - 1) // 2, dtype=torch.int64)
    if not rows.is_floating_point():
        return middle
    numbers = _numbers(rows, dim)
    return torch.where(numbers == rows.size(dim), middle, numbers)


def _middle_number(rows: torch.Tensor, dim: int) -> torch.Tensor:
    if not rows.is_floating_point():
        return _middle(rows, dim)
    return ((_numbers(rows, dim) - 1).clamp(min=0) / 2).to(torch.int64)


@decomposes("aten.median.dim")
def median(x: torch.Tensor, dim: int, keepdim: bool = False) -> Tensors:
    return _picked(x, dim, keepdim, _middle)


@decomposes("aten.nanmedian.dim")
def nanmedian(x: torch.Tensor, dim: int, keepdim: bool = False) -> Tensors:
    return _picked(x, dim, keepdim, _middle_number)


@decomposes("aten.median.default")
def median_of_all(x: torch.Tensor) -> torch.Tensor:
    return _picked(x.reshape(-1), 0, False, _middle)[0]


@decomposes("aten.nanmedian.default")
def nanmedian_of_all(x: torch.Tensor) -> torch.Tensor:
    return _picked(x.reshape(-1), 0, False, _middle_number)[0]


@decomposes("aten.kthvalue.default")
def kthvalue(x: torch.Tensor, k: int, dim: int = -1, keepdim: bool = False) -> Tensors:
    return _picked(
        x, dim, keepdim, lambda rows, along: torch.full_like(rows.narrow(along, 0, 1), k - 1, dtype=torch.int64)
    )


@decomposes("aten.mode.default")
def mode(x: torch.Tensor, dim: int = -1, keepdim: bool = False) -> Tensors:
    """Return the most frequent value of each row, the least of equally frequent ones, and its last index."""
    rows, along = _lifted(x, dim)
    size = rows.size(along)
    _check_pairs(rows.numel() * size)
    counts = (rows.unsqueeze(along) == rows.unsqueeze(along + 1)).sum(along + 1)
    is_frequent = counts == counts.amax(along, keepdim=True)
    above = float("inf") if x.is_floating_point() else rows.amax(along, keepdim=True)
    value = torch.where(is_frequent, rows, above).amin(along, keepdim=True)
    places = torch.arange(size, device=x.device).reshape([-1] + [1] * (rows.dim() - along - 1))
    index = torch.where(rows == value, places, 0).amax(along, keepdim=True)
    if keepdim and x.dim():
        return value, index
    return value.squeeze(along), index.squeeze(along)


@decomposes("aten.searchsorted.Tensor")
def searchsorted(
    boundaries: torch.Tensor,
    x: torch.Tensor,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: torch.Tensor | None = None,
) -> torch.Tensor:
    """Count the boundaries below each element; with `right`, those below or equal to it."""
    _check_pairs(x.numel() * boundaries.size(-1))
    if sorter is not None:
        boundaries = boundaries.gather(-1, sorter)
    right = right or side == "right"
    steps = boundaries if boundaries.dim() == 1 else boundaries.unsqueeze(-2)
    wanted = x.unsqueeze(-1)
    is_before = steps <= wanted if right else steps < wanted
    if x.is_floating_point():
        is_before = is_before | torch.isnan(wanted)
    return is_before.sum(-1).to(torch.int32 if out_int32 else torch.int64)


@decomposes("aten.searchsorted.Scalar")
def searchsorted_scalar(boundaries: torch.Tensor, x: float, **options: object) -> torch.Tensor:
    return searchsorted(boundaries, boundaries.new_full((), x), **options)  # type: ignore[arg-type]


@decomposes("aten.bucketize.Scalar")
def bucketize_scalar(
    x: float, boundaries: torch.Tensor, *, out_int32: bool = False, right: bool = False
) -> torch.Tensor:
    return searchsorted(boundaries, boundaries.new_full((), x), out_int32=out_int32, right=right)


def _running(
    combine: Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], Tensors], values: Tensors, dim: int
) -> Tensors:
    """Compute running results of an associative function, in log2(size) steps.

    Args:
        combine: The function, on tuples of tensors.
        values: The tensors to scan together.
        dim: The dimension along which results accumulate.
    """
    size, step = values[0].size(dim), 1
    while step < size:
        joined = combine(
            [x.narrow(dim, 0, size - step) for x in values], [x.narrow(dim, step, size - step) for x in values]
        )
        values = tuple(torch.cat([old.narrow(dim, 0, step), new], dim) for old, new in zip(values, joined, strict=True))
        step *= 2
    return values


def _running_extreme(x: torch.Tensor, dim: int, is_better: Callable[..., torch.Tensor]) -> Tensors:
    """Return running extremes and their indices; equal values give the last index, and NaN persists once it occurs."""
    rows, along = _lifted(x, dim)
    places = torch.arange(rows.size(along), device=x.device).reshape([-1] + [1] * (rows.dim() - along - 1))

    def combine(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> Tensors:
        takes_right = is_better(right[0], left[0])
        if x.is_floating_point():
            takes_right = torch.isnan(right[0]) | (takes_right & torch.isnan(left[0]).logical_not())
        return torch.where(takes_right, right[0], left[0]), torch.where(takes_right, right[1], left[1])

    values, indices = _running(combine, (rows, places.expand(rows.shape)), along)
    return values.reshape(x.shape), indices.reshape(x.shape)


@decomposes("aten.cummax.default")
def cummax(x: torch.Tensor, dim: int) -> Tensors:
    return _running_extreme(x, dim, torch.ge)


@decomposes("aten.cummin.default")
def cummin(x: torch.Tensor, dim: int) -> Tensors:
    return _running_extreme(x, dim, torch.le)


@decomposes("aten.cumprod.default")
def cumprod(x: torch.Tensor, dim: int, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    result = dtype or (x.dtype if x.is_floating_point() else torch.int64)
    rows, along = _lifted(x.to(result), dim)
    (products,) = _running(lambda left, right: (left[0] * right[0],), (rows,), along)
    return products.reshape(x.shape)


@decomposes("aten.logcumsumexp.default")
def logcumsumexp(x: torch.Tensor, dim: int) -> torch.Tensor:
    rows, along = _lifted(x, dim)
    (sums,) = _running(lambda left, right: (torch.logaddexp(left[0], right[0]),), (rows,), along)
    return sums.reshape(x.shape)
