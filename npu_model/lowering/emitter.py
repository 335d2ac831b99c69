"""`Emitter`: writes the section (instructions) of one kernel call, as if they ran one after the other.

A lowering opens loops, allocates pieces (operand tiles in a memory of the chip), computes with them and stores results;
it does not deal with tokens. A piece that is allocated within a loop has several slots, used in turn (double
buffering), so that an engine may fill one while another engine reads the previous one.

When the section is finished, the emitter adds the tokens that make the concurrent engines produce the results of the
sequential order. For an instruction I that touches a piece which another engine E touches too, one of the two writing:

1. Every instruction of E that touches the piece raises a token. In sequential order, that token has been raised
   `before(I)` times when I comes; this number is affine in the loops' counters. Pieces that the same instructions of E
   touch share a token.
2. If I reads what E writes, I waits for `before(I)`.
3. If I only writes, and E has not touched the piece in this iteration yet, I overwrites what lay in this slot `slots`
   iterations ago: it waits for `before(I)` less what E does in `slots` − 1 iterations. Otherwise it waits for
   `before(I)` too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from npu_compiler.graph.dtypes import itemsize
from npu_compiler.program.views import View, contiguous_strides
from npu_model.isa.instructions import (
    ZERO,
    Affine,
    Axis,
    Compute,
    Engine,
    Instruction,
    Loop,
    Multiply,
    Node,
    Role,
    Space,
    Step,
    Tile,
    Token,
    Transfer,
    Wait,
    has_whole_groups,
)

DOUBLE = 2  # places of a piece within a loop


class DoesNotFit(Exception):
    """A section needs more of a memory than it may use: at least `size` bytes in all."""

    def __init__(self, space: Space, size: int) -> None:
        super().__init__()
        self.space, self.size = space, size


@dataclass(frozen=True)
class Place:
    """Location of an operand's buffer: in DRAM or L2, or in the scratchpad for as long as it is live.

    Attributes:
        name: The buffer in DRAM that contains it; in a scratchpad, the core, empty on a chip of one core.
        offset: Bytes from the beginning of that buffer, or of the memory.
    """

    space: Space
    name: str
    offset: int
    size: int


@dataclass(eq=False)
class Memory:
    """Memory that a section allocates for a piece (operand tile), in the scratchpad or the accumulators.

    Attributes:
        depth: Number of loops around the allocation, whose iterations use the slots in turn.
        address, size: Address of the first slot, and bytes of each.
        slots: Number of slots.
        turn: Index of the iteration; it uses slot `turn` mod `slots`.
    """

    space: Space
    depth: int
    address: int
    size: int
    slots: int
    turn: Affine


@dataclass(frozen=True)
class Piece:
    """A box (tile) of a tensor in a memory of the chip, where engines can access it.

    Attributes:
        axes: Its axes, of which some elements may lie outside of the tensor.
        strides: Bytes.
        memory: The section's own allocation; None for a part of an operand that stays in the scratchpad.
        place: Location of that operand; None for an allocation.
    """

    axes: tuple[Axis, ...]
    dtype: str
    space: Space
    address: Affine
    strides: tuple[int, ...]
    memory: Memory | None = None
    place: Place | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(axis.size for axis in self.axes)

    def tile(self, *dims: int | None, offset: int = 0) -> Tile:
        """The piece as an operand: for each axis of the instruction, a dimension of the piece, or None to broadcast."""
        strides = tuple(0 if dim is None else self.strides[dim] for dim in dims)
        return self.with_strides(strides, offset)

    def with_strides(self, strides: tuple[int, ...], offset: int = 0) -> Tile:
        """The piece as an operand that is accessed with these strides, beginning `offset` bytes into it."""
        memory = self.memory
        address = self.address + offset
        if memory is None or memory.slots == 1:
            return Tile(self.space, self.dtype, address, strides)
        return Tile(self.space, self.dtype, address, strides, "", memory.slots, memory.size, memory.turn)

    def reshaped(self, axes: Sequence[Axis], strides: Sequence[int], offset: int | Affine = 0) -> Piece:
        """View the memory under other axes and strides, beginning `offset` bytes into the piece."""
        return replace(self, axes=tuple(axes), strides=tuple(strides), address=self.address + offset)


@dataclass(eq=False)
class _Item:
    instruction: Instruction
    path: tuple[_LoopItem, ...]
    order: int
    touches: dict[Memory, tuple[bool, bool]]  # with whether it is read, and whether it is written
    outside: list[tuple[Place, int, int, bool]]  # bytes of operands' places, with whether they are written

    def executions(self, depth: int = 0) -> int:
        """Number of times that the instruction runs in one iteration of the outermost `depth` loops around it."""
        return math.prod(loop.count for loop in self.path[depth:])


@dataclass(eq=False)
class _LoopItem:
    count: int
    items: list[_Item | _LoopItem] = field(default_factory=list)


@dataclass(frozen=True)
class Touch:
    """A range of bytes of a memory that an engine of a section reads or writes."""

    engine: str
    space: Space
    name: str
    first: int
    end: int
    writes: bool


@dataclass(frozen=True)
class Draft:
    """A generated section (instructions of a kernel call) without synchronisation with other sections.

    Attributes:
        touches: Byte ranges that its engines access and other sections might access too.
        raised: Token → number of times that the section raises it.
        scratchpad, accumulators: Bytes that it allocates for its tiles.
    """

    touches: tuple[Touch, ...]
    raised: Mapping[Token, int]
    scratchpad: int
    accumulators: int
    _items: Sequence[_Item | _LoopItem]
    _waits: Mapping[_Item, Mapping[Token, Affine]]
    _signals: Mapping[_Item, Sequence[Token]]

    def body(self, raised: Mapping[Token, int] | None = None) -> tuple[Node, ...]:
        """The section's instructions.

        Args:
            raised: Token → number of times that earlier sections have raised it, which is added to the counts of waits.
        """
        return tuple(_built(item, self._waits, self._signals, raised or {}) for item in self._items)


class Emitter:
    """Generates the section (instructions) of one kernel call.

    Args:
        places: Buffer → its location.
        queues: Number of DMA engines.
        scratchpad: First byte and number of bytes of the scratchpad that the section may allocate.
        accumulators: First byte and number of bytes of the accumulators that it may allocate.
        alignment: Every allocated tile begins at a multiple of this number of bytes.
        has_output: Whether the chip has an output stage; otherwise the vector engine executes epilogues.
        sparsity: N and M of the right operand of products, whose zeros the matrix engine skips. None: it skips none.
    """

    def __init__(
        self,
        places: Mapping[str, Place],
        queues: int,
        scratchpad: tuple[int, int],
        accumulators: tuple[int, int],
        alignment: int,
        has_output: bool = False,
        sparsity: tuple[int, int] | None = None,
    ) -> None:
        self.places = places
        self.output_engine = Engine.OUTPUT if has_output else Engine.VECTOR
        self._queues = queues
        self._sparsity = sparsity
        self._room = {Space.SCRATCHPAD: scratchpad, Space.ACCUMULATORS: accumulators}
        self._used = {Space.SCRATCHPAD: 0, Space.ACCUMULATORS: 0}
        self._alignment = alignment
        self._root = _LoopItem(1)
        self._path: list[_LoopItem] = []
        self._items: list[_Item] = []

    # Loops and room

    @contextmanager
    def loop(self, count: int) -> Iterator[Affine]:
        """Context that emits a hardware loop of `count` iterations around the instructions emitted within.

        Yields its counter.
        """
        if count == 1:
            yield ZERO
            return
        item = _LoopItem(count)
        self._body.append(item)
        self._path.append(item)
        yield Affine(0, (0,) * (len(self._path) - 1) + (1,))
        self._path.pop()

    @property
    def depth(self) -> int:
        """Number of loops that are open."""
        return len(self._path)

    @property
    def rounds(self) -> list[int]:
        """Iteration counts of the open loops, the outermost first."""
        return [loop.count for loop in self._path]

    @property
    def _body(self) -> list[_Item | _LoopItem]:
        return self._path[-1].items if self._path else self._root.items

    def _turn(self) -> Affine:
        steps: list[int] = []
        for loop in self._path:
            steps = [step * loop.count for step in steps] + [1]
        return Affine(0, tuple(steps))

    def room(
        self, shape: Sequence[int | Axis], dtype: str, space: Space = Space.SCRATCHPAD, slots: int = DOUBLE
    ) -> Piece:
        """Allocate a dense tile on the chip, with up to `slots` slots that iterations of the open loops use in turn.

        Raises:
            DoesNotFit: the memory has too little room.
        """
        axes = tuple(axis if isinstance(axis, Axis) else Axis(axis) for axis in shape)
        sizes = [axis.size for axis in axes]
        bytes_ = max(1, math.prod(sizes)) * itemsize(dtype)
        size = -(-bytes_ // self._alignment) * self._alignment
        slots = min(slots, math.prod(loop.count for loop in self._path))
        first, room = self._room[space]
        address = self._used[space]
        self._used[space] = address + size * slots
        if self._used[space] > room:
            raise DoesNotFit(space, self._used[space])
        memory = Memory(space, self.depth, first + address, size, slots, self._turn())
        strides = tuple(step * itemsize(dtype) for step in contiguous_strides(sizes))
        return Piece(axes, dtype, space, Affine(memory.address), strides, memory)

    # Transfers

    def load(
        self, view: View, box: Sequence[tuple[Affine, int]], fill: float | int | None = None, queue: int = 0
    ) -> Piece:
        """Load a box of a tensor into the scratchpad; without a transfer if the tensor lies there already.

        Args:
            box: For each dimension, the coordinate of the first element and the number of elements. Coordinates outside
                of the tensor stand for elements that do not exist.
            fill: Value of elements that do not exist. None: they are skipped.
            queue: Number of the DMA engine, modulo the number of engines.
        """
        axes = tuple(Axis(size, start, total) for (start, size), total in zip(box, view.shape, strict=True))
        source = self.whole(view, axes)
        if fill is not None and not self._leaves(axes):
            fill = None
        if source.space is Space.SCRATCHPAD and fill is None:
            return source
        target = self.room(axes, view.dtype)
        self.transfer(axes, source, target, fill=fill, queue=queue)
        if fill is not None:
            target = replace(target, axes=tuple(Axis(axis.size) for axis in axes))
        return target

    @staticmethod
    def part(whole: Piece, view: View, box: Sequence[tuple[Affine, int]]) -> Piece:
        """The piece of a box of a tensor of which the whole is in the scratchpad already; emits nothing."""
        axes = [Axis(size, start, total) for (start, size), total in zip(box, view.shape, strict=True)]
        offset = sum((start * stride for (start, _), stride in zip(box, whole.strides, strict=True)), ZERO)
        return whole.reshaped(axes, whole.strides, offset)

    def store(self, piece: Piece, view: View, box: Sequence[tuple[Affine, int]], queue: int = 2) -> None:
        """Emit the transfer of an on-chip tile to a box (first element and size along each dimension) of a tensor.

        Args:
            queue: Number of the DMA engine, which is taken modulo their number.
        """
        axes = tuple(Axis(size, start, total) for (start, size), total in zip(box, view.shape, strict=True))
        self.transfer(axes, piece, self.whole(view, axes), queue=queue)

    def result(self, view: View, box: Sequence[tuple[Affine, int]]) -> tuple[Piece, bool]:
        """A tile to compute a box of a result in: the result itself if it lies in the scratchpad, else an allocation.

        Returns:
            The tile, and whether it has to be stored afterwards.
        """
        axes = tuple(Axis(size, start, total) for (start, size), total in zip(box, view.shape, strict=True))
        target = self.whole(view, axes)
        if target.space is Space.SCRATCHPAD:
            return target, False
        return self.room(axes, view.dtype), True

    def whole(self, view: View, axes: tuple[Axis, ...]) -> Piece:
        """The piece of a box of a tensor, in the memory in which the tensor lies (as DRAM); emits nothing."""
        place = self.places[view.buffer]
        size = itemsize(view.dtype)
        strides = tuple(stride * size for stride in view.strides)
        address = Affine(place.offset + view.offset * size)
        for axis, stride in zip(axes, strides, strict=True):
            address = address + axis.start * stride
        return Piece(axes, view.dtype, place.space, address, strides, None, place)

    def _leaves(self, axes: Sequence[Axis]) -> bool:
        """Whether some element of a box lies outside of the tensor in some iteration of the open loops."""
        counts = [loop.count for loop in self._path]
        return any(axis.is_clipped(counts) for axis in axes)

    def transfer(
        self,
        axes: tuple[Axis, ...],
        source: Piece,
        target: Piece,
        *,
        fill: float | int | None = None,
        queue: int = 0,
        index: Piece | None = None,
        index_limit: int = 0,
        scatters: bool = False,
        others: Sequence[Piece] = (),
    ) -> None:
        """Emit a transfer of a box with these axes; `index` is a list of rows to gather or scatter (see `Transfer`).

        Axes of size 1 that always lie inside the tensor are left out.
        """
        dims = [
            d for d, axis in enumerate(axes) if axis.size > 1 or self._leaves([axis]) or (d == 0 and index is not None)
        ]
        self._add(
            Transfer(
                engine=f"{Engine.DMA}{queue % self._queues}",
                box=tuple(axes[d] for d in dims),
                source=self._located(source, source.tile(*dims)),
                target=self._located(target, target.tile(*dims)),
                fill=fill,
                index=None if index is None else index.tile(*(d if d < len(index.axes) else None for d in dims)),
                index_limit=index_limit,
                scatters=scatters,
                others=tuple(self._located(other, other.tile(*dims)) for other in others),
            ),
            reads=[source] if index is None else [source, index],
            writes=[target, *others],
        )

    @staticmethod
    def _located(piece: Piece, tile: Tile) -> Tile:
        return tile if piece.place is None else replace(tile, buffer=piece.place.name)

    # Computing

    def multiply(
        self,
        axes: Sequence[tuple[Role, Axis]],
        left: tuple[Piece, Tile],
        right: tuple[Piece, Tile],
        sums: tuple[Piece, Tile],
        *,
        begins: tuple[int, ...] | None = None,
        left_zero: int = 0,
        right_zeros: tuple[Piece, Tile] | None = None,
    ) -> None:
        """Emit a matrix product: sums[m, n] (+)= Σ left[m, k] · right[n, k], in the accumulators.

        Each operand is a piece and the tile in it that the instruction accesses.

        Args:
            axes: The axes that the instruction iterates over, each with its role (row, column, summed, batch).
            begins: Depths of loops in whose first iterations the sums start at zero; in the others they are added to.
                None: the sums always start at zero.
            left_zero, right_zeros: Zero points subtracted from the operands: of the left one a single integer, of the
                right one an integer for each column, or None for none.
        """
        zeros = None if right_zeros is None else self._located(*right_zeros)
        self._add(
            Multiply(
                engine=Engine.MATRIX,
                box=tuple(axis for _, axis in axes),
                roles=tuple(role for role, _ in axes),
                left=self._located(*left),
                right=self._located(*right),
                sums=sums[1],
                begins=begins,
                left_zero=left_zero,
                right_zeros=zeros,
                sparsity=self._sparsity if self._has_whole_groups(axes) else None,
            ),
            reads=[
                left[0],
                right[0],
                *([] if begins is None else [sums[0]]),
                *([right_zeros[0]] if right_zeros else []),
            ],
            writes=[sums[0]],
        )

    def _has_whole_groups(self, axes: Sequence[tuple[Role, Axis]]) -> bool:
        """Whether a product's summed axis has only whole groups of the sparsity, in all iterations."""
        own = [axis for role, axis in axes if role is Role.SUM]
        return self._sparsity is not None and len(own) == 1 and has_whole_groups(own[0], self._sparsity[1])

    def compute(
        self,
        axes: Sequence[Axis],
        inputs: Sequence[tuple[Piece, Tile]],
        steps: Sequence[Step],
        stores: Sequence[tuple[int, tuple[Piece, Tile]]],
        *,
        engine: Engine = Engine.VECTOR,
        begins: tuple[int, ...] = (),
        carried: Sequence[tuple[int, float]] = (),
    ) -> None:
        """Emit a vector program: element-wise operations and reductions over a box.

        Each operand is a piece and the tile in it that the instruction accesses.

        Args:
            axes: The axes of the box.
            inputs: The operands, which become registers 0, 1, …
            steps: The operations, each of which defines the next register.
            stores: The registers to store, and where.
            begins, carried: Running values: in the first iterations of the loops at the depths `begins`, the input with
                that number has the given value instead of what its tile holds.
        """
        self._add(
            Compute(
                engine=engine,
                box=tuple(axes),
                inputs=tuple(self._located(*each) for each in inputs),
                steps=tuple(steps),
                stores=tuple((register, self._located(*each)) for register, each in stores),
                begins=begins,
                carried=tuple(carried),
            ),
            reads=[piece for piece, _ in inputs],
            writes=[piece for _, (piece, _) in stores],
        )

    def _add(self, instruction: Instruction, reads: Sequence[Piece], writes: Sequence[Piece]) -> None:
        touches: dict[Memory, tuple[bool, bool]] = {}
        outside: list[tuple[Place, int, int, bool]] = []
        for piece, is_written in [*((p, False) for p in reads), *((p, True) for p in writes)]:
            if piece.memory is not None:
                was_read, was_written = touches.get(piece.memory, (False, False))
                touches[piece.memory] = was_read or not is_written, was_written or is_written
            elif piece.place is not None:
                outside.append((piece.place, piece.place.offset, piece.place.offset + piece.place.size, is_written))
        item = _Item(instruction, tuple(self._path), len(self._items), touches, outside)
        self._items.append(item)
        self._body.append(item)

    # What was emitted

    @property
    def used(self) -> int:
        """Bytes of the scratchpad allocated for tiles."""
        return self._used[Space.SCRATCHPAD]

    @property
    def used_accumulators(self) -> int:
        """Bytes of the accumulators allocated for tiles."""
        return self._used[Space.ACCUMULATORS]

    def executions(self) -> Iterator[tuple[Instruction, int, str]]:
        """Each instruction, its number of executions, and the DRAM buffer that it transfers from or to ('' if none)."""
        for item in self._items:
            names = [place.name for place, *_ in item.outside if place.space is Space.DRAM]
            yield item.instruction, item.executions(), names[0] if names else ""

    def rooms(self) -> dict[str, int]:
        """DRAM buffer → scratchpad bytes of its tiles, which would not be needed if the buffer lay in the scratchpad.

        Tiles with fill values are left out: they are copied in any case.
        """
        touching: dict[Memory, list[_Item]] = {}
        for item in self._items:
            for memory in item.touches:
                touching.setdefault(memory, []).append(item)
        sizes: dict[str, int] = {}
        for memory, items in touching.items():
            for name in _owners(memory, items):
                sizes[name] = sizes.get(name, 0) + memory.size * memory.slots
        return sizes

    # Tokens

    def finish(self) -> Draft:  # noqa: C901, PLR0912
        """End the section: add tokens that synchronise its engines with each other, and return it."""
        sharing: dict[Memory, dict[str, list[_Item]]] = {}
        for item in self._items:
            for memory in item.touches:
                sharing.setdefault(memory, {}).setdefault(item.instruction.engine, []).append(item)
        conditions: dict[tuple[_Item, ...], list[dict[_Item, Affine]]] = {}
        for memory, by_engine in sharing.items():
            for engine, touching in by_engine.items():
                is_written = any(item.touches[memory][1] for item in touching)
                counts: dict[_Item, Affine] = {}
                for item in (item for other, items in by_engine.items() for item in items if other != engine):
                    if not (is_written or item.touches[memory][1]):
                        continue
                    needed = _before(touching, item)
                    if not (item.touches[memory][0] and is_written) and not _same_round(touching, item, memory.depth):
                        in_a_round = sum(other.executions(memory.depth) for other in touching)
                        needed = needed + -(memory.slots - 1) * in_a_round
                    if needed.bounds([loop.count for loop in item.path])[1] > 0:
                        counts[item] = needed
                if counts:
                    _add_token(conditions.setdefault(tuple(touching), []), counts)
        waits: dict[_Item, dict[Token, Affine]] = {}
        signals: dict[_Item, list[Token]] = {}
        numbers: dict[str, int] = {}
        raised: dict[Token, int] = {}
        for raising, tokens in conditions.items():
            engine = raising[0].instruction.engine
            for counts in tokens:
                numbers[engine] = numbers.get(engine, 0) + 1
                token = Token(engine, numbers[engine])
                raised[token] = sum(item.executions() for item in raising)
                for item in raising:
                    signals.setdefault(item, []).append(token)
                for item, needed in counts.items():
                    waits.setdefault(item, {})[token] = needed
        outside = tuple(
            {
                Touch(item.instruction.engine, place.space, place.name, first, end, is_written)
                for item in self._items
                for place, first, end, is_written in item.outside
            }
        ) + tuple(
            {
                Touch(engine, memory.space, "", memory.address, memory.address + memory.size * memory.slots, writes)
                for memory, by_engine in sharing.items()
                for engine, touching in by_engine.items()
                for writes in {item.touches[memory][1] for item in touching}
            }
        )
        return Draft(outside, raised, self.used, self.used_accumulators, self._root.items, waits, signals)


