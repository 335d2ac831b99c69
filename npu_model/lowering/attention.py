"""Attention kernels in tiles of queries and keys, with a running softmax.

T. Dao et al., "FlashAttention: Fast and Memory-Efficient Exact Attention with IO-Awareness", arXiv:2205.14135: the
scores of a tile of keys are exponentiated relative to the largest score so far; earlier sums are rescaled when a later
tile has a larger one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from npu_compiler.graph.code_formats import CODE_FORMATS
from npu_compiler.program.elementwise import ELEMENTWISE
from npu_compiler.program.views import View
from npu_model.chip import Chip
from npu_model.isa.instructions import ZERO, Affine, Axis, Role, Space, Tile
from npu_model.lowering.elementwise import need_functions
from npu_model.lowering.emitter import Emitter, Piece
from npu_model.lowering.families import Operands, Tiling, divided, halvings, in_tiers, lowering, parts
from npu_model.lowering.indexing import pick_box
from npu_model.lowering.products import need_matrix
from npu_model.lowering.vector_program import VectorProgram

_LOWEST = float("-inf")


def _need_engines(o: Operands, chip: Chip) -> None:
    """Check that the chip has a matrix engine and, if the scores have a soft cap, tanh on its vector engine."""
    need_matrix(chip, o.q.dtype)
    if o.soft_cap:
        need_functions(chip, ELEMENTWISE["tanh"], True)


def _tilings(o: Operands, chip: Chip) -> Iterable[Tiling | None]:
    _need_engines(o, chip)
    assert chip.matrix is not None
    sums = chip.matrix.accumulator_bytes // 4
    _, heads, queries, _ = o.q.shape
    _, shared, keys, width = o.v.shape
    members = heads // shared

    def tiles(divisor: int) -> list[Tiling]:
        found: list[tuple[int, int, Tiling]] = []
        # Query heads that read one tile of keys and values, and heads of keys and values.
        for together, groups in [*((members, groups) for groups in divided(halvings(shared, 1), divisor)), (1, 1)]:
            for tk in divided(halvings(keys, 16, 16)[:7], divisor):
                for tq in divided(halvings(queries, 8, 8)[:7], divisor):
                    if groups * together * tq * (tk + width) > sums:
                        continue
                    loads = parts(queries, tq) * (members // together)
                    rounds = loads * parts(keys, tk) * parts(shared, groups)
                    found.append((loads, rounds, {"groups": groups, "heads": together, "q": tq, "k": tk}))
        return [tiling for *_, tiling in sorted(found, key=lambda each: each[:2])]

    return in_tiers(tiles)


Own: TypeAlias = tuple[Axis, Axis, Axis]
"""The axes of a tile of queries: key/value heads, query heads for each of them, queries."""


@dataclass(frozen=True)
class _Part:
    """A half of a query tile, or all of one that cannot be halved.

    While the softmax of one half is computed, the matrix engine works on the other half.

    Attributes:
        own: Its axes: key/value heads, query heads for each of them, queries.
        at: Offset in the tile of its first element along each of these axes.
        members: Query heads of the tile for each key/value head.
        state: The running maximum of the scores, the sum of the weights and the weighted sum of the values.
    """

    own: Own
    at: tuple[int, int, int]
    members: int
    state: list[Piece]

    def by_heads(self, piece: Piece) -> Tile:
        """This half of an on-chip operand of shape [1, heads, queries, …]: along the axes of `own` and the last one."""
        _, head, query, last = piece.strides
        strides = (head * self.members, head, query)
        return piece.with_strides((*strides, last), sum(at * step for at, step in zip(self.at, strides, strict=True)))

    def by_groups(self, piece: Piece, *dims: int | None) -> Tile:
        """This half of an on-chip operand of shape [1, key/value heads, …], along these dimensions."""
        return piece.tile(*dims, offset=self.at[0] * piece.strides[1])


def _parts(own: Own) -> list[tuple[Own, tuple[int, int, int]]]:
    """Split a query tile with the axes `own` along the first one of even size; one part if all sizes are odd.

    Return the axes of each part, and its offset in the tile along each of them.
    """
    groups, heads, queries = own
    if groups.size % 2 == 0:
        return [((part, heads, queries), (at, 0, 0)) for part, at in _halves(groups)]
    if heads.size % 2 == 0:
        return [((groups, part, queries), (0, at, 0)) for part, at in _halves(heads)]
    if queries.size % 2 == 0:
        return [((groups, heads, part), (0, 0, at)) for part, at in _halves(queries)]
    return [(own, (0, 0, 0))]


def _halves(axis: Axis) -> list[tuple[Axis, int]]:
    half = axis.size // 2
    return [(Axis(half, axis.start + at, axis.total), at) for at in (0, half)]


@lowering("attention_kernel", "quantized_attention_kernel", tilings=_tilings)
def attention(e: Emitter, o: Operands, tiling: Tiling) -> None:
    """out = softmax(scale · q·kᵀ + mask) · v; consecutive query heads share a key/value head (grouped-query attention).

    Quantized keys and values, with a scale for each row, are dequantized tile by tile. A head's sink adds to the sum of
    its weights in the end.
    """
    batch, heads, queries, width = o.q.shape
    shared, keys, value_width = o.k.shape[1], o.k.shape[2], o.v.shape[3]
    groups, together, tq, tk = tiling["groups"], tiling["heads"], tiling["q"], tiling["k"]
    members = heads // shared
    with e.loop(batch) as b, e.loop(parts(shared, groups)) as group, e.loop(members // together) as member:
        head = group * (groups * members) + member * together
        with e.loop(parts(queries, tq)) as i:
            own = (Axis(groups, group * groups, shared), Axis(together), Axis(tq, i * tq, queries))
            box = [(b, 1), (head, groups * together), (i * tq, tq)]
            q = e.load(o.q, [*box, (ZERO, width)], queue=0)
            tiles = _tiles(e, own, together, value_width)
            with e.loop(parts(keys, tk)) as part:
                of_keys = [(b, 1), (group * groups, groups), (part * tk, tk)]
                k = _rows(e, o, "k", [*of_keys, (ZERO, width)])
                v = _rows(e, o, "v", [*of_keys, (ZERO, value_width)])
                mask = None if o.mask is None else e.load(o.mask, [*box, (part * tk, tk)], queue=3)
                axis = Axis(tk, part * tk, keys)
                begins = () if parts(keys, tk) == 1 else (e.depth - 1,)
                _attend(e, o, tiles, (q, k, v, mask), axis, begins)
            out_box = [*box, (ZERO, value_width)]
            if o.sinks is not None:
                _add_sinks(e, tiles, e.load(o.sinks, box[1:2], queue=3))
            out, is_stored = e.result(o.out, out_box)
            _divide(e, tiles, out)
            if is_stored:
                e.store(out, o.out, out_box)


def _paged_tilings(o: Operands, chip: Chip) -> Iterable[Tiling | None]:
    _need_engines(o, chip)
    assert chip.matrix is not None
    sums = chip.matrix.accumulator_bytes // 4
    heads, blocks = o.q.shape[1], o.tables.shape[1]
    _, shared, width = o.v.shape

    def tiles(divisor: int) -> Iterator[Tiling]:
        for groups in divided(halvings(shared, 1), divisor):
            for together in divided(halvings(blocks, 1)[:8], divisor):
                if groups * heads // shared * (together * o.block_size + width) <= sums:
                    yield {"groups": groups, "blocks": together}

    return in_tiers(tiles)


@lowering("paged_attention_kernel", tilings=_paged_tilings)
def paged_attention(e: Emitter, o: Operands, tiling: Tiling) -> None:
    """Paged attention: each token attends to its sequence's rows of a pool, in the blocks of a block table.

    DMA engines gather the block table of the token's sequence, then the rows of keys and values; the vector engine
    computes the row numbers and a mask of the keys up to the token's position, or of those in its window, though all
    are gathered. Out-of-range numbers are clamped. A head's sink adds to the sum of its weights in the end.
    """
    tokens, heads, width = o.q.shape
    rows, shared, value_width = o.v.shape
    (sequences, blocks), block = o.tables.shape, o.block_size
    groups, together = tiling["groups"], tiling["blocks"]
    members, keys = heads // shared, blocks * block
    with e.loop(tokens) as n:
        sequence, position = _within(e, o.sequences, n, sequences), _within(e, o.positions, n, keys)
        with e.loop(parts(shared, groups)) as group:
            of_groups = Axis(groups, group * groups, shared)
            box = [(n, 1), (group * (groups * members), groups * members)]
            q = _with_queries(e.load(o.q, [*box, (ZERO, width)], queue=0))
            tiles = _tiles(e, (of_groups, Axis(members), Axis(1)), members, value_width)
            with e.loop(parts(blocks, together)) as part:
                own = Axis(together, part * together, blocks)
                axis = Axis(together * block, part * (together * block), keys)
                places = _block_rows(e, o, pick_box(e, o.tables, (Axis(1), own), sequence, sequences), own, axis)
                k, v = (pick_box(e, view, (axis, of_groups, Axis(view.shape[2])), places, rows) for view in (o.k, o.v))
                mask = _up_to(e, position, axis, o.window)
                operands = q, _by_group(k), _by_group(v), mask.reshaped((Axis(1), Axis(1), Axis(1), axis), (0, 0, 0, 1))
                _attend(e, o, tiles, operands, axis, () if parts(blocks, together) == 1 else (e.depth - 1,))
            out_box = [*box, (ZERO, value_width)]
            if o.sinks is not None:
                _add_sinks(e, tiles, e.load(o.sinks, box[1:], queue=3))
            out, is_stored = e.result(o.out, out_box)
            _divide(e, tiles, _with_queries(out))
            if is_stored:
                e.store(out, o.out, out_box)


def _within(e: Emitter, view: View, at: Affine, count: int) -> Piece:
    """Load one element of an index vector, clamped to 0 … count − 1."""
    axes = (Axis(1, at, view.shape[0]),)
    piece, nearest = e.load(view, [(at, 1)], queue=3), e.room(axes, "int32")
    program = VectorProgram(axes)
    program.emit(e, [(_clamped(program, program.input(piece, 0), count), nearest, (0,))])
    return nearest.reshaped((Axis(1),), nearest.strides)


def _clamped(program: VectorProgram, value: int, count: int) -> int:
    return program.op("minimum", program.op("maximum", value, 0.0), float(count - 1))


def _block_rows(e: Emitter, o: Operands, table: Piece, blocks: Axis, keys: Axis) -> Piece:
    """Compute the numbers of the pool's rows in the blocks that `table`, a tile of a block table, names: [keys]."""
    block = o.block_size
    places = e.room((blocks, Axis(block)), "int32")
    program = VectorProgram((blocks, Axis(block)))
    first = program.op("mul", _clamped(program, program.input(table, 1, None), o.k.shape[0] // block), float(block))
    program.emit(e, [(program.op("add", first, program.op("coordinate", attrs=(1,))), places, (0, 1))])
    return places.reshaped((keys,), places.strides[1:])


def _up_to(e: Emitter, position: Piece, keys: Axis, window: int) -> Piece:
    """A mask of the keys whose position is at most that of the token: all, or with a `window` the last so many."""
    mask = e.room((keys,), "bool")
    program = VectorProgram((keys,))
    last, key = program.input(position, None), program.op("coordinate", attrs=(0,))
    seen = program.op("le", key, last)
    if window:
        seen = program.op("logical_and", seen, program.op("gt", program.op("add", key, float(window)), last))
    program.emit(e, [(seen, mask, (0,))])
    return mask


def _with_queries(piece: Piece) -> Piece:
    """Reshape a tile [1, heads, width] of one token to [1, heads, 1, width]."""
    (token, heads, width), (first, second, last) = piece.axes, piece.strides
    return piece.reshaped((token, heads, Axis(1), width), (first, second, 0, last))


def _by_group(piece: Piece) -> Piece:
    """Transpose a tile [keys, heads, width] to [1, heads, keys, width]."""
    (keys, heads, width), (first, second, last) = piece.axes, piece.strides
    return piece.reshaped((Axis(1), heads, keys, width), (0, second, first, last))


def _tiles(e: Emitter, own: Own, members: int, width: int) -> list[_Part]:
    """The halves of a query tile (see `_Part`), with memory for their running softmax."""
    return [
        _Part(axes, at, members, [e.room((*axes, last), "float32") for last in (1, 1, width)])
        for axes, at in _parts(own)
    ]


def _attend(
    e: Emitter,
    o: Operands,
    tiles: Sequence[_Part],
    operands: tuple[Piece, Piece, Piece, Piece | None],
    keys: Axis,
    begins: tuple[int, ...],
) -> None:
    """Process a tile of keys and values: update the running softmax of all halves of the query tile."""
    q, k, v, mask = operands
    scores = [_scores(e, tile, q, k, keys) for tile in tiles]
    weights = [_softmax(e, o, tile, each, mask, keys, begins) for tile, each in zip(tiles, scores, strict=True)]
    products = [_values(e, tile, each[0], v, keys) for tile, each in zip(tiles, weights, strict=True)]
    for tile, (_, scaling), added in zip(tiles, weights, products, strict=True):
        _add(e, tile, scaling, added, begins)


def _add_sinks(e: Emitter, tiles: Sequence[_Part], sinks: Piece) -> None:
    """Add the weight of each head's sink [heads] to the sums of weights, relative to the largest score of the keys."""
    (heads,), (step,) = sinks.axes, sinks.strides
    by_heads = sinks.reshaped((Axis(1), heads, Axis(1), Axis(1)), (0, step, 0, 0))
    for tile in tiles:
        program = VectorProgram([*tile.own, Axis(1)])
        sink = program.input_tile(by_heads, tile.by_heads(by_heads))
        largest, sums = (program.input(state, 0, 1, 2, None) for state in tile.state[:2])
        safe = program.op("where", program.op("eq", largest, _LOWEST), 0.0, largest)  # no key was seen
        weight = program.op("exp", program.op("sub", sink, safe))
        program.emit(e, [(program.op("add", sums, weight), tile.state[1], (0, 1, 2, None))])


def _divide(e: Emitter, tiles: Sequence[_Part], out: Piece) -> None:
    """Store the result: sums of values divided by sums of weights, or 0 for a query without any key."""
    for tile in tiles:
        program = VectorProgram([*tile.own, out.axes[3]])
        value, sums = program.input(tile.state[2], 0, 1, 2, 3), program.input(tile.state[1], 0, 1, 2, None)
        value = program.op("true_divide", value, sums)
        value = program.op("where", program.op("eq", sums, 0.0), 0.0, value)  # no key was seen
        program.emit_tiles(e, [(value, out, tile.by_heads(out))])


def _rows(e: Emitter, o: Operands, name: str, box: list[tuple[Affine, int]]) -> Piece:
    """Load rows of the keys or values, dequantized if they are stored as codes with scales."""
    piece = e.load(getattr(o, name), box, queue=1)
    scales = getattr(o.names, f"{name}_scales", None)
    if scales is None:
        return piece
    factors = e.load(scales, box[:3], queue=1)
    numbers = e.room(piece.axes, o.q.dtype)
    program = VectorProgram(piece.axes[1:])
    code, scale = program.input(piece, 1, 2, 3), program.input(factors, 1, 2, None)
    if CODE_FORMATS[o.format].is_float:
        value = program.op("from_float8", code)
    else:
        value = program.op("to_float", program.op("signed_byte", code))
    program.emit(e, [(program.op("mul", value, scale), numbers, (1, 2, 3))])
    return numbers


def _scores(e: Emitter, part: _Part, q: Piece, k: Piece, keys: Axis) -> Piece:
    """Scores of a half of the query tile: q·kᵀ for a tile of keys, in the accumulators."""
    scores = e.room((*part.own, keys), "float32", Space.ACCUMULATORS)
    query = part.by_heads(q)
    e.multiply(
        [*_roles(part), (Role.COLUMN, keys), (Role.SUM, Axis(q.shape[3]))],
        (q, replace(query, strides=(*query.strides[:3], 0, query.strides[3]))),
        (k, part.by_groups(k, 1, None, None, 2, 3)),
        (scores, scores.tile(0, 1, 2, 3, None)),
    )
    return scores


def _values(e: Emitter, part: _Part, weights: Piece, v: Piece, keys: Axis) -> Piece:
    """Values weighted by the softmax of a tile of keys: weights·v, in the accumulators."""
    wide = Axis(v.shape[3])
    products = e.room((*part.own, wide), "float32", Space.ACCUMULATORS)
    e.multiply(
        [*_roles(part), (Role.COLUMN, wide), (Role.SUM, keys)],
        (weights, weights.tile(0, 1, 2, None, 3)),
        (v, part.by_groups(v, 1, None, None, 3, 2)),
        (products, products.tile(0, 1, 2, 3, None)),
    )
    return products


def _roles(part: _Part) -> list[tuple[Role, Axis]]:
    return list(zip((Role.BATCH, Role.ROW, Role.ROW), part.own, strict=True))


def _add(e: Emitter, part: _Part, scaling: Piece, products: Piece, begins: tuple[int, ...]) -> None:
    """Rescale the running sums of values and add those of a tile."""
    sums = part.state[2]
    program = VectorProgram([*part.own, Axis(sums.shape[3])])
    added, factor = program.input(products, 0, 1, 2, 3), program.input(scaling, 0, 1, 2, None)
    before = program.carried(sums, 0.0, begins, 0, 1, 2, 3)
    program.emit(e, [(program.op("add", program.op("mul", before, factor), added), sums, (0, 1, 2, 3))])


def _softmax(
    e: Emitter, o: Operands, part: _Part, scores: Piece, mask: Piece | None, keys: Axis, begins: tuple[int, ...]
) -> tuple[Piece, Piece]:
    """Update the running maximum and sum of weights with a tile's scores.

    Returns the tile's weights (exponentials relative to the maximum), and the factor that rescales earlier sums.
    """
    largest, total, _ = part.state
    weights = e.room((*part.own, keys), o.q.dtype)
    scaling = e.room((*part.own, 1), "float32")
    program = VectorProgram([*part.own, keys])
    value = program.input(scores, 0, 1, 2, 3)
    allowed = None if mask is None else program.input_tile(mask, part.by_heads(mask))
    before = program.carried(largest, _LOWEST, begins, 0, 1, 2, None)
    sums = program.carried(total, 0.0, begins, 0, 1, 2, None)
    value = program.op("mul", value, float(o.scale))
    if o.soft_cap:
        value = program.op("mul", program.op("tanh", program.op("mul", value, 1.0 / o.soft_cap)), float(o.soft_cap))
    if allowed is not None and mask is not None:
        if mask.dtype == "bool":
            value = program.op("where", allowed, value, _LOWEST)
        else:
            value = program.op("add", value, allowed)
    if getattr(o.names, "causal", False):
        row = program.op("coordinate", attrs=(2,))
        column = program.op("coordinate", attrs=(3,))
        value = program.op("where", program.op("le", column, row), value, _LOWEST)
    now = program.op("maximum", before, program.op("max", value, attrs=(3,)))
    safe = program.op("where", program.op("eq", now, _LOWEST), 0.0, now)
    exponentials = program.op("exp", program.op("sub", value, safe))
    factor = program.op("exp", program.op("sub", before, safe))
    after = program.op("add", program.op("mul", sums, factor), program.op("sum", exponentials, attrs=(3,)))
    program.emit(
        e,
        [
            (exponentials, weights, (0, 1, 2, 3)),
            (factor, scaling, (0, 1, 2, None)),
            (now, largest, (0, 1, 2, None)),
            (after, total, (0, 1, 2, None)),
        ],
    )
    return weights, scaling
