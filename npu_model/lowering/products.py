"""Matrix products, of activations with a weight or batched: tiles of rows, columns and k, with an epilogue."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from functools import partial

from npu_compiler.graph.dtypes import itemsize
from npu_compiler.program.views import View
from npu_model.chip import Chip
from npu_model.isa.instructions import ZERO, Affine, Axis, Role, Space, Tile
from npu_model.lowering.emitter import Emitter, Piece
from npu_model.lowering.epilogues import first_rows, float_epilogue, gated_epilogue, integer_epilogue
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
from npu_model.lowering.tiles import Box
from npu_model.lowering.vector_program import VectorProgram

_MOST_TRIED = 6  # sizes along an axis


def need_matrix(chip: Chip, dtype: str) -> None:
    """Raise `CannotLower` if a chip has no matrix engine, or its matrix engine does not multiply a dtype."""
    if chip.matrix is None:
        raise CannotLower("it has no matrix engine")
    if dtype not in chip.matrix.rates:
        raise CannotLower(f"its matrix engine multiplies {', '.join(chip.matrix.rates)}, not {dtype}")


def product_tilings(
    m: int, n: int, k: int, chip: Chip, sizes: tuple[int, int] = (1, 1), staged: int = 0
) -> Iterable[Tiling | None]:
    """Tilings of a product, promising ones first. `rows_outer` is 1 if rows are the outer loop, 0 if columns are.

    Args:
        sizes: Bytes of an element of the left operand, and of the weight.
        staged: Bit mask of the operands that are loaded whole beforehand: 1 for the weight, 2 for the left operand.
    """
    return in_tiers(partial(_tiles, m, n, k, chip, sizes, staged, 1))


def _tiles(
    m: int, n: int, k: int, chip: Chip, sizes: tuple[int, int], staged: int, products: int, divisor: int
) -> list[Tiling]:
    """Tilings of `products` products computed together, those that load the fewest bytes first.

    For each number of rows, only the largest numbers of columns whose sums fit the accumulators are tried.
    """
    assert chip.matrix is not None
    sums, room = chip.matrix.accumulator_bytes // 4 // products, chip.sram.size // products
    rows, columns = chip.matrix.rows, chip.matrix.columns
    found: list[tuple[int, Tiling]] = []
    for tk in divided(halvings(k, 64, rows)[:_MOST_TRIED], divisor, rows):
        for tm in divided(halvings(m, 8, 8), divisor):
            fitting = [tn for tn in divided(halvings(n, columns, columns), divisor, columns) if tm * tn <= sums]
            for tn in fitting[:_MOST_TRIED]:
                if tk * (tm * sizes[0] + tn * sizes[1]) > room:
                    continue
                for rows_outer in (0, 1) if tm < m and tn < n else (0,):
                    left = 1 if staged & 2 or (rows_outer and tk == k) else parts(n, tn)
                    right = 1 if staged & 1 or (not rows_outer and tk == k) else parts(m, tm)
                    loads = m * left * sizes[0] + n * right * sizes[1]
                    found.append((loads, {"m": tm, "n": tn, "k": tk, "rows_outer": rows_outer, "staged": staged}))
    return [tiling for _, tiling in sorted(found, key=lambda each: each[0])]


def _tilings(o: Operands, chip: Chip) -> Iterable[Tiling | None]:
    need_matrix(chip, o.x.dtype)
    return _linear_tilings(o, chip)


def _linear_tilings(o: Operands, chip: Chip) -> Iterable[Tiling | None]:
    """Tilings of a product with a weight; with more than one row, operands that fit `staged_bytes` are loaded whole."""
    m, k = o.x.shape
    room, staged = chip.dma.staged_bytes, 0
    for bit, view in ((1, o.weight), (2, o.x)) if m > 1 else ():
        if (size := view.numel * itemsize(view.dtype)) <= room:
            room, staged = room - size, staged | bit
    return product_tilings(m, o.weight.shape[0], k, chip, (itemsize(o.x.dtype), itemsize(o.weight.dtype)), staged)


@lowering(
    "matmul_kernel",
    "matmul_notrans_kernel",
    "matmul_vec_kernel",
    "matmul_vec_notrans_kernel",
    tilings=_tilings,
    multiplies_weight=True,
)
def linear(e: Emitter, o: Operands, tiling: Tiling) -> None:
    """out[m, n] = act(x[m, k] · weight[n, k]ᵀ + bias) + residual."""
    _tiled(e, o, tiling)


def _integer_tilings(o: Operands, chip: Chip) -> Iterable[Tiling | None]:
    need_matrix(chip, "int8")
    return _linear_tilings(o, chip)


@lowering("integer_linear_kernel", tilings=_integer_tilings, multiplies_weight=True)
def integer_linear(e: Emitter, o: Operands, tiling: Tiling) -> None:
    """The product of integers: sums in int32, then scales, bias, residual, activation and requantization."""
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
    staged: dict[int, Piece] = {}
    for queue, view in enumerate((o.x, o.weight)):
        if tiling["staged"] & 2 >> queue:
            staged[queue] = e.load(view, [(ZERO, size) for size in view.shape], queue=queue)

    def side(queue: int, view: View, row: Affine, rows: int, part: Affine) -> Piece:
        box = [(row * rows, rows), (part * tk, tk)]
        return e.part(staged[queue], view, box) if queue in staged else e.load(view, box, queue=queue)

    with e.loop(outer) as first:
        kept: Piece | None = None
        if whole_k:
            kept = side(0, o.x, first, tm, ZERO) if tiling["rows_outer"] else side(1, o.weight, first, tn, ZERO)
        with e.loop(inner) as second:
            i, j = (first, second) if tiling["rows_outer"] else (second, first)
            rows, columns = Axis(tm, i * tm, m), Axis(tn, j * tn, n)
            sums = e.room((rows, columns), "int32" if is_integer else "float32", Space.ACCUMULATORS)
            with e.loop(parts(k, tk)) as part:
                begins = None if whole_k else (e.depth - 1,)
                x = kept if kept is not None and tiling["rows_outer"] else side(0, o.x, i, tm, part)
                w = kept if kept is not None and not tiling["rows_outer"] else side(1, o.weight, j, tn, part)
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


def _gated_tilings(o: Operands, chip: Chip) -> Iterable[Tiling | None]:
    need_matrix(chip, o.x.dtype)
    return product_tilings(1, o.n, o.k, chip)  # of one row, so that rows are never outside


@lowering("gated_matmul_vec_kernel", tilings=_gated_tilings, multiplies_weight=True)
def gated_linear(e: Emitter, o: Operands, tiling: Tiling) -> None:
    """out[1, n] = act(gate) · up, where [gate, up] = x[1, k] · weight[2n, k]ᵀ + bias."""
    tn, tk = tiling["n"], tiling["k"]
    with e.loop(parts(o.n, tn)) as j:
        columns = Axis(tn, j * tn, o.n)
        halves = []
        for first in first_rows(o):
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
    """Load the zero points of a weight's columns; None if the weight has none."""
    view = getattr(o.names, "weight_zeros", None)
    if view is None:
        return None
    piece = e.load(view, [(first, count)], queue=1)
    return piece, piece.tile(None, 0, None)


