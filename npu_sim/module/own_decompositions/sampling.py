"""Decompositions of ops that sample images at fractional coordinates."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from npu_sim.module.own_decompositions.table import decomposes, stays_where

BILINEAR, NEAREST, BICUBIC = range(3)  # PyTorch's numbers of the interpolation modes
ZEROS, BORDER, REFLECTION = range(3)  # and of the padding modes


@decomposes("aten.grid_sampler.default aten.grid_sampler_2d.default aten.grid_sampler_3d.default")
def grid_sampler(x: Tensor, grid: Tensor, mode: int, padding: int, align_corners: bool) -> Tensor:
    """Sample `x` [batch, channels, *sizes] at the coordinates in `grid` [batch, *places, coordinate].

    Coordinates are from -1 to 1, and the last dimension's comes first.
    """
    sizes = list(x.shape[2:])
    coordinates = [
        _unnormalized(grid.select(-1, len(sizes) - 1 - axis), size, align_corners) for axis, size in enumerate(sizes)
    ]
    if mode == BICUBIC:
        return _bicubic(x, coordinates, padding, align_corners)
    bounded = [
        _bounded(c, size, padding, align_corners, 0 if len(sizes) == 2 else size - 1)
        for c, size in zip(coordinates, sizes, strict=True)
    ]
    if padding == ZEROS and len(sizes) == 3:  # PyTorch's 2-D kernel makes NaN of such places, its 3-D kernel 0
        # At -2 no pixel takes part; at -1 the first does, with a share of 0, which makes NaN of infinity.
        bounded = [torch.nan_to_num(torch.clamp(c, -2, size), nan=-2.0) for c, size in zip(bounded, sizes, strict=True)]
    if mode == NEAREST:
        return _picked(x, [torch.round(c) for c in bounded])
    lows = [torch.floor(c) for c in bounded]
    total = None
    for corner in itertools.product((0, 1), repeat=len(sizes)):
        shares = [c - low if bit else low + 1 - c for c, low, bit in zip(bounded, lows, corner, strict=True)]
        share = _product(shares[::-1]).unsqueeze(1)  # the last size's first, as PyTorch multiplies
        term = _picked(x, [low + bit for low, bit in zip(lows, corner, strict=True)]) * share
        total = term if total is None else total + term
    assert total is not None
    return total


def _unnormalized(coordinate: Tensor, size: int, align_corners: bool) -> Tensor:
    """Convert coordinates from -1 to 1 to pixel coordinates."""
    if align_corners:
        return (coordinate + 1) / 2 * (size - 1)
    return ((coordinate + 1) * size - 1) / 2


def _bounded(coordinate: Tensor, size: int, padding: int, align_corners: bool, of_nan: int = 0) -> Tensor:
    """Return the coordinate that the padding mode reads instead of one outside; with `ZEROS` it stays outside.

    Args:
        of_nan: The coordinate that replaces NaN: the first in PyTorch's 2-D kernel, the last in its 3-D kernel.
    """
    if padding == ZEROS:
        return coordinate
    if padding == REFLECTION:
        coordinate = _reflected(coordinate, size, align_corners)
    inside = torch.clamp(coordinate, 0, size - 1)
    return torch.where(torch.isnan(inside), torch.full_like(inside, of_nan), inside)


def _reflected(coordinate: Tensor, size: int, align_corners: bool) -> Tensor:
    low, span = (0.0, size - 1) if align_corners else (-0.5, size)
    if span == 0:
        return torch.zeros_like(coordinate)
    distance = torch.abs(coordinate - low)
    extra, flips = torch.fmod(distance, span), torch.floor(distance / span)
    return torch.where(torch.remainder(flips, 2) == 0, extra + low, span - extra + low)


def _picked(x: Tensor, places: Sequence[Tensor]) -> Tensor:
    """Return the elements at integer coordinates, zero outside of the image.

    Args:
        x: [batch, channels, *sizes].
        places: For each dimension, coordinates [batch, *shape].
    """
    inside = None
    index = None
    for place, size in zip(places, x.shape[2:], strict=True):
        within = torch.logical_and(place >= 0, place <= size - 1)
        whole = torch.where(within, place, torch.zeros_like(place)).to(torch.int32)
        inside = within if inside is None else torch.logical_and(inside, within)
        index = whole if index is None else index * size + whole
    assert index is not None and inside is not None
    batch, channels, shape = x.shape[0], x.shape[1], index.shape[1:]
    flat = index.to(torch.int64).reshape(batch, 1, -1).expand(batch, channels, -1)
    picked = torch.gather(x.flatten(2), 2, flat).reshape(batch, channels, *shape)
    return torch.where(inside.unsqueeze(1), picked, torch.zeros_like(picked))


def _product(factors: Sequence[Tensor]) -> Tensor:
    result = factors[0]
    for factor in factors[1:]:
        result = result * factor
    return result


def _bicubic(x: Tensor, coordinates: Sequence[Tensor], padding: int, align_corners: bool) -> Tensor:
    lows = [torch.floor(c) for c in coordinates]
    shares = [_cubic_shares(c - low) for c, low in zip(coordinates, lows, strict=True)]
    height, width = x.shape[2:]
    columns = [_bounded(lows[1] + step, width, padding, align_corners) for step in (-1, 0, 1, 2)]
    total = None
    for step, share in zip((-1, 0, 1, 2), shares[0], strict=True):
        row = _bounded(lows[0] + step, height, padding, align_corners)
        terms = [
            _picked(x, [torch.trunc(row), torch.trunc(column)]) * other.unsqueeze(1)
            for column, other in zip(columns, shares[1], strict=True)
        ]
        term = (terms[0] + terms[1] + terms[2] + terms[3]) * share.unsqueeze(1)
        total = term if total is None else total + term
    assert total is not None
    return total


def _cubic_shares(t: Tensor, a: float = -0.75) -> list[Tensor]:
    """Return the weights of the four elements around a point for cubic interpolation.

    Args:
        t: Distance of the point past the second element.
        a: Coefficient of the cubic kernel.
    """

    def near(x: Tensor) -> Tensor:
        return ((a + 2) * x - (a + 3)) * x * x + 1

    def far(x: Tensor) -> Tensor:
        return ((a * x - 5 * a) * x + 8 * a) * x - 4 * a

    return [far(t + 1), near(t), near(1 - t), far(2 - t)]


def _triangle(x: Tensor) -> Tensor:
    return torch.clamp_min(1 - torch.abs(x), 0)


def _cubic(x: Tensor, a: float = -0.5) -> Tensor:
    x = torch.abs(x)
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    return torch.where(x < 1, near, torch.where(x < 2, far, torch.zeros_like(x)))


@stays_where(
    "aten._upsample_bilinear2d_aa.default aten._upsample_bilinear2d_aa.vec aten._upsample_bicubic2d_aa.default "
    "aten._upsample_bicubic2d_aa.vec aten.upsample_bilinear2d.default aten.upsample_bilinear2d.vec "
    "aten.upsample_bicubic2d.default aten.upsample_bicubic2d.vec"
)
def resamples_in_fixed_point(x: Tensor, *_: Any, **__: Any) -> bool:
    """Whether PyTorch's kernel rounds otherwise than any decomposition: it resamples integers in fixed point."""
    return not x.is_floating_point()


