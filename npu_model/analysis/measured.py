"""How much longer a device takes for a call than its description as arrays, lanes and memories says.

A description has one rate for products and one for elements. A device has a rate for each shape: blocks that do not
divide it, kernels chosen among several, windows to gather. `npu-sim calibrate` measures a few shapes of each kind of
call, and writes for each by what factor the computing takes longer than the description says. For a call of another
shape the factors of the nearest ones are interpolated: their logarithms, weighted by the inverse square of the
distance, where the distance is between the logarithms of the sizes (D. Shepard, "A two-dimensional interpolation
function for irregularly-spaced data", ACM 1968).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from npu_compiler.program.kernels import Family

_PLAIN = ("elements", "row")
# Kind of call → the sizes that its measured calls are given by.
KINDS: Mapping[str, tuple[str, ...]] = {
    "product": ("m", "n", "k", "batch", "activation"),  # operations of the activation, and one
    "convolution": ("pixels", "outputs", "channels", "taps", "stride"),
    "depthwise": ("channels", "images", "width", "taps", "stride"),
    "attention": ("queries", "keys", "width", "heads"),
    **{family.value: _PLAIN for family in Family if family not in (Family.MATMUL, Family.CONV, Family.ATTENTION)},
}
# A kind that was not measured is computed as another one, if there is one.
_LIKE = {
    "convolution": "product",
    "reduction": "pool",
    "pool": "reduction",
    "rope": "elementwise",
    "tensor": "elementwise",
}
# Columns that decide by which algorithm a device computes: calls that differ in them say little of each other.
_ALGORITHM = {"convolution": slice(3, 5), "depthwise": slice(3, 5)}
_NEAREST = 4


def in_dtype(kind: str, dtype: str) -> str:
    """The name of the calls of a kind that were measured in a dtype of their own."""
    return f"{dtype}.{kind}"


def slowdown(
    measured: Mapping[str, Sequence[Sequence[float]]], kind: str, sizes: Sequence[int], dtype: str = ""
) -> float:
    """By what factor a call's computing takes longer than a chip's description says.

    Args:
        measured: Kind, or `in_dtype` of it → rows of the sizes of a call, and its factor.
        kind, sizes: Of the call, as `KINDS` names them.
        dtype: What it computes in. Where there are no calls of this dtype, those of any dtype count.
    """
    if in_dtype(kind, dtype) in measured:
        kind = in_dtype(kind, dtype)
    if kind not in measured:
        like = _LIKE.get(kind, "")
        if like not in measured:
            return 1.0
        kind, sizes = like, _sizes_like(kind, sizes)
    rows, at = measured[kind], [math.log2(size) for size in sizes]
    if alike := _ALGORITHM.get(kind.split(".")[-1]):
        rows = [row for row in rows if tuple(row[alike]) == tuple(sizes[alike])] or rows
    near = sorted((math.dist(at, [math.log2(size) for size in row[:-1]]), row[-1]) for row in rows)[:_NEAREST]
    if near[0][0] == 0:
        return near[0][1]
    weights = [distance**-2 for distance, _ in near]
    mean = math.fsum(weight * math.log(factor) for weight, (_, factor) in zip(weights, near, strict=True))
    return math.exp(mean / math.fsum(weights))


def multiplied(
    measured: Mapping[str, Sequence[Sequence[float]]], kind: str, sizes: Sequence[int], dtype: str = ""
) -> float:
    """The share of its multiply-accumulates that a device does for a call, as far as the measured calls tell.

    Below 1 for convolutions that were measured to take less than their products at full rate: the device computes them
    by a method that multiplies less (A. Lavin and S. Gray, "Fast algorithms for convolutional neural networks", 2016).
    """
    return min(1.0, slowdown(measured, kind, sizes, dtype)) if kind == "convolution" else 1.0


def _sizes_like(kind: str, sizes: Sequence[int]) -> Sequence[int]:
    """The sizes by which a call of a kind that was not measured is looked up."""
    if kind != "convolution":
        return sizes
    pixels, outputs, channels, taps, _ = sizes
    return pixels, outputs, channels * taps, 1, 1


__all__ = ["KINDS", "in_dtype", "multiplied", "slowdown"]
