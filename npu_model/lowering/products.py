"""Matrix products, with a weight or of batches: tiles of rows, columns and k, and an epilogue on the output stage."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from npu_compiler.program.views import View
from npu_model.chip import Chip
from npu_model.isa.instructions import ZERO, Affine, Axis, Role, Space, Tile
from npu_model.lowering.emitter import Emitter, Piece
from npu_model.lowering.epilogues import float_epilogue, gated_epilogue, integer_epilogue
from npu_model.lowering.families import (
    CannotLower,
    Operands,
    Tiling,
    divided,
    halvings,
    in_tiers,
    lowering,
    parts,
)
from npu_model.lowering.vector_program import VectorProgram

_MOST_TRIED = 6  # sizes along an axis


def need_matrix(chip: Chip, dtype: str) -> None:
    """Raise `CannotLower` where a chip multiplies no matrices of a dtype."""
    if chip.matrix is None:
        raise CannotLower("it has no matrix engine")
    if dtype not in chip.matrix.rates:
        raise CannotLower(f"its matrix engine multiplies {', '.join(chip.matrix.rates)}, not {dtype}")


def product_tilings(m: int, n: int, k: int, chip: Chip) -> Iterator[Tiling | None]:
    """Tile sizes of a product and what stays while the other side is loaded again (`rows_outer`)."""
    return in_tiers(partial(_tiles, m, n, k, chip))


def _tiles(m: int, n: int, k: int, chip: Chip, divisor: int) -> Iterator[Tiling]:
    assert chip.matrix is not None
    sums = chip.matrix.accumulator_bytes // 4
    rows, columns = chip.matrix.rows, chip.matrix.columns
    for tk in divided(halvings(k, 64, rows)[:_MOST_TRIED], divisor, rows):
        for tm in divided(halvings(m, 8, 8)[:_MOST_TRIED], divisor):
            for tn in divided(halvings(n, columns, columns)[:_MOST_TRIED], divisor, columns):
                if tm * tn > sums:
                    continue
                orders = (0, 1) if tm < m and tn < n else (0,)
                for rows_outer in orders:
                    yield {"m": tm, "n": tn, "k": tk, "rows_outer": rows_outer}


def _tilings(o: Operands, chip: Chip) -> Iterator[Tiling | None]:
    need_matrix(chip, o.x.dtype)
    return product_tilings(o.m, o.n, o.k, chip)


@lowering("matmul_kernel", "matmul_notrans_kernel", "matmul_vec_kernel", "matmul_vec_notrans_kernel", tilings=_tilings)
def linear(e: Emitter, o: Operands, tiling: Tiling) -> None:
    """out[m, n] = act(x[m, k] · weight[n, k]ᵀ + bias) + residual."""
    _tiled(e, o, tiling)


def _integer_tilings(o: Operands, chip: Chip) -> Iterator[Tiling | None]:
    need_matrix(chip, "int8")
    return product_tilings(o.x.shape[0], o.weight.shape[0], o.x.shape[1], chip)


@lowering("integer_linear_kernel", tilings=_integer_tilings)
def integer_linear(e: Emitter, o: Operands, tiling: Tiling) -> None:
    """The product of codes: sums in int32, then scales, bias, residual, activation and rounding to codes."""
    _tiled(e, o, tiling)


def _tiled(e: Emitter, o: Operands, tiling: Tiling) -> None:
    m, k = o.x.shape
    n = o.weight.shape[0]
    is_integer = o.x.dtype in ("int8", "uint8")
    tm, tn, tk = tiling["m"], tiling["n"], tiling["k"]
    outer, inner = parts(n, tn), parts(m, tm)
    if tiling["rows_outer"]:
        outer, inner = inner, outer
    whole_k = tk == k
    with e.loop(outer) as first:
        kept: Piece | None = None
        if whole_k:
            kept = (
                _side(e, o.x, first, tm, Affine(), tk, 0)
                if tiling["rows_outer"]
                else _side(e, o.weight, first, tn, Affine(), tk, 1)
            )
        with e.loop(inner) as second:
            i, j = (first, second) if tiling["rows_outer"] else (second, first)
            rows, columns = Axis(tm, i * tm, m), Axis(tn, j * tn, n)
            sums = e.room((rows, columns), "int32" if is_integer else "float32", Space.ACCUMULATORS)
            with e.loop(parts(k, tk)) as part:
                begins = None if whole_k else (e.depth - 1,)
                x = kept if kept is not None and tiling["rows_outer"] else _side(e, o.x, i, tm, part, tk, 0)
                w = kept if kept is not None and not tiling["rows_outer"] else _side(e, o.weight, j, tn, part, tk, 1)
                e.multiply(
                    [(Role.ROW, rows), (Role.COLUMN, columns), (Role.SUM, Axis(tk, part * tk, k))],
                    (x, x.tile(0, None, 1)),
                    (w, w.tile(None, 0, 1)),
                    (sums, sums.tile(0, 1, None)),
                    begins=begins,
                    left_zero=o.zero_point if is_integer else 0,
                    right_zeros=_zeros(e, o, j * tn, tn),
                )
            _epilogue(e, o, sums, rows, columns)


def _gated_tilings(o: Operands, chip: Chip) -> Iterator[Tiling | None]:
    need_matrix(chip, o.x.dtype)
    return product_tilings(1, o.n, o.k, chip)  # of one row, so that rows are never outside


@lowering("gated_matmul_vec_kernel", tilings=_gated_tilings)
def gated_linear(e: Emitter, o: Operands, tiling: Tiling) -> None:
    """out[1, n] = act(gate) · up, where [gate, up] = x[1, k] · weight[2n, k]ᵀ + bias."""
    tn, tk = tiling["n"], tiling["k"]
    with e.loop(parts(o.n, tn)) as j:
        columns = Axis(tn, j * tn, o.n)
        halves = []
        for first in (0, o.n):
            sums = e.room((Axis(1), columns), "float32", Space.ACCUMULATORS)
            with e.loop(parts(o.k, tk)) as part:
                begins = None if tk == o.k else (e.depth - 1,)
                x = e.load(o.x, [(ZERO, 1), (part * tk, tk)], queue=0)
                w = e.load(o.weight, [(j * tn + first, tn), (part * tk, tk)], queue=1)
                e.multiply(
                    [(Role.ROW, Axis(1)), (Role.COLUMN, columns), (Role.SUM, Axis(tk, part * tk, o.k))],
                    (x, x.tile(0, None, 1)),
                    (w, w.tile(None, 0, 1)),
                    (sums, sums.tile(0, 1, None)),
                    begins=begins,
                )
            halves.append(sums)
        gated_epilogue(e, o, columns, halves)


def _zeros(e: Emitter, o: Operands, first: Affine, count: int) -> tuple[Piece, Tile] | None:
    """The zero points of a weight's columns, where it has them."""
    view = getattr(o.names, "weight_zeros", None)
    if view is None:
        return None
    piece = e.load(view, [(first, count)], queue=1)
    return piece, piece.tile(None, 0, None)


