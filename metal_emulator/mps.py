"""Metal Performance Shaders: matrix products, computed in float32 and rounded once."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from typing import Self

import ml_dtypes
import numpy as np

from metal_emulator.commands import MTLCommandBuffer
from metal_emulator.device import MTLDevice
from metal_emulator.enums import MPS
from metal_emulator.objc import (
    BOOL,
    DOUBLE,
    NSUINTEGER,
    Allocatable,
    Either,
    Labelled,
    MetalUsageError,
    Object,
    initializer,
    selector,
)
from metal_emulator.resources import MTLBuffer

NUMPY_TYPES: dict[int, np.dtype] = {
    MPS["MPSDataTypeBFloat16"]: np.dtype(ml_dtypes.bfloat16),
    MPS["MPSDataTypeFloat16"]: np.dtype(np.float16),
    MPS["MPSDataTypeFloat32"]: np.dtype(np.float32),
}
DATA_TYPE = Either("a floating-point MPSDataType", *NUMPY_TYPES)
OVERLAP_EFFORT = 10_000  # candidates that NumPy may try; past that, two strided matrices count as apart


def MPSSupportsMTLDevice(device: MTLDevice) -> bool:
    """Whether Metal Performance Shaders run on the device: True for every `MTLDevice`."""
    if not isinstance(device, MTLDevice):
        raise MetalUsageError(f"MPSSupportsMTLDevice: Metal wants MTLDevice, {device!r:.60} came")
    return True


@dataclass(frozen=True)
class Layout:
    """The layout of `matrices` matrices of `rows` × `columns`.

    The strides between rows and between matrices are in bytes.
    """

    rows: int
    columns: int
    matrices: int
    row_bytes: int
    matrix_bytes: int
    data_type: int

    @property
    def dtype(self) -> np.dtype:
        return NUMPY_TYPES[self.data_type]

    @property
    def extent(self) -> int:
        """Number of bytes from the first matrix's start to the last row's end, including padding."""
        return (self.matrices - 1) * self.matrix_bytes + self.rows * self.row_bytes

    def problem(self) -> str:
        """The first inconsistency among the layout's sizes, in words; empty if there is none."""
        if not (self.rows and self.columns and self.matrices):
            return f"an empty matrix: {self.rows} × {self.columns} × {self.matrices}"
        if self.row_bytes % self.dtype.itemsize:
            return f"rowBytes {self.row_bytes} is no multiple of the element's {self.dtype.itemsize} bytes"
        if self.row_bytes < self.columns * self.dtype.itemsize:
            return f"rowBytes {self.row_bytes} is less than a row of {self.columns} columns"
        if self.matrix_bytes % self.row_bytes:
            return f"matrixBytes {self.matrix_bytes} is no multiple of rowBytes {self.row_bytes}"
        if self.matrix_bytes < self.rows * self.row_bytes:
            return f"matrixBytes {self.matrix_bytes} is less than {self.rows} rows of {self.row_bytes} bytes"
        return ""


class _Shaped(Allocatable):
    """A base class of objects that have the shape of one or several matrices."""

    __slots__ = ("_layout",)
    _layout: Layout

    @selector()
    def rows(self) -> int:
        return self._layout.rows

    @selector()
    def columns(self) -> int:
        return self._layout.columns

    @selector()
    def matrices(self) -> int:
        return self._layout.matrices


