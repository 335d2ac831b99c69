"""Matrix products with a weight: tiles of rows, columns and k, and an epilogue on the output stage."""

from __future__ import annotations

from collections.abc import Iterator

from npu_compiler.program.views import View
from npu_model.chip import Chip
from npu_model.isa.instructions import Affine, Axis, Role, Space
from npu_model.lowering.emitter import Emitter, Piece
from npu_model.lowering.families import CannotLower, Operands, Tiling, halvings, lowering, parts
from npu_model.lowering.vector_program import VectorProgram

_MOST_TRIED = 6  # sizes along an axis


def need_matrix(chip: Chip, dtype: str) -> None:
    """Raise `CannotLower` where a chip multiplies no matrices of a dtype."""
    if chip.matrix is None:
        raise CannotLower("it has no matrix engine")
    if dtype not in chip.matrix.rates:
        raise CannotLower(f"its matrix engine multiplies {', '.join(chip.matrix.rates)}, not {dtype}")


def product_tilings(m: int, n: int, k: int, chip: Chip) -> Iterator[dict[str, int]]:
    """Tile sizes of a product and what stays while the other side is loaded again (`rows_outer`)."""
    assert chip.matrix is not None
    sums = chip.matrix.accumulator_bytes // 4
    for tk in halvings(k, 64, chip.matrix.rows)[:_MOST_TRIED]:
        for tm in halvings(m, 8, 8)[:_MOST_TRIED]:
            for tn in halvings(n, chip.matrix.columns, chip.matrix.columns)[:_MOST_TRIED]:
                if tm * tn > sums:
                    continue
                orders = (0, 1) if tm < m and tn < n else (0,)
                for rows_outer in orders:
                    yield {"m": tm, "n": tn, "k": tk, "rows_outer": rows_outer}


def _tilings(o: Operands, chip: Chip) -> Iterator[Tiling]:
    need_matrix(chip, o.x.dtype)
    return product_tilings(o.m, o.n, o.k, chip)


@lowering(
    "matmul_kernel", "matmul_notrans_kernel", "matmul_vec_kernel", "matmul_vec_notrans_kernel", tilings=_tilings
)
def linear(e: Emitter, o: Operands, tiling: Tiling) -> None:
    """out[m, n] = act(x[m, k] · weight[n, k]ᵀ + bias) + residual."""
    tm, tn, tk = tiling["m"], tiling["n"], tiling["k"]
    outer, inner = parts(o.n, tn), parts(o.m, tm)
    if tiling["rows_outer"]:
        outer, inner = inner, outer
    whole_k = tk == o.k
    with e.loop(outer) as first:
        kept: Piece | None = None
        if whole_k:
            kept = _side(e, o.x, first, tm, Affine(), tk, 0) if tiling["rows_outer"] else _side(
                e, o.weight, first, tn, Affine(), tk, 1
            )
        with e.loop(inner) as second:
            i, j = (first, second) if tiling["rows_outer"] else (second, first)
            rows, columns = Axis(tm, i * tm, o.m), Axis(tn, j * tn, o.n)
            sums = e.room((rows, columns), "float32", Space.ACCUMULATORS)
            with e.loop(parts(o.k, tk)) as part:
                begins = None if whole_k else (e.depth - 1,)
                x = kept if kept is not None and tiling["rows_outer"] else _side(e, o.x, i, tm, part, tk, 0)
                w = kept if kept is not None and not tiling["rows_outer"] else _side(e, o.weight, j, tn, part, tk, 1)
                e.multiply(
                    [(Role.ROW, rows), (Role.COLUMN, columns), (Role.SUM, Axis(tk, part * tk, o.k))],
                    (x, x.tile(0, None, 1)),
                    (w, w.tile(None, 0, 1)),
                    (sums, sums.tile(0, 1, None)),
                    begins=begins,
                )
            _epilogue(e, o, sums, rows, columns)


def _side(e: Emitter, view: View, row: Affine, rows: int, part: Affine, k: int, queue: int) -> Piece:
    return e.load(view, [(row * rows, rows), (part * k, k)], queue=queue)


def _epilogue(e: Emitter, o: Operands, sums: Piece, rows: Axis, columns: Axis) -> None:
    """out = act(sums + bias) + residual, for a tile."""
    box = [(rows.start, rows.size), (columns.start, columns.size)]
    bias = None if o.bias is None else e.load(o.bias, box[1:], queue=1)
    residual = None if o.residual is None else e.load(o.residual, box, queue=3)
    program = VectorProgram([rows, columns])
    value = program.input(sums, 0, 1)
    added = None if bias is None else program.input(bias, None, 0)
    last = None if residual is None else program.input(residual, 0, 1)
    if added is not None:
        value = program.op("add", value, added)
    value = program.activation(value, o.activation)
    if last is not None:
        value = program.op("add", value, last)
    out, is_stored = e.result(o.out, box)
    program.emit(e, [(value, out, (0, 1))], e.output_engine)
    if is_stored:
        e.store(out, o.out, box)