def _epilogue(e: Emitter, o: Operands, sums: Piece, rows: Axis, columns: Axis) -> None:
    """Emit the epilogue of a tile of results, for float or for integer sums, and store the tile."""
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


def _batched_tilings(o: Operands, chip: Chip) -> Iterable[Tiling | None]:
    need_matrix(chip, o.a.dtype)
    products = o.out.shape[-3] if len(o.out.shape) > 2 else 1
    sizes = itemsize(o.a.dtype), itemsize(o.b.dtype)

    def tiles(divisor: int) -> Iterator[Tiling]:
        for together in divided(halvings(products, 1), divisor):
            for tiling in _tiles(o.m, o.n, o.k, chip, sizes, 0, together, divisor):
                if not tiling["rows_outer"] or (tiling["m"] < o.m and tiling["k"] == o.k):
                    yield {**tiling, "together": together}

    return in_tiers(tiles)


@lowering("batched_matmul_kernel", tilings=_batched_tilings)
def batched_matmul(e: Emitter, o: Operands, tiling: Tiling) -> None:
    """out[…, m, n] = scale · a[…, m, k] · b[…, k, n].

    Several products along the last batch dimension are computed together.
    """
    with ExitStack() as loops:
        lead = [(loops.enter_context(e.loop(size)), 1) for size in o.out.shape[:-3]]
        if len(o.out.shape) > 2:
            together = tiling["together"]
            counter = loops.enter_context(e.loop(parts(o.out.shape[-3], together)))
            lead.append((counter * together, together))
        _products(e, o, tiling, lead)


def _products(e: Emitter, o: Operands, tiling: Tiling, lead: Box) -> None:
    tm, tn, tk = tiling["m"], tiling["n"], tiling["k"]
    at = len(lead)
    whole_k = tk == o.k
    batch = [Axis(lead[-1][1], lead[-1][0], o.out.shape[-3])] if lead else []
    own = [at - 1] if lead else []  # the dimension of products that are computed side by side

    def left_side(i: Affine, part: Affine) -> Piece:
        return e.load(o.a, [*lead, (i * tm, tm), (part * tk, tk)], queue=0)

    def right_side(j: Affine, part: Affine) -> Piece:
        return e.load(o.b, [*lead, (part * tk, tk), (j * tn, tn)], queue=1)

    outer, inner = parts(o.m, tm), parts(o.n, tn)
    by_columns = not tiling["rows_outer"] and whole_k
    if by_columns:
        outer, inner = inner, outer
    with e.loop(outer) as first:
        kept = (right_side(first, ZERO) if by_columns else left_side(first, ZERO)) if whole_k else None
        with e.loop(inner) as second:
            i, j = (second, first) if by_columns else (first, second)
            rows, columns = Axis(tm, i * tm, o.m), Axis(tn, j * tn, o.n)
            sums = e.room((*batch, rows, columns), "float32", Space.ACCUMULATORS)
            with e.loop(parts(o.k, tk)) as part:
                begins = None if whole_k else (e.depth - 1,)
                left = kept if kept is not None and not by_columns else left_side(i, part)
                right = kept if kept is not None and by_columns else right_side(j, part)
                axes = [*((Role.BATCH, axis) for axis in batch), (Role.ROW, rows), (Role.COLUMN, columns)]
                e.multiply(
                    [*axes, (Role.SUM, Axis(tk, part * tk, o.k))],
                    (left, left.tile(*own, at, None, at + 1)),
                    (right, right.tile(*own, None, at + 1, at)),
                    (sums, sums.tile(*range(len(sums.axes)), None)),
                    begins=begins,
                )
            box = [*lead, (i * tm, tm), (j * tn, tn)]
            out, is_stored = e.result(o.out, box)
            program = VectorProgram([*batch, rows, columns])
            value = program.input(sums, *range(len(sums.axes)))
            if o.scale != 1.0:
                value = program.op("mul", value, float(o.scale))
            program.emit(e, [(value, out, (*own, at, at + 1))], e.output_engine)
            if is_stored:
                e.store(out, o.out, box)
