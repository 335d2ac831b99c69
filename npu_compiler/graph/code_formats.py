"""Formats of quantized codes, a row each: the number that a code stands for, its range, and how codes lie in bytes.

A row is enough for a `QuantizedFormat` to name the codes, and for NumPy to quantize and dequantize with them. Targets
refuse weights in codes that their `TargetConfig.weight_codes` does not name. docs/quantization.md lists what a new
format needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from npu_compiler.errors import InputError


@dataclass(frozen=True)
class CodeFormat:
    """One kind of code. Without offsets, a code stands for its own value minus `zero`.

    Attributes:
        name: The name by which formats and programs choose it.
        bits: Bits of a code: 1, 2, 4 or 8. Codes of less than 8 bits share a byte, the first in the lowest bits. Codes
            of 3 bits would cross bytes; docs/quantization.md, "A new format", says what becomes of them.
        dtype: The NumPy dtype of a byte with one code: uint8 for less than 8 bits.
        low, high: The smallest and the largest value of a code.
        zero: The code that stands for 0 without offsets.
        largest: The distance from `zero` to which a group's largest magnitude is scaled without offsets. Codes further
            from `zero` are then unused.
        is_float: Whether codes are floating-point numbers, which have no offsets.
        table: The int8 number that each code stands for; empty where a code stands for its own value. `low`, `high` and
            `largest` are then those of the numbers, and there are no offsets.
    """

    name: str
    bits: int
    dtype: np.dtype[Any]
    low: float
    high: float
    zero: int
    largest: float
    is_float: bool = False
    table: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.bits not in (1, 2, 4, 8):
            raise InputError(f"codes of {self.bits} bits, as {self.name} has, cross bytes; use 1, 2, 4 or 8 bits")
        if self.dtype.itemsize != 1 or (self.bits < 8 and self.dtype != np.uint8):
            raise InputError(f"codes of {self.bits} bits, as {self.name} has, cannot be {self.dtype}; use uint8")

    @property
    def takes_offsets(self) -> bool:
        """Whether a group of codes may have a minimum or a zero point."""
        return not self.is_float and not self.table

    @property
    def zero_code(self) -> int:
        """The code that stands for 0 without offsets, or for the number nearest to it."""
        return min(range(len(self.table)), key=lambda code: abs(self.table[code])) if self.table else self.zero

    @property
    def per_byte(self) -> int:
        """Number of codes in one byte."""
        return 8 // self.bits

    def range(self, has_offsets: bool) -> tuple[float, float]:
        """The smallest and the largest number that quantization chooses for an element, before scale and offset.

        Args:
            has_offsets: Whether groups have offsets, so that all codes are used.
        """
        return (self.low if has_offsets else int(self.zero - self.largest)), self.high

    def unpack(self, stored: np.ndarray) -> np.ndarray:
        """Single codes, `dtype` [n, bytes · 8 / bits], from packed bytes, uint8 [n, bytes]."""
        if self.bits == 8:
            return stored.view(self.dtype)
        unpacked = np.empty((*stored.shape, self.per_byte), np.uint8)
        for place in range(self.per_byte):
            np.right_shift(stored, place * self.bits, out=unpacked[..., place])
        unpacked &= np.uint8(2**self.bits - 1)
        return unpacked.reshape(len(stored), -1)

    def pack(self, codes: np.ndarray) -> np.ndarray:
        """Packed bytes, uint8 [n, k · bits / 8], from numbers [n, k] of any dtype that are codes.

        This is the inverse of `unpack`.
        """
        single = np.ascontiguousarray(codes.astype(self.dtype, copy=False)).view(np.uint8)
        if self.bits == 8:
            return single
        places = single.reshape(len(single), -1, self.per_byte)
        stored: np.ndarray = places[..., 0]
        for place in range(1, self.per_byte):
            stored = stored | places[..., place] << place * self.bits
        return np.ascontiguousarray(stored)

    def numbers(self, codes: np.ndarray) -> np.ndarray:
        """The numbers that unpacked codes stand for before offsets: int16, or float32 if codes are floats."""
        if self.table:
            chosen: np.ndarray = np.array(self.table, np.int16)[codes]
            return chosen
        return codes.astype(np.float32 if self.is_float else np.int16)

    def nearest(self, numbers: np.ndarray) -> np.ndarray:
        """The codes nearest to float32 numbers that lie within `range`, unpacked: `dtype`, of the same shape."""
        if self.table:
            values, codes = np.unique(self.table, return_index=True)
            return codes[np.searchsorted((values[1:] + values[:-1]) / 2, numbers)].astype(self.dtype)
        return (numbers if self.is_float else np.rint(numbers)).astype(self.dtype)

    def zero_points(self, stored: np.ndarray) -> np.ndarray:
        """Zero points as int16 numbers, from how they are stored: as bytes, uint8."""
        return stored.view(self.dtype).astype(np.int16)


def _of_table(name: str, table: tuple[int, ...]) -> CodeFormat:
    """Return the row of 4-bit codes that stand for the numbers of a table."""
    largest = max(map(abs, table))
    return CodeFormat(name, 4, np.dtype(np.uint8), min(table), max(table), zero=0, largest=largest, table=table)


_FLOAT4 = (0, 1, 2, 3, 4, 6, 8, 12)
_NONLINEAR4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)

CODE_FORMATS = {
    row.name: row
    for row in (
        CodeFormat("int4", 4, np.dtype(np.uint8), 0, 15, zero=8, largest=7.5),
        CodeFormat("int8", 8, np.dtype(np.int8), -128, 127, zero=0, largest=127),
        CodeFormat("float8_e4m3", 8, np.dtype(ml_dtypes.float8_e4m3fn), -448, 448, zero=0, largest=448, is_float=True),
        # The floats of MXFP4 and NVFP4, counted in halves so that they are integers.
        _of_table("float4_e2m1", (*_FLOAT4, *(-number for number in _FLOAT4))),
        _of_table("iq4_nl", _NONLINEAR4),  # of GGUF's IQ4_NL and IQ4_XS
    )
}


def integer_codes(bits: int) -> str:
    """The name of the format of integer codes with `bits` bits."""
    return next(row.name for row in CODE_FORMATS.values() if row.bits == bits and not row.is_float)
