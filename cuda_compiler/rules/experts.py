"""Rules of mixture-of-experts products, whose tokens choose their weights.

Tensor cores compute all rows of an expert together, so that its matrix is read once. What they do not take (float32,
rows that are not whole vectors) has a warp for each result. `passes/expert_products.py` makes products with a gate and
weighted sums of products, for tensor cores only.
"""

from __future__ import annotations

from dataclasses import replace

from cuda_compiler.rules.gates import GATED_EXPERTS
from cuda_compiler.rules.quantized import code_pack
from cuda_compiler.specialization.gpu import MULTIPROCESSORS, WARP
from cuda_compiler.specialization.sizes import groups, vector_width
from cuda_compiler.specialization.specializer import Rule, Specializer
from npu_compiler.graph.code_formats import CODE_FORMATS
from npu_compiler.graph.dtypes import HALF_DTYPES, itemsize
from npu_compiler.program.kernels import KernelCall
from npu_compiler.program.views import View

_FILE = "matmul/expert_tiles.cu"
_WARPS = 8
_WIDEST = 16  # bytes of one access
_TILE_WARPS, _TILE_ROWS = 4, 16
_MOST_SUM_WARPS = 16
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
    return [_dense_tiles(make, call)] if suits_tiles(make, call) else _per_warp(make, call, _dense_pack(call))


def _dense_pack(call: KernelCall) -> int:
    """Number of elements of one access to x and to a row of the weight."""
    pack = min(min(vector_width(view), _WIDEST // itemsize(view.dtype)) for view in call.inputs[:2])
    while call.params["k"] % pack:
        pack //= 2
    return pack


def suits_tiles(make: Specializer, call: KernelCall) -> bool:
    """Whether tensor cores can compute a product by experts."""
    if "codes" in call.params:
        return _held_rows_of_codes(make, call) > 0
    x, weight = call.inputs[:2]
    is_half = x.dtype == weight.dtype and x.dtype in HALF_DTYPES
    return is_half and make.gpu.multiplies_bfloat16 and _dense_pack(call) == _WIDEST // 2


def suits_sum(make: Specializer, call: KernelCall, choices: int) -> bool:
    """Whether one kernel should compute a dense product by experts and the weighted sum of each `choices` rows.

    It reads an expert's matrix for each of its rows, so few rows may have the same expert.
    """
    rows = call.outputs[0].shape[0]
    apart = rows == choices or rows * _ALONE <= call.params["e"]
    return "codes" not in call.params and choices <= _MOST_SUM_WARPS and apart and suits_tiles(make, call)


def _quantized(make: Specializer, call: KernelCall) -> list[KernelCall]:
    held = _held_rows_of_codes(make, call)
    return [_quantized_tiles(make, call, held)] if held else _per_warp(make, call, code_pack(call))


def _gated(make: Specializer, call: KernelCall) -> list[KernelCall]:
    """The call of a product whose result's first half, activated, is multiplied with the second half."""
    (product,) = (name for name, gated in GATED_EXPERTS.items() if gated == call.kernel)
    return RULES[product](make, replace(call, kernel=product))


def _sum(make: Specializer, call: KernelCall) -> list[KernelCall]:
    """The call of a weighted sum of products by experts."""
    named = iter(call.inputs)
    inputs: dict[str, View | None] = {name: next(named) for name in ("x", "weight", "experts", "weights")}
    inputs |= {name: next(named) if call.params[f"has_{name}"] else None for name in ("bias", "residual")}
    (rows, columns), choices = call.outputs[0].shape, call.inputs[3].shape[1]
    pieces, splits = groups(call.params["k"], _PIECE_TERMS), 1
    while 2 * splits * choices <= _MOST_SUM_WARPS and pieces // (2 * splits) >= _FEWEST_PIECES:
        splits *= 2
    return [
        make.kernel(
            replace(call, kernel="expert_matmul_kernel"),
            "matmul/expert_sum.cu",
            function="expert_sum",
            inputs=inputs,
            outputs={"out": call.outputs[0]},
            grid=(groups(columns, _TILE_ROWS), rows, 1),
            block=(choices * splits * WARP, 1, 1),
            constants={
                "splits": splits,
                "unrolled": _unrolled(groups(pieces, splits), 4),
                "ahead": call.params["ahead"],
            },
        )
    ]


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
    tiles, splits = min(rows, call.params["e"]) * groups(columns, _tile_columns(call)), 1
    while splits < _TILE_WARPS and tiles * splits < _FILLING_WARPS and steps // (2 * splits) >= fewest:
        splits *= 2
    return splits


def _tile_columns(call: KernelCall) -> int:
    """Number of columns that a tile makes; in a product with a gate, half of its rows are gates."""
    return _TILE_ROWS // 2 if "activation" in call.params else _TILE_ROWS


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
        shared = staged + 4 * min(rows, _LISTED_ROWS) + _TILE_WARPS * held * _TILE_ROWS * 4
        if shared <= _STATIC_SHARED - 64:
            return held
        held //= 2
    return held


def _tiles(
    make: Specializer, call: KernelCall, function: str, held: int, splits: int, unrolled: int, min_blocks: int
) -> KernelCall:
    """The call of a kernel whose warps make a tile's columns of an expert's rows each.

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
        grid=(jobs * groups(columns, _tile_columns(call) * (_TILE_WARPS // splits)), 1, 1),
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
    **dict.fromkeys(GATED_EXPERTS.values(), _gated),
    "expert_sum": _sum,
    "route": _route,
    "weighted_sum": _weighted_sum,
}
