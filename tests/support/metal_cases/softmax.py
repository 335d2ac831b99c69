"""Softmax, log_softmax and masked softmax: widths about the SIMD group's, any strides, infinities, NaN."""

from __future__ import annotations

from math import inf, nan

import numpy as np
from metal_harness import Case, T

KERNELS = ("softmax_kernel", "log_softmax_kernel")
LOWEST = float(np.finfo(np.float32).min)

# Rows that a softmax which starts at -inf, or drops NaN, gets wrong; two SIMD groups of each.
ODD_ROWS = np.array(
    [
        [-inf] * 150,
        [-inf, 1.0, 2.0] * 50,
        [1.0, inf, -inf] * 50,
        [0.5, nan, 1.0] * 50,
        [3e4, -3e4, 0.0] * 50,
        [-inf] * 149 + [1.0],
        [1.0] * 149 + [inf],
        [2.0] * 149 + [nan],
    ]
)


def plain(name: str, x: T, out: T, scale: float = 1.0) -> list[Case]:
    return [Case(kernel, name, [x], [out], {"scale": scale}) for kernel in KERNELS]


def masked(name: str, x: T, mask: T, out: T, scale: float = 1.0) -> Case:
    return Case("masked_softmax_kernel", name, [x, mask], [out], {"scale": scale})


CASES = [
    *(case for width in (1, 31, 33, 257, 1031) for case in plain(f"width-{width}", T((2, width)), T((2, width)), 0.7)),
    *plain("vector", T((3,)), T((3,))),
    *plain("four-dimensions", T((2, 3, 2, 36)), T((2, 3, 2, 36)), 1.5),
    *plain("rows-with-gaps", T((3, 134), strides=(140, 1), offset=4), T((3, 134), strides=(136, 1))),
    *plain("transposed", T((5, 37), strides=(1, 5)), T((5, 37), strides=(1, 5)), 0.5),
    *plain("middle-dimension", T((2, 3, 150), strides=(450, 1, 3)), T((2, 3, 150), strides=(450, 1, 3))),
    *plain("float32", T((2, 140), "float32"), T((2, 140), "float32")),
    *plain("from-float32", T((2, 41), "float32"), T((2, 41))),
    *plain("to-float32", T((2, 64)), T((2, 64), "float32")),
    *plain("odd-rows", T((8, 150), values=ODD_ROWS), T((8, 150))),
    *plain("odd-rows-vectorized", T((8, 152), values=np.pad(ODD_ROWS, ((0, 0), (2, 0)), "edge")), T((8, 152))),
    *plain("large", T((2, 133), values=(-60000.0, 60000.0)), T((2, 133))),
    masked("rows", T((3, 36)), T((3, 36)), T((3, 36)), 0.3),
    masked("scalar-path", T((3, 133)), T((3, 133)), T((3, 133)), 0.3),
    masked("float32-mask", T((2, 2, 3, 132)), T((2, 2, 3, 132), "float32", strides=(0, 0, 132, 1)), T((2, 2, 3, 132))),
    masked("mask-of-one-column", T((2, 3, 8)), T((2, 3, 8), strides=(3, 1, 0)), T((2, 3, 8))),
    masked("bool-mask", T((2, 8)), T((2, 8), "bool"), T((2, 8))),
    masked("some-minus-infinity", T((3, 160)), T((3, 160), values=[0.0, -inf, 0.0, -inf] * 40), T((3, 160))),
    masked("all-minus-infinity", T((2, 5)), T((2, 5), values=-inf), T((2, 5))),
    masked("all-lowest", T((2, 140), values="positive"), T((2, 140), "float32", values=LOWEST), T((2, 140))),
    masked("transposed-scores", T((4, 7), strides=(1, 4)), T((4, 7)), T((4, 7), strides=(8, 1))),
]
