"""Rules of mixture-of-experts products, whose tokens choose their weights.

Tensor cores compute all rows of an expert together, so that its matrix is read once. What they do not take (float32,
rows that are not whole vectors) has a warp for each result.
"""

from __future__ import annotations

from cuda_compiler.rules.quantized import code_pack
from cuda_compiler.specialization.gpu import MULTIPROCESSORS, WARP
from cuda_compiler.specialization.sizes import groups, vector_width
from cuda_compiler.specialization.specializer import Rule, Specializer
from npu_compiler.graph.code_formats import CODE_FORMATS
from npu_compiler.graph.dtypes import HALF_DTYPES, itemsize
from npu_compiler.program.kernels import KernelCall

_FILE = "matmul/expert_tiles.cu"
_WARPS = 8
_WIDEST = 16  # bytes of one access
_TILE_WARPS, _TILE_COLUMNS = 4, 16
_FILLING_WARPS = 16 * MULTIPROCESSORS
_FEWEST_PIECES = 8  # of a warp: two batches
_PIECE_TERMS = 32
_LISTED_ROWS = 2048
_ROWS_BY_LOAD = ((3, 8), (8, 16))  # most rows of an expert, on average, for which a block holds so many; else 32
_MOST_ROWS_OF_DENSE, _MOST_ROWS_OF_CODES = 32, 4
_ALONE = 8  # experts for each row, from which on few rows have the same one
_FEWEST_STEPS = 4  # of a warp, four spans each
_ROUTE_WARPS = 4  # of a block, each with a row
_SUM_BLOCK = 64  # few threads, so that one row's sums are on several multiprocessors
_STATIC_SHARED = 48 * 1024  # bytes
_SPAN_SCALE_BYTES = 8


