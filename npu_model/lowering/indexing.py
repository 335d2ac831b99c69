"""Kernels that read or write elements by index tensors: gathers and scatters of the DMA engines."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from npu_compiler.graph.code_formats import CODE_FORMATS
from npu_compiler.program.views import View
from npu_model.chip import Chip
from npu_model.isa.instructions import Axis
from npu_model.lowering.elementwise import STORES
from npu_model.lowering.emitter import Emitter, Piece
from npu_model.lowering.families import Operands, Tiling, lowering
from npu_model.lowering.tiles import (
    Round,
    element_tilings,
    grouped,
    spread,
    tile_shape,
    tiled,
)
from npu_model.lowering.vector_program import VectorProgram

MOST_PICKED = 4  # axes of a transfer besides the one that the index chooses along


def _tilings(o: Operands, chip: Chip) -> Iterable[Tiling]:
    return element_tilings(max(view.numel for view in o.call.outputs))


def along(view: View, dim: int) -> View:
    """A view with dimension `dim` moved to the front."""
    return view.permute([dim, *(d for d in range(view.rank) if d != dim)])


def merged_behind_first(*views: View) -> list[View]:
    """Views of equal shape, with their dimensions other than the first merged where strides allow it."""
    order = sorted(range(1, views[0].rank), key=lambda d: -abs(views[0].strides[d]))
    merged, _ = grouped([order], *views)
    return [
        replace(each, shape=(view.shape[0], *each.shape), strides=(view.strides[0], *each.strides))
        for view, each in zip(views, merged, strict=True)
    ]


def pick(e: Emitter, source: View, index: View, out: View, elements: int) -> None:
    """out[i, j, …] = source[index[i, j, …], j, …].

    Args:
        source: Any size along its first dimension; the other sizes are those of `out`.
        index: A view of `out`'s shape, possibly broadcast (with strides of 0).
    """
    if not out.numel:
        return
    limit = source.shape[0]
    chosen, index = (replace(view, shape=out.shape) for view in (source, index))
    out, chosen, index = merged_behind_first(out, chosen, index)
    tile = tile_shape(out.shape, elements, MOST_PICKED)
    with tiled(e, out.shape, tile, [index]) as turn:
        (places,) = turn.pieces
        axes = tuple(turn.axis(d) for d in range(len(tile)))
        piece = pick_box(e, chosen, axes, places, limit)
        _store_as(e, turn, piece, out)


def pick_box(e: Emitter, chosen: View, axes: tuple[Axis, ...], places: Piece, limit: int) -> Piece:
    """Emit a gather into the scratchpad: tile[i, …] = chosen[places[i], …]; return the tile.

    Args:
        axes: The axes of the tile, the first of which runs over the indices.
        places: The indices, an on-chip tile.
        limit: Number of elements that an index may choose among.
    """
    target = e.room(axes, chosen.dtype)
    source = e.whole(chosen, (Axis(axes[0].size), *axes[1:]))
    e.transfer(axes, source, target, index=places, index_limit=limit)
    return target


def picked_rows(e: Emitter, table: View, rows: Axis, places: Piece) -> Piece:
    """Emit a gather of rows of a matrix: tile[i, :] = table[places[i], :]; return the tile.

    Args:
        rows: The axis of the tile's rows.
        places: The row numbers, an on-chip tile.
    """
    chosen = replace(table, shape=(rows.total, table.shape[1]))
    return pick_box(e, chosen, (rows, Axis(table.shape[1])), places, table.shape[0])


def _store_as(e: Emitter, turn: Round, piece: Piece, out: View) -> None:
    """Store an on-chip tile in its place in `out`, converted to the dtype of `out`."""
    if piece.dtype == out.dtype:
        e.store(piece, out, turn.box)
        return
    program = turn.program()
    turn.store(e, program, program.op("copy", program.input(piece, *turn.axes)), out)


@lowering("embedding_kernel", tilings=_tilings)
def embedding(e: Emitter, o: Operands, tiling: Tiling) -> None:
    """out[…, :] = table[ids[…], :]; dimensions of `ids` that cannot be merged into one are looped over."""
    if not o.out.numel:
        return
    last = o.ids.rank
    ids = spread(o.ids, o.out.shape, range(last))
    (out, ids), (count, _) = grouped([range(last), [last]], o.out, ids)
    _rows_of(e, o.table, ids, out, count, tiling["elements"])


def _rows_of(e: Emitter, table: View, ids: View, out: View, count: int, elements: int) -> None:
    """out[i…, j…] = table[ids[i…], j…] with `count` dimensions i, of which all but the last are looped over."""
    for_rows = tile_shape(out.shape[count - 1 :], elements, MOST_PICKED + 1)
    tile = (*[1] * (count - 1), *for_rows)
    with tiled(e, out.shape, tile, [ids]) as turn:
        (places,) = turn.pieces
        axes = tuple(turn.axis(d) for d in range(count - 1, len(tile)))
        own = replace(table, shape=(axes[0].total, *table.shape[1:]))
        picked = pick_box(e, own, axes, _last_axes(places, count - 1), table.shape[0])
        outer = [turn.axis(d) for d in range(count - 1)]
        piece = picked.reshaped((*outer, *picked.axes), (*[0] * len(outer), *picked.strides))
        _store_as(e, turn, piece, out)


def _last_axes(piece: Piece, first: int) -> Piece:
    """Drop the first axes of an on-chip tile, which have size 1."""
    return piece.reshaped(piece.axes[first:], piece.strides[first:])


@lowering("index_select_kernel", tilings=_tilings)
def index_select(e: Emitter, o: Operands, tiling: Tiling) -> None:
    """out[…, i, …] = x[…, index[i], …] along a dimension."""
    out = along(o.out, o.dim)
    pick(e, along(o.x, o.dim), spread(o.index, out.shape, [0]), out, tiling["elements"])


@lowering("gather_kernel", tilings=_tilings)
def gather(e: Emitter, o: Operands, tiling: Tiling) -> None:
    """out[…, i, …] = x[…, index[…, i, …], …] along `dim`; in other dimensions the index may be smaller than x."""
    out, index, x = (along(view, o.dim) for view in (o.out, o.index, o.x))
    pick(e, x, index, out, tiling["elements"])


@lowering("index_kernel", tilings=_tilings)
def index(e: Emitter, o: Operands, tiling: Tiling) -> None:
    """Advanced indexing of adjacent dimensions by several index tensors; negative indices count from the end.

    The vector engine combines the indices into one linear offset, or -1 if one is out of range, which the transfer then
    reports as an error.
    """
    if not o.out.numel:
        return
    first, count = o.first, o.count
    indices = [getattr(o, f"index{i}") for i in range(count)]
    chosen = range(first, first + count)
    spread_rank = indices[0].rank
    behind = first + spread_rank
    # The dimensions of the index come first; those before and behind stay as they are.
    order = [*range(first, behind), *range(first), *range(behind, o.out.rank)]
    others = [d for d in range(o.x.rank) if d not in chosen]
    out = o.out.permute(order)
    wide = [spread(view, out.shape, range(spread_rank)) for view in indices]
    rest = replace(
        o.x,
        shape=out.shape,
        strides=(*[0] * spread_rank, *(o.x.strides[d] for d in others)),
    )
    (out, rest, *wide), (places, _) = grouped([range(spread_rank), range(spread_rank, out.rank)], out, rest, *wide)
    sizes, strides = ([values[d] for d in chosen] for values in (o.x.shape, o.x.strides))
    tile = (*[1] * (places - 1), *tile_shape(out.shape[places - 1 :], tiling["elements"], MOST_PICKED + 1))
    with tiled(e, out.shape, tile, wide) as turn:
        list_axis = turn.axis(places - 1)
        flat = _flat_index(e, turn, places - 1, sizes, strides)
        axes = (list_axis, *(turn.axis(d) for d in range(places, len(tile))))
        limit = sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True)) + 1
        step = 1
        if len(sizes) == 1:
            limit, step = sizes[0], strides[0]
        own = replace(rest, shape=(list_axis.total, *rest.shape[places:]), strides=(step, *rest.strides[places:]))
        picked = pick_box(e, own, axes, flat, limit)
        outer = [turn.axis(d) for d in range(places - 1)]
        _store_as(e, turn, picked.reshaped((*outer, *picked.axes), (*[0] * len(outer), *picked.strides)), out)


def _flat_index(e: Emitter, turn: Round, d: int, sizes: Sequence[int], strides: Sequence[int]) -> Piece:
    """The linear offset of loaded tiles of the index tensors along dimension `d`.

    With one tensor, its index without strides.
    """
    own = Round([turn.box[d]], (turn.sizes[d],))
    program = own.program()
    registers = [program.input(piece, d) for piece in turn.pieces]
    total: int | None = None
    wrong: int | None = None
    for register, size, stride in zip(registers, sizes, strides, strict=True):
        place = program.op("where", program.op("lt", register, 0.0), program.op("add", register, float(size)), register)
        outside = program.op("logical_or", program.op("lt", place, 0.0), program.op("ge", place, float(size)))
        wrong = outside if wrong is None else program.op("logical_or", wrong, outside)
        distance = place if len(sizes) == 1 else program.op("mul", place, float(stride))
        total = distance if total is None else program.op("add", total, distance)
    assert total is not None and wrong is not None
    flat = e.room([own.axis(0)], "int32")
    value = total if len(sizes) == 1 else program.op("where", wrong, -1.0, total)
    program.emit(e, [(value, flat, own.axes)])
    return flat


@lowering("index_copy_kernel", "index_copy_pair_kernel", tilings=_tilings)
def index_copy(e: Emitter, o: Operands, tiling: Tiling) -> None:
    """out[…, index[i], …] = source[…, i, …] in place, for each pair of source and out."""
    pairs = [(o.source, o.out)] if o.call.kernel == "index_copy_kernel" else [(o.source0, o.out0), (o.source1, o.out1)]
    for source, out in pairs:
        if source.numel:
            rows = along(source, o.dim)
            places = spread(o.index, rows.shape, range(o.index.rank))
            replace_rows(e, places, rows, along(out, o.dim), tiling["elements"])


def _rounding_tilings(o: Operands, chip: Chip) -> Iterable[Tiling]:
    return element_tilings(o.source.numel, max(32, o.source.shape[3]))


@lowering("quantized_index_copy_kernel", tilings=_rounding_tilings)
def quantized_index_copy(e: Emitter, o: Operands, tiling: Tiling) -> None:
    """Quantize rows of `source` and write them in place: codes[…, index[i], :] and scales[…, index[i]]."""
    if not o.source.numel:
        return
    source, codes, scales = (along(view, 2) for view in (o.source, o.codes, o.scales))
    limit = codes.shape[0]
    codes, scales = replace(codes, shape=source.shape), replace(scales, shape=source.shape[:3])
    tile = tile_shape(source.shape, max(tiling["elements"], source.shape[3]), MOST_PICKED)
    with tiled(e, source.shape, tile, [source, spread(o.index, source.shape, [0])]) as turn:
        piece, rows = turn.pieces
        axes = tuple(turn.axis(d) for d in range(4))
        row_axes = (*axes[:3], Axis(1))
        places = [e.room(axes, "uint8"), e.room(row_axes, "float32")]
        program = turn.program()
        code, scale = _rounded(program, program.input(piece, *turn.axes), o.format, turn.axes)
        along_rows = [None if d == 3 else d for d in turn.axes]
        program.emit(e, [(code, places[0], turn.axes), (scale, places[1], along_rows)])
        for stored, view in zip(places, (codes, scales), strict=True):
            own = axes[: view.rank]
            picks = rows.reshaped(own, rows.strides[: view.rank])
            moved = stored.reshaped(own, stored.strides[: view.rank])
            whole = e.whole(view, (Axis(own[0].size), *own[1:]))
            e.transfer(own, moved, whole, queue=STORES, index=picks, index_limit=limit, scatters=True)


def _rounded(program: VectorProgram, value: int, codes: str, axes: Sequence[int]) -> tuple[int, int]:
    """Quantize rows along the fourth dimension to bytes, as `quantize_rows` does.

    Return the registers of codes and scales.
    """
    kind = CODE_FORMATS[codes]
    largest = program.op("abs", value)
    if 3 in axes:
        largest = program.op("max", largest, attrs=(axes.index(3),))
    finite = program.op("lt", largest, math.inf)
    scale = program.op("true_divide", largest, float(kind.largest))
    scale = program.op("where", program.op("lt", scale, float(np.finfo(np.float32).tiny)), 0.0, scale)
    inverse = program.op("where", program.op("gt", scale, 0.0), program.op("true_divide", 1.0, scale), 0.0)
    scaled = program.op("mul", program.op("where", finite, value, 0.0), program.op("where", finite, inverse, 0.0))
    if kind.is_float:
        code = program.op("float8_bits", scaled)
    else:
        code = program.op("bits", program.op("round", scaled), attrs=(0, 255))
    return code, program.op("where", finite, scale, program.op("sub", largest, largest))  # else NaN


def replace_rows(e: Emitter, places: View, source: View, out: View, elements: int) -> None:
    """out[places[i, j, …], j, …] = source[i, j, …]."""
    limit = out.shape[0]
    target = replace(out, shape=source.shape)
    source, target, places = merged_behind_first(source, target, places)
    tile = tile_shape(source.shape, elements, MOST_PICKED)
    with tiled(e, source.shape, tile, [source, places]) as turn:
        piece, rows = turn.pieces
        axes = tuple(turn.axis(d) for d in range(len(tile)))
        piece = _converted(e, turn, piece, target.dtype)
        whole = e.whole(target, (Axis(axes[0].size), *axes[1:]))
        e.transfer(axes, piece, whole, queue=STORES, index=rows, index_limit=limit, scatters=True)


def _converted(e: Emitter, turn: Round, piece: Piece, dtype: str) -> Piece:
    """Convert an on-chip tile to another dtype; unchanged if it has it already."""
    if piece.dtype == dtype:
        return piece
    program = turn.program()
    target = e.room([turn.axis(d) for d in range(len(turn.box))], dtype)
    program.emit(e, [(program.op("copy", program.input(piece, *turn.axes)), target, turn.axes)])
    return target
