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
    return grouped([range(target.rank)], *views)[0]


def grouped(groups: Sequence[Sequence[int]], *views: View) -> tuple[list[View], list[int]]:
    """Views of one shape with the dimensions of each group merged as far as all of them allow, at least one a group.

    Returns:
        The views, and how many dimensions each group has left.
    """
    sizes: list[int] = []
    counts = []
    strides: list[list[int]] = [[] for _ in views]
    for group in groups:
        merged_sizes, merged_strides = collapse(
            [views[0].shape[d] for d in group], *([view.strides[d] for d in group] for view in views)
        )
        sizes += merged_sizes or [1]
        counts.append(len(merged_sizes) or 1)
        for own, more in zip(strides, merged_strides, strict=True):
            own += more or [0]
    merged_views = [replace(v, shape=tuple(sizes), strides=tuple(own)) for v, own in zip(views, strides, strict=True)]
    return merged_views, counts


def spread(view: View, shape: Sequence[int], dims: Sequence[int]) -> View:
    """A view of a larger shape, of which the view has these dimensions and repeats in the others."""
    strides = dict(zip(dims, view.strides, strict=True))
    return replace(view, shape=tuple(shape), strides=tuple(strides.get(d, 0) for d in range(len(shape))))


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
        sizes: Sizes of the whole tensors.
        counted: The first of the dimensions whose coordinates matter, also where the box has one element.
    """

    box: Box
    sizes: tuple[int, ...]
    pieces: tuple[Piece, ...] = ()
    counted: int = 2**31

    @property
    def axes(self) -> list[int]:
        """The dimensions of more than one element, along which a vector program works; at least one."""
        axes = [d for d, (_, size) in enumerate(self.box) if size > 1 or (d >= self.counted and self.sizes[d] > 1)]
        return axes or [len(self.box) - 1]

    def axis(self, d: int) -> Axis:
        """A dimension's part in the box."""
        start, size = self.box[d]
        return Axis(size, start, self.sizes[d])

    def program(self) -> VectorProgram:
        """An empty vector program over the box."""
        return VectorProgram([self.axis(d) for d in self.axes])

    def inputs(self, program: VectorProgram) -> list[int]:
        """The registers of the pieces."""
        return [program.input(piece, *self.axes) for piece in self.pieces]

    def store(self, e: Emitter, program: VectorProgram, register: int, target: View, dims: int | None = None) -> None:
        """Emit the program, and put a register's value into the target, which has the first `dims` dimensions."""
        count = len(self.box) if dims is None else dims
        own = replace(target, shape=target.shape[:count], strides=target.strides[:count])
        out, is_stored = e.result(own, self.box[:count])
        program.emit(e, [(register, out, [d if d < count else None for d in self.axes])])
        if is_stored:
            e.store(out, own, self.box[:count])


@contextmanager
def tiled(
    e: Emitter,
    sizes: Sequence[int],
    tile: Sequence[int],
    views: Sequence[View],
    box: Box | None = None,
    dims: Sequence[int] | None = None,
) -> Iterator[Round]:
    """Loops over tiles of a box; a view is loaded as soon as the loops are open along which it changes.

    Args:
        box: Ranges that open loops have chosen.
        dims: The dimensions that are still to be looped over. Default: all.
    """
    box = [(ZERO, size) for size in tile] if box is None else list(box)
    looped = [d for d in (range(len(tile)) if dims is None else dims) if tile[d] < sizes[d]]
    pieces: dict[int, Piece] = {}

    def load(opened: int) -> None:
        for number, view in enumerate(views):
            if number not in pieces and max((d for d in looped if view.strides[d]), default=-1) <= opened:
                pieces[number] = load_distinct(e, view, box, number)

    with ExitStack() as loops:
        load(-1)
        for d in looped:
            counter = loops.enter_context(e.loop(parts(sizes[d], tile[d])))
            box[d] = (counter * tile[d], tile[d])
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
