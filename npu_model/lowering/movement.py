"""Kernels that create and rearrange elements: fill, arange, pad, flip, triu and tril, nearest upsampling."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from npu_compiler.graph.dtypes import is_float
from npu_compiler.program.views import View
from npu_model.chip import Chip
from npu_model.lowering.elementwise import copy
from npu_model.lowering.emitter import Emitter
from npu_model.lowering.families import Operands, Tiling, lowering
from npu_model.lowering.tiles import Round, element_tilings, grouped, merged, tile_shape, tiled
from npu_model.lowering.vector_program import VectorProgram


def _tilings(o: Operands, chip: Chip) -> Iterable[Tiling]:
    return element_tilings(o.out.numel)


@lowering("fill_kernel", tilings=_tilings)
def fill(e: Emitter, o: Operands, tiling: Tiling) -> None:
    """out = value: one tile is computed, and stored repeatedly."""
    if not o.out.numel:
        return
    (out,) = merged(o.out)
    tile = tile_shape(out.shape, tiling["elements"])
    piece = e.room(tile, out.dtype)
    program = VectorProgram(piece.axes)
    value = program.op("copy", float(o.value))
    program.emit(e, [(value, piece, range(len(tile)))])
    with tiled(e, out.shape, tile, []) as turn:
        e.store(piece, out, turn.box)


@lowering("arange_kernel", tilings=_tilings)
def arange(e: Emitter, o: Operands, tiling: Tiling) -> None:
    """out[i] = start + i · step."""
    if not o.out.numel:
        return
    start, step = (o.start, o.step) if is_float(o.out.dtype) else (o.int_start, o.int_step)
    with tiled(e, o.out.shape, [min(o.out.numel, tiling["elements"])], []) as turn:
        turn = replace(turn, counted=0)
        program = turn.program()
        place = program.op("coordinate", attrs=(0,))
        place = program.op("to_float", place) if is_float(o.out.dtype) else place
        turn.store(e, program, program.op("add", float(start), program.op("mul", place, float(step))), o.out)


@lowering("triangle_kernel", tilings=_tilings)
def triangle(e: Emitter, o: Operands, tiling: Tiling) -> None:
    """out = x on and above (or below) a diagonal, and 0 elsewhere."""
    if not o.out.numel:
        return
    rank = o.out.rank
    (out, x), (lead, _, _) = grouped([range(rank - 2), [rank - 2], [rank - 1]], o.out, o.x)
    tile = tile_shape(out.shape, tiling["elements"])
    with tiled(e, out.shape, tile, [x]) as turn:
        turn = replace(turn, counted=lead)
        program = turn.program()
        (value,) = turn.inputs(program)
        row, column = (_coordinate(program, turn, d) for d in (lead, lead + 1))
        beyond = program.op("sub", column, row)
        kept = program.op("ge" if o.upper else "le", beyond, float(o.diagonal))
        turn.store(e, program, program.op("where", kept, value, 0.0), out)


def _coordinate(program: VectorProgram, turn: Round, d: int) -> int:
    if turn.sizes[d] == 1:
        return program.op("to_int", 0.0)
    return program.op("coordinate", attrs=(turn.axes.index(d),))


@lowering("flip_kernel", tilings=_tilings)
def flip(e: Emitter, o: Operands, tiling: Tiling) -> None:
    """out = x, reversed along some dimensions."""
    x = o.x
    for d, is_flipped in enumerate(o.dims[: x.rank]):
        x = _from_behind(x, d) if is_flipped else x
    copy(e, x, o.out, tiling["elements"])


def _from_behind(view: View, d: int) -> View:
    strides = (*view.strides[:d], -view.strides[d], *view.strides[d + 1 :])
    return replace(view, strides=strides, offset=view.offset + max(0, view.shape[d] - 1) * view.strides[d])


# Padding


@lowering("pad_kernel", tilings=_tilings)
def pad(e: Emitter, o: Operands, tiling: Tiling) -> None:
    """out = x padded before and after; `pads` lists the last dimension first."""
    if not o.out.numel:
        return
    pairs = [(o.pads[2 * i], o.pads[2 * i + 1]) for i in reversed(range(o.x.rank))]
    if o.mode == "constant":
        _pad_with(e, o, pairs, tiling["elements"])
        return
    for parts in itertools.product(*(_parts(n, pair, o.mode) for n, pair in zip(o.x.shape, pairs, strict=True))):
        source, target = o.x, o.out
        for d, part in enumerate(parts):
            source, target = part.of(source, d), target.slice(d, part.start, part.start + part.size)
        copy(e, source, target, tiling["elements"])


@dataclass(frozen=True)
class _Part:
    """A range of a padded dimension, from `start` on, that copies source elements from `first` on with step `step`."""

    start: int
    size: int
    first: int
    step: int

    def of(self, view: View, d: int) -> View:
        """The source elements of this range, as a view."""
        shape = (*view.shape[:d], self.size, *view.shape[d + 1 :])
        strides = (*view.strides[:d], view.strides[d] * self.step, *view.strides[d + 1 :])
        return replace(view, shape=shape, strides=strides, offset=view.offset + self.first * view.strides[d])


def _parts(size: int, pads: tuple[int, int], mode: str) -> Iterator[_Part]:
    before, after = pads
    first, last, step = {
        "reflect": (before, size - 2, -1),
        "replicate": (0, size - 1, 0),
        "circular": (size - before, 0, 1),
    }[mode]
    if before:
        yield _Part(0, before, first, step)
    if size:
        yield _Part(before, size, 0, 1)
    if after:
        yield _Part(before + size, after, last, step)


def _pad_with(e: Emitter, o: Operands, pairs: Sequence[tuple[int, int]], elements: int) -> None:
    """Pad with a constant, which is the fill value of the loads."""
    out, x, before = _merged_padding(o.out, o.x, [first for first, _ in pairs])
    value = float(o.value) if is_float(x.dtype) else int(o.int_value)
    tile = tile_shape(out.shape, elements)
    with tiled(e, out.shape, tile, []) as turn:
        box = [(start + -first, size) for (start, size), first in zip(turn.box, before, strict=True)]
        piece = e.load(x, box, value)
        if x.dtype == out.dtype:
            e.store(piece, out, turn.box)
        else:
            program = turn.program()
            turn.store(e, program, program.op("copy", program.input(piece, *turn.axes)), out)


def _merged_padding(out: View, x: View, before: Sequence[int]) -> tuple[View, View, list[int]]:
    """Merge each dimension without padding into the one outside of it, where strides allow it."""
    dims: list[tuple[int, int, int, int, int]] = []  # sizes and strides of out and x, elements before
    for d in range(out.rank):
        own = (out.shape[d], x.shape[d], out.strides[d], x.strides[d], before[d])
        if dims and own[0] == own[1]:
            size, x_size, stride, x_stride, first = dims[-1]
            if stride == own[0] * own[2] and x_stride == own[1] * own[3]:
                dims[-1] = (size * own[0], x_size * own[1], own[2], own[3], first * own[0])
                continue
        dims.append(own)
    shape, x_shape, strides, x_strides, first_elements = (
        zip(*dims, strict=True) if dims else ((1,), (1,), (0,), (0,), (0,))
    )
    return (
        replace(out, shape=tuple(shape), strides=tuple(strides)),
        replace(x, shape=tuple(x_shape), strides=tuple(x_strides)),
        list(first_elements),
    )


# Repeated pixels


@lowering("upsample_nearest_kernel", tilings=_tilings)
def upsample_nearest(e: Emitter, o: Operands, tiling: Tiling) -> None:
    """out[…, i, j] = x[…, floor(i · scale), floor(j · scale)]: one strided copy for each run of rows and columns."""
    if not o.out.numel:
        return
    rows, columns = (
        list(_runs(nearest_places(count, size, scale, bool(o.exact))))
        for count, size, scale in zip(o.out.shape[2:], o.x.shape[2:], o.scale, strict=True)
    )
    for row, column in itertools.product(rows, columns):
        source = _repeated(_repeated(o.x, 2, row), 4, column)
        target = _split(_split(o.out, 2, row), 4, column)
        copy(e, source, target, tiling["elements"])


def nearest_places(count: int, size: int, scale: float, exact: bool) -> list[int]:
    """Index of the nearest input element for each of `count` output positions, in float32 as on the CPU device.

    Args:
        size: Number of input elements.
        scale: Input elements per output element.
        exact: Whether positions are taken at the centers of elements, not at their beginnings.
    """
    shift = np.float32(0.5 if exact else 0.0)
    places = ((np.arange(count, dtype=np.float32) + shift) * np.float32(scale)).astype(np.int64)
    return [int(place) for place in np.minimum(places, size - 1)]


@dataclass(frozen=True)
class _Run:
    """`count` source positions from `first` on, `step` apart; `repeats` outputs read each, from `start` on."""

    start: int
    count: int
    repeats: int
    first: int
    step: int


def _runs(places: Sequence[int]) -> Iterator[_Run]:
    """Greedily split source positions into runs."""
    groups = [(place, len(list(group))) for place, group in itertools.groupby(places)]
    start = index = 0
    while index < len(groups):
        place, repeats = groups[index]
        step = groups[index + 1][0] - place if index + 1 < len(groups) else 1
        end = index + 1
        while end < len(groups) and groups[end] == (place + (end - index) * step, repeats):
            end += 1
        yield _Run(start, end - index, repeats, place, step)
        start += (end - index) * repeats
        index = end


def _repeated(view: View, d: int, run: _Run) -> View:
    stride = view.strides[d]
    shape = (*view.shape[:d], run.count, run.repeats, *view.shape[d + 1 :])
    strides = (*view.strides[:d], stride * run.step, 0, *view.strides[d + 1 :])
    return replace(view, shape=shape, strides=strides, offset=view.offset + run.first * stride)


def _split(view: View, d: int, run: _Run) -> View:
    stride = view.strides[d]
    shape = (*view.shape[:d], run.count, run.repeats, *view.shape[d + 1 :])
    strides = (*view.strides[:d], stride * run.repeats, stride, *view.strides[d + 1 :])
    return replace(view, shape=shape, strides=strides, offset=view.offset + run.start * stride)