def _owners(memory: Memory, items: Sequence[_Item]) -> set[str]:
    """The DRAM buffers that an on-chip tile is a copy of, or is stored to; empty if it holds anything else."""
    moving = [item for item in items if isinstance(item.instruction, Transfer)]
    plain = all(item.instruction.fill is None and item.instruction.index is None for item in moving)  # type: ignore[attr-defined]
    names = {place.name for item in moving for place, *_ in item.outside if place.name}
    computed = any(item.touches[memory][1] for item in items if item not in moving)
    loaded = any(item.touches[memory][1] for item in moving)
    is_copy = len(moving) == len(items)
    return names if plain and not (loaded and computed) and (len(names) == 1 or is_copy) else set()


def _add_token(tokens: list[dict[_Item, Affine]], counts: Mapping[_Item, Affine]) -> None:
    """Add the counts that instructions wait for to an existing token of the raising instructions, or to a new one.

    An existing token is used if, for each waiting instruction, one of the two counts is the larger one in all
    iterations.
    """
    for token in tokens:
        larger = {item: _larger(token.get(item, count), count, item) for item, count in counts.items()}
        if None not in larger.values():
            token.update({item: count for item, count in larger.items() if count is not None})
            return
    tokens.append(dict(counts))


def _larger(first: Affine, second: Affine, item: _Item) -> Affine | None:
    """The count that is the larger one in all iterations of the loops around `item`; None if neither is."""
    low, high = (first + second * -1).bounds([loop.count for loop in item.path])
    return first if low >= 0 else second if high <= 0 else None


