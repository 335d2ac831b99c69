"""Products of many rows of bytes and a weight of bytes by warpgroups, bound by the tensor cores.

The kernels also apply scales, bias, residual and gate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

from cuda_compiler.rules.matmul import operands
from cuda_compiler.specialization.gpu import MULTIPROCESSORS
from cuda_compiler.specialization.sizes import groups, vector_width
from cuda_compiler.specialization.specializer import Specializer
from cuda_compiler.specialization.template_files import template_text
from npu_compiler.graph.code_formats import CODE_FORMATS
from npu_compiler.graph.dtypes import HALF_DTYPES
from npu_compiler.program.kernels import KernelCall, distinct_bytes
from npu_compiler.program.views import View

_FEWEST_ROWS = 17  # of x; with fewer, too much of a tile is in vain
FEWEST_TILES = 64  # with fewer, cuBLASLt finds more work that can be done at a time
_THREADS = 384  # two warpgroups that multiply, one that copies
_TILE_ROWS = 128  # of x
_STEP_BYTES = 128  # of a row
_WEIGHT_ROWS = (256, 192, 128)  # of a tile
_TILE_COST = 60_000  # of a tile besides its products, in bytes of the weight
_FEWEST_STAGES, _MOST_STAGES = 2, 7
_BARRIER_BYTES, _OTHER_BARRIERS = 16, 16  # of a stage, and of the residual
_STORED_ROWS, _STORED_WIDTH = 64, 64  # of the result, by one instruction


@dataclass(frozen=True)
class Tiling:
    """The division of a product into tiles.

    Attributes:
        weight_rows: Rows of the weight in a tile.
        stages: Number of steps of the summation that the ring in shared memory has room for.
        shared: Bytes of shared memory.
        blocks: Number of blocks, which process all tiles in turn.
    """

    weight_rows: int
    stages: int
    shared: int
    blocks: int


def suits_linear_codes(make: Specializer, call: KernelCall) -> bool:
    """Whether this kernel can compute a product of bytes by bytes with its epilogue, and suits its size.

    It needs a GPU with warpgroups, and a result, bias and residual of one 16-bit dtype, bfloat16 for float8
    codes, in whole 16-byte vectors. A product of few rows, or of few tiles, is left to other kernels.
    """
    inputs, out = operands(call), call.outputs[0]
    # The sums of float8 are the tensor cores' own, which are not exact enough for a result in float16.
    dtypes = ("bfloat16",) if CODE_FORMATS[call.params["codes"]].is_float else HALF_DTYPES
    if not make.gpu.has_warpgroups or call.params["m"] < _FEWEST_ROWS or out.dtype not in dtypes:
        return False
    tiling = tiling_of(*(call.params[name] for name in "mnk"), False, make.gpu.shared_memory)
    if tiling is None or tiling.blocks < FEWEST_TILES:
        return False
    bias, residual = inputs["bias"], inputs["residual"]
    addends = [view for view in (bias, residual) if view is not None]
    matrices = [view for view in (residual, out) if view is not None]
    return all(view.dtype == out.dtype and vector_width(view) >= 8 for view in (out, *addends)) and all(
        view.strides[0] >= view.shape[1] for view in matrices
    )


def linear_codes(
    make: Specializer,
    call: KernelCall,
    rows: View,
    scales: tuple[View, View],
    inputs: Mapping[str, View | None],
    out: View,
    function: str = "",
) -> KernelCall:
    """The call of the kernel for a product of bytes for which `suits_linear_codes` holds.

    Args:
        rows: Quantized rows of x, [m, k].
        scales: Scales of the rows [m] and of the columns [n].
        inputs: The weight's codes (`data`), bias, residual.
        out: The result.
        function: C definition of `float made(float a, float b)`, which joins the two halves of the product's columns;
            empty for none.
    """
    data, residual = inputs["data"], inputs["residual"]
    (m, k), n = rows.shape, out.shape[1]
    tiling = tiling_of(m, n, k, bool(function), make.gpu.shared_memory)
    assert data is not None and tiling is not None
    return tile_product(
        make,
        replace(call, params={**call.params, "n": n}),
        "linear_codes",
        tiling,
        {
            "x": rows,
            "weight": data,
            "rows": scales[0],
            "columns": scales[1],
            "bias": inputs["bias"],
            "residual": residual,
        },
        out,
        {"to_int8": not CODE_FORMATS[call.params["codes"]].is_float, "residual_last": True},
        function,
    )


def tile_product(
    make: Specializer,
    call: KernelCall,
    function: str,
    tiling: Tiling,
    inputs: Mapping[str, View | None],
    out: View,
    constants: Mapping[str, bool],
    joined: str = "",
) -> KernelCall:
    """The call of a kernel of `linear_tiles.cu`.

    Args:
        function: The kernel's name.
        inputs: `x` [m, k], `weight` [n, k], `bias` and `residual`, and what else the kernel reads.
        constants: Further constants of the kernel, of which `residual_last` says whether the residual is added behind
            the activation.
        joined: C definition of `float made(float a, float b)`, which joins the two halves of the product's columns;
            empty for none.
    """
    maps = {"x": _TILE_ROWS, "weight": tiling.weight_rows // 2, "out": _STORED_ROWS}
    if inputs["residual"] is not None:
        maps["residual"] = _STORED_ROWS
    definitions = (
        template_text("elementwise/elementwise.cuh") if joined else "",
        joined or "__device__ __forceinline__ float made(float a, float) { return a; }",
        f"#define RESIDUAL_MAP {'residual_map' if 'residual' in maps else '0'}",
        "",
    )
    product = make.kernel(
        call,
        "matmul/linear_tiles.cu",
        function=function,
        inputs=inputs,
        outputs={"out": out},
        grid=(tiling.blocks, 1, 1),
        block=(_THREADS, 1, 1),
        shared=tiling.shared,
        constants={
            **constants,
            "is_made": bool(joined),
            "weight_rows": tiling.weight_rows,
            "stages": tiling.stages,
            "shared": tiling.shared,
        },
        definitions="\n".join(definitions),
        maps=maps,
    )
    return replace(product, bytes_moved=sum(map(distinct_bytes, (*product.inputs, *product.outputs))))


@cache
def tiling_of(m: int, n: int, row_bytes: int, is_made: bool, shared_memory: int) -> Tiling | None:
    """The tiling whose busiest block finishes first; None if none fits in shared memory.

    Args:
        row_bytes: Bytes of a row of either side.
        is_made: Whether the result is the product of a gate and what it multiplies, half as wide as the weight.
        shared_memory: Bytes of shared memory that a block may have.
    """
    best, least = None, math.inf
    for weight_rows in _WEIGHT_ROWS:
        width = weight_rows // 2 if is_made else weight_rows
        rest = _TILE_ROWS * width * 2 + _OTHER_BARRIERS
        stage = _STEP_BYTES * (_TILE_ROWS + weight_rows) + _BARRIER_BYTES
        stages = min(_MOST_STAGES, (shared_memory - rest) // stage)
        tiles = groups(m, _TILE_ROWS) * groups(n, width)
        busiest = groups(tiles, MULTIPROCESSORS) * (weight_rows * row_bytes + _TILE_COST)
        if width % _STORED_WIDTH == 0 and stages >= _FEWEST_STAGES and busiest < least:
            best, least = Tiling(weight_rows, stages, stages * stage + rest, min(tiles, MULTIPROCESSORS)), busiest
    return best
