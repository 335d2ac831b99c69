"""Rules of attention: split over the keys for few queries, tiled for many, a plain kernel for the rest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod

from cuda_compiler.specialization.c_text import geometry_text
from cuda_compiler.specialization.gpu import CLUSTERS, GPU, MAX_GRID, MULTIPROCESSORS, WARP, memory_of_each
from cuda_compiler.specialization.sizes import groups, vector_width
from cuda_compiler.specialization.specializer import Rule, Specializer
from npu_compiler.graph.dtypes import HALF_DTYPES, is_float
from npu_compiler.program.kernels import KERNELS, KernelCall, distinct_bytes
from npu_compiler.program.views import View

BLOCK_ROWS = 16  # of a warp's product
BLOCK_KEYS = 16
_FEW_ROWS = 8  # of a tile, which need half the registers of `BLOCK_ROWS`
_WARPS = 4
_STAGES = 2  # tiles of keys per warp in shared memory: one in use, the others being copied
_FILLING_BLOCKS = 2 * MULTIPROCESSORS
_ENOUGH_BLOCKS = 64  # from here on one block handles all keys of its rows, which saves the combining kernel
_FEW_TURNS = 4  # tiles of keys of a warp, up to which that is so however few blocks there are
WIDEST_HEAD = 128  # head dimension whose queries, keys and sums fit into a warp's registers
_MOST_TEAM = 8  # warps that share wider heads
_WIDEST_TILE = 256  # head dimension of values whose sums of 16 rows alone fit into a warp's registers
_MIN_BLOCKS = 2  # blocks per multiprocessor; still leaves enough registers per thread
_COMBINE_THREADS = 128
_SLICE = 512  # dimensions of the result per block of the plain kernel
_TILE_WARPS = 4
# Rows per block, keys per tile, and the least number of blocks that occupies a large GPU well enough; the more rows the
# better. The last is for GPUs with little shared memory.
_TILES = ((128, 32, 528), (64, 64, 96), (64, 32, 96))
# The same for kernels of warpgroups (wgmma, which only Hopper has): the more warpgroups per block, the more rows share
# the keys that it copies.
_WARPGROUP_TILES = ((192, 96), (128, 96), (64, 48))
_THREE, _THREE_TIME = 192, 0.86  # rows of three warpgroups, and their time per row relative to two
_NARROW = 32  # head dimension up to which warpgroups, whose rows have 64 or 128 elements, would mostly multiply zeros
_FILLED = 0.7  # of a block's rows, from which on it may have fewer
# Problems, and the share of a block's rows, from which on one tile is best for all of a problem, as for windows; and
# problems from which on it may have a second tile of keys.
_WINDOWS, _HALF, _MANY_WINDOWS = 32, 0.5, MULTIPROCESSORS
_MANY_ROWS = 64 * 1024  # of all problems, from which on blocks of few rows would copy keys too often
_WARPGROUP = 128
_WARPGROUP_ROWS = 64
_WARPGROUP_KEYS = (128, 96)  # per tile, the better the more; as few as leave the fewest keys beyond the end
_PRODUCT_WIDTHS = (40, 64, 80, 128)  # columns of the products of weights and values
_SLAB = 64  # elements that a row of shared memory has, or a multiple of them
_MOST_STAGES = 4  # of keys and values
_BARRIERS = 4 * 8  # bytes, for each stage
_QUERIES_BARRIER = 8  # bytes
_FEW_TILES = 2  # of keys, up to which warpgroups that start in turns only wait for each other
_TABLES = 3  # place of the block tables among the inputs of paged attention
_PAGED_BLOCKS = 4 * MULTIPROCESSORS  # sequences differ in length, so that some blocks end early
_MANY_TOKENS = 256  # from here on most are of prompts, whose tiles of many rows share the keys that a block copies
_MOST_SHARERS = 8  # blocks of a cluster
# Warps of a block, and such blocks of a multiprocessor. If both are as good, the first leaves the next kernel more
# shared memory.
_PAGED_SHAPES = ((4, 2), (8, 1))
_PAGED_STAGES = 3  # as `_STAGES`, where most tiles have one token
_LONG = 2048  # keys, above which a sequence may be much longer than others
_SURVEY_THREADS = 256
_MOST_UNSURVEYED = 4  # tiles of keys with a bias, up to which a survey would take longer than what it may save
_SURVEY_MIN_BLOCKS = 4


@dataclass(frozen=True)
class _Operands:
    """The views of a call: q [B, H, T, D], k [B, KV, S, D], v [B, KV, S, Dv], mask [B, H, T, S], out [B, H, T, Dv].

    Attributes:
        sinks: The heads' sinks [H]; None if there are none.
        problems: Number of problems: pairs of a batch and a KV head, whose queries attend to the same keys.
        rows: Queries of one problem.
    """

    q: View
    k: View
    v: View
    mask: View | None
    sinks: View | None
    out: View

    @property
    def problems(self) -> int:
        return self.k.shape[0] * self.k.shape[1]

    @property
    def rows(self) -> int:
        return self.q.shape[2] * (self.q.shape[1] // self.k.shape[1])

    @property
    def inputs(self) -> Mapping[str, View | None]:
        return {"q": self.q, "k": self.k, "v": self.v, "mask": self.mask, **self.beside}

    @property
    def beside(self) -> Mapping[str, View]:
        """The sinks by name, if there are any: a source without them does not mention them."""
        return {} if self.sinks is None else {"sinks": self.sinks}


def _attention(make: Specializer, call: KernelCall) -> list[KernelCall]:
    call = without_absent_features(call)
    q, k, v, mask, sinks, out = KERNELS[call.kernel].bind(call)
    assert q is not None and k is not None and v is not None and out is not None
    operands = _Operands(q, k, v, mask, sinks, out)
    rows, problems = operands.rows, operands.problems
    if not suits_tensor_cores(q, k, v):
        return _plain(make, call, operands)
    if make.gpu.has_warpgroups and WIDEST_HEAD >= q.shape[3] == v.shape[3] > _NARROW:
        fitting = [
            tile_rows
            for tile_rows, enough in _WARPGROUP_TILES
            if rows >= tile_rows and problems * groups(rows, tile_rows) >= enough
        ]
        if fitting:
            return _by_warpgroups(make, call, operands, _best_rows(operands, fitting, make.gpu))
    tiles = _fitting_tiles(q.shape[3], v.shape[3], make.gpu)
    for tile_rows, tile_keys, enough in tiles:
        fills = rows >= tile_rows or rows >= _FILLED * tile_rows and problems * rows >= _MANY_ROWS
        most_keys = tile_keys * (1 + (problems >= _MANY_WINDOWS))
        is_one = problems >= _WINDOWS and k.shape[2] <= most_keys and _HALF * tile_rows < rows <= tile_rows
        if is_one or fills and problems * groups(rows, tile_rows) >= enough:
            return _tiled(make, call, operands, tile_rows, tile_keys)
    fits_grid = max(q.shape[0], k.shape[1] * groups(rows, BLOCK_ROWS)) <= MAX_GRID[1]
    if fits_grid and _split_blocks(operands, make.gpu) is not None:
        return _split(make, call, operands)
    return _tiled(make, call, operands, *tiles[-1][:2]) if tiles else _plain(make, call, operands)


def _fitting_tiles(width: int, value_width: int, gpu: GPU) -> list[tuple[int, int, int]]:
    """The entries of `_TILES` that fit a GPU's shared memory and, where heads are wide, a warp's registers."""
    tiles = _TILES if max(width, value_width) <= WIDEST_HEAD else _TILES[-1:]
    part = min(value_width, _WIDEST_TILE)
    return [tile for tile in tiles if _tile_memory(width, part, *tile[:2]) <= gpu.shared_memory]


def _split_blocks(operands: _Operands, gpu: GPU) -> tuple[int, int] | None:
    """Warps of a block of the split-K kernels, and stages, that fit the shared memory; None if none do."""
    width, value_width = operands.k.shape[3], operands.v.shape[3]
    warps = max(_WARPS, team_warps(width, value_width))
    stages = range(_STAGES, 0, -1)
    fits = (
        count for count in stages if split_memory(operands.rows, width, value_width, warps, count) <= gpu.shared_memory
    )
    most = next(fits, None)
    return None if most is None else (warps, most)


def _best_rows(operands: _Operands, fitting: list[int], gpu: GPU) -> int:
    """Rows per block, of those that fit: the most, or three warpgroups' where the GPU is done sooner with them.

    Three have fewer registers each, so heads must be narrow, and take less time per row.
    """

    def time(tile_rows: int) -> float:
        items = operands.problems * groups(operands.rows, tile_rows)
        return groups(items, gpu.multiprocessors) * tile_rows * (_THREE_TIME if tile_rows == _THREE else 1.0)

    usable = [rows for rows in fitting if rows < _THREE or operands.q.shape[3] <= _SLAB]
    return min(usable[:2], key=time) if usable[0] == _THREE else usable[0]


def _plain(make: Specializer, call: KernelCall, operands: _Operands) -> list[KernelCall]:
    """The call of the plain kernel: a block computes `_SLICE` dimensions of the result of one query."""
    value_width = operands.v.shape[3]
    width = min(value_width, _SLICE)
    blocks = operands.problems * operands.rows * groups(value_width, width)
    return [
        make.kernel(
            call,
            "attention/attention.cu",
            function="attention_plain",
            inputs=operands.inputs,
            outputs={"out": operands.out},
            grid=(blocks, 1, 1),
            block=(_WARPS * WARP, 1, 1),
            constants={"slice": width},
        )
    ]


def _split(make: Specializer, call: KernelCall, operands: _Operands) -> list[KernelCall]:
    """The calls of the split-K kernels: a block's warps divide the keys of 16 rows.

    Several blocks do if one would leave the GPU idle.
    """
    batch, kv_heads, keys, width = operands.k.shape
    rows, value_width, out = operands.rows, operands.v.shape[3], {"out": operands.out}
    row_blocks = groups(rows, BLOCK_ROWS)
    blocks = operands.problems * row_blocks
    shape = _split_blocks(operands, make.gpu)
    assert shape is not None
    warps, stages = shape
    block_keys = warps // team_warps(width, value_width) * BLOCK_KEYS
    if blocks >= _ENOUGH_BLOCKS or keys <= _FEW_TURNS * block_keys:
        of_keys = team_warps(width, value_width) << (groups(keys, BLOCK_KEYS) - 1).bit_length()
        most = min(2 * _WARPS, of_keys)
        if split_memory(rows, width, value_width, most, 1) <= make.gpu.shared_memory:
            warps = most
        return [
            make.kernel(
                call,
                "attention/attention.cu",
                function="attention_once",
                inputs=operands.inputs,
                outputs=out,
                grid=(1, kv_heads * row_blocks, batch),
                block=(warps * WARP, 1, 1),
                shared=split_memory(rows, width, value_width, warps, 1),
                constants={"stages": 1},
            )
        ]
    splits = min(groups(keys, block_keys), groups(_FILLING_BLOCKS * _WARPS // warps, blocks))
    parts = _partial_sums(make, call, (batch, kv_heads, rows, splits, value_width))
    split = make.kernel(
        call,
        "attention/attention.cu",
        function="attention_split",
        inputs=operands.inputs,
        outputs=parts,
        grid=(splits, kv_heads * row_blocks, batch),
        block=(warps * WARP, 1, 1),
        shared=split_memory(rows, width, value_width, warps, stages),
        constants={"splits": splits, "stages": stages},
        min_blocks=_MIN_BLOCKS * _WARPS // warps,
    )
    return [split, _combine(make, call, {**parts, **operands.beside}, operands.out)]


def _partial_sums(make: Specializer, call: KernelCall, shape: tuple[int, ...]) -> dict[str, View]:
    """Temporary buffers for blocks that attend to a part of the keys each, by name.

    They hold sums [..., rows, splits, value width] and statistics [..., rows, splits, 2].
    """
    sums, stats = (make.temporary(call.node, (*shape[:-1], width), "float32") for width in (shape[-1], 2))
    return {"sums": sums, "stats": stats}


def _combine(make: Specializer, call: KernelCall, parts: Mapping[str, View | None], out: View) -> KernelCall:
    """The call of the kernel that combines the partial sums of each row (see `_partial_sums`) into `out`.

    Args:
        parts: The partial sums; and, if there are any, the heads' sinks.
    """
    sums = parts["sums"]
    assert sums is not None
    *lead, splits, value_width = sums.shape
    combine = make.kernel(
        call,
        "attention/attention.cu",
        function="attention_combine",
        inputs=parts,
        outputs={"out": out},
        grid=(prod(lead) * groups(value_width, WARP), 1, 1),
        block=(_COMBINE_THREADS, 1, 1),
        constants={"splits": splits},
    )
    return replace(combine, flops=0, bytes_moved=0)


def split_memory(rows: int, width: int, value_width: int, warps: int = _WARPS, stages: int = _STAGES) -> int:
    """The size in bytes of the C struct `SplitMemory` in `attention_fragments.cuh`, for all warps of a block."""
    team = team_warps(width, value_width)
    padded = groups(groups(width, 32), team) * 32, groups(groups(value_width, 64), team) * 64
    tiles = stages * BLOCK_KEYS * sum(padded) * 2
    found = found_memory(rows, width, value_width)
    return warps * (max(tiles, found) + team_memory(rows, width, value_width))


def team_warps(width: int, value_width: int) -> int:
    """Number of warps that share the dimensions of a tile of keys and values: `team` in `attention_fragments.cuh`."""
    return 1 << (groups(max(width, value_width), WIDEST_HEAD) - 1).bit_length()


def found_memory(rows: int, width: int, value_width: int) -> int:
    """The size in bytes of the C struct `Found` in `attention_fragments.cuh`: a warp's partial result."""
    spans = groups(groups(value_width, 64), team_warps(width, value_width))
    return 4 * (2 * BLOCK_ROWS + min(rows, BLOCK_ROWS) * spans * 64)


