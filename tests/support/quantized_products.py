"""Helpers for tests of products with weights in few bits: formats, shapes, exact weights, error bounds."""

from __future__ import annotations

import math

import numpy as np

from npu_compiler.graph.dtypes import numpy_dtype
from npu_compiler.graph.quantization import QuantizedArray, QuantizedFormat
from npu_runtime.cpu.arrays import BFLOAT16
from npu_runtime.cpu.native.bindings import layout

INTEGERS = [(codes, offsets) for codes in ("int4", "int8") for offsets in ("none", "minimum", "zero_point")]
KINDS = [*INTEGERS, ("float8_e4m3", "none"), ("float4_e2m1", "none"), ("iq4_nl", "none")]
SCALES = ("float16", "bfloat16", "float32")
DTYPES = (np.dtype(np.float32), np.dtype(np.float16), BFLOAT16)
# Outputs, elements of a row and of a group: whole panels and blocks, parts of them, and rows of several slices.
SHAPES = (
    (1, 2, 2),
    (7, 34, 0),
    (33, 66, 6),
    (5, 90, 15),
    (40, 96, 32),
    (70, 300, 100),
    (33, 512, 128),
    (19, 208, 16),
    (9, 5002, 0),
)
EPS = 2.0**-24  # half the distance of float32 from 1


def rng() -> np.random.Generator:
    return np.random.default_rng(7)


def strided(rows: np.ndarray) -> np.ndarray:
    """Return a copy of a matrix whose rows are further apart than they are long."""
    memory = np.zeros((rows.shape[0], rows.shape[1] + 3), rows.dtype)
    memory[:, : rows.shape[1]] = rows
    return memory[:, : rows.shape[1]]


def blank(rows: int, columns: int, dtype: np.dtype = DTYPES[0]) -> np.ndarray:
    """Return a strided result filled with NaN, which shows elements that a kernel did not write."""
    return np.full((rows, columns + 5), np.nan, dtype)[:, :columns]


def whole_numbers(format: QuantizedFormat, n: int, k: int) -> QuantizedArray:
    """A weight with scales of 0.5, 1 and 2 and whole minimums, whose elements have 8 significant bits, as bfloat16."""
    random, parts = rng(), format.parts((n, k))
    low, high = (max(-60, format.code_range[0]), min(60, format.code_range[1]))
    if format.codes == "float8_e4m3":
        codes = random.integers(-15, 16, (n, k)).astype(np.float32).astype("float8_e4m3fn").view(np.uint8)
    elif format.code_format.table:
        codes = random.integers(0, 256, (n, k // 2), np.uint8)
    else:
        codes = format.code_format.pack(random.integers(low, high + 1, (n, k)))
    scales = random.choice(np.array([0.5, 1, 2], numpy_dtype(format.scales)), parts["scales"][0])
    if format.offsets == "none":
        return QuantizedArray(format, (n, k), codes, scales)
    shape, dtype = parts["offsets"]
    offsets = random.integers(max(low, -9), 10, shape)
    signed = offsets.astype(np.int8).view(np.uint8) if dtype == "uint8" else offsets.astype(numpy_dtype(dtype))
    return QuantizedArray(format, (n, k), codes, scales, signed)


def bound(x: np.ndarray, weight: QuantizedArray) -> np.ndarray:
    """Return the error bound of a float32 result: [rows, n].

    The integer of an element differs from it by half a unit at most, which is 2^-15 of the block's largest at most; a
    block is part of a group. Then products, sums over blocks and the two terms of a minimum are rounded; float products
    in at most 8 chains. Rows of float32 and float8 have no integers, but a sum of k terms. Where the machine multiplies
    pairs of bfloat16, the weight may be rounded to that.
    """
    k, group = x.shape[1], weight.format.group or x.shape[1]
    magnitude, wide = np.abs(x.astype(np.float64)), np.abs(weight.dequantize().astype(np.float64))
    if weight.format.offsets == "minimum":
        minimum = np.abs(np.repeat(weight.part("offsets").astype(np.float64), group, axis=1))
        wide += 2 * minimum
    result: np.ndarray
    if x.dtype == np.float32 or weight.format.codes == "float8_e4m3":
        result = (k + 8) * EPS * (magnitude @ wide.T)
    else:
        largest = np.repeat(magnitude.reshape(len(x), -1, group).max(axis=2), group, axis=1)
        result = (2.0**-15 * largest + (math.ceil(k / 8) + 8) * EPS * magnitude) @ wide.T
    if x.dtype == BFLOAT16 and (layout().has_pairs or layout().has_tiles):
        result += 2.0**-8 * (magnitude @ wide.T)
    return result
