"""Rule of batched products of 16-bit matrices that lie at distances which cuBLASLt does not take.

cuBLASLt goes through a batch at one stride. Heads of a joint projection lie at two: from image to image, and from head
to head. Copies of the operands would take longer than a product of few terms does.
"""

from __future__ import annotations

from cuda_compiler.specialization.gpu import MULTIPROCESSORS, WARP
from cuda_compiler.specialization.sizes import groups, vector_width
from cuda_compiler.specialization.specializer import Specializer
from npu_compiler.graph.dtypes import HALF_DTYPES
from npu_compiler.program.kernels import KernelCall
from npu_compiler.program.views import View, numel

_WARPS = 4
_SMALL, _LARGE = 32, 64  # rows, columns or terms of a tile
_MOST_PACK = 8  # elements that a thread copies at a time
_STAGES = 4  # of the pipeline of copies to shared memory
_SPARE = 8  # elements between the lines of a tile there, so that they lie in different banks
# What products are weighed by, fitted to times on an H200: operations and bytes a second; seconds of a kernel that has
# hardly anything to do; and of a step of a block's sums, where vectors are copied and where single elements are.
_OWN_RATE, _CUBLAS_RATE, _BANDWIDTH, _LAUNCH = 1.5e14, 4e14, 2.2e12, 2e-6
_STEP, _STEP_OF_SINGLES = 0.6e-6, 2e-6
_TOGETHER = 4 * MULTIPROCESSORS  # blocks


def suits_halves(call: KernelCall) -> bool:
    """Whether the kernel takes the operands of a batched product: 16-bit matrices, and a result of floats."""
    (a, b), (out,) = call.inputs, call.outputs
    return a.dtype == b.dtype in HALF_DTYPES and out.dtype in (a.dtype, "float32") and 0 not in (*a.shape, *b.shape)


def beats_copies(call: KernelCall, copied: int, copies: int) -> bool:
    """Whether the kernel takes less time than cuBLASLt with copies.

    Args:
        copied: Bytes of the operands that would be copied.
        copies: Number of copies.
    """
    (left, right), (out,) = call.inputs, call.outputs
    *batch, rows, columns = out.shape
    terms, tile_m, tile_n = left.shape[-1], _tile(rows), _tile(columns)
    blocks = numel(batch) * groups(rows, tile_m) * groups(columns, tile_n)
    operations = 2 * blocks * tile_m * tile_n * terms
    step = _STEP_OF_SINGLES if min(_pack(left), _pack(right.transpose(-1, -2))) == 1 else _STEP
    own = _LAUNCH + max(operations / _OWN_RATE, groups(terms, _tile(terms)) * groups(blocks, _TOGETHER) * step)
    others = (1 + copies) * _LAUNCH + operations / _CUBLAS_RATE + 2 * copied / _BANDWIDTH
    return suits_halves(call) and own <= others


def batched_halves(make: Specializer, call: KernelCall) -> KernelCall:
    """The call of the kernel: a block of four warps computes a tile of a matrix."""
    (left, b), (out,) = call.inputs, call.outputs
    right = b.transpose(-1, -2)
    if out.strides[-1] != 1 == out.strides[-2]:
        left, right, out = right, left, out.transpose(-1, -2)
    *batch, rows, columns = out.shape
    tile_m, tile_n, depth = _tile(rows), _tile(columns), _tile(left.shape[-1])
    stages = max(2, min(_STAGES, groups(left.shape[-1], depth)))
    stage_bytes = sum(
        2 * (lines * (depth + _SPARE) if matrix.strides[-1] == 1 else depth * (lines + _SPARE))
        for matrix, lines in ((left, tile_m), (right, tile_n))
    )
    return make.kernel(
        call,
        "matmul/batched_halves.cu",
        function="batched_halves",
        inputs={"left": left, "right": right},
        outputs={"out": out},
        grid=(numel(batch) * groups(rows, tile_m) * groups(columns, tile_n), 1, 1),
        block=(_WARPS * WARP, 1, 1),
        shared=stages * stage_bytes,
        constants={
            "stages": stages,
            "spare": _SPARE,
            "tile_m": tile_m,
            "tile_n": tile_n,
            "depth": depth,
            "warps_m": 2 if tile_m == _SMALL or tile_n == _LARGE else _WARPS,
            "left_pack": _pack(left),
            "right_pack": _pack(right),
            "in_pairs": vector_width(out) > 1 and columns % 2 == 0,
        },
    )


def _tile(size: int) -> int:
    return _SMALL if size <= _SMALL else _LARGE


def _pack(matrix: View) -> int:
    """Number of elements of a matrix that can be copied as an aligned vector, along its rows or along its terms."""
    along = matrix if matrix.strides[-1] == 1 else matrix.transpose(-1, -2)
    pack = min(vector_width(along), _MOST_PACK)
    while along.shape[-1] % pack:
        pack //= 2
    return pack