class MPSMatrixDescriptor(_Shaped):
    """The shape and layout of a matrix, or of several of one shape."""

    __slots__ = ()

    @classmethod
    @selector(NSUINTEGER, NSUINTEGER, NSUINTEGER, DATA_TYPE)
    def matrixDescriptorWithRows_columns_rowBytes_dataType_(
        cls, rows: int, columns: int, row_bytes: int, data_type: int
    ) -> Self:
        method = "matrixDescriptorWithRows_columns_rowBytes_dataType_"
        return cls._make(method, Layout(rows, columns, 1, row_bytes, rows * row_bytes, data_type))

    @classmethod
    @selector(NSUINTEGER, NSUINTEGER, NSUINTEGER, NSUINTEGER, NSUINTEGER, DATA_TYPE)
    def matrixDescriptorWithRows_columns_matrices_rowBytes_matrixBytes_dataType_(
        cls, rows: int, columns: int, matrices: int, row_bytes: int, matrix_bytes: int, data_type: int
    ) -> Self:
        method = "matrixDescriptorWithRows_columns_matrices_rowBytes_matrixBytes_dataType_"
        return cls._make(method, Layout(rows, columns, matrices, row_bytes, matrix_bytes, data_type))

    @classmethod
    def _make(cls, method: str, layout: Layout) -> Self:
        problem = layout.problem()
        if problem:
            raise MetalUsageError(f"+[MPSMatrixDescriptor {method.replace('_', ':')}]: {problem}")
        instance = cls.alloc()
        instance._begin(method)
        instance._layout = layout
        return instance

    @selector()
    def rowBytes(self) -> int:
        return self._layout.row_bytes

    @selector()
    def matrixBytes(self) -> int:
        return self._layout.matrix_bytes


class MPSMatrix(_Shaped):
    """One or several matrices in a buffer."""

    __slots__ = ("_buffer", "_offset")

    @initializer(Object("MTLBuffer"), NSUINTEGER, Object("MPSMatrixDescriptor"))
    def initWithBuffer_offset_descriptor_(
        self, buffer: MTLBuffer, offset: int, descriptor: MPSMatrixDescriptor
    ) -> Self:
        method = "initWithBuffer_offset_descriptor_"
        layout, storage = descriptor._layout, buffer._memory
        size = layout.dtype.itemsize
        self._check(offset % size == 0, method, f"offset {offset} is no multiple of the element's {size} bytes")
        fits = offset + layout.extent <= storage.length
        self._check(fits, method, f"{layout.extent} bytes of matrix from offset {offset} do not fit in {storage}")
        self._device = buffer._device
        self._buffer = buffer
        self._offset = offset
        self._layout = layout
        return self


@dataclass(frozen=True)
class Batch:
    """A range of the matrices of an `MPSMatrix`, by address, so that a command holds no reference to the buffer."""

    layout: Layout
    address: int
    count: int

    def array(self) -> np.ndarray:
        """The matrices as an array [count, rows, columns] that shares the buffer's memory."""
        layout = self.layout
        extent = (self.count - 1) * layout.matrix_bytes + layout.rows * layout.row_bytes
        memory = (ctypes.c_uint8 * extent).from_address(self.address)
        strides = layout.matrix_bytes, layout.row_bytes, layout.dtype.itemsize
        return np.ndarray((self.count, layout.rows, layout.columns), layout.dtype, memoryview(memory), 0, strides)


