"""Rounding of weights to the nearest value of a format, with scales from the range or of least squared error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from npu_compiler.errors import InputError
from npu_compiler.graph.quantization import QuantizedArray, QuantizedFormat
from npu_runtime.torch_arrays import tensor_to_numpy

RANGE = (1.0,)
SEARCH = tuple(1 - step / 25 for step in range(10))
"""Fractions of the range to try: clipping the largest elements makes the steps of all others smaller."""

_PIECE = 2**17  # elements that are searched at once: their temporary arrays stay in a core's cache


@dataclass(frozen=True)
class Scales:
    """Scales and zero points of groups of weights: value = scale · (code - zero).

    Attributes:
        scale: float32 [n, groups], rounded to the dtype in which the format stores it; never 0.
        zero: float32 [n, groups], whole numbers.
    """

    scale: torch.Tensor
    zero: torch.Tensor


def fit(columns: torch.Tensor, format: QuantizedFormat, fractions: Sequence[float]) -> Scales:
    """Choose the scale and zero point of each row of a group of columns, float32 [n, group].

    Args:
        columns: The weights.
        format: The format to round to.
        fractions: Fractions of each row's range to try; the one with the least squared error is taken, the first of
            equals.
    """
    best, *others = (_of_range(columns, format, fraction) for fraction in fractions)
    if not others:
        return best
    least = _squared_error(columns, best, format)
    for scales in others:
        error = _squared_error(columns, scales, format)
        better = error < least
        best = Scales(*(torch.where(better, x, y) for x, y in ((scales.scale, best.scale), (scales.zero, best.zero))))
        least = torch.where(better, error, least)
    return best


def _squared_error(columns: torch.Tensor, scales: Scales, format: QuantizedFormat) -> torch.Tensor:
    """Return the squared rounding error of each row: [n, 1]."""
    return (rounded(columns, scales, format) - columns).square().sum(1, keepdim=True)


def _of_range(columns: torch.Tensor, format: QuantizedFormat, fraction: float) -> Scales:
    if format.offsets == "none":
        largest = columns.abs().amax(1, keepdim=True) * fraction
        scale = stored_scales(largest / format.code_format.largest, format)
        return Scales(scale, torch.full_like(scale, format.code_format.zero))
    low, high = format.code_range
    smallest = columns.amin(1, keepdim=True).clamp(max=0) * fraction
    greatest = columns.amax(1, keepdim=True).clamp(min=0) * fraction
    scale = stored_scales((greatest - smallest) / (high - low), format)
    return Scales(scale, (low - smallest / scale).round().clamp(low, high))


def stored_scales(scale: torch.Tensor, format: QuantizedFormat) -> torch.Tensor:
    """Return scales rounded to the stored dtype, in float32; a scale that becomes 0 is replaced by 1."""
    narrow = scale.to(getattr(torch, format.scales)).float()
    return torch.where(narrow == 0, 1.0, narrow)


def codes(columns: torch.Tensor, scales: Scales, format: QuantizedFormat) -> torch.Tensor:
    """Return the codes of columns [n, m] as float32: integers or, for float8, the rounded quotients value / scale."""
    return round_codes(exact_codes(columns, scales, format), format)


def exact_codes(columns: torch.Tensor, scales: Scales, format: QuantizedFormat) -> torch.Tensor:
    """Return the numbers that `codes` rounds, clamped to the range of the codes."""
    exact = columns / scales.scale
    return (exact if format.code_format.is_float else exact + scales.zero).clamp(*format.code_range)


def round_codes(exact: torch.Tensor, format: QuantizedFormat) -> torch.Tensor:
    """Return the code nearest to each element of `exact`, as float32; elements out of range are not clamped."""
    kind = format.code_format
    return exact.to(getattr(torch, kind.dtype.name)).float() if kind.is_float else exact.round()


def rounded(columns: torch.Tensor, scales: Scales, format: QuantizedFormat) -> torch.Tensor:
    """Return the columns rounded to the format and dequantized."""
    return (codes(columns, scales, format) - scales.zero) * scales.scale


def fit_rows(weight: torch.Tensor, format: QuantizedFormat, fractions: Sequence[float]) -> Scales:
    """Return scales and zero points, chosen by `fit`, for each group of a matrix, float32 [n, k]."""
    n, k = weight.shape
    groups = weight.reshape(-1, format.group or k)
    scales = [fit(piece, format, fractions) for piece in groups.split(max(1, _PIECE // groups.shape[1]))]
    return Scales(*(torch.cat([getattr(x, name) for x in scales]).reshape(n, -1) for name in ("scale", "zero")))


def assemble(codes: torch.Tensor, scales: Scales, format: QuantizedFormat) -> QuantizedArray:
    """Return the quantized matrix that consists of these codes and of its groups' scales.

    Args:
        codes: One number for each element [n, k], not packed yet, as the function `codes` returns them.
    """
    n, k = codes.shape
    codes, scales = codes.cpu(), Scales(scales.scale.cpu(), scales.zero.cpu())
    offsets = None
    if format.offsets == "zero_point":
        offsets = scales.zero.numpy().astype(format.code_format.dtype).view(np.uint8)
    narrow = scales.scale.to(getattr(torch, format.scales))
    return QuantizedArray(format, (n, k), format.code_format.pack(codes.numpy()), tensor_to_numpy(narrow), offsets)


def nearest(weight: torch.Tensor, format: QuantizedFormat, fractions: Sequence[float]) -> QuantizedArray:
    """Quantize a matrix, float32 [n, k], by rounding each element to the nearest value.

    Raises:
        InputError: its rows are not a whole number of groups, or it holds values that are not finite.
    """
    check(weight, format)
    scales = fit_rows(weight, format, fractions)
    by_group = Scales(*(x.reshape(-1, 1) for x in (scales.scale, scales.zero)))
    rounded = codes(weight.reshape(len(by_group.scale), -1), by_group, format)
    return assemble(rounded.reshape(weight.shape), scales, format)


def check(weight: torch.Tensor, format: QuantizedFormat) -> None:
    """Raise `InputError` if a weight's shape does not fit a format, or the weight is not finite."""
    if problem := format.problem(tuple(weight.shape)):
        raise InputError(problem)
    if not bool(weight.isfinite().all()):
        raise InputError("it holds values that are not finite")
