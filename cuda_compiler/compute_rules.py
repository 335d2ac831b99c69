"""Template rules of the kernels that compute: reductions, softmax, norms, running sums."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from cuda_compiler import attention_rules, matmul_rules, sorting_rules  # noqa: F401  (they register their templates)
from cuda_compiler.cuda_templates import WARP, Size3, Specializer, groups, template_rule, vector_width
from npu_compiler.graph.dtypes import is_float, itemsize
from npu_compiler.ops.reductions import REDUCTIONS
from npu_compiler.program.kernels import KernelCall
from npu_compiler.program.views import View, collapse, numel

_MOST_WARPS = 32
_MANY_ROWS = 1024  # from here on rows fill the GPU; fewer threads to each have more to do
_TEAMS = 4
_HELD_PACKS = 4
_EXTREMES = ("max_kernel", "min_kernel", "argmax_kernel", "argmin_kernel")
_FEW_ROWS = 32
_LONG_ROW = 16384
_CHUNKS = 128  # of a long row


def shared_pack(views: Iterable[View], most: int = 8) -> int:
    """How many elements along the last dimension all operands can move at once, 16 bytes of the narrowest at most."""
    present = list(views)
    widest = max(1, 16 // min(itemsize(view.dtype) for view in present))
    return min(most, widest, *(vector_width(view) for view in present))


def _teams(rows: int, items: int) -> tuple[dict[str, bool | int | float], Size3, Size3]:
    """Constants, grid and block of a kernel that gives each of its rows of `items` to a team of warps."""
    warps = min(groups(items, WARP * (4 if rows >= _MANY_ROWS else 1)), _MOST_WARPS)
    teams = _TEAMS if warps == 1 and rows >= _TEAMS else 1
    return {"team_warps": warps, "teams": teams}, (groups(rows, teams), 1, 1), (warps * teams * WARP, 1, 1)


def _held_packs(items: int, block: Size3, teams: int | float) -> int:
    """How many packs a thread keeps in registers between its passes over a row."""
    return min(groups(items, block[0] // int(teams)), _HELD_PACKS)


@template_rule(*(f"{name}_kernel" for name in REDUCTIONS))
def _reduction(make: Specializer, call: KernelCall) -> list[KernelCall]:
    """A team per output element; dimensions that step evenly are merged first, so that equal walks share a kernel."""
    x, out = call.inputs[0], call.outputs[0]
    kept = x.rank - call.params["reduce_dims"]
    sizes, (x_steps, out_steps) = collapse(x.shape[:kept], x.strides[:kept], out.strides)
    inner, (inner_steps,) = collapse(x.shape[kept:], x.strides[kept:])
    inner, inner_steps = (inner, inner_steps) if inner else ([1], [1])
    x = replace(x, shape=(*sizes, *inner), strides=(*x_steps, *inner_steps))
    out = replace(out, shape=tuple(sizes), strides=tuple(out_steps))
    call = replace(call, inputs=(x,), outputs=(out,), params={**call.params, "reduce_dims": len(inner)})
    pack = min(vector_width(x), 16 // itemsize(x.dtype)) if len(inner) == 1 else 1
    if call.kernel in _EXTREMES and out.numel <= _FEW_ROWS and x.rank <= 2 and inner_steps == [1]:
        if inner[0] >= _LONG_ROW:
            return [_extreme_of_long_rows(make, call, pack)]
    constants, grid, block = _teams(out.numel, numel(inner) // pack)
    return [make.kernel(call, "reductions/reduce.cu", grid=grid, block=block, constants=constants)]


def _extreme_of_long_rows(make: Specializer, call: KernelCall, pack: int) -> KernelCall:
    """One block to a row would leave the rest of the GPU idle."""
    (x,), (out,) = call.inputs, call.outputs
    x = x if x.rank == 2 else replace(x, shape=(1, *x.shape), strides=(0, *x.strides))
    rows, width = x.shape
    chunk = WARP * pack * groups(groups(width, _CHUNKS), WARP * pack)
    chunks, warps = groups(width, chunk), min(chunk // pack // WARP, 8)
    stem = call.outputs[0].buffer
    outputs = {
        "best": make.temporary(stem, (rows, chunks), "int32"),
        "index": make.temporary(stem, (rows, chunks), "int32"),
        "done": make.counters(stem),
        "out": out,
    }
    constants = {
        "chunk": chunk,
        "pack": pack,
        "least": "min" in call.kernel,
        "wants_index": call.kernel.startswith("arg"),
        "team_warps": warps,
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


@template_rule("softmax_kernel", "log_softmax_kernel", "masked_softmax_kernel")
def _softmax(make: Specializer, call: KernelCall) -> list[KernelCall]:
    x, *mask = call.inputs
    out = call.outputs[0]
    pack = shared_pack((x, *mask, out))
    constants, grid, block = _teams(out.numel // out.shape[-1], groups(out.shape[-1], pack))
    held = _held_packs(out.shape[-1] // pack, block, constants["teams"])
    return [
        make.kernel(
            call,
            "norms/softmax.cu",
            inputs={"x": x, "mask": mask[0] if mask else None},
            outputs={"out": out},
            grid=grid,
            block=block,
            constants={**constants, "pack": pack, "held_packs": held},
        )
    ]


@template_rule("rmsnorm_kernel", "layernorm_kernel")
def _row_norm(make: Specializer, call: KernelCall) -> list[KernelCall]:
    rows, width = call.outputs[0].shape
    pack = shared_pack((*call.inputs, *call.outputs))
    constants, grid, block = _teams(rows, groups(width, pack))
    held = _held_packs(width // pack, block, constants["teams"])
    constants = {**constants, "pack": pack, "held_packs": held}
    return [make.kernel(call, "norms/norms.cu", grid=grid, block=block, constants=constants)]


@template_rule("groupnorm_kernel")
def _group_norm(make: Specializer, call: KernelCall) -> list[KernelCall]:
    """A pack must not reach into the next row of a channel, so the innermost size must be a multiple of it."""
    x, out = call.inputs[0], call.outputs[0]
    spatial = numel(x.shape[2:])
    flat = [_spatial_merged(view) for view in (x, out)]
    inner = flat[0].shape[-1] if flat[0].rank > 2 and flat[0].shape == flat[1].shape else 1
    pack = shared_pack(flat) if inner > 1 else 1
    while inner % pack:
        pack //= 2
    groups_of_all = x.shape[0] * call.params["groups"]
    items = spatial * (x.shape[1] // call.params["groups"]) // pack
    constants, grid, block = _teams(groups_of_all, items)
    held = _held_packs(items, block, constants["teams"])
    constants = {**constants, "pack": pack, "held_packs": held}
    return [make.kernel(call, "norms/norms.cu", grid=grid, block=block, constants=constants)]


def _spatial_merged(view: View) -> View:
    """[N, C, …] with the spatial dimensions merged where they step evenly."""
    sizes, (steps,) = collapse(view.shape[2:], view.strides[2:])
    return replace(view, shape=(*view.shape[:2], *sizes), strides=(*view.strides[:2], *steps))


@template_rule("cumsum_kernel")
def _running_sum(make: Specializer, call: KernelCall) -> list[KernelCall]:
    (x,), (out,) = call.inputs, call.outputs
    width = out.shape[-1]
    rows = out.numel // width
    warps = min(groups(width, WARP), _MOST_WARPS)
    constants, block = {"team_warps": warps, "teams": 1}, (warps * WARP, 1, 1)
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
