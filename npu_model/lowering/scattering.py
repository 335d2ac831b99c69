"""Scatters: elements are written to their places by transfers, or combined there by the vector engine.

Transfers cannot combine data with the contents of their target. So with a reduction, the vector engine compares each
place of the result with all indices, and combines the elements whose index is equal.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

from npu_model.chip import Chip
from npu_model.isa.instructions import Axis
from npu_model.lowering.elementwise import copy
from npu_model.lowering.emitter import Emitter, Piece
from npu_model.lowering.families import CannotLower, Operands, Tiling, halvings, lowering, parts
from npu_model.lowering.indexing import MOST_PICKED, along, merged_behind_first, pick_box, replace_rows
from npu_model.lowering.tiles import Round, element_tilings, load_distinct, tile_shape, tiled
from npu_model.lowering.vector_program import VectorProgram

# Mode → reduction of the elements that name a place, and the op that joins two of them.
_JOINS = {
    "sum": ("sum", "add"),
    "mean": ("sum", "add"),
    "prod": ("product", "mul"),
    "amax": ("max", "maximum"),
    "amin": ("min", "minimum"),
}
_IDENTITIES = {"sum": 0.0, "mean": 0.0, "prod": 1.0, "amax": -math.inf, "amin": math.inf}


def _tilings(o: Operands, chip: Chip) -> Iterable[Tiling]:
    if o.reduce != "last":
        if "float" not in o.out.dtype:
            raise CannotLower(f"its vector engine joins floats, not {o.out.dtype}")
        return _joining_tilings(o)
    if o.base.dtype != o.out.dtype:
        raise CannotLower("its DMA engines do not change the dtype of what they copy")
    return element_tilings(o.out.numel)


def _joining_tilings(o: Operands) -> Iterator[Tiling]:
    for named in halvings(max(1, o.index.shape[-1]), 16)[:6]:
        for elements in halvings(max(1, o.out.numel), 16)[:8]:
            yield {"elements": elements, "named": named}


@lowering("scatter_kernel", tilings=_tilings)
def scatter(e: Emitter, o: Operands, tiling: Tiling) -> None:
    """out[…, index[…, k]] = source[…, k], the last of several, or all of them combined.

    Other elements are those of `base`.
    """
    if not o.source.numel or o.reduce == "last":
        copy(e, o.base, o.out, tiling["elements"])
    if o.source.numel:
        index, source, out, base = (along(view, view.rank - 1) for view in (o.index, o.source, o.out, o.base))
        if o.reduce == "last":
            replace_rows(e, index, source, out, tiling["elements"])
        else:
            out, base, index, source = merged_behind_first(out, base, index, source)
            count = index.shape[0]
            tile = tile_shape(out.shape, tiling["elements"], MOST_PICKED)
            with tiled(e, out.shape, tile, [base]) as turn:
                axes = [turn.axis(d) for d in range(len(tile))]
                state = e.room(axes, "float32"), e.room(axes, "float32")
                result, is_stored = e.result(out, turn.box)
                with e.loop(parts(count, tiling["named"])) as part:
                    begins = () if parts(count, tiling["named"]) == 1 else (e.depth - 1,)
                    box = [(part * tiling["named"], tiling["named"]), *turn.box[1:]]
                    places, values = load_distinct(e, index, box), load_distinct(e, source, box)
                    own = (Axis(box[0][1], box[0][0], count), *axes[1:])
                    pick_box(e, replace(base, shape=(count, *base.shape[1:])), own, places, base.shape[0])  # in range?
                    _join(e, o, turn, (places, values), state, result, begins)
                if is_stored:
                    e.store(result, out, turn.box)


def _join(
    e: Emitter,
    o: Operands,
    turn: Round,
    named: tuple[Piece, Piece],
    state: tuple[Piece, Piece],
    result: Piece,
    begins: tuple[int, ...],
) -> None:
    """Combine a tile of elements with the running values of each place, and store the result so far.

    Args:
        turn: The tile of the result; its only piece holds the values before.
        named: The places that elements name along dimension 0, and the elements.
        state: The running value and the number of elements of each place.
        result: The tile to store to.
        begins: Depths of the loops over elements; the state starts anew in their first iterations.
    """
    reduction, join = _JOINS[o.reduce]
    identity = _IDENTITIES[o.reduce]
    dims = [0, *(d for d in range(1, len(turn.box)) if turn.box[d][1] > 1)]
    last = len(dims)
    program = VectorProgram([*(turn.axis(d) for d in dims), named[0].axes[0]])
    base = program.input(turn.pieces[0], *dims, None)
    place, value = (program.input(piece, None, *dims[1:], 0) for piece in named)
    total = program.carried(state[0], identity, begins, *dims, None)
    count = program.carried(state[1], 0.0, begins, *dims, None)
    names = program.op("eq", place, program.op("coordinate", attrs=(0,)))
    joined = program.op(reduction, program.op("where", names, value, identity), attrs=(last,))
    total = program.op(join, total, joined)
    count = program.op("add", count, program.op("sum", program.op("where", names, 1.0, 0.0), attrs=(last,)))
    is_named = program.op("gt", count, 0.0)
    start = base if o.include_self else program.op("where", is_named, identity, base)
    out = program.op(join, start, total)
    if o.reduce == "mean":
        most = program.op("add", count, 1.0) if o.include_self else program.op("maximum", count, 1.0)
        out = program.op("true_divide", out, most)
    stores = [(total, state[0]), (count, state[1]), (out, result)]
    program.emit(e, [(register, piece, [*dims, None]) for register, piece in stores])
