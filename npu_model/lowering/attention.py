"""Attention in tiles of queries and keys, with running maxima and sums.

T. Dao et al., "FlashAttention: Fast and Memory-Efficient Exact Attention with IO-Awareness", arXiv:2205.14135: the
scores of a tile of keys are turned into weights by the largest score so far; what was summed before is scaled when a
later tile has a larger one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from npu_compiler.graph.code_formats import CODE_FORMATS
from npu_model.chip import Chip
from npu_model.isa.instructions import ZERO, Affine, Axis, Role, Space
from npu_model.lowering.emitter import Emitter, Piece
from npu_model.lowering.families import Operands, Tiling, divided, halvings, in_tiers, lowering, parts
from npu_model.lowering.products import need_matrix
from npu_model.lowering.vector_program import VectorProgram

_LOWEST = float("-inf")


def _tilings(o: Operands, chip: Chip) -> Iterator[Tiling | None]:
    need_matrix(chip, o.q.dtype)
    assert chip.matrix is not None
    sums = chip.matrix.accumulator_bytes // 4
    _, heads, queries, _ = o.q.shape
    _, shared, keys, width = o.v.shape
    members = heads // shared

    def tiles(divisor: int) -> Iterator[Tiling]:
        for together in dict.fromkeys((members, 1)):  # query heads that read one tile of keys and values
            for tk in divided(halvings(keys, 16, 16)[:7], divisor):
                for tq in divided(halvings(queries, 8, 8)[:7], divisor):
                    if together * tq * (tk + width) <= sums:
                        yield {"heads": together, "q": tq, "k": tk}

    return in_tiers(tiles)


@dataclass(frozen=True)
class _Tile:
    """The axes of a tile: query heads, queries, keys, and elements of a value; and where its keys begin anew."""

    heads: Axis
    queries: Axis
    keys: Axis
    wide: Axis
    begins: tuple[int, ...]


@lowering("attention_kernel", "quantized_attention_kernel", tilings=_tilings)
def attention(e: Emitter, o: Operands, tiling: Tiling) -> None:
    """out = softmax(scale · q·kᵀ + mask) · v; consecutive query heads share heads of keys and values.

    Keys and values that are stored as codes, with a scale for each row, become numbers tile by tile.
    """
    batch, heads, queries, width = o.q.shape
    shared, keys, value_width = o.k.shape[1], o.k.shape[2], o.v.shape[3]
    together, tq, tk = tiling["heads"], tiling["q"], tiling["k"]
    members = heads // shared
    with e.loop(batch) as b, e.loop(shared) as group, e.loop(members // together) as member:
        head = group * members + member * together
        with e.loop(parts(queries, tq)) as i:
            own, rows = Axis(together), Axis(tq, i * tq, queries)
            box = [(b, 1), (head, together), (i * tq, tq)]
            q = e.load(o.q, [*box, (ZERO, width)], queue=0)
            state = [e.room((own, rows, last), "float32") for last in (1, 1, value_width)]
            with e.loop(parts(keys, tk)) as part:
                begins = () if parts(keys, tk) == 1 else (e.depth - 1,)
                tile = _Tile(own, rows, Axis(tk, part * tk, keys), Axis(value_width), begins)
                of_keys = [(b, 1), (group, 1), (part * tk, tk)]
                k = _rows(e, o, "k", [*of_keys, (ZERO, width)])
                v = _rows(e, o, "v", [*of_keys, (ZERO, value_width)])
                mask = None if o.mask is None else e.load(o.mask, [*box, (part * tk, tk)], queue=3)
                _attend(e, o, tile, (q, k, v, mask), state)
            out_box = [*box, (ZERO, value_width)]
            out, is_stored = e.result(o.out, out_box)
            program = VectorProgram([own, rows, Axis(value_width)])
            value, sums = program.input(state[2], 0, 1, 2), program.input(state[1], 0, 1, None)
            value = program.op("true_divide", value, sums)
            value = program.op("where", program.op("eq", sums, 0.0), 0.0, value)  # no key was seen
            program.emit(e, [(value, out, (1, 2, 3))])
            if is_stored:
                e.store(out, o.out, out_box)


def _rows(e: Emitter, o: Operands, name: str, box: list[tuple[Affine, int]]) -> Piece:
    """Rows of the keys or values as they are multiplied."""
    piece = e.load(getattr(o, name), box, queue=1)
    scales = getattr(o.names, f"{name}_scales", None)
    if scales is None:
        return piece
    factors = e.load(scales, box[:3], queue=1)
    numbers = e.room(piece.axes, o.q.dtype)
    program = VectorProgram(piece.axes[2:])
    code, scale = program.input(piece, 2, 3), program.input(factors, 2, None)
    if CODE_FORMATS[o.format].is_float:
        value = program.op("from_float8", code)
    else:
        value = program.op("to_float", program.op("signed_byte", code))
    program.emit(e, [(program.op("mul", value, scale), numbers, (2, 3))])
    return numbers


def _attend(
    e: Emitter, o: Operands, tile: _Tile, operands: tuple[Piece, Piece, Piece, Piece | None], state: list[Piece]
) -> None:
    """Take a tile of keys and values into the state: the largest score, the sum of weights, the sum of values."""
    q, k, v, mask = operands
    scores = e.room((tile.heads, tile.queries, tile.keys), "float32", Space.ACCUMULATORS)
    e.multiply(
        [(Role.ROW, tile.heads), (Role.ROW, tile.queries), (Role.COLUMN, tile.keys), (Role.SUM, Axis(q.shape[3]))],
        (q, q.tile(1, 2, None, 3)),
        (k, k.tile(None, None, 2, 3)),
        (scores, scores.tile(0, 1, 2, None)),
    )
    weights = e.room((tile.heads, tile.queries, tile.keys), o.q.dtype)
    scaling = e.room((tile.heads, tile.queries, 1), "float32")
    _softmax(e, o, tile, (scores, mask), (weights, scaling), state)
    products = e.room((tile.heads, tile.queries, tile.wide), "float32", Space.ACCUMULATORS)
    e.multiply(
        [(Role.ROW, tile.heads), (Role.ROW, tile.queries), (Role.COLUMN, tile.wide), (Role.SUM, tile.keys)],
        (weights, weights.tile(0, 1, None, 2)),
        (v, v.tile(None, None, 3, 2)),
        (products, products.tile(0, 1, 2, None)),
    )
    program = VectorProgram([tile.heads, tile.queries, tile.wide])
    added, factor = program.input(products, 0, 1, 2), program.input(scaling, 0, 1, None)
    before = program.carried(state[2], 0.0, tile.begins, 0, 1, 2)
    program.emit(e, [(program.op("add", program.op("mul", before, factor), added), state[2], (0, 1, 2))])


def _softmax(
    e: Emitter,
    o: Operands,
    tile: _Tile,
    sources: tuple[Piece, Piece | None],
    targets: tuple[Piece, Piece],
    state: list[Piece],
) -> None:
    """Exponentials of a tile's scores less the largest so far, and the factor for the sums before."""
    (scores, mask), (weights, scaling), (largest, total, _) = sources, targets, state
    program = VectorProgram([tile.heads, tile.queries, tile.keys])
    value = program.input(scores, 0, 1, 2)
    allowed = None if mask is None else program.input(mask, 1, 2, 3)
    before = program.carried(largest, _LOWEST, tile.begins, 0, 1, None)
    sums = program.carried(total, 0.0, tile.begins, 0, 1, None)
    value = program.op("mul", value, float(o.scale))
    if allowed is not None and mask is not None:
        if mask.dtype == "bool":
            value = program.op("where", allowed, value, _LOWEST)
        else:
            value = program.op("add", value, allowed)
    if o.causal:
        row = program.op("coordinate", attrs=(1,))
        column = program.op("coordinate", attrs=(2,))
        value = program.op("where", program.op("le", column, row), value, _LOWEST)
    now = program.op("maximum", before, program.op("max", value, attrs=(2,)))
    safe = program.op("where", program.op("eq", now, _LOWEST), 0.0, now)
    exponentials = program.op("exp", program.op("sub", value, safe))
    factor = program.op("exp", program.op("sub", before, safe))
    after = program.op("add", program.op("mul", sums, factor), program.op("sum", exponentials, attrs=(2,)))
    program.emit(
        e,
        [
            (exponentials, weights, (0, 1, 2)),
            (factor, scaling, (0, 1, None)),
            (now, largest, (0, 1, None)),
            (after, total, (0, 1, None)),
        ],
    )
