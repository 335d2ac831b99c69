"""Layouts of quantized matrices in GPTQ, AWQ, compressed-tensors and fp8 checkpoints, read as `QuantizedArray`.

Nothing is rounded: codes and zero points are taken over, and scales keep their dtype. A layout gets a module's tensors
by their names within the module ("qweight", "weight_scale", ...).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from npu_compiler.errors import WeightError
from npu_compiler.graph.code_formats import CODE_FORMATS, integer_codes
from npu_compiler.graph.quantization import QuantizedArray, QuantizedFormat
from npu_sim.checkpoints.bits import SIGN, awq_fields, awq_rows_of, fields, rows_of, signed

Parts = Mapping[str, np.ndarray]
_SCALES = ("float16", "bfloat16", "float32")
_SMALLEST_GROUP = 16  # of elements for which a block's width and a row's length may have a common divisor


@dataclass(frozen=True)
class GPTQ:
    """The layout of AutoGPTQ and GPTQModel.

    qweight is int32 [k / elements of a word, n], qzeros [groups, n / elements of a word], scales [groups, n],
    g_idx [k]; a weight is scale · (code - zero point).

    Attributes:
        bits: Bits of a code: 4 or 8.
        group: Number of elements of a row that share a scale; 0: the whole row.
        symmetric: Whether all zero points are the middle of the range of codes.
        stored_minus_one: Whether the file stores zero points minus 1, as in version 1 of the format.
    """

    bits: int
    group: int
    symmetric: bool
    stored_minus_one: bool

    names = ("qweight", "qzeros", "scales", "g_idx")
    required = ("qweight", "qzeros", "scales")

    def shape(self, parts: Parts) -> tuple[int, int]:
        words, n = matrix_shape(parts, "qweight", "int32")
        return n, words * 32 // self.bits

    def format(self, parts: Parts) -> QuantizedFormat:
        n, k = self.shape(parts)
        groups = groups_of(k, self.group)
        expect(parts, "scales", (groups, n), _SCALES)
        expect(parts, "qzeros", (groups, n * self.bits // 32), ("int32",))
        self._check_order(parts.get("g_idx"), k)
        middle = self.symmetric and bool((self._zeros(parts) == 2 ** (self.bits - 1)).all())
        offsets = "none" if middle else "zero_point"
        return QuantizedFormat(integer_codes(self.bits), self.group, parts["scales"].dtype.name, offsets)

    def _zeros(self, parts: Parts) -> np.ndarray:
        """The zero points, int16 [groups, n], unpacked from `qzeros`."""
        return fields(parts["qzeros"], self.bits).astype(np.int16) + np.int16(self.stored_minus_one)

    def _check_order(self, order: np.ndarray | None, k: int) -> None:
        """Raise WeightError if columns are stored in another order than the input's elements (`desc_act`)."""
        if order is not None and not np.array_equal(order, np.arange(k) // (self.group or k)):
            raise WeightError(
                "its g_idx says that the columns of a group do not follow each other (desc_act, act-order), which is "
                "not supported; quantize the model again with desc_act=False"
            )

    def array(self, parts: Parts) -> QuantizedArray:
        format, shape = self.format(parts), self.shape(parts)
        codes = rows_of(parts["qweight"])
        zeros = None
        if format.offsets == "zero_point":
            wide = self._zeros(parts).T
            if self.bits == 8 and int(wide.max()) > 255:
                raise WeightError("it has a zero point of 256, which no library packs without an overflow")
            zeros = np.ascontiguousarray(wide.astype(np.uint8))
        if self.bits == 8:
            codes = signed(codes)
            zeros = None if zeros is None else zeros ^ SIGN
        return checked(QuantizedArray(format, shape, codes, np.ascontiguousarray(parts["scales"].T), zeros))


@dataclass(frozen=True)
class AWQ:
    """AutoAWQ's version "gemm": qweight int32 [k, n / 8], qzeros [groups, n / 8], scales [groups, n].

    Attributes:
        group: Number of elements of a row that share a scale; 0: the whole row.
    """

    group: int

    names = ("qweight", "qzeros", "scales")
    required = names

    def shape(self, parts: Parts) -> tuple[int, int]:
        k, words = matrix_shape(parts, "qweight", "int32")
        return words * 8, k

    def format(self, parts: Parts) -> QuantizedFormat:
        n, k = self.shape(parts)
        groups = groups_of(k, self.group)
        expect(parts, "scales", (groups, n), _SCALES)
        expect(parts, "qzeros", (groups, n // 8), ("int32",))
        return QuantizedFormat("int4", self.group, parts["scales"].dtype.name, "zero_point")

    def array(self, parts: Parts) -> QuantizedArray:
        format = self.format(parts)
        codes, zeros = awq_rows_of(parts["qweight"]), np.ascontiguousarray(awq_fields(parts["qzeros"]).T)
        scales = np.ascontiguousarray(parts["scales"].T)
        return checked(QuantizedArray(format, self.shape(parts), codes, scales, zeros))


@dataclass(frozen=True)
class Packed:
    """The layout "pack-quantized" of compressed-tensors.

    weight_packed is int32 [n, words] with the codes plus half their range, weight_scale [n, groups] or a single number,
    weight_zero_point packed along n, weight_shape [2].

    Attributes:
        bits: Bits of a code: 4 or 8.
        group: Number of elements of a row that share a scale; 0: the whole row, or the whole matrix.
        symmetric: Whether there are no zero points.
    """

    bits: int
    group: int
    symmetric: bool

    names = ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx")

    @property
    def required(self) -> tuple[str, ...]:
        return ("weight_packed", "weight_scale", *(() if self.symmetric else ("weight_zero_point",)))

    def shape(self, parts: Parts) -> tuple[int, int]:
        n, words = matrix_shape(parts, "weight_packed", "int32")
        most = words * 32 // self.bits
        if "weight_shape" not in parts:
            return n, most
        sizes = [int(size) for size in parts["weight_shape"].reshape(-1)]
        if len(sizes) != 2 or sizes[0] != n or -(-sizes[1] * self.bits // 32) != words:
            raise WeightError(f"its weight_shape is {sizes}, but weight_packed has the shape {[n, words]}")
        return n, sizes[1]

    def format(self, parts: Parts) -> QuantizedFormat:
        n, k = self.shape(parts)
        if "weight_g_idx" in parts and not np.array_equal(parts["weight_g_idx"], np.arange(k) // (self.group or k)):
            raise WeightError("its weight_g_idx says that the columns of a group do not follow each other (actorder)")
        _check_scales(parts, n, groups_of(k, self.group))
        offsets = "none" if self.symmetric else "zero_point"
        return QuantizedFormat(integer_codes(self.bits), self.group, parts["weight_scale"].dtype.name, offsets)

    def array(self, parts: Parts) -> QuantizedArray:
        format, (n, k) = self.format(parts), self.shape(parts)
        codes = np.ascontiguousarray(parts["weight_packed"]).view(np.uint8)[:, : k * self.bits // 8]
        codes = signed(codes) if self.bits == 8 else np.ascontiguousarray(codes)
        groups = format.groups(k)
        scales = _per_row(parts["weight_scale"], n, groups)
        zeros = None if self.symmetric else self._zeros(parts["weight_zero_point"], n, groups)
        return checked(QuantizedArray(format, (n, k), codes, scales, zeros))

    def _zeros(self, stored: np.ndarray, n: int, groups: int) -> np.ndarray:
        """Zero points [n, groups], unpacked and shifted back by half the range.

        A single one for the whole matrix is not shifted.
        """
        if stored.dtype != np.int32:
            middle = 8 if self.bits == 4 else 0
            return _per_row((stored.astype(np.int16) + middle).astype(np.uint8), n, groups)
        words = -(-n * self.bits // 32)
        if stored.shape != (words, groups):
            raise WeightError(f"its weight_zero_point has the shape {list(stored.shape)}, not {[words, groups]}")
        zeros = np.ascontiguousarray(fields(stored.T, self.bits)[:, :n].T)
        return zeros ^ SIGN if self.bits == 8 else zeros


@dataclass(frozen=True)
class Plain:
    """A layout with one byte for each element, int8 or float8 e4m3.

    The weight is [n, k]; its scales are for the whole matrix, its rows, groups of columns, or blocks.

    Attributes:
        scale: Name of the scales' tensor: "weight_scale", or "weight_scale_inv" in DeepSeek's format. Both are factors
            of the codes.
        block: Rows and columns that share a scale: one row for groups; 0 columns means whole rows. None: whole rows. A
            single scale is for the whole matrix in any case.
        symmetric: Whether there are no zero points.
    """

    scale: str
    block: tuple[int, int] | None
    symmetric: bool = True

    @property
    def names(self) -> tuple[str, ...]:
        return ("weight", self.scale, "weight_zero_point")

    @property
    def required(self) -> tuple[str, ...]:
        return ("weight", self.scale, *(() if self.symmetric else ("weight_zero_point",)))

    def shape(self, parts: Parts) -> tuple[int, int]:
        n, k = matrix_shape(parts, "weight", "int8", "float8_e4m3fn")
        return n, k

    def _block(self, parts: Parts) -> tuple[int, int]:
        """Number of rows and of columns that share a scale."""
        (n, k), scales = self.shape(parts), parts[self.scale]
        if scales.size == 1:
            return n, k
        rows, columns = self.block or (1, 0)
        return rows, columns or k

    def format(self, parts: Parts) -> QuantizedFormat:
        (n, k), scales = self.shape(parts), parts[self.scale]
        rows, columns = self._block(parts)
        _check_scales(parts, -(-n // rows), -(-k // columns), self.scale)
        group = math.gcd(columns, k)
        if group < (min(_SMALLEST_GROUP, k) if rows > 1 else columns):
            raise WeightError(
                f"its rows of {k} elements are not a whole number of groups of {columns}, or of parts of them"
            )
        codes = next(name for name, row in CODE_FORMATS.items() if row.dtype == parts["weight"].dtype)
        offsets = "none" if self.symmetric else "zero_point"
        declared = self.block is not None and self.block[1] == group
        return QuantizedFormat(codes, group if group < k or declared else 0, scales.dtype.name, offsets)

    def array(self, parts: Parts) -> QuantizedArray:
        format, (n, k) = self.format(parts), self.shape(parts)
        rows, columns = self._block(parts)
        group = format.group or k

        def spread(values: np.ndarray) -> np.ndarray:
            """Repeat a value for each block as a value for each group of each row: [n, groups]."""
            by_block = _per_row(values, -(-n // rows), -(-k // columns))
            by_group = by_block[:, np.arange(0, k, group) // columns]
            return np.ascontiguousarray(np.repeat(by_group, rows, axis=0)[:n])

        zeros = None
        if not self.symmetric:
            if parts["weight_zero_point"].size != parts[self.scale].size:
                raise WeightError("it has another number of zero points than of scales")
            zeros = spread(parts["weight_zero_point"].astype(np.int8).view(np.uint8))
        codes = np.ascontiguousarray(parts["weight"]).view(np.uint8)
        return checked(QuantizedArray(format, (n, k), codes, spread(parts[self.scale]), zeros))


def matrix_shape(parts: Parts, name: str, *dtypes: str) -> tuple[int, int]:
    """The shape of a stored matrix, which must be present.

    Raises:
        WeightError: the tensor is no matrix, is empty, or has none of these dtypes.
    """
    array = parts[name]
    if array.ndim != 2 or 0 in array.shape or array.dtype.name not in dtypes:
        raise WeightError(f"its {name} is {array.dtype.name}{list(array.shape)}, not a matrix of {' or '.join(dtypes)}")
    rows, columns = array.shape
    return rows, columns


def groups_of(k: int, group: int) -> int:
    """The number of groups in a row of k elements. Raises WeightError if `group` does not divide k."""
    if group and k % group:
        raise WeightError(f"its rows of {k} elements are not a whole number of groups of {group}")
    return k // (group or k)


def expect(parts: Parts, name: str, shape: tuple[int, int], dtypes: tuple[str, ...]) -> None:
    """Raise WeightError if a tensor has another shape than this, or none of these dtypes."""
    part = parts[name]
    if part.shape != shape or part.dtype.name not in dtypes:
        wanted = f"{' or '.join(dtypes)} {list(shape)}"
        raise WeightError(f"its {name} are {part.dtype.name} {list(part.shape)}; the other tensors ask for {wanted}")


def _check_scales(parts: Parts, rows: int, groups: int, name: str = "weight_scale") -> None:
    """Raise WeightError for scales whose shape is not [rows, groups], [rows] or that of a single number.

    The shape [rows] is allowed only if a row is one group.
    """
    scales = parts[name]
    if scales.size != 1 and scales.shape != (rows, groups) and not (groups == 1 and scales.shape == (rows,)):
        raise WeightError(f"its {name} has the shape {list(scales.shape)}; the other tensors ask for {[rows, groups]}")
    if scales.dtype.name not in _SCALES:
        raise WeightError(f"its {name} has the dtype {scales.dtype.name}; supported are {', '.join(_SCALES)}")


def _per_row(values: np.ndarray, rows: int, groups: int) -> np.ndarray:
    """Values of shape [rows, groups], [rows] or a single one, broadcast to [rows, groups]."""
    if values.size == 1:
        return np.full((rows, groups), values.reshape(-1)[0], values.dtype)
    if values.size != rows * groups:
        raise WeightError(f"it has {values.size} zero points for {rows * groups} scales")
    return np.ascontiguousarray(values.reshape(rows, groups))


def checked(array: QuantizedArray) -> QuantizedArray:
    """Return the array. Raises WeightError for scales that no quantizer writes, which mean a damaged file."""
    for problem in array.problems():
        raise WeightError(problem)
    return array
