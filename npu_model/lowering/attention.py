"""Attention in tiles of queries and keys, with running maxima and sums.

T. Dao et al., "FlashAttention: Fast and Memory-Efficient Exact Attention with IO-Awareness", arXiv:2205.14135: the
scores of a tile of keys are turned into weights by the largest score so far; what was summed before is scaled when a
later tile has a larger one.
"""

from __future__ import annotations

from collections.abc import Iterator

from npu_model.chip import Chip
from npu_model.isa.instructions import ZERO, Affine, Axis, Role, Space
from npu_model.lowering.emitter import Emitter, Piece
from npu_model.lowering.families import Operands, Tiling, halvings, lowering, parts
from npu_model.lowering.products import need_matrix
from npu_model.lowering.vector_program import VectorProgram

_LOWEST = float("-inf")


def _tilings(o: Operands, chip: Chip) -> Iterator[Tiling]:
    need_matrix(chip, o.q.dtype)
    assert chip.matrix is not None
    sums = chip.matrix.accumulator_bytes // 4
    _, _, queries, _ = o.q.shape
    _, _, keys, width = o.v.shape
    for tk in halvings(keys, 16, 16)[:7]:
        for tq in halvings(queries, 8, 8)[:7]:
            if tq * (tk + width) <= sums:
                yield {"q": tq, "k": tk}


