"""Rules of reductions and running sums."""

from __future__ import annotations

from dataclasses import dataclass, replace

from cuda_compiler.rules.rows import MOST_WARPS, teams_for
from cuda_compiler.specialization.gpu import MULTIPROCESSORS, WARP
from cuda_compiler.specialization.sizes import groups, vector_width
from cuda_compiler.specialization.specializer import Rule, Specializer
from npu_compiler.graph.dtypes import is_float, itemsize
from npu_compiler.ops.reductions import REDUCTIONS
from npu_compiler.program.kernels import KernelCall
from npu_compiler.program.views import collapse, numel

_FEW_ROWS = 32
_LONG_ROW = 16384
_CHUNKS = 128  # blocks per long row
_SUMS = {"sum_kernel": "sum_of_columns", "mean_kernel": "mean_of_columns", "norm_kernel": "norm_of_columns"}
_FEW_ELEMENTS = 64 * 1024  # below which a thread's accesses do not matter
_FEW_TERMS = 32
_COLUMN_THREADS = 256


@dataclass(frozen=True)
class _Extreme:
    """The kind of an extremum: the minimum or the maximum, and whether the result is its index."""

    least: bool
    wants_index: bool


_EXTREMES = {
    "max_kernel": _Extreme(least=False, wants_index=False),
    "min_kernel": _Extreme(least=True, wants_index=False),
    "argmax_kernel": _Extreme(least=False, wants_index=True),
    "argmin_kernel": _Extreme(least=True, wants_index=True),
}


