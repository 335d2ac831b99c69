"""Quantized weights: the format, as data that the graph and programs carry, and arrays in such a format.

A quantized matrix [n, k] is held as two or three arrays, its parts:

- `codes`, uint8 [n, k · bits / 8]: the elements of a row one after the other. Of two 4-bit codes in a byte, the one in
  the low bits is first.
- `scales`, float [n, groups]: factors of the codes; a group is a number of consecutive elements of a row.
- `offsets` [n, groups]: a float `minimum` that is added to each product; or a `zero_point`, one uint8 each, that is
  subtracted from the codes before.

4-bit integer codes are unsigned; without offsets they stand for code - 8. Other 4-bit codes choose their number from a
table of their format. 8-bit codes are signed, their zero points too (as two's complement). Every format that
checkpoints use for weights maps to these without rounding (docs/quantization.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from npu_compiler.errors import InputError
from npu_compiler.graph.code_formats import CODE_FORMATS, CodeFormat
from npu_compiler.graph.dtypes import FLOAT_DTYPES, itemsize, numpy_dtype

OFFSETS = ("none", "minimum", "zero_point")
PARTS = ("codes", "scales", "offsets")
ROW_FORMATS = ("int8", "float8_e4m3")  # to which rows of activations and of KV caches are quantized at run time
METHODS = ("rtn", "gptq")  # by which weights are rounded to a format
COMPUTING_DEVICES = ("cpu", "gpu")


@dataclass(frozen=True)
class QuantizedFormat:
    """The format of a quantized matrix.

    Attributes:
        codes: Name of a row of `CODE_FORMATS`.
        group: Number of consecutive elements of a row that share a scale; 0 stands for the whole row.
        scales: Dtype of the scales, and of minimums.
        offsets: `none`, `minimum` or `zero_point`.
        activations: Format to which products quantize the rows of their other operand (`quantize_rows`): `int8`,
            `float8_e4m3`, or `none`. It does not affect how the matrix is stored.
    """

    codes: str
    group: int = 0
    scales: str = "float32"
    offsets: str = "none"
    activations: str = "none"

    def __post_init__(self) -> None:
        if self.codes not in CODE_FORMATS:
            names = ", ".join(CODE_FORMATS)
            raise InputError(f"unknown codes {self.codes!r:.80} of a quantized format; known are {names}")
        if type(self.group) is not int or self.group < 0:
            raise InputError(f"the group size of a quantized format is {self.group!r:.80}, which is not a whole number")
        if self.scales not in FLOAT_DTYPES - {"float64"}:
            raise InputError(f"scales of dtype {self.scales!r:.80}; use float16, bfloat16 or float32")
        if self.offsets not in OFFSETS or (self.offsets != "none" and not self.code_format.takes_offsets):
            raise InputError(f"offsets {self.offsets!r:.80} of {self.codes}; known are {', '.join(OFFSETS)}")
        if self.activations not in ("none", *ROW_FORMATS):
            names = ", ".join(("none", *ROW_FORMATS))
            raise InputError(f"activations cannot be rounded to {self.activations!r:.80}; choose one of {names}")

    def __str__(self) -> str:
        offsets = "" if self.offsets == "none" else f" {self.offsets}"
        activations = "" if self.activations == "none" else f", activations {self.activations}"
        return f"{self.codes} group {self.group or 'row'} {self.scales}{offsets}{activations}"

    @property
    def stored(self) -> QuantizedFormat:
        """The format without quantization of activations: the part that determines how the matrix is stored."""
        return replace(self, activations="none")

    @property
    def code_format(self) -> CodeFormat:
        """The row of `CODE_FORMATS` for the codes."""
        return CODE_FORMATS[self.codes]

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return self.code_format.bits

    @property
    def code_range(self) -> tuple[float, float]:
        """The smallest and the largest value of the codes that `quantize` chooses."""
        return self.code_format.range(self.offsets != "none")

    def groups(self, k: int) -> int:
        """The number of groups in a row of k elements; `problem` tells whether k is a whole number of groups."""
        return k // self.group if self.group else 1

    def problem(self, shape: tuple[int, ...]) -> str | None:
        """The reason why a tensor of this shape cannot be stored in this format, in words; None if it can."""
        if len(shape) != 2 or 0 in shape:
            return f"shape {list(shape)} is not that of a matrix"
        if self.group and shape[1] % self.group:
            return f"rows of {shape[1]} elements are not a whole number of groups of {self.group}"
        if shape[1] * self.bits % 8:
            return f"rows of {shape[1]} elements of {self.bits} bits are not a whole number of bytes"
        return None

    def parts(self, shape: tuple[int, ...]) -> dict[str, tuple[tuple[int, int], str]]:
        """The arrays that a matrix of this shape is stored as: name (codes, scales, offsets) → (shape, dtype)."""
        n, k = shape
        rows = (n, self.groups(k))
        parts = {"codes": ((n, k * self.bits // 8), "uint8"), "scales": (rows, self.scales)}
        if self.offsets != "none":
            parts["offsets"] = (rows, self.scales if self.offsets == "minimum" else "uint8")
        return parts

    def size_bytes(self, shape: tuple[int, ...]) -> int:
        """Bytes of a matrix of this shape, scales and offsets included."""
        return sum(n * width * itemsize(dtype) for (n, width), dtype in self.parts(shape).values())


NAMED_FORMATS = {
    "int4": QuantizedFormat("int4", 128, "float16", "zero_point"),
    "int8": QuantizedFormat("int8"),
    "fp8": QuantizedFormat("float8_e4m3"),
}
NAMED_ROW_FORMATS = {"int8": "int8", "fp8": "float8_e4m3"}


def named_format(name: str) -> QuantizedFormat:
    """A format by its name in `NAMED_FORMATS`, or one that also quantizes activations, as in `int4+int8`.

    Raises:
        InputError: there is no such name.
    """
    weights, plus, activations = name.partition("+")
    if weights not in NAMED_FORMATS:
        raise InputError(f"unknown quantization '{name:.80}'; choose one of {', '.join(NAMED_FORMATS)}")
    return with_activations(NAMED_FORMATS[weights], activations) if plus else NAMED_FORMATS[weights]


def with_activations(format: QuantizedFormat, name: str) -> QuantizedFormat:
    """The format with activations quantized to `int8` or `fp8`, or not quantized (`none`).

    Raises:
        InputError: there is no such name.
    """
    return replace(format, activations="none" if name == "none" else row_format(name, "activations"))


def row_format(name: str, what: str) -> str:
    """The entry of `ROW_FORMATS` that a name stands for; `what` names what is quantized, for the InputError."""
    if name not in NAMED_ROW_FORMATS:
        raise InputError(f"{what} cannot be rounded to '{name:.80}'; choose one of {', '.join(NAMED_ROW_FORMATS)}")
    return NAMED_ROW_FORMATS[name]


@dataclass(frozen=True, eq=False)
class QuantizedArray:
    """A quantized matrix [n, k]; the parts are described at the top of this file.

    Raises:
        InputError: the parts do not have the shapes and dtypes that the format asks for, or the format quantizes
            activations.
    """

    format: QuantizedFormat
    shape: tuple[int, int]
    codes: np.ndarray
    scales: np.ndarray
    offsets: np.ndarray | None = None

    def __post_init__(self) -> None:
        if problem := self.format.problem(self.shape):
            raise InputError(f"a matrix cannot be quantized as {self.format}: {problem}")
        if self.format.activations != "none":
            raise InputError(f"a stored matrix has no activations, as {self.format} says; use `format.stored`")
        wanted = self.format.parts(self.shape)
        for name in PARTS:
            part = getattr(self, name)
            layout = None if part is None else (part.shape, part.dtype.name)
            if layout != wanted.get(name):
                raise InputError(f"the {name} of a matrix {list(self.shape)} in {self.format} are {layout}")

    def part(self, name: str) -> np.ndarray:
        """One of the arrays named in `PARTS`, which the format must have."""
        part: np.ndarray = getattr(self, name)
        return part

    def rows(self, bounds: tuple[int, int] | None = None) -> QuantizedArray:
        """The matrix of the rows from `bounds[0]` up to `bounds[1]`; None means all rows."""
        if bounds is None or bounds == (0, self.shape[0]):
            return self
        own = slice(*bounds)
        offsets = None if self.offsets is None else self.offsets[own]
        codes = self.codes[own]
        return QuantizedArray(self.format, (len(codes), self.shape[1]), codes, self.scales[own], offsets)

    @property
    def size_bytes(self) -> int:
        """Bytes of the matrix, scales and offsets included."""
        return self.format.size_bytes(self.shape)

    def numbers(self, rows: slice | np.ndarray = slice(None)) -> np.ndarray:
        """The codes as numbers, minus zero points: int16 [rows, k], or float32 if codes are floats."""
        kind = self.format.code_format
        values = kind.numbers(kind.unpack(self.codes[rows]))
        if kind.is_float:
            return values
        if self.format.offsets == "none":
            return values - np.int16(kind.zero)
        if self.format.offsets == "minimum":
            return values
        assert self.offsets is not None
        centred: np.ndarray = values - self._spread(kind.zero_points(self.offsets[rows]))
        return centred

    def dequantize(self, rows: slice = slice(None)) -> np.ndarray:
        """The elements in float32 [rows, k]: scale · code + minimum, each operation rounded to float32."""
        values: np.ndarray = self.numbers(rows).astype(np.float32, copy=False)
        values = values * self._spread(self.scales[rows].astype(np.float32))
        if self.format.offsets == "minimum":
            assert self.offsets is not None
            values = values + self._spread(self.offsets[rows].astype(np.float32))
        return values

    def _spread(self, groups: np.ndarray) -> np.ndarray:
        """An array [rows, groups] repeated to one value per element, [rows, k]."""
        spread: np.ndarray = np.repeat(groups, self.shape[1] // groups.shape[1], axis=1)
        return spread

    def problems(self) -> Iterator[str]:
        """Yield the defects that make the stored values useless, in words."""
        for name in ("scales", "offsets"):
            part = getattr(self, name)
            if part is not None and part.dtype != np.uint8 and not np.isfinite(part.astype(np.float32)).all():
                yield f"its {name} contain values that are not finite"
        if self.format.code_format.is_float and bool(np.isnan(self.format.code_format.unpack(self.codes)).any()):
            yield "its float8 codes contain NaN"
        if self._loses_codes():
            yield "its scales are 0 where its codes are not"

    def _loses_codes(self) -> bool:
        """Whether codes other than 0 have a scale of 0, which no writer of a checkpoint means."""
        if self.format.code_format.table and 0 not in self.format.code_format.table:
            return False
        rows = np.flatnonzero((self.scales == 0).any(axis=1))
        if not rows.size:
            return False
        return bool(self.numbers(rows)[self._spread(self.scales[rows] == 0)].any())


def quantize(matrix: np.ndarray, format: QuantizedFormat) -> QuantizedArray:
    """Quantize a matrix [n, k]: round each element to the nearest value that the format can represent.

    Scales are chosen from each group's largest magnitude, or from its range if the format has offsets, and rounded to
    their dtype before the codes are chosen. Activations are not affected.

    Raises:
        InputError: the matrix does not divide into groups, or holds values that are not finite.
    """
    if problem := format.problem(matrix.shape):
        raise InputError(f"a matrix cannot be quantized as {format}: {problem}")
    n, k = matrix.shape
    grouped = np.asarray(matrix, np.float32).reshape(n, format.groups(k), -1)
    if not np.isfinite(grouped).all():
        raise InputError("a matrix with values that are not finite cannot be quantized")
    scales, offsets = _fit(grouped, format)
    return with_scales(matrix, format.stored, scales, offsets)


def quantize_rows(rows: np.ndarray, codes: str) -> tuple[np.ndarray, np.ndarray]:
    """Quantize each row to codes with one scale per row, as is done at run time for activations and KV caches.

    The scale is the largest magnitude divided by 127 (`int8`) or 448 (`float8_e4m3`); a code is the nearest to
    element · (1 / scale). All of that is in float32. A scale below the least normal float32 becomes 0, with codes of
    zeros (of float8, with the elements' signs). A row with an element that is not finite has the scale NaN and codes
    of 0.

    Args:
        rows: Floats [..., k].
        codes: One of `ROW_FORMATS`.

    Returns:
        Codes, uint8 [..., k], and scales, float32 [...].
    """
    wide = np.asarray(rows, np.float32).reshape(-1, rows.shape[-1])
    finite = np.isfinite(wide).all(axis=1, keepdims=True)
    wide = np.where(finite, wide, np.float32(0))
    kind = CODE_FORMATS[codes]
    scales = np.abs(wide).max(axis=1, initial=0, keepdims=True) / np.float32(kind.largest)
    scales[scales < np.finfo(np.float32).tiny] = 0
    scaled = wide * np.divide(np.float32(1), scales, out=np.zeros_like(scales), where=scales > 0)
    scales[~finite] = np.nan
    return kind.pack(kind.nearest(scaled)).reshape(rows.shape), scales.reshape(rows.shape[:-1])


def dequantize_rows(codes: np.ndarray, scales: np.ndarray, kind: str) -> np.ndarray:
    """The float32 rows [..., k] that codes and scales from `quantize_rows` stand for.

    Args:
        kind: The format of the codes, one of `ROW_FORMATS`.
    """
    rows: np.ndarray = CODE_FORMATS[kind].unpack(codes).astype(np.float32) * scales[..., None].astype(np.float32)
    return rows


def with_scales(
    matrix: np.ndarray, format: QuantizedFormat, scales: np.ndarray, offsets: np.ndarray | None
) -> QuantizedArray:
    """A matrix [n, k] quantized with these scales and offsets, each element to the nearest code."""
    n, k = matrix.shape
    grouped = np.asarray(matrix, np.float32).reshape(n, format.groups(k), -1)
    wide = scales.astype(np.float32)[..., None]
    safe = np.where(wide == 0, np.float32(1), wide)
    kind = format.code_format
    if format.offsets == "minimum":
        assert offsets is not None
        values = (grouped - offsets.astype(np.float32)[..., None]) / safe
    elif format.offsets == "zero_point":
        assert offsets is not None
        values = grouped / safe + kind.zero_points(offsets).astype(np.float32)[..., None]
    else:
        values = grouped / safe
        values = values + np.float32(kind.zero) if kind.zero else values  # the sum with 0 would lose the sign of -0.0
    codes = kind.nearest(np.clip(values, *format.code_range)).reshape(n, k)
    return QuantizedArray(format, (n, k), kind.pack(codes), scales, offsets)


def _fit(grouped: np.ndarray, format: QuantizedFormat) -> tuple[np.ndarray, np.ndarray | None]:
    """The best scales and offsets [n, groups] for elements [n, groups, group].

    Offsets are None if the format has none.
    """
    dtype = numpy_dtype(format.scales)
    if format.offsets == "none":
        largest = np.abs(grouped).max(axis=2)
        return (largest / np.float32(format.code_format.largest)).astype(dtype), None
    low, high = format.code_range
    smallest, greatest = (np.float32(f(grouped, axis=2)) for f in (np.min, np.max))
    if format.offsets == "minimum":
        if low < 0:  # offsets are those of code 0
            scales = ((greatest - smallest) / np.float32(high - low)).astype(dtype)
            return scales, (smallest - low * scales.astype(np.float32)).astype(dtype)
        return ((greatest - smallest) / np.float32(high)).astype(dtype), smallest.astype(dtype)
    smallest, greatest = np.minimum(smallest, 0), np.maximum(greatest, 0)
    scales = ((greatest - smallest) / np.float32(high - low)).astype(dtype)
    wide = scales.astype(np.float32)
    zeros = np.clip(np.rint(low - smallest / np.where(wide == 0, np.float32(1), wide)), low, high)
    return scales, zeros.astype(format.code_format.dtype).view(np.uint8)