def _common(first: _Item, second: _Item) -> int:
    """Number of loops that enclose both instructions."""
    pairs = zip(first.path, second.path, strict=False)
    return next((depth for depth, (a, b) in enumerate(pairs) if a is not b), min(len(first.path), len(second.path)))


def _same_round(others: Sequence[_Item], item: _Item, depth: int) -> bool:
    """Whether one of `others` precedes `item` in sequential order, within an iteration of the outer `depth` loops."""
    return any(
        (common := _common(other, item)) > depth or (common == depth and other.order < item.order) for other in others
    )


def _before(others: Sequence[_Item], item: _Item) -> Affine:
    """Number of times that the others have been executed before `item`, in sequential order."""
    base, steps = 0, [0] * len(item.path)
    for other in others:
        common = _common(other, item)
        for depth in range(common):
            steps[depth] += other.executions(depth + 1)
        if other.order < item.order:
            base += other.executions(common)
    return Affine(base, tuple(steps))


def _built(
    item: _Item | _LoopItem,
    waits: Mapping[_Item, Mapping[Token, Affine]],
    signals: Mapping[_Item, Sequence[Token]],
    raised: Mapping[Token, int],
) -> Node:
    if isinstance(item, _LoopItem):
        return Loop(item.count, tuple(_built(inner, waits, signals, raised) for inner in item.items))
    conditions = tuple(Wait(token, count + raised.get(token, 0)) for token, count in waits.get(item, {}).items())
    return replace(item.instruction, waits=conditions, signals=tuple(signals.get(item, ())))


__all__ = ["DoesNotFit", "Draft", "Emitter", "Piece", "Place", "Touch"]
