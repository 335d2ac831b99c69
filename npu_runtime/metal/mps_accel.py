"""Matrix products by `MPSMatrixMultiplication`.

The rest of a linear (bias, activation, residual) is a separate dispatch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from npu_compiler.graph.dtypes import itemsize
from npu_compiler.program.kernels import KernelCall
from npu_compiler.program.views import View, collapse
from npu_runtime.metal.device import CommandEncoder, MetalDevice


@dataclass(frozen=True)
class Matrix:
    """A view as MPS describes matrices: `count` matrices with rows of `columns` elements, `row_stride` apart."""

    view: View
    rows: int
    columns: int
    row_stride: int
    count: int
    matrix_stride: int


@dataclass(frozen=True)
class Product:
    """A product result = alpha · left · right + beta · result, in which left and right may be transposed."""

    left: Matrix
    right: Matrix
    result: Matrix
    transpose_left: bool
    transpose_right: bool
    inner: int
    alpha: float
    beta: float


def as_product(call: KernelCall) -> Product | None:
    """The call as an MPS product; None if one of our own kernels has to compute it.

    MPS requires one dtype for all matrices; products of one row are left to our kernels, which read the weights at full
    bandwidth.
    """
    params = call.params
    if call.kernel in ("matmul_kernel", "matmul_notrans_kernel"):
        left, right, alpha = call.inputs[0], call.inputs[1].transpose(0, 1), 1.0
    elif call.kernel == "batched_matmul_kernel":
        (left, right), alpha = call.inputs, params["scale"]
    else:
        return None
    result = call.outputs[0]
    if params["m"] == 1 or params["k"] == 0:
        return None
    if len({left.dtype, right.dtype, result.dtype}) > 1 or left.dtype not in ("float16", "bfloat16", "float32"):
        return None
    batches = [_batches(view) for view in (left, right, result)]
    sides = [_matrix(view, batch) for view, batch in zip((left, right, result), batches, strict=True) if batch]
    if len(sides) < 3 or None in sides:
        return None
    (a, transpose_a), (b, transpose_b), (c, transpose_c) = (side for side in sides if side is not None)
    if transpose_c:
        return None
    beta = 0.0 if addend_of(call) is None else 1.0
    return Product(a, b, c, transpose_a, transpose_b, params["k"], alpha, beta)


def addend_of(call: KernelCall) -> KernelCall | None:
    """The call that writes a linear's bias or residual to the output, for MPS to add the product to it.

    MPS rounds such a sum once, where an epilogue would round it twice. None if there is nothing to add, or more than
    one sum: PyTorch itself rounds before an activation, and between a bias and a residual.
    """
    params, out = call.params, call.outputs[0]
    if len(call.inputs) != 3 or params.get("activation", "none") != "none":
        return None
    addend = call.inputs[2].expand(out.shape)
    if addend.dtype != out.dtype:
        return None
    return replace(call, kernel="copy_broadcast_kernel", inputs=(addend,), params={"scalars": [None]}, flops=0)


def epilogue_of(call: KernelCall) -> KernelCall | None:
    """The call that applies bias, activation and residual to a linear's product in the output; None if not needed."""
    params = call.params
    if addend_of(call) is not None:
        return None
    if not params.get("has_bias") and not params.get("has_residual") and params.get("activation", "none") == "none":
        return None
    inputs = (call.outputs[0], *call.inputs[2:])
    return replace(call, kernel="linear_epilogue_kernel", inputs=inputs, flops=0)


def _batches(view: View) -> tuple[int, int] | None:
    """(count, distance) of the matrices in a view; None if they are not evenly spaced, or one is repeated."""
    shape, (strides,) = collapse(view.shape[:-2], view.strides[:-2])
    if not shape:
        return 1, 0
    return (shape[0], strides[0]) if len(shape) == 1 and strides[0] else None


def _matrix(view: View, batch: tuple[int, int]) -> tuple[Matrix, bool] | None:
    """The matrix in memory, and whether the view is its transpose; None if neither dimension is contiguous."""
    (rows, columns), (row_stride, column_stride) = view.shape[-2:], view.strides[-2:]
    if column_stride == 1 or columns == 1 and row_stride != 1:
        return _fitting(view, rows, columns, row_stride, batch, False)
    if row_stride == 1 or rows == 1:
        return _fitting(view, columns, rows, column_stride, batch, True)
    return None


def _fitting(
    view: View, rows: int, columns: int, row_stride: int, batch: tuple[int, int], transposed: bool
) -> tuple[Matrix, bool] | None:
    """The matrix as MPS describes it, and `transposed` as given.

    None if it begins inside a longer row, or the matrices of a batch are not whole rows apart: MPS counts a matrix as
    whole rows, so such a matrix could end beyond its buffer.

    Args:
        rows, columns, row_stride: Sizes, and elements from row to row, in memory.
        batch: Number of matrices, and elements from one to the next.
        transposed: Whether the view is the transpose of the matrix in memory.
    """
    count, distance = batch
    stride = row_stride if rows > 1 else columns
    whole = stride == columns or (stride > columns and view.offset % stride == 0)
    if not whole or (count > 1 and distance % stride):
        return None
    return Matrix(view, rows, columns, stride, count, distance), transposed


class MPSLaunch:
    """A prepared product with its MPS objects, which are created once for fixed memory."""

    def __init__(self, device: MetalDevice, product: Product, memory: list[tuple[Any, int]]) -> None:
        """Create the MPS objects; `memory` has (buffer, byte offset) of the left, right and result matrices."""
        self._device = device
        self._matrices = [
            self._describe(matrix, buffer, offset)
            for matrix, (buffer, offset) in zip((product.left, product.right, product.result), memory, strict=True)
        ]
        self._kernel = device.api.MPS.MPSMatrixMultiplication.alloc().initWithDevice_transposeLeft_transposeRight_resultRows_resultColumns_interiorColumns_alpha_beta_(  # noqa: E501
            device.handle,
            product.transpose_left,
            product.transpose_right,
            product.result.rows,
            product.result.columns,
            product.inner,
            product.alpha,
            product.beta,
        )
        if product.result.count > 1:
            self._kernel.setBatchStart_(0)
            self._kernel.setBatchSize_(product.result.count)

    def _describe(self, matrix: Matrix, buffer: Any, offset: int) -> Any:
        mps, size = self._device.api.MPS, itemsize(matrix.view.dtype)
        dtype = {
            "float16": mps.MPSDataTypeFloat16,
            "bfloat16": mps.MPSDataTypeBFloat16,
            "float32": mps.MPSDataTypeFloat32,
        }[matrix.view.dtype]
        row_bytes = matrix.row_stride * size
        matrix_bytes = matrix.matrix_stride * size if matrix.count > 1 else matrix.rows * row_bytes
        make = mps.MPSMatrixDescriptor.matrixDescriptorWithRows_columns_matrices_rowBytes_matrixBytes_dataType_
        descriptor = make(matrix.rows, matrix.columns, matrix.count, row_bytes, matrix_bytes, dtype)
        return mps.MPSMatrix.alloc().initWithBuffer_offset_descriptor_(buffer, offset, descriptor)

    def encode(self, encoder: CommandEncoder) -> None:
        left, right, result = self._matrices
        self._kernel.encodeToCommandBuffer_leftMatrix_rightMatrix_resultMatrix_(
            encoder.command_buffer(), left, right, result
        )
        self._device.counters["mps_products"] += 1
