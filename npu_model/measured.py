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
_NEAREST = 4


def slowdown(measured: Mapping[str, Sequence[Sequence[float]]], kind: str, sizes: Sequence[int]) -> float:
    """By what factor a call's computing takes longer than a chip's description says.

    Args:
        measured: Kind → rows of the sizes of a call, and its factor.
        kind, sizes: Of the call, as `KINDS` names them.
    """
    if kind not in measured:
        like = _LIKE.get(kind, "")
        if like not in measured:
            return 1.0
        kind, sizes = like, _sizes_like(kind, sizes)
    at = [math.log2(size) for size in sizes]
    near = sorted((math.dist(at, [math.log2(size) for size in row[:-1]]), row[-1]) for row in measured[kind])[:_NEAREST]
    if near[0][0] == 0:
        return near[0][1]
    weights = [distance**-2 for distance, _ in near]
    mean = math.fsum(weight * math.log(factor) for weight, (_, factor) in zip(weights, near, strict=True))
    return math.exp(mean / math.fsum(weights))


def _sizes_like(kind: str, sizes: Sequence[int]) -> Sequence[int]:
    """The sizes by which a call of a kind that was not measured is looked up."""
    if kind != "convolution":
        return sizes
    pixels, outputs, channels, taps, _ = sizes
    return pixels, outputs, channels * taps, 1, 1


__all__ = ["KINDS", "slowdown"]