class MPSMatrixMultiplication(Labelled, Allocatable):
    """result = alpha · op(left) · op(right) + beta · result, for every matrix of the batch."""

    __slots__ = ("_alpha", "_batch_size", "_batch_start", "_beta", "_shape", "_transpose_left", "_transpose_right")
    _device: MTLDevice

    @initializer(Object("MTLDevice"), BOOL, BOOL, NSUINTEGER, NSUINTEGER, NSUINTEGER, DOUBLE, DOUBLE)
    def initWithDevice_transposeLeft_transposeRight_resultRows_resultColumns_interiorColumns_alpha_beta_(
        self,
        device: MTLDevice,
        transpose_left: bool,
        transpose_right: bool,
        rows: int,
        columns: int,
        interior: int,
        alpha: float,
        beta: float,
    ) -> Self:
        method = "initWithDevice_transposeLeft_transposeRight_resultRows_resultColumns_interiorColumns_alpha_beta_"
        self._check(rows * columns * interior > 0, method, f"an empty product: {rows} × {interior} × {columns}")
        self._device = device
        self._transpose_left = transpose_left
        self._transpose_right = transpose_right
        self._shape = rows, columns, interior
        self._alpha = alpha
        self._beta = beta
        self._batch_start = 0
        self._batch_size: int | None = None
        return self

    @selector(NSUINTEGER)
    def setBatchStart_(self, start: int) -> None:
        self._batch_start = start

    @selector(NSUINTEGER)
    def setBatchSize_(self, size: int) -> None:
        self._batch_size = size

    @selector(Object("MTLCommandBuffer"), Object("MPSMatrix"), Object("MPSMatrix"), Object("MPSMatrix"))
    def encodeToCommandBuffer_leftMatrix_rightMatrix_resultMatrix_(
        self, command_buffer: MTLCommandBuffer, left: MPSMatrix, right: MPSMatrix, result: MPSMatrix
    ) -> None:
        method = "encodeToCommandBuffer_leftMatrix_rightMatrix_resultMatrix_"
        command_buffer._require_encodable("encode an MPS kernel")
        rows, columns, interior = self._shape
        self._require_shape(method, "left", left, (rows, interior), self._transpose_left)
        self._require_shape(method, "right", right, (interior, columns), self._transpose_right)
        self._require_shape(method, "result", result, (rows, columns), transposed=False)
        types = {matrix._layout.dtype.name for matrix in (left, right, result)}
        self._check(len(types) == 1, method, f"matrices of different types: {', '.join(sorted(types))}")
        a, b, out = (self._batch(method, matrix) for matrix in (left, right, result))
        self._check(a.count == b.count == out.count, method, "different numbers of matrices")
        disjoint = not any(_overlap(operand.array(), out.array()) for operand in (a, b))
        self._check(disjoint, method, "the result overlaps an operand")
        self._device._emulator.mps_encodes += 1
        for matrix in (left, right, result):
            command_buffer._references.add(matrix._buffer._memory)
        flags = self._transpose_left, self._transpose_right
        command_buffer._commands.append(functools.partial(_multiply, a, b, out, *flags, self._alpha, self._beta))

    def _require_shape(
        self, method: str, operand: str, matrix: MPSMatrix, shape: tuple[int, int], transposed: bool
    ) -> None:
        """Check that a matrix has exactly the rows and columns that the product needs."""
        wanted = shape[::-1] if transposed else shape
        came = matrix._layout.rows, matrix._layout.columns
        if came != wanted:
            sizes = "{} × {}, the product wants {} × {}".format(*came, *wanted)
            self._fail(method, f"the {operand} matrix is {sizes}")

    def _batch(self, method: str, matrix: MPSMatrix) -> Batch:
        """The matrices that take part in the product: `batchSize` of them from `batchStart` on; all if it is unset."""
        layout, start = matrix._layout, self._batch_start
        count = layout.matrices - start if self._batch_size is None else self._batch_size
        if count < 1 or start + count > layout.matrices:
            self._fail(method, f"{count} matrices from the {start}th on, of {layout.matrices}")
        buffer = matrix._buffer
        if buffer._unusable():
            self._fail(method, "a matrix's buffer was released")
        return Batch(layout, buffer._memory.address + matrix._offset + start * layout.matrix_bytes, count)


def _overlap(a: np.ndarray, b: np.ndarray) -> bool:
    try:
        return np.shares_memory(a, b, max_work=OVERLAP_EFFORT)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return False


def _multiply(
    left: Batch, right: Batch, result: Batch, transpose_left: bool, transpose_right: bool, alpha: float, beta: float
) -> None:
    """Write alpha · left · right + beta · result to each result, computed in float32 and rounded once.

    Padding keeps its content.
    """
    a, b = (batch.array().astype(np.float32) for batch in (left, right))
    out = result.array()
    with np.errstate(all="ignore"):
        product = (a.mT if transpose_left else a) @ (b.mT if transpose_right else b)
        if alpha != 1:
            product *= np.float32(alpha)
        if beta:
            product += np.float32(beta) * out.astype(np.float32)
        out[...] = product