def _side(e: Emitter, view: View, row: Affine, rows: int, part: Affine, k: int, queue: int) -> Piece:
    return e.load(view, [(row * rows, rows), (part * k, k)], queue=queue)


def _epilogue(e: Emitter, o: Operands, sums: Piece, rows: Axis, columns: Axis) -> None:
    """Emit the epilogue of a tile: bias, activation and residual, or those of an integer product."""
    box = [(rows.start, rows.size), (columns.start, columns.size)]

    def by_column(view: View | None) -> tuple[Piece, tuple[int | None, ...]] | None:
        return None if view is None else (e.load(view, box[1:], queue=1), (None, 0))

    bias = by_column(o.bias)
    scales = by_column(o.scales) if sums.dtype == "int32" else None
    residual = None if o.residual is None else (e.load(o.residual, box, queue=3), (0, 1))
    out, is_stored = e.result(o.out, box)
    axes, own, target = (rows, columns), (sums, (0, 1)), (out, (0, 1))
    if scales is not None:
        integer_epilogue(e, o, axes, own, scales, bias, residual, target)
    else:
        float_epilogue(e, o, axes, own, bias, residual, target, residual_first=False)
    if is_stored:
        e.store(out, o.out, box)


def _batched_tilings(o: Operands, chip: Chip) -> Iterator[Tiling | None]:
    need_matrix(chip, o.a.dtype)
    assert chip.matrix is not None
    sums = chip.matrix.accumulator_bytes // 4
    rows, columns = chip.matrix.rows, chip.matrix.columns

    def tiles(divisor: int) -> Iterator[Tiling]:
        for tk in divided(halvings(o.k, 64, rows)[:5], divisor, rows):
            for tm in divided(halvings(o.m, 8, 8)[:6], divisor):
                for tn in divided(halvings(o.n, columns, columns)[:6], divisor, columns):
                    if tm * tn <= sums:
                        yield {"m": tm, "n": tn, "k": tk}

    return in_tiers(tiles)


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
