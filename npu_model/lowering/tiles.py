"""Boxes of tensors that are walked element by element: the dimensions that operands share, and tiles of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

from npu_compiler.program.views import View, collapse
from npu_model.isa.instructions import ZERO, Affine, Axis
from npu_model.lowering.emitter import Emitter, Piece
from npu_model.lowering.families import Tiling, halvings, parts
from npu_model.lowering.vector_program import VectorProgram

MOST_AXES = 5  # of a transfer

Box = list[tuple[Affine, int]]
"""Coordinate of the first element and number of elements, by dimension."""


def element_tilings(count: int, least: int = 32) -> list[Tiling]:
    """Tilings of `elements` per tile, for a call that works on `count` of them."""
    return [{"elements": size} for size in halvings(max(1, count), least)]


def merged(target: View, *others: View) -> list[View]:
    """Views of one shape over as few dimensions as show all of them, those with the target's largest strides first."""
    order = sorted(range(target.rank), key=lambda d: -abs(target.strides[d]))
    views = [view.permute(order) for view in (target, *others)]
    return grouped([range(target.rank)], *views)


def grouped(groups: Sequence[Sequence[int]], *views: View) -> list[View]:
    """Views of one shape with the dimensions of each group merged as far as all of them allow, at least one a group."""
    sizes: list[int] = []
    strides: list[list[int]] = [[] for _ in views]
    for group in groups:
        merged_sizes, merged_strides = collapse(
            [views[0].shape[d] for d in group], *([view.strides[d] for d in group] for view in views)
        )
        sizes += merged_sizes or [1]
        for own, more in zip(strides, merged_strides, strict=True):
            own += more or [0]
    return [replace(v, shape=tuple(sizes), strides=tuple(own)) for v, own in zip(views, strides, strict=True)]


def tile_shape(sizes: Sequence[int], elements: int, most: int = MOST_AXES) -> tuple[int, ...]:
    """A tile of about so many elements: inner dimensions whole, then a part of one, in at most `most` dimensions."""
    tile = []
    room = max(1, elements)
    axes = 0
    for size in reversed(sizes):
        part = min(size, room) if axes < most else 1
        part = -(-size // parts(size, part))
        axes += part > 1
        room = room // part if part == size else 1
        tile.append(part)
    return tuple(reversed(tile))


@dataclass(frozen=True)
class Round:
    """A round of the loops over tiles: the box, and the operands' pieces of it, with all dimensions.

    Attributes:
        axes: The dimensions of more than one element, along which a vector program works.
    """

    box: Box
    sizes: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def axes(self) -> list[int]:
        return [d for d, (_, size) in enumerate(self.box) if size > 1] or [len(self.box) - 1]

    def program(self) -> VectorProgram:
        """An empty vector program over the box."""
        return VectorProgram([Axis(self.box[d][1], self.box[d][0], self.sizes[d]) for d in self.axes])

    def inputs(self, program: VectorProgram) -> list[int]:
        """The registers of the pieces."""
        return [program.input(piece, *self.axes) for piece in self.pieces]

    def store(self, e: Emitter, program: VectorProgram, register: int, target: View) -> None:
        """Emit the program, and put a register's value into the target."""
        out, is_stored = e.result(target, self.box)
        program.emit(e, [(register, out, self.axes)])
        if is_stored:
            e.store(out, target, self.box)


@contextmanager
def tiled(e: Emitter, sizes: Sequence[int], tile: Sequence[int], views: Sequence[View]) -> Iterator[Round]:
    """Loops over tiles of a box; a view is loaded as soon as the loops are open along which it changes."""
    box: Box = [(ZERO, size) for size in tile]
    pieces: dict[int, Piece] = {}

    def load(opened: int) -> None:
        for number, view in enumerate(views):
            looped = [d for d, part in enumerate(tile) if part < sizes[d] and view.strides[d]]
            if number not in pieces and max(looped, default=-1) <= opened:
                pieces[number] = load_distinct(e, view, box, number)

    with ExitStack() as loops:
        load(-1)
        for d, part in enumerate(tile):
            if part < sizes[d]:
                counter = loops.enter_context(e.loop(parts(sizes[d], part)))
                box[d] = (counter * part, part)
                load(d)
        yield Round(box, tuple(sizes), tuple(pieces[number] for number in range(len(views))))


def load_distinct(e: Emitter, view: View, box: Box, queue: int = 0, fill: float | int | None = None) -> Piece:
    """A box of a view in the scratchpad; along dimensions that the view repeats, only one element is there."""
    dims = [d for d, stride in enumerate(view.strides) if stride]
    own = replace(view, shape=tuple(view.shape[d] for d in dims), strides=tuple(view.strides[d] for d in dims))
    piece = e.load(own, [box[d] for d in dims], fill, queue=queue)
    own_strides = dict(zip(dims, piece.strides, strict=True))
    own_axes = dict(zip(dims, piece.axes, strict=True))
    axes = [own_axes.get(d, Axis(size, start, view.shape[d])) for d, (start, size) in enumerate(box)]
    return piece.reshaped(axes, [own_strides.get(d, 0) for d in range(view.rank)])


def as_float(program: VectorProgram, register: int, dtype: str) -> int:
    """A register's value as a float, where it was read from integers."""
    return register if "float" in dtype else program.op("to_float", register)