def _reduction(make: Specializer, call: KernelCall) -> list[KernelCall]:
    """The call of a reduction, with one team of warps per output element.

    Dimensions are merged where possible, so that more calls share a kernel.
    """
    by_columns = _by_columns(make, call)
    if by_columns is not None:
        return [by_columns]
    x, out = call.inputs[0], call.outputs[0]
    kept = x.rank - call.params["reduce_dims"]
    sizes, (x_steps, out_steps) = collapse(x.shape[:kept], x.strides[:kept], out.strides)
    inner, (inner_steps,) = collapse(x.shape[kept:], x.strides[kept:])
    inner, inner_steps = (inner, inner_steps) if inner else ([1], [1])
    x = replace(x, shape=(*sizes, *inner), strides=(*x_steps, *inner_steps))
    out = replace(out, shape=tuple(sizes), strides=tuple(out_steps))
    call = replace(call, inputs=(x,), outputs=(out,), params={**call.params, "reduce_dims": len(inner)})
    pack = min(vector_width(x), 16 // itemsize(x.dtype)) if len(inner) == 1 else 1
    extreme = _EXTREMES.get(call.kernel)
    long_rows = out.numel <= _FEW_ROWS and x.rank <= 2 and inner_steps == [1] and inner[0] >= _LONG_ROW
    if extreme is not None and long_rows:
        return [_extreme_of_long_rows(make, call, extreme, pack)]
    constants, grid, block = teams_for(out.numel, numel(inner) // pack)
    return [make.kernel(call, "reductions/reduce.cu", grid=grid, block=block, constants=constants)]


def _by_columns(make: Specializer, call: KernelCall) -> KernelCall | None:
    """The call of a sum whose results lie side by side as their elements do, so that a thread reads several at a time.

    None for other reductions, where a reduced dimension is the contiguous one, and for few terms, of which a thread of
    the general kernel sums all, beside the threads of the next results.
    """
    x, out = call.inputs[0], call.outputs[0]
    kept = x.rank - call.params["reduce_dims"]
    sums = call.kernel in _SUMS and (call.kernel != "norm_kernel" or call.params["order"] == 2.0)
    beside = [dim for dim in range(x.rank) if x.shape[dim] > 1 and x.strides[dim] == 1]
    if not sums or not is_float(x.dtype) or len(beside) != 1 or beside[0] >= kept or x.numel < _FEW_ELEMENTS:
        return None
    if numel(x.shape[kept:]) < _FEW_TERMS:
        return None
    (column,) = beside
    lead = [dim for dim in range(kept) if dim != column]
    shape, *strides = ([view[dim] for dim in lead] for view in (x.shape, x.strides, out.strides))
    sizes, (x_steps, out_steps) = collapse(shape, *strides)
    inner, (inner_steps,) = collapse(x.shape[kept:], x.strides[kept:])
    width = x.shape[column]
    packed = replace(x, shape=(*sizes, *inner, width), strides=(*x_steps, *inner_steps, 1))
    pack = min(vector_width(packed), 16 // itemsize(x.dtype))
    while width % pack:
        pack //= 2
    rows = numel(sizes)
    columns = next((c for c in (8, 4) if rows * groups(width, c * pack) >= 2 * MULTIPROCESSORS), 2)
    return make.kernel(
        replace(call, params={**call.params, "reduce_dims": len(inner)}),
        "reductions/columns.cu",
        function=_SUMS[call.kernel],
        inputs={"x": replace(x, shape=(*sizes, width, *inner), strides=(*x_steps, 1, *inner_steps))},
        outputs={"out": replace(out, shape=(*sizes, width), strides=(*out_steps, out.strides[column]))},
        grid=(rows * groups(width, columns * pack), 1, 1),
        block=(_COLUMN_THREADS, 1, 1),
        constants={"pack": pack, "columns": columns, "count": numel(inner)},
    )


def _extreme_of_long_rows(make: Specializer, call: KernelCall, extreme: _Extreme, pack: int) -> KernelCall:
    """The call of an extremum with several blocks per row, since one would leave the rest of the GPU idle.

    The block of a row that finishes last combines their results.
    """
    (x,), (out,) = call.inputs, call.outputs
    x = x if x.rank == 2 else replace(x, shape=(1, *x.shape), strides=(0, *x.strides))
    rows, width = x.shape
    chunk = WARP * pack * groups(groups(width, _CHUNKS), WARP * pack)
    chunks, warps = groups(width, chunk), min(chunk // pack // WARP, 8)
    stem = call.outputs[0].buffer
    outputs = {
        "best": make.temporary(stem, (rows, chunks), "int32"),
        "index": make.temporary(stem, (rows, chunks), "int32"),
        "done": make.counters(stem, rows),
        "out": out,
    }
    constants = {
        "chunk": chunk,
        "pack": pack,
        "least": extreme.least,
        "wants_index": extreme.wants_index,
        "team_warps": warps,
        "team_lanes": WARP,
        "teams": 1,
    }
    return make.kernel(
        call,
        "reductions/long_rows.cu",
        function="extreme_of_long_rows",
        grid=(chunks, rows, 1),
        block=(warps * WARP, 1, 1),
        inputs={"x": x},
        outputs=outputs,
        constants=constants,
    )


def _running_sum(make: Specializer, call: KernelCall) -> list[KernelCall]:
    (x,), (out,) = call.inputs, call.outputs
    width = out.shape[-1]
    rows = out.numel // width
    warps = min(groups(width, WARP), MOST_WARPS)
    constants, block = {"team_warps": warps, "team_lanes": WARP, "teams": 1}, (warps * WARP, 1, 1)
    if rows > _FEW_ROWS or width < _LONG_ROW:
        return [make.kernel(call, "reductions/cumsum.cu", grid=(rows, 1, 1), block=block, constants=constants)]
    chunk = block[0] * groups(width, block[0] * _CHUNKS)
    chunks = groups(width, chunk)
    sums = make.temporary(out.buffer, (rows, chunks), "float32" if is_float(x.dtype) else "int32")
    grid, constants = (chunks, rows, 1), {**constants, "CHUNK": chunk}
    return [
        make.kernel(
            call,
            "reductions/cumsum.cu",
            function="sum_chunks",
            inputs={"x": x},
            outputs={"sums": sums},
            grid=grid,
            block=block,
            constants=constants,
        ),
        make.kernel(
            call,
            "reductions/cumsum.cu",
            function="cumsum_of_chunks",
            inputs={"x": x, "sums": sums},
            outputs={"out": out},
            grid=grid,
            block=block,
            constants=constants,
        ),
    ]


RULES: dict[str, Rule] = {
    **{f"{name}_kernel": _reduction for name in REDUCTIONS},
    "cumsum_kernel": _running_sum,
}
