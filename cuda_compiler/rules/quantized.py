"""Rules of quantized weights.

Products of up to some hundred rows run on our own kernels; for more rows, the weight is dequantized for cuBLASLt.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

from cuda_compiler.rules.matmul import (
    FILLING_WARPS,
    MATVEC_WARPS,
    VECTOR_ROWS,
    many_rows,
    matvec_splits,
    operands,
    unrolled,
)
from cuda_compiler.specialization.gpu import MULTIPROCESSORS, WARP
from cuda_compiler.specialization.sizes import groups, vector_width
from cuda_compiler.specialization.specializer import Rule, Specializer
from npu_compiler.graph.code_formats import CODE_FORMATS
from npu_compiler.graph.dtypes import HALF_DTYPES
from npu_compiler.program.kernels import KERNELS, KernelCall, distinct_bytes
from npu_compiler.program.views import View

_FILE = "matmul/quantized.cu"
_BLOCK = 256
_PARTS = ("data", "scales", "offset")
_LOADS = 6  # of 16 bytes of codes in flight per thread
_SHARED_LOADS = 4  # for each warp from which on two rows of the weight share what a warp reads of x
# Fewest and most rows of products that read codes on tensor cores, by the bits of a code. With fewer, the units for
# floats are as fast; with more it pays to widen the weight and to leave the product to cuBLASLt.
_TILED_ROWS = {4: (4, 64), 8: (8, 32)}
_TILE_WARPS, _TILE_COLUMNS = 4, 128
_STEP_BYTES = 64  # of a row of the weight, that a block of tiles takes at a time
_FEWEST_BLOCKS = MULTIPROCESSORS  # below which blocks share the terms of a tile
_FEWEST_STEPS = 4  # of each of them
_STAGED_BYTES, _MOST_STAGES = 96 * 1024, 5  # that a block copies to shared memory ahead


def _linear(make: Specializer, call: KernelCall, gated: bool = False) -> list[KernelCall]:
    return linear(make, call, operands(call), gated)


def linear(make: Specializer, call: KernelCall, inputs: dict[str, View | None], gated: bool) -> list[KernelCall]:
    """The calls of a product with a quantized weight, whose operands may differ from the call's.

    Args:
        inputs: The views by the names of the declaration's operands; None for one that the call lacks.
        gated: Whether the weight holds the rows of a gate, then those of what it multiplies; for one row of x only.

    Returns:
        One call; or, for many rows, one that dequantizes the weight and those of the dense product.
    """
    x = inputs["x"]
    assert x is not None
    if _suits_tiles(make, call, x, inputs["data"]):
        return [_tiles(make, call, inputs)]
    if call.params["m"] <= VECTOR_ROWS:
        return [_matvec(make, call, inputs, gated)]
    weight = make.temporary(call.node, (call.params["n"], call.params["k"]), x.dtype)
    widened = _dequantize(make, call, {name: inputs[name] for name in _PARTS}, weight)
    product = many_rows(make, call, x, weight.transpose(0, 1), inputs["bias"], inputs["residual"])
    return [widened, *product]


def _matvec(make: Specializer, call: KernelCall, inputs: dict[str, View | None], gated: bool) -> KernelCall:
    """The call of a kernel with a warp for one or two results, or several warps if memory would not be saturated.

    Args:
        gated: As in `linear`.
    """
    n, k = call.params["n"], call.params["k"]
    pack = code_pack(call)
    loads = n * groups(k, pack * WARP)  # of a warp, in all
    columns = 2 if not gated and call.params["m"] == 1 and loads >= _SHARED_LOADS * FILLING_WARPS else 1
    splits = matvec_splits(n // columns, k // pack)
    steps = max(1, k // (pack * WARP * splits))
    return make.kernel(
        call,
        _FILE,
        function="quantized_matvec",
        inputs=inputs,
        outputs={"out": call.outputs[0]},
        grid=(groups(n, MATVEC_WARPS // splits * columns), 1, 1),
        block=(MATVEC_WARPS * WARP, 1, 1),
        constants={
            "gated": gated,
            "pack": pack,
            "columns": columns,
            "splits": splits,
            "unrolled": 1 if gated else unrolled(steps, _LOADS // columns),
        },
    )


def _suits_tiles(make: Specializer, call: KernelCall, x: View, data: View | None) -> bool:
    """Whether tensor cores are the fastest for a product of codes: few rows, and a scale for at least 32 terms."""
    assert data is not None
    params = call.params
    fewest, most = _TILED_ROWS[CODE_FORMATS[params["codes"]].bits]
    return (
        fewest <= params["m"] <= most
        and make.gpu.multiplies_bfloat16
        and x.dtype in HALF_DTYPES
        and vector_width(x) >= 8
        and vector_width(data) >= 16
        and params["k"] % 32 == 0
        and params["k"] // params["groups"] % 32 == 0
    )


def _tiles(make: Specializer, call: KernelCall, inputs: dict[str, View | None]) -> KernelCall:
    """The call of a product by tiles of rows and columns.

    If tiles are few, the blocks of a cluster divide the sums of a tile: each adds a part of the k terms.
    """
    m, n, k = (call.params[name] for name in "mnk")
    step = CODE_FORMATS[call.params["codes"]].per_byte * _STEP_BYTES
    tile_m = next(rows for rows in (16, 32, 64) if m <= rows or rows == 64)
    tiles, steps = groups(m, tile_m) * groups(n, _TILE_COLUMNS), groups(k, step)
    splits = 1
    while splits < 8 and tiles * splits < _FEWEST_BLOCKS and steps // (2 * splits) >= _FEWEST_STEPS:
        splits *= 2
    stage = _TILE_COLUMNS * _STEP_BYTES + tile_m * step * 2
    stages = min(_MOST_STAGES, max(2, min(make.gpu.shared_memory, _STAGED_BYTES) // stage))
    return make.kernel(
        call,
        "matmul/quantized_tiles.cu",
        function="quantized_tiles",
        inputs=inputs,
        outputs={"out": call.outputs[0]},
        grid=(tiles, 1, splits),
        block=(_TILE_WARPS * WARP, 1, 1),
        shared=max(stages * stage, 4 * tile_m * (_TILE_COLUMNS + 4)),
        constants={
            "gated": False,
            "pack": 8,
            "tile_m": tile_m,
            "tile_n": _TILE_COLUMNS,
            "stages": stages,
            "splits": splits,
            "scaled_terms": math.gcd(k // call.params["groups"], step),
        },
        cluster=splits,
    )


def _dequantize(make: Specializer, call: KernelCall, parts: dict[str, View | None], out: View) -> KernelCall:
    pack = min(8, code_pack(call))  # 16 bytes of the result, so that neighbours store side by side
    kernel = make.kernel(
        call,
        _FILE,
        function="dequantize",
        inputs=parts,
        outputs={"out": out},
        grid=(groups(out.numel // pack, _BLOCK), 1, 1),
        block=(_BLOCK, 1, 1),
        constants={"pack": pack},
    )
    return replace(kernel, flops=0, bytes_moved=sum(map(distinct_bytes, (*kernel.inputs, out))))


def _embedding(make: Specializer, call: KernelCall) -> list[KernelCall]:
    decl = KERNELS[call.kernel]
    *_, ids, _ = decl.bind(call)
    assert ids is not None
    pack = min(8, code_pack(call))
    threads = ids.numel * call.params["k"] // pack
    block = min(_BLOCK, WARP * groups(threads, WARP))
    grid = (groups(threads, block), 1, 1)
    return [make.kernel(call, _FILE, grid=grid, block=(block, 1, 1), constants={"pack": pack})]


def code_pack(call: KernelCall) -> int:
    """Elements of the weight that a lane reads at a time, within one quantization group: up to 16 bytes of codes."""
    data = next(view for view in call.inputs if view.dtype == "uint8")
    codes_per_byte = CODE_FORMATS[call.params["codes"]].per_byte
    pack = vector_width(data) * codes_per_byte
    while pack > codes_per_byte and call.params["k"] // call.params["groups"] % pack:
        pack //= 2
    return pack


RULES: dict[str, Rule] = {
    "quantized_matmul_kernel": _linear,
    "quantized_matmul_vec_kernel": _linear,
    "quantized_gated_matmul_vec_kernel": partial(_linear, gated=True),
    "quantized_embedding_kernel": _embedding,
}
