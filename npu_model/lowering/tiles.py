"""Tiles of tensors for element-wise work: merging the dimensions that operands share, and loops over tiles."""

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
"""First coordinate and number of elements, by dimension."""


def element_tilings(count: int, least: int = 32) -> list[Tiling]:
    """Tilings by the number of elements of a tile, for a call with `count` elements; at least `least` each."""
    return [{"elements": size} for size in halvings(max(1, count), least)]


def merged(target: View, *others: View) -> list[View]:
    """Views of equal shape with dimensions merged where all strides allow it, ordered by the target's strides."""
    order = sorted(range(target.rank), key=lambda d: -abs(target.strides[d]))
    views = [view.permute(order) for view in (target, *others)]
    return grouped([range(target.rank)], *views)[0]


def grouped(groups: Sequence[Sequence[int]], *views: View) -> tuple[list[View], list[int]]:
    """Views of equal shape with each group's dimensions merged where all strides allow it, to at least one.

    Returns:
        The views, and the number of dimensions that each group has left.
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
    """Broadcast a view to a larger shape, whose dimensions `dims` are those of the view."""
    strides = dict(zip(dims, view.strides, strict=True))
    return replace(view, shape=tuple(shape), strides=tuple(strides.get(d, 0) for d in range(len(shape))))


def tile_shape(sizes: Sequence[int], elements: int, most: int = MOST_AXES) -> tuple[int, ...]:
    """The shape of a tile of about `elements` elements: inner dimensions whole, then a part of one.

    At most `most` dimensions of the tile are larger than 1.
    """
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
    """An iteration of the loops over tiles: the box of its tile, and the loaded tiles (`Piece`) of the operands.

    Attributes:
        box: For each dimension, the first coordinate and the number of elements of the tile.
        sizes: Sizes of the whole tensors.
        pieces: The loaded operands.
        counted: From this dimension on, dimensions are axes of the vector program even if the tile has one element
            there, since the program uses their coordinates.
    """

    box: Box
    sizes: tuple[int, ...]
    pieces: tuple[Piece, ...] = ()
    counted: int = 2**31

    @property
    def axes(self) -> list[int]:
        """The dimensions that are axes of the vector program: those larger than 1 in the box, but at least one."""
        axes = [d for d, (_, size) in enumerate(self.box) if size > 1 or (d >= self.counted and self.sizes[d] > 1)]
        return axes or [len(self.box) - 1]

    def axis(self, d: int) -> Axis:
        """A dimension of the box as an axis."""
        start, size = self.box[d]
        return Axis(size, start, self.sizes[d])

    def program(self) -> VectorProgram:
        """Create a vector program over the tile's box, without instructions yet."""
        return VectorProgram([self.axis(d) for d in self.axes])

    def inputs(self, program: VectorProgram) -> list[int]:
        """Add the loaded tiles as inputs of a program; return their registers."""
        return [program.input(piece, *self.axes) for piece in self.pieces]

    def store(self, e: Emitter, program: VectorProgram, register: int, target: View, dims: int | None = None) -> None:
        """Emit the program and store a register to the target, which has the first `dims` dimensions (None: all)."""
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
    """Context that loops over tiles of a box and loads views, each in the outermost loop possible; yields the `Round`.

    Args:
        sizes, tile: Sizes of the tensors and of a tile.
        views: The operands to load.
        box: Ranges that enclosing loops have chosen. None: the loops begin at 0.
        dims: The dimensions to loop over. None: all.
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
    """Load a box of a view into the scratchpad.

    Along broadcast dimensions (strides of 0), only one element is loaded.
    """
    dims = [d for d, stride in enumerate(view.strides) if stride]
    own = replace(view, shape=tuple(view.shape[d] for d in dims), strides=tuple(view.strides[d] for d in dims))
    piece = e.load(own, [box[d] for d in dims], fill, queue=queue)
    own_strides = dict(zip(dims, piece.strides, strict=True))
    own_axes = dict(zip(dims, piece.axes, strict=True))
    axes = [own_axes.get(d, Axis(size, start, view.shape[d])) for d, (start, size) in enumerate(box)]
    return piece.reshaped(axes, [own_strides.get(d, 0) for d in range(view.rank)])


def as_float(program: VectorProgram, register: int, dtype: str) -> int:
    """Convert a register to float if it was read from integers; otherwise return it unchanged."""
    return register if "float" in dtype else program.op("to_float", register)