def team_memory(rows: int, width: int, value_width: int) -> int:
    """The size in bytes of the C struct `TeamScores` there: a warp's parts of the scores of two tiles."""
    halves = 2 if rows > _FEW_ROWS else 1
    return 0 if team_warps(width, value_width) == 1 else 2 * WARP * 4 * halves * 4


def _tiled(
    make: Specializer, call: KernelCall, operands: _Operands, tile_rows: int, tile_keys: int
) -> list[KernelCall]:
    """The calls of the tiled kernel: each block computes many rows, and its warps share tiles of keys.

    A call computes as many dimensions of the result as a warp has registers for.
    """
    calls, verdicts = _survey(make, call, operands, tile_rows, tile_keys)
    width = operands.v.shape[3]
    slices = [(first, min(first + _WIDEST_TILE, width)) for first in range(0, width, _WIDEST_TILE)]
    for part in slices:
        v, out = (view.slice(3, *part) for view in (operands.v, operands.out))
        tiled = _tiled_part(make, call, replace(operands, v=v, out=out), tile_rows, tile_keys, verdicts)
        calls.append(replace(tiled, flops=tiled.flops // len(slices), bytes_moved=tiled.bytes_moved // len(slices)))
    return calls


def _tiled_part(
    make: Specializer,
    call: KernelCall,
    operands: _Operands,
    tile_rows: int,
    tile_keys: int,
    verdicts: View | None,
) -> KernelCall:
    """The call of the tiled kernel for all dimensions of `operands`."""
    shared = _tile_memory(operands.k.shape[3], operands.v.shape[3], tile_rows, tile_keys)
    return make.kernel(
        call,
        "attention/attention_tiled.cu",
        function="attention_tiled",
        inputs={**operands.inputs, "verdicts": verdicts},
        outputs={"out": operands.out},
        grid=(operands.problems * groups(operands.rows, tile_rows), 1, 1),
        block=(_TILE_WARPS * WARP, 1, 1),
        shared=shared,
        constants={
            "tile_rows": tile_rows,
            "tile_keys": tile_keys,
            "value_tiles": 2 * groups(operands.v.shape[3], 16),  # of 8 dimensions
        },
        min_blocks=_MIN_BLOCKS,
    )


def _by_warpgroups(make: Specializer, call: KernelCall, operands: _Operands, tile_rows: int) -> list[KernelCall]:
    """The calls of the tiled kernel with one warpgroup per 64 rows, and a producer warpgroup that copies the keys."""
    keys, width = operands.k.shape[2:]
    row_bytes = 2 * groups(width, _SLAB) * _SLAB
    tile_keys = min(_WARPGROUP_KEYS, key=lambda count: groups(keys, count) * count)
    stage, rest = 2 * tile_keys * row_bytes + _BARRIERS, tile_rows * row_bytes + _QUERIES_BARRIER
    stages = min(_MOST_STAGES, (make.gpu.shared_memory - rest) // stage)
    calls, verdicts = _survey(make, call, operands, tile_rows, tile_keys)
    tiled = make.kernel(
        call,
        "attention/attention_wgmma.cu",
        function="attention_wgmma",
        inputs={**operands.inputs, "verdicts": verdicts},
        outputs={"out": operands.out},
        grid=(min(operands.problems * groups(operands.rows, tile_rows), make.gpu.multiprocessors), 1, 1),
        block=((tile_rows // _WARPGROUP_ROWS + 1) * _WARPGROUP, 1, 1),
        shared=rest + stages * stage,
        constants={
            "tile_rows": tile_rows,
            "tile_keys": tile_keys,
            "stages": stages,
            "takes_turns": tile_rows > _WARPGROUP_ROWS and keys > _FEW_TILES * tile_keys,
            "value_tiles": next(width for width in _PRODUCT_WIDTHS if width >= operands.v.shape[3]) // 8,
        },
    )
    return [*calls, tiled]


def _survey(
    make: Specializer, call: KernelCall, operands: _Operands, tile_rows: int, tile_keys: int
) -> tuple[list[KernelCall], View | None]:
    """The call that classifies the mask's tiles (all masked, none masked, mixed), and the view of its result.

    Later kernels skip tiles that are all masked. Layers with the same mask share one result, and the prologue computes
    that of a constant mask, as a bias by relative positions is, so there may be no call. Both are absent if there is no
    mask, if the keys fit in one tile, or if there are few tiles and the run computes a bias for each head.
    """
    mask, k, row_blocks = operands.mask, operands.k, groups(operands.rows, tile_rows)
    if mask is None or k.shape[2] <= tile_keys:
        return [], None
    if k.shape[2] <= _MOST_UNSURVEYED * tile_keys and _is_bias(mask, k) and not make.is_constant(mask):
        return [], None
    constants = {"tile_rows": tile_rows, "tile_keys": tile_keys}
    looks = (k.shape[0] if mask.strides[0] else 1, k.shape[1] if mask.strides[1] else 1, row_blocks)
    subject = (mask, (looks, k.shape[1], call.params["causal"], tile_rows, tile_keys))
    verdicts = make.cached(subject)
    if verdicts is not None:
        return [], verdicts
    shape = (*looks, groups(k.shape[2], tile_keys))
    is_ahead = make.is_constant(mask) and not make.is_constant(operands.out)
    verdicts = (make.constant if is_ahead else make.temporary)(call.node, shape, "int32")
    others = {"q": operands.q, "k": k, "v": operands.v} if is_ahead else {}
    survey = make.kernel(
        replace(call, params={name: value for name, value in call.params.items() if name != "has_sinks"}),
        "attention/attention_survey.cu",
        function="attention_survey",
        inputs={name: view for name, view in operands.inputs.items() if name not in {"sinks", *others}},
        outputs={"verdicts": verdicts},
        grid=(prod(looks), 1, 1),
        block=(_SURVEY_THREADS, 1, 1),
        constants=constants,
        definitions="\n".join(geometry_text(name, view) for name, view in others.items()),
        min_blocks=_SURVEY_MIN_BLOCKS,
    )
    survey = replace(survey, flops=0, bytes_moved=distinct_bytes(mask))
    make.cache(subject, verdicts)
    if is_ahead:
        make.ahead.append(survey)
    return [] if is_ahead else [survey], verdicts


def _is_bias(mask: View, k: View) -> bool:
    """Whether a mask has floats of its own for each head, as a bias has that hides no keys."""
    return is_float(mask.dtype) and k.shape[1] > 1 and mask.shape[1] > 1 and mask.strides[1] != 0


def _tile_memory(width: int, value_width: int, tile_rows: int, tile_keys: int) -> int:
    """The size in bytes of the C struct `Memory` in `attention_tiled.cu`."""
    key_row, value_row = (2 * (groups(each, 16) * 16 + 8) for each in (width, value_width))
    held_queries = tile_rows if tile_rows > _TILE_WARPS * BLOCK_ROWS or width > WIDEST_HEAD else 1
    return 2 * tile_keys * (key_row + value_row) + held_queries * key_row


def suits_tensor_cores(q: View, k: View, v: View) -> bool:
    """Whether tensor cores can compute attention over these views.

    All must have one 16-bit dtype, rows of whole 16-byte vectors, and a head dimension that fits a block's registers.
    """
    alike = q.dtype == k.dtype == v.dtype and q.dtype in HALF_DTYPES
    widths = (q.shape[-1], v.shape[-1])
    pieces = all(width % 8 == 0 and width <= WIDEST_HEAD * _MOST_TEAM for width in widths)
    return alike and pieces and k.numel > 0 and all(vector_width(view) >= 8 for view in (q, k, v))


def paged_attention(make: Specializer, call: KernelCall, written: View | None = None) -> list[KernelCall]:
    """The calls of paged attention; a tile of rows consists of heads and of tokens of one sequence.

    The keys are split among blocks if multiprocessors would be idle otherwise.

    Args:
        written: The rows of the pool that the preceding kernel writes, if that kernel writes nothing else that this
            call reads besides q, k and v. With this, the first keys may be read while that kernel still runs, except
            before Hopper and if most tokens belong to prompts. None means to wait for that kernel.
    """
    call = without_absent_features(call)
    q, k, v, *_ = call.inputs
    (out,) = call.outputs
    inputs: dict[str, View | None] = {**paged_inputs(call), "written": None}
    (tokens, heads, width), value_width = q.shape, v.shape[2]
    if not suits_tensor_cores(q, k, v) or tokens > MAX_GRID[2]:
        return [_paged_plain(make, call, inputs)]
    sharing = heads_together(heads, k.shape[1])
    head_groups = heads // sharing
    team, many = team_warps(width, value_width), tokens >= _MANY_TOKENS
    if _sharing_memory(q, v, team, BLOCK_ROWS, _PAGED_STAGES) > make.gpu.shared_memory or team > _WARPS:
        return [_paged_plain(make, call, inputs)]
    together = many and team == 1
    rows = _WARPS * BLOCK_ROWS if together else BLOCK_ROWS if sharing > _FEW_ROWS or many else _FEW_ROWS
    constants = {
        "sharing": sharing,
        "tile_tokens": rows // sharing,
        "stages": _STAGES,
    }
    if make.gpu.has_clusters and together and _sharing_memory(q, v, _WARPS, rows, _STAGES) <= make.gpu.shared_memory:
        return [_paged_pieces(make, call, inputs, constants, head_groups)]
    if make.gpu.has_clusters and not together:
        return [_paged_tokens(make, call, {**inputs, "written": written}, constants, head_groups)]
    keys = keys_of_tile(call, rows // sharing)
    splits = min(groups(keys, _WARPS // team * BLOCK_KEYS), groups(_PAGED_BLOCKS, tokens * head_groups))
    shared = split_memory(BLOCK_ROWS, width, value_width)
    if together or splits == 1:
        return [
            make.kernel(
                call,
                "attention/paged.cu",
                function="paged_once",
                inputs=inputs,
                outputs={"out": out},
                grid=(head_groups, tokens, 1),
                block=(_WARPS * WARP, 1, 1),
                shared=shared,
                constants=constants,
                min_blocks=_MIN_BLOCKS,
            )
        ]
    parts = _partial_sums(make, call, (tokens, head_groups, sharing, splits, value_width))
    split = make.kernel(
        call,
        "attention/paged.cu",
        function="paged_split",
        inputs=inputs,
        outputs=parts,
        grid=(splits, head_groups, tokens),
        block=(_WARPS * WARP, 1, 1),
        shared=shared,
        constants={**constants, "splits": splits},
        min_blocks=_MIN_BLOCKS,
    )
    sinks = {name: view for name, view in inputs.items() if name == "sinks"}
    return [split, _combine(make, call, {**parts, **sinks}, out.unsqueeze(2))]


def without_absent_features(call: KernelCall) -> KernelCall:
    """A call of attention without the parameters of a window, a soft cap or sinks that it does not have.

    Its source does not mention them then.
    """
    features = ("window", "soft_cap", "has_sinks")
    return replace(call, params={name: value for name, value in call.params.items() if value or name not in features})


def paged_inputs(call: KernelCall) -> dict[str, View]:
    """The inputs of a call of paged attention by name, without sinks if it has none."""
    return {name: view for name, view in KERNELS[call.kernel].inputs_of(call).items() if view is not None}


def keys_of_tile(call: KernelCall, tile_tokens: int) -> int:
    """Greatest number of keys that a tile of so many tokens of a sequence reads, in whole blocks of the pool."""
    block_size = int(call.params["block_size"])
    context = call.inputs[_TABLES].shape[1] * block_size
    window = call.params.get("window", 0)
    return min(context, (groups(window + tile_tokens - 1, block_size) + 1) * block_size) if window else context


def _paged_plain(make: Specializer, call: KernelCall, inputs: Mapping[str, View | None]) -> KernelCall:
    """The call of the plain kernel: a block computes `_SLICE` dimensions of the result of one token and head."""
    (tokens, heads, value_width), (out,) = (*call.inputs[0].shape[:2], call.inputs[2].shape[2]), call.outputs
    width = min(value_width, _SLICE)
    return make.kernel(
        call,
        "attention/paged.cu",
        function="paged_plain",
        inputs=inputs,
        outputs={"out": out},
        grid=(tokens * heads * groups(value_width, width), 1, 1),
        block=(_WARPS * WARP, 1, 1),
        constants={"slice": width, "sharing": 1, "tile_tokens": 1},
    )


def heads_together(heads: int, kv_heads: int) -> int:
    """Number of query heads that paged attention processes together, as rows of one tile; all use the same KV head."""
    per_kv_head = heads // kv_heads
    return next(size for size in range(min(per_kv_head, BLOCK_ROWS), 0, -1) if per_kv_head % size == 0)


def _paged_tokens(
    make: Specializer, call: KernelCall, inputs: dict[str, View | None], constants: Mapping[str, int], head_groups: int
) -> KernelCall:
    """The call of paged attention for decode, where most tiles have one token: a cluster of blocks shares its keys.

    The number and the size of the blocks are those that let the most warps run at a time. In a long context, at least
    two blocks share the keys of a tile, since one long sequence could keep the others waiting.
    """
    q, v = call.inputs[0], call.inputs[2]
    keys, tiles = keys_of_tile(call, constants["tile_tokens"]), q.shape[0] * head_groups
    team, least = team_warps(q.shape[2], v.shape[2]), 2 if keys > _LONG else 1

    def division(warps: int, resident: int) -> tuple[float, int, int, int]:
        """A division of each tile's keys among blocks of `warps` warps, `resident` of them per multiprocessor.

        Returns:
            The average number of warps per tile, which ranks divisions; blocks per tile; `warps`; `resident`.
        """
        splits, most = 1, min(_MOST_SHARERS, groups(keys, warps // team * BLOCK_KEYS))
        while 2 * splits <= most and (splits < least or tiles <= resident * CLUSTERS[2 * splits]):
            splits *= 2
        return warps * splits / groups(tiles, resident * CLUSTERS[splits]), splits, warps, resident

    _, splits, warps, resident = max((division(*each) for each in _PAGED_SHAPES), key=lambda shape: shape[0])
    while warps > team and _sharing_memory(q, v, warps, BLOCK_ROWS, _PAGED_STAGES) > memory_of_each(
        make.gpu.shared_memory, resident
    ):
        warps //= 2
    shared = _sharing_memory(q, v, warps, BLOCK_ROWS, _PAGED_STAGES)
    grid, constants = (head_groups, q.shape[0], splits), {**constants, "stages": _PAGED_STAGES}
    return _paged_shared(make, call, inputs, constants, grid, warps, shared, resident)


def _paged_pieces(
    make: Specializer, call: KernelCall, inputs: dict[str, View | None], constants: Mapping[str, int], head_groups: int
) -> KernelCall:
    """The call of paged attention for steps with prompts: a block computes a tile of several tokens of a sequence.

    Most tiles are full, so each warp of the block has rows of its own. A cluster of blocks shares the keys of a tile.

    Args:
        constants: Constants of the kernel's template.
        head_groups: Number of blocks that divide the heads of a tile.
    """
    q, v, tables = call.inputs[0], call.inputs[2], call.inputs[3]
    keys, rows = keys_of_tile(call, constants["tile_tokens"]), _WARPS * BLOCK_ROWS
    full = groups(q.shape[0], constants["tile_tokens"])
    least = 2 if keys > _LONG else 1
    most = min(_MOST_SHARERS, groups(keys, _WARPS * BLOCK_KEYS))
    splits = 1
    while 2 * splits <= most and (full * head_groups * splits < MULTIPROCESSORS or splits < least):
        splits *= 2
    grid = (head_groups, min(q.shape[0], full + tables.shape[0]), splits)
    shared = _sharing_memory(q, v, _WARPS, rows, _STAGES)
    return _paged_shared(make, call, inputs, constants, grid, _WARPS, shared, _MIN_BLOCKS)


def _paged_shared(
    make: Specializer,
    call: KernelCall,
    inputs: dict[str, View | None],
    constants: Mapping[str, int],
    grid: tuple[int, int, int],
    warps: int,
    shared: int,
    min_blocks: int,
) -> KernelCall:
    """The call of the paged kernel whose clusters of blocks lie along the grid's third dimension."""
    splits = grid[2]
    return make.kernel(
        call,
        "attention/paged.cu",
        function="paged_shared",
        inputs=inputs,
        outputs={"out": call.outputs[0]},
        grid=grid,
        block=(warps * WARP, 1, 1),
        shared=shared,
        constants={**constants, "splits": splits},
        min_blocks=min_blocks,
        cluster=splits,
    )


def _sharing_memory(q: View, v: View, warps: int, rows: int, stages: int) -> int:
    """Bytes of shared memory for the union `SplitMemory` of each warp, and for the largest `Part` in `paged.cu`."""
    return split_memory(BLOCK_ROWS, q.shape[2], v.shape[2], warps, stages) + 4 * rows * (2 + v.shape[2])


RULES: dict[str, Rule] = {
    "attention_kernel": _attention,
    "paged_attention_kernel": paged_attention,
}
