"""Rule of batched products of 16-bit matrices that lie at distances which cuBLASLt does not take.

cuBLASLt goes through a batch at one stride. Heads of a joint projection lie at two: from image to image, and from head
to head. Copies of the operands would take longer than a product of few terms does.
"""

from __future__ import annotations

from cuda_compiler.specialization.gpu import WARP
from cuda_compiler.specialization.sizes import groups, vector_width
from cuda_compiler.specialization.specializer import Specializer
from npu_compiler.graph.dtypes import HALF_DTYPES
from npu_compiler.program.kernels import KernelCall
from npu_compiler.program.views import View, numel

_WARPS = 4
_SMALL, _LARGE = 32, 64  # rows, columns or terms of a tile
_MOST_PACK = 8  # elements that a thread copies at a time
# Operations and bytes a second, and seconds of a launch, by which copies for cuBLASLt are weighed against this kernel.
_OWN_RATE, _CUBLAS_RATE, _BANDWIDTH, _LAUNCH = 1.5e14, 4e14, 3e12, 1.5e-6


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
    *batch, rows, columns = call.outputs[0].shape
    tile_m, tile_n = _tile(rows), _tile(columns)
    padded = numel(batch) * groups(rows, tile_m) * tile_m * groups(columns, tile_n) * tile_n
    operations = 2 * padded * call.inputs[0].shape[-1]
    others = operations / _CUBLAS_RATE + 2 * copied / _BANDWIDTH + copies * _LAUNCH
    return suits_halves(call) and operations / _OWN_RATE <= others


def batched_halves(make: Specializer, call: KernelCall) -> KernelCall:
    """The call of the kernel: a block of four warps computes a tile of a matrix."""
    (left, b), (out,) = call.inputs, call.outputs
    right = b.transpose(-1, -2)
    if out.strides[-1] != 1 == out.strides[-2]:
        left, right, out = right, left, out.transpose(-1, -2)
    *batch, rows, columns = out.shape
    tile_m, tile_n, depth = _tile(rows), _tile(columns), _tile(left.shape[-1])
    return make.kernel(
        call,
        "matmul/batched_halves.cu",
        function="batched_halves",
        inputs={"left": left, "right": right},
        outputs={"out": out},
        grid=(numel(batch) * groups(rows, tile_m) * groups(columns, tile_n), 1, 1),
        block=(_WARPS * WARP, 1, 1),
        constants={
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
