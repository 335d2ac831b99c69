"""Sorting by ranks: an element's position is the number of elements before it, counted by the vector engine."""

from __future__ import annotations

from collections.abc import Iterator

from npu_model.chip import Chip
from npu_model.isa.instructions import Axis
from npu_model.lowering.elementwise import STORES
from npu_model.lowering.emitter import Emitter, Piece
from npu_model.lowering.families import Operands, Tiling, halvings, lowering, parts
from npu_model.lowering.indexing import MOST_PICKED, along, merged_behind_first
from npu_model.lowering.tiles import Round, as_float, load_distinct, tile_shape, tiled
from npu_model.lowering.vector_program import VectorProgram


def _tilings(o: Operands, chip: Chip) -> Iterator[Tiling]:
    for others in halvings(o.x.shape[-1], 16)[:6]:
        for elements in halvings(o.x.numel, 16)[:8]:
            yield {"elements": elements, "others": others}


@lowering("argsort_kernel", tilings=_tilings)
def argsort(e: Emitter, o: Operands, tiling: Tiling) -> None:
    """order[…, p] = index of the element that has p elements before it; the sort is stable."""
    if not o.x.numel:
        return
    x, order = merged_behind_first(*(along(view, view.rank - 1) for view in (o.x, o.order)))
    count = x.shape[0]
    tile = tile_shape(x.shape, tiling["elements"], MOST_PICKED)
    with tiled(e, x.shape, tile, [x]) as turn:
        axes = tuple(turn.axis(d) for d in range(len(tile)))
        before, places, numbers = (e.room(axes, dtype) for dtype in ("float32", "int32", "int32"))
        with e.loop(parts(count, tiling["others"])) as part:
            begins = () if parts(count, tiling["others"]) == 1 else (e.depth - 1,)
            own = [(part * tiling["others"], tiling["others"]), *turn.box[1:]]
            others = load_distinct(e, x, own)
            _count(e, turn, bool(o.descending), others, (before, places, numbers), begins, x.dtype)
        whole = e.whole(order, (Axis(axes[0].size), *axes[1:]))
        e.transfer(axes, numbers, whole, queue=STORES, index=places, index_limit=count, scatters=True)


def _count(
    e: Emitter,
    turn: Round,
    descending: bool,
    others: Piece,
    targets: tuple[Piece, Piece, Piece],
    begins: tuple[int, ...],
    dtype: str,
) -> None:
    """Count, for each element of a tile, those of `others` that come before it in the sorted order.

    Args:
        turn: The tile; its only piece holds the elements to sort, along dimension 0.
        others: Elements of the same rows to compare with.
        targets: The tiles to store to: the counts so far as float32, the same counts as int32, and the elements'
            indices along dimension 0 as int32.
        begins: Depths of the loops over `others`; the counts start at 0 in their first iterations.
        dtype: Dtype of the elements.
    """
    before, places, numbers = targets
    dims = [0, *(d for d in range(1, len(turn.box)) if turn.box[d][1] > 1)]
    last = len(dims)
    program = VectorProgram([*(turn.axis(d) for d in dims), others.axes[0]])
    own = program.input(turn.pieces[0], *dims, None)
    other = program.input(others, None, *dims[1:], 0)
    sums = program.carried(before, 0.0, begins, *dims, None)
    own, other = as_float(program, own, dtype), as_float(program, other, dtype)
    first, second = (own, other) if descending else (other, own)
    both = [program.op("ne", value, value) for value in (first, second)]  # NaN is the largest
    is_less = program.op("where", both[1], program.op("eq", both[0], 0.0), program.op("lt", first, second))
    same = program.op("logical_or", program.op("eq", own, other), program.op("logical_and", *both))
    number = program.op("coordinate", attrs=(0,))
    is_earlier = program.op("lt", program.op("coordinate", attrs=(last,)), number)
    comes_before = program.op("logical_or", is_less, program.op("logical_and", same, is_earlier))
    total = program.op("add", sums, program.op("sum", program.op("where", comes_before, 1.0, 0.0), attrs=(last,)))
    stores = [(total, before), (program.op("to_int", total), places), (number, numbers)]
    program.emit(e, [(register, piece, [*dims, None]) for register, piece in stores])