def _dense(make: Specializer, call: KernelCall) -> list[KernelCall]:
    x, weight = call.inputs[:2]
    pack = min(min(vector_width(view), _WIDEST // itemsize(view.dtype)) for view in (x, weight))
    while call.params["k"] % pack:
        pack //= 2
    if pack == _WIDEST // 2 and make.gpu.multiplies_bfloat16 and x.dtype == weight.dtype and x.dtype in HALF_DTYPES:
        return [_dense_tiles(make, call)]
    return _per_warp(make, call, pack)


def _quantized(make: Specializer, call: KernelCall) -> list[KernelCall]:
    held = _held_rows_of_codes(make, call)
    return [_quantized_tiles(make, call, held)] if held else _per_warp(make, call, code_pack(call))


def _per_warp(make: Specializer, call: KernelCall, pack: int) -> list[KernelCall]:
    grid = (groups(call.outputs[0].numel, _WARPS), 1, 1)
    return [make.kernel(call, "matmul/experts.cu", grid=grid, block=(_WARPS * WARP, 1, 1), constants={"pack": pack})]


def _dense_tiles(make: Specializer, call: KernelCall) -> KernelCall:
    rows, experts = call.outputs[0].shape[0], call.params["e"]
    held = next((held for load, held in _ROWS_BY_LOAD if rows <= load * experts), _MOST_ROWS_OF_DENSE)
    pieces = groups(call.params["k"], _PIECE_TERMS)
    splits = _splits(call, pieces, _FEWEST_PIECES)
    most = 4 if held == 8 else 2
    return _tiles(make, call, "expert_tiles", held, splits, _unrolled(groups(pieces, splits), most), 6 - held // 16)


def _quantized_tiles(make: Specializer, call: KernelCall, held: int) -> KernelCall:
    steps = groups(call.params["k"] // _span(call), 4)
    splits = _splits(call, steps, _FEWEST_STEPS)
    blocks = 6 if held == 1 else 4
    return _tiles(make, call, "quantized_expert_tiles", held, splits, _unrolled(groups(steps, splits), 2), blocks)


def _splits(call: KernelCall, steps: int, fewest: int) -> int:
    """Number of warps that share a tile's terms, so that there are enough warps to saturate memory bandwidth.

    Args:
        steps: Number of steps of a tile's terms.
        fewest: Smallest number of steps of one warp.
    """
    rows, columns = call.outputs[0].shape
    tiles, splits = min(rows, call.params["e"]) * groups(columns, _TILE_COLUMNS), 1
    while splits < _TILE_WARPS and tiles * splits < _FILLING_WARPS and steps // (2 * splits) >= fewest:
        splits *= 2
    return splits


def _unrolled(steps: int, most: int) -> int:
    """Number of steps whose weights a warp reads at a time: one for which the fewest are in vain."""
    return min(range(most, 0, -1), key=lambda count: groups(steps, count) * count - (count > most // 2))


def _span(call: KernelCall) -> int:
    """Number of elements of 16 bytes of codes."""
    return _WIDEST * CODE_FORMATS[call.params["codes"]].per_byte


def _held_rows_of_codes(make: Specializer, call: KernelCall) -> int:
    """Number of rows of x that a block of the kernel for codes holds in shared memory; 0 if it cannot compute a call.

    It needs 16-bit rows, 16-byte accesses, and scales for whole spans, or of codes with a table for parts of them.
    """
    x, data = call.inputs[:2]
    span, k = _span(call), call.params["k"]
    group = k // call.params["groups"]
    in_parts = bool(CODE_FORMATS[call.params["codes"]].table) and group > 0 and span % group == 0 and span // group <= 4
    if (
        not make.gpu.multiplies_bfloat16
        or x.dtype not in HALF_DTYPES
        or vector_width(x) < _WIDEST // 2
        or vector_width(data) < _WIDEST
        or k % span
        or (group % span and not in_parts)
    ):
        return 0
    rows, experts = call.outputs[0].shape[0], call.params["e"]
    alone = x.shape[0] == 1 or rows * _ALONE <= experts
    held = 1 if alone else _MOST_ROWS_OF_CODES
    padding = 4 * 2 * _TILE_WARPS  # spans
    while held:
        staged = held * (k // span + padding) * (2 * span + _SPAN_SCALE_BYTES)
        shared = staged + 4 * min(rows, _LISTED_ROWS) + _TILE_WARPS * held * _TILE_COLUMNS * 4
        if shared <= _STATIC_SHARED - 64:
            return held
        held //= 2
    return held


def _tiles(
    make: Specializer, call: KernelCall, function: str, held: int, splits: int, unrolled: int, min_blocks: int
) -> KernelCall:
    """The call of a kernel whose warps make 16 columns of an expert's rows each.

    Args:
        held: Rows of an expert that a block computes at a time.
        splits: Warps that share a tile's terms.
        unrolled: Steps of terms that a warp reads at a time.
        min_blocks: Blocks that a multiprocessor has room for.
    """
    rows, columns = call.outputs[0].shape
    experts = call.params["e"]
    jobs = rows if rows <= min(experts, _LISTED_ROWS) else experts + 1
    return make.kernel(
        call,
        _FILE,
        function=function,
        grid=(jobs * groups(columns, _TILE_COLUMNS * (_TILE_WARPS // splits)), 1, 1),
        block=(_TILE_WARPS * WARP, 1, 1),
        constants={"held": held, "splits": splits, "unrolled": unrolled},
        min_blocks=min_blocks,
    )


def _route(make: Specializer, call: KernelCall) -> list[KernelCall]:
    (x,), (order, weights) = call.inputs, call.outputs
    return [
        make.kernel(
            call,
            "sorting/route.cu",
            inputs={"x": x},
            outputs={"order": order, "weights": weights},
            grid=(groups(x.shape[0], _ROUTE_WARPS), 1, 1),
            block=(_ROUTE_WARPS * WARP, 1, 1),
            constants=dict(call.params),
        )
    ]


def _weighted_sum(make: Specializer, call: KernelCall) -> list[KernelCall]:
    x, weights, *residual = call.inputs
    (out,) = call.outputs
    pack = min(min(vector_width(view), _WIDEST // itemsize(view.dtype)) for view in (x, out, *residual))
    while out.shape[1] % pack:
        pack //= 2
    return [
        make.kernel(
            call,
            "reductions/weighted_sum.cu",
            inputs={"x": x, "weights": weights, "residual": residual[0] if residual else None},
            outputs={"out": out},
            grid=(groups(out.numel // pack, _SUM_BLOCK), 1, 1),
            block=(_SUM_BLOCK, 1, 1),
            constants={"pack": pack},
        )
    ]


RULES: dict[str, Rule] = {
    "expert_matmul_kernel": _dense,
    "quantized_expert_matmul_kernel": _quantized,
    "route": _route,
    "weighted_sum": _weighted_sum,
}
