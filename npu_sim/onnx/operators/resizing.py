"""Converters of image resizing.

A case that PyTorch's interpolation supports becomes a call of it. Any other becomes a product along each axis with a
constant matrix, whose rows hold the weight of each input element in an output element.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from npu_sim.onnx.rows import Call, Refusal, converts, numbered

MOST_SHARES = 2**24  # elements of a matrix


@converts("Upsample", static=(1,))
def _upsample(call: Call, x: Tensor, scales: list[float]) -> Tensor:
    old = Call(
        "Resize", call.opset, {**call.attrs, "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    )
    return _resize(old, x, None, scales)


@converts("Resize", static=(1, 2, 3))
def _resize(
    call: Call,
    x: Tensor,
    roi: list[float] | None = None,
    scales: list[float] | None = None,
    sizes: list[int] | None = None,
) -> Tensor:
    axes = [axis % x.ndim for axis in call.attr("axes", list(range(x.ndim)))]
    inside = [x.shape[axis] for axis in axes]
    if sizes:
        outside, factors = _kept_ratio(call, inside, sizes)
    elif scales:
        outside, factors = [math.floor(n * s) for n, s in zip(inside, scales, strict=True)], list(scales)
    else:
        raise Refusal("has neither scales nor sizes")
    mode, way = call.attr("mode", "nearest"), call.attr("coordinate_transformation_mode", "half_pixel")
    if (function := _plain(call, x, axes, inside, outside, factors)) is not None:
        return function(x)
    regions = roi if roi and way == "tf_crop_and_resize" else [0.0] * len(axes) + [1.0] * len(axes)
    dtype = x.dtype
    result = x if dtype.is_floating_point or mode == "nearest" else x.float()
    for place, axis in enumerate(axes):
        if outside[place] == inside[place] and factors[place] == 1 and way != "tf_crop_and_resize":
            continue
        region = (regions[place], regions[place + len(axes)])
        matrix, beyond = _matrix(call, inside[place], outside[place], factors[place], region)
        result = _along(result, axis, matrix, beyond, call)
    return result.to(dtype)


def _along(x: Tensor, axis: int, matrix: np.ndarray, beyond: np.ndarray, call: Call) -> Tensor:
    """Resize a tensor along one axis.

    Args:
        matrix: Weight of each input element in each output element, [outputs, inputs].
        beyond: Whether each output lies outside of the input, where it gets the node's extrapolation value.
    """
    if call.attr("mode", "nearest") == "nearest":
        resized = x.index_select(axis, torch.from_numpy(matrix.argmax(1)))
    else:
        weights = torch.from_numpy(matrix).to(x.dtype)
        resized = torch.matmul(x.movedim(axis, -1), weights.T).movedim(-1, axis)
    if not beyond.any():
        return resized
    shape = [1] * x.ndim
    shape[axis] = len(beyond)
    fill = torch.full_like(resized, call.attr("extrapolation_value", 0.0))
    return torch.where(torch.from_numpy(beyond).reshape(shape), fill, resized)


def _kept_ratio(call: Call, inside: list[int], sizes: list[int]) -> tuple[list[int], list[float]]:
    """Return output sizes and factors of a resize to given sizes, adjusted if the node keeps the aspect ratio."""
    policy = call.attr("keep_aspect_ratio_policy", "stretch")
    factors = [size / n for size, n in zip(sizes, inside, strict=True)]
    if policy == "stretch":
        return list(sizes), factors
    factor = min(factors) if policy == "not_larger" else max(factors)
    return [math.floor(n * factor + 0.5) for n in inside], [factor] * len(inside)


def _plain(
    call: Call, x: Tensor, axes: list[int], inside: list[int], outside: list[int], factors: list[float]
) -> Callable[[Tensor], Tensor] | None:
    """Return a call of PyTorch's interpolation, or None if that would compute something else than the node."""
    mode, way = call.attr("mode", "nearest"), call.attr("coordinate_transformation_mode", "half_pixel")
    images = x.ndim == 4 and x.is_floating_point() and axes in ([0, 1, 2, 3], [2, 3])
    exact = all(size == n * factor for size, n, factor in zip(outside, inside, factors, strict=True))
    if not images or not exact or call.attr("antialias", 0) or call.attr("exclude_outside", 0):
        return None
    if len(axes) == 4 and outside[:2] != inside[:2]:
        return None
    size = outside[-2:]
    whole = all(out % n == 0 for out, n in zip(size, inside[-2:], strict=True))
    if mode == "nearest":
        rounding = call.attr("nearest_mode", "round_prefer_floor")
        repeats = way == "asymmetric" and rounding == "floor" or way == "half_pixel" and rounding.startswith("round_")
        return (lambda images: F.interpolate(images, size, mode="nearest")) if whole and repeats else None
    names = {"linear": "bilinear", "cubic": "bicubic"}
    if mode not in names or mode == "cubic" and call.attr("cubic_coeff_a", -0.75) != -0.75:
        return None
    if way not in ("half_pixel", "align_corners", "pytorch_half_pixel") or 1 in size:
        return None
    return lambda images: F.interpolate(images, size, mode=names[mode], align_corners=way == "align_corners")