@decomposes("aten._upsample_bilinear2d_aa.default")
def upsample_bilinear_antialiased(
    x: Tensor, size: Sequence[int], align_corners: bool, scale_h: float | None = None, scale_w: float | None = None
) -> Tensor:
    x = _antialiased(x, 3, size[1], align_corners, scale_w, _triangle, 1)
    return _antialiased(x, 2, size[0], align_corners, scale_h, _triangle, 1)


@decomposes("aten._upsample_bicubic2d_aa.default")
def upsample_bicubic_antialiased(
    x: Tensor, size: Sequence[int], align_corners: bool, scale_h: float | None = None, scale_w: float | None = None
) -> Tensor:
    x = _antialiased(x, 3, size[1], align_corners, scale_w, _cubic, 2)
    return _antialiased(x, 2, size[0], align_corners, scale_h, _cubic, 2)


@decomposes("aten._upsample_bilinear2d_aa.vec")
def upsample_bilinear_antialiased_by_factors(
    x: Tensor, size: Sequence[int] | None, align_corners: bool, factors: Sequence[float] | None
) -> Tensor:
    return upsample_bilinear_antialiased(x, _sizes(x, size, factors), align_corners, *(factors or (None, None)))


@decomposes("aten._upsample_bicubic2d_aa.vec")
def upsample_bicubic_antialiased_by_factors(
    x: Tensor, size: Sequence[int] | None, align_corners: bool, factors: Sequence[float] | None
) -> Tensor:
    return upsample_bicubic_antialiased(x, _sizes(x, size, factors), align_corners, *(factors or (None, None)))


def _sizes(x: Tensor, size: Sequence[int] | None, factors: Sequence[float] | None) -> Sequence[int]:
    if size is not None:
        return size
    assert factors is not None
    return [math.floor(source * factor) for source, factor in zip(x.shape[2:], factors, strict=True)]


def _antialiased(
    x: Tensor,
    dim: int,
    size: int,
    align_corners: bool,
    factor: float | None,
    shape: Callable[[Tensor], Tensor],
    reach: int,
) -> Tensor:
    """Resample one dimension with a filter that widens with the reduction factor, which prevents aliasing.

    Args:
        factor: Scale factor given by the caller. None: derived from the sizes.
        shape: The filter, as a function of the distance in elements.
        reach: The distance beyond which the filter is zero.
    """
    source = x.shape[dim]
    if size == source and not factor:
        return x
    if align_corners:
        scale = (source - 1) / (size - 1) if size > 1 else 0.0
    else:
        scale = 1.0 / factor if factor and factor > 0 else source / size
    support, narrowing = (reach * scale, 1.0 / scale) if scale >= 1.0 else (float(reach), 1.0)
    center = (torch.arange(size, device=x.device, dtype=torch.float32).unsqueeze(1) + 0.5) * scale
    first = torch.clamp_min(torch.trunc(center - support + 0.5), 0)
    count = torch.clamp_max(torch.trunc(center + support + 0.5), source) - first
    tap = torch.arange(2 * math.ceil(support) + 1, device=x.device, dtype=torch.float32)
    weight = shape((tap + first - center + 0.5) * narrowing)
    weight = torch.where(tap < count, weight, torch.zeros_like(weight))
    place = torch.clamp(tap + first, 0, source - 1).to(torch.int32)
    taps = torch.index_select(x, dim, place.reshape(-1)).unflatten(dim, place.shape)
    aligned = [*place.shape, *(1 for _ in range(x.dim() - dim - 1))]
    terms = taps * weight.reshape(aligned)
    terms = torch.where((weight != 0).reshape(aligned), terms, torch.zeros_like(terms))
    return (terms.sum(dim + 1) / weight.sum(1).reshape([size, *aligned[2:]])).to(x.dtype)
