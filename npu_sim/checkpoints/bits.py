"""Unpacking the small integers that checkpoints pack into 32-bit words; large arrays by several threads."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from npu_compiler.graph.code_formats import CODE_FORMATS
from npu_runtime.pieces import in_pieces

SIGN = np.uint8(0x80)  # flips between unsigned 8-bit codes and those with 128 subtracted, as two's complement
COMPRESSED_CODES = ("int4", "int8", "float8_e4m3")  # that compressed-tensors folders are read with, and written
COMPRESSED_BITS = tuple(CODE_FORMATS[name].bits for name in COMPRESSED_CODES if not CODE_FORMATS[name].is_float)
_PIECE = 2**20  # bytes
# AWQ's kernels read the eight outputs of a word in this order of its 4-bit fields.
_AWQ_FIELDS = (0, 4, 1, 5, 2, 6, 3, 7)


def fields(words: np.ndarray, bits: int) -> np.ndarray:
    """The unsigned 4- or 8-bit integers in 32-bit words [n, m], low bits first: uint8 [n, m · 32 / bits]."""
    data = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return data
    return np.stack((data & 15, data >> 4), axis=-1).reshape(len(words), -1)


def awq_fields(words: np.ndarray) -> np.ndarray:
    """The 4-bit integers in AWQ's words [k, n / 8], undoing AWQ's interleaved order: uint8 [k, n]."""
    stored = fields(words, 4).reshape(len(words), -1, 8)
    return stored[..., _AWQ_FIELDS].reshape(len(words), -1)


def rows_of(columns: np.ndarray) -> np.ndarray:
    """Transpose words [m, n], each with consecutive elements of one of n rows, to the packed rows: uint8 [n, 4 · m]."""
    result = np.empty(columns.shape[::-1], columns.dtype)
    by_rows(result, lambda piece: columns[:, piece].T)
    return result.view(np.uint8)


def awq_rows_of(words: np.ndarray) -> np.ndarray:
    """Transpose AWQ's words [k, n / 8] to packed rows of 4-bit codes: uint8 [n, k / 2]."""
    k, columns = words.shape
    result = np.empty((columns, 8, k // 2), np.uint8)

    def convert(piece: slice) -> np.ndarray:
        codes = awq_fields(words[:, piece]).reshape(k // 2, 2, -1, 8)
        pairs: np.ndarray = codes[:, 0] | codes[:, 1] << 4
        return pairs.transpose(1, 2, 0)

    by_rows(result, convert)
    return result.reshape(columns * 8, k // 2)


def signed(codes: np.ndarray) -> np.ndarray:
    """Subtract 128 from unsigned 8-bit codes [n, k], which become signed."""
    result = np.empty_like(codes)
    by_rows(result, lambda piece: codes[piece] ^ SIGN)
    return result


def by_rows(result: np.ndarray, make: Callable[[slice], np.ndarray]) -> None:
    """Fill an array with the rows that `make` returns for slices of them, by several threads."""

    def fill(piece: slice) -> None:
        result[piece] = make(piece)

    in_pieces(fill, len(result), max(1, _PIECE // max(1, result[0].nbytes)))