@lowering("attention_kernel", tilings=_tilings)
def attention(e: Emitter, o: Operands, tiling: Tiling) -> None:
    """out = softmax(scale · q·kᵀ + mask) · v; consecutive query heads share heads of keys and values."""
    batch, heads, queries, width = o.q.shape
    shared, keys, value_width = o.k.shape[1], o.k.shape[2], o.v.shape[3]
    tq, tk = tiling["q"], tiling["k"]
    with e.loop(batch) as b, e.loop(shared) as group, e.loop(heads // shared) as member:
        head = group * (heads // shared) + member
        with e.loop(parts(queries, tq)) as i:
            rows, wide = Axis(tq, i * tq, queries), Axis(value_width)
            q = e.load(o.q, [(b, 1), (head, 1), (i * tq, tq), (ZERO, width)], queue=0)
            largest = e.room((rows, 1), "float32")
            total = e.room((rows, 1), "float32")
            result = e.room((rows, wide), "float32")
            with e.loop(parts(keys, tk)) as part:
                begins = () if parts(keys, tk) == 1 else (e.depth - 1,)
                columns = Axis(tk, part * tk, keys)
                box = [(b, 1), (group, 1), (part * tk, tk)]
                k = e.load(o.k, [*box, (ZERO, width)], queue=1)
                v = e.load(o.v, [*box, (ZERO, value_width)], queue=1)
                scores = e.room((rows, columns), "float32", Space.ACCUMULATORS)
                e.multiply(
                    [(Role.ROW, rows), (Role.COLUMN, columns), (Role.SUM, Axis(width))],
                    (q, q.tile(2, None, 3)),
                    (k, k.tile(None, 2, 3)),
                    (scores, scores.tile(0, 1, None)),
                )
                mask = None
                if o.mask is not None:
                    mask = e.load(o.mask, [(b, 1), (head, 1), (i * tq, tq), (part * tk, tk)], queue=3)
                weights = e.room((rows, columns), o.q.dtype)
                scaling = e.room((rows, 1), "float32")
                _softmax(e, o, rows, columns, scores, mask, weights, scaling, largest, total, begins)
                products = e.room((rows, wide), "float32", Space.ACCUMULATORS)
                e.multiply(
                    [(Role.ROW, rows), (Role.COLUMN, wide), (Role.SUM, columns)],
                    (weights, weights.tile(0, None, 1)),
                    (v, v.tile(None, 3, 2)),
                    (products, products.tile(0, 1, None)),
                )
                _accumulate(e, rows, wide, products, scaling, result, begins)
            out_box = [(b, 1), (head, 1), (i * tq, tq), (ZERO, value_width)]
            out, is_stored = e.result(o.out, out_box)
            program = VectorProgram([rows, wide])
            value, sums = program.input(result, 0, 1), program.input(total, 0, None)
            value = program.op("true_divide", value, sums)
            value = program.op("where", program.op("eq", sums, 0.0), 0.0, value)  # no key was seen
            program.emit(e, [(value, out, (2, 3))])
            if is_stored:
                e.store(out, o.out, out_box)


def _softmax(
    e: Emitter,
    o: Operands,
    rows: Axis,
    columns: Axis,
    scores: Piece,
    mask: Piece | None,
    weights: Piece,
    scaling: Piece,
    largest: Piece,
    total: Piece,
    begins: tuple[int, ...],
) -> None:
    """Exponentials of a tile's scores less the largest so far, and the factor for the sums before."""
    program = VectorProgram([rows, columns])
    value = program.input(scores, 0, 1)
    allowed = None if mask is None else program.input(mask, 2, 3)
    before = program.carried(largest, _LOWEST, begins, 0, None)
    sums = program.carried(total, 0.0, begins, 0, None)
    value = program.op("mul", value, float(o.scale))
    if allowed is not None and mask is not None:
        if mask.dtype == "bool":
            value = program.op("where", allowed, value, _LOWEST)
        else:
            value = program.op("add", value, allowed)
    if o.causal:
        row = program.op("coordinate", attrs=(0,))
        column = program.op("coordinate", attrs=(1,))
        value = program.op("where", program.op("le", column, row), value, _LOWEST)
    now = program.op("maximum", before, program.op("max", value, attrs=(1,)))
    safe = program.op("where", program.op("eq", now, _LOWEST), 0.0, now)
    exponentials = program.op("exp", program.op("sub", value, safe))
    factor = program.op("exp", program.op("sub", before, safe))
    after = program.op("add", program.op("mul", sums, factor), program.op("sum", exponentials, attrs=(1,)))
    program.emit(
        e,
        [
            (exponentials, weights, (0, 1)),
            (factor, scaling, (0, None)),
            (now, largest, (0, None)),
            (after, total, (0, None)),
        ],
    )


def _accumulate(
    e: Emitter, rows: Axis, wide: Axis, products: Piece, scaling: Piece, result: Piece, begins: tuple[int, ...]
) -> None:
    program = VectorProgram([rows, wide])
    added, factor = program.input(products, 0, 1), program.input(scaling, 0, None)
    before = program.carried(result, 0.0, begins, 0, 1)
    program.emit(e, [(program.op("add", program.op("mul", before, factor), added), result, (0, 1))])


def _batched_tilings(o: Operands, chip: Chip) -> Iterator[Tiling]:
    need_matrix(chip, o.a.dtype)
    assert chip.matrix is not None
    sums = chip.matrix.accumulator_bytes // 4
    for tk in halvings(o.k, 64, chip.matrix.rows)[:5]:
        for tm in halvings(o.m, 8, 8)[:6]:
            for tn in halvings(o.n, chip.matrix.columns, chip.matrix.columns)[:6]:
                if tm * tn <= sums:
                    yield {"m": tm, "n": tn, "k": tk}


@lowering("batched_matmul_kernel", tilings=_batched_tilings)
def batched_matmul(e: Emitter, o: Operands, tiling: Tiling) -> None:
    """out[…, m, n] = scale · a[…, m, k] · b[…, k, n]."""
    lead = o.out.shape[:-2]
    if any(size != 1 for size in lead):
        _over_lead(e, o, tiling, lead, [])
    else:
        _one_product(e, o, tiling, [ZERO] * len(lead))


def _over_lead(e: Emitter, o: Operands, tiling: Tiling, lead: tuple[int, ...], counters: list[Affine]) -> None:
    if len(counters) == len(lead):
        _one_product(e, o, tiling, counters)
        return
    with e.loop(lead[len(counters)]) as counter:
        _over_lead(e, o, tiling, lead, [*counters, counter])


def _one_product(e: Emitter, o: Operands, tiling: Tiling, lead: list[Affine]) -> None:
    tm, tn, tk = tiling["m"], tiling["n"], tiling["k"]
    outside = [(counter, 1) for counter in lead]
    at = len(lead)
    whole_k = tk == o.k
    with e.loop(parts(o.m, tm)) as i:
        a = e.load(o.a, [*outside, (i * tm, tm), (ZERO, tk)], queue=0) if whole_k else None
        with e.loop(parts(o.n, tn)) as j:
            rows, columns = Axis(tm, i * tm, o.m), Axis(tn, j * tn, o.n)
            sums = e.room((rows, columns), "float32", Space.ACCUMULATORS)
            with e.loop(parts(o.k, tk)) as part:
                begins = None if whole_k else (e.depth - 1,)
                left = a or e.load(o.a, [*outside, (i * tm, tm), (part * tk, tk)], queue=0)
                right = e.load(o.b, [*outside, (part * tk, tk), (j * tn, tn)], queue=1)
                e.multiply(
                    [(Role.ROW, rows), (Role.COLUMN, columns), (Role.SUM, Axis(tk, part * tk, o.k))],
                    (left, left.tile(at, None, at + 1)),
                    (right, right.tile(None, at + 1, at)),
                    (sums, sums.tile(0, 1, None)),
                    begins=begins,
                )
            box = [*outside, (i * tm, tm), (j * tn, tn)]
            out, is_stored = e.result(o.out, box)
            program = VectorProgram([rows, columns])
            value = program.input(sums, 0, 1)
            if o.scale != 1.0:
                value = program.op("mul", value, float(o.scale))
            program.emit(e, [(value, out, (at, at + 1))], e.output_engine)
            if is_stored:
                e.store(out, o.out, box)


__all__ = ["attention", "batched_matmul"]