def _matrix(
    call: Call, inside: int, outside: int, factor: float, region: tuple[float, float]
) -> tuple[np.ndarray, np.ndarray]:
    """Return the weights [outside, inside] of input elements in each output, and which outputs lie outside.

    Args:
        inside, outside: Number of elements along the axis in the input and in the output.
        factor: Scale factor.
        region: Start and end of the region to crop to, as fractions of the axis.
    """
    rows = numbered(outside, "places along an axis")
    if outside * inside > MOST_SHARES:
        raise Refusal(f"resizes {inside} to {outside} elements along an axis, which takes a matrix that is too large")
    places = np.array([_source(call, index, inside, outside, factor, region) for index in rows])
    is_cropped = call.attr("coordinate_transformation_mode", "half_pixel") == "tf_crop_and_resize"
    beyond = (places < 0) | (places > inside - 1) if is_cropped else np.zeros(outside, bool)
    matrix = np.zeros((outside, inside), np.float32)
    for row, place in enumerate(places):
        terms = _terms(call, float(place), min(factor, 1.0) if call.attr("antialias", 0) else 1.0)
        if call.attr("exclude_outside", 0):
            terms = [(index, share) for index, share in terms if 0 <= index < inside]
            total = sum(share for _, share in terms)
            terms = [(index, share / total) for index, share in terms]
        for index, share in terms:
            matrix[row, min(max(index, 0), inside - 1)] += share
    return matrix, beyond


def _source(call: Call, index: int, inside: int, outside: int, factor: float, region: tuple[float, float]) -> float:
    """Return the position in the input that corresponds to an output element."""
    way = call.attr("coordinate_transformation_mode", "half_pixel")
    if way == "asymmetric":
        return index / factor
    if way == "align_corners":
        return 0.0 if outside == 1 else index * (inside - 1) / (factor * inside - 1)
    if way == "pytorch_half_pixel":
        return -0.5 if factor * inside == 1 else (index + 0.5) / factor - 0.5
    if way == "half_pixel_symmetric":
        middle = inside / 2 * (1 - outside / (factor * inside))
        return middle + (index + 0.5) / factor - 0.5
    if way == "tf_half_pixel_for_nn":
        return (index + 0.5) / factor
    if way == "tf_crop_and_resize":
        first, last = region
        if outside == 1:
            return 0.5 * (first + last) * (inside - 1)
        return first * (inside - 1) + index * (last - first) * (inside - 1) / (outside - 1)
    if way != "half_pixel":
        raise Refusal(f"has the coordinate_transformation_mode '{way}'")
    return (index + 0.5) / factor - 0.5


def _terms(call: Call, place: float, scale: float) -> list[tuple[int, float]]:
    """Return the elements and weights that interpolation at a position uses; elements may lie outside of the input.

    Args:
        place: The position in the input.
        scale: Below 1, the filter is wider by its reciprocal, against aliasing.
    """
    mode = call.attr("mode", "nearest")
    if mode == "nearest":
        return [(_nearest(place, call.attr("nearest_mode", "round_prefer_floor")), 1.0)]
    a = call.attr("cubic_coeff_a", -0.75)
    shapes: dict[str, tuple[int, Callable[[float], float]]] = {
        "linear": (1, lambda d: max(1 - abs(d), 0.0)),
        "cubic": (2, lambda d: _cubic(abs(d), a)),
    }
    if mode not in shapes:
        raise Refusal(f"resizes in mode '{mode}'; known are nearest, linear and cubic")
    reach, share = shapes[mode]
    first = math.floor(place - reach / scale) + 1
    terms = [(index, share((index - place) * scale)) for index in range(first, math.ceil(place + reach / scale) + 1)]
    total: Any = sum(value for _, value in terms)
    return [(index, value / total) for index, value in terms if value]


def _cubic(d: float, a: float) -> float:
    if d <= 1:
        return ((a + 2) * d - (a + 3)) * d * d + 1
    return ((a * d - 5 * a) * d + 8 * a) * d - 4 * a if d < 2 else 0.0


def _nearest(place: float, rounding: str) -> int:
    if rounding == "floor":
        return math.floor(place)
    if rounding == "ceil":
        return math.ceil(place)
    if rounding == "round_prefer_ceil":
        return math.floor(place + 0.5)
    if rounding != "round_prefer_floor":
        raise Refusal(f"has the nearest_mode '{rounding}'")
    return math.ceil(place - 0.5)
