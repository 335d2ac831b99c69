"""The instructions of a tile program, as data.

A tile program is a list of sections, one for each kernel call. A section is a list of instructions and hardware loops.
Each instruction belongs to an engine; an engine executes its instructions in order, and engines run concurrently.
Engines are synchronised by tokens alone, which are counters: an instruction starts when every token that it waits for
has reached the count it needs, and raises its own tokens by one each when it has ended.

An instruction iterates over a box, an index space with the instruction's `axes`. Each operand is a `Tile`, which says
where the element at (i, j, …) of the box lies. All numbers that change from one iteration of a loop to the next are
`Affine` functions of the loops' counters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from operator import mul
from typing import TypeAlias

MAX_LOOPS = 8  # loops within each other


class Engine(StrEnum):
    """Kinds of engine; each core has one or more DMA engines, numbered from 0, and at most one of each other kind."""

    MATRIX = "matrix"
    OUTPUT = "output"
    VECTOR = "vector"
    DMA = "dma"


def core_of(engine: str) -> str:
    """The core's part of an engine's name, such as `core1` of `core1.dma0`; empty on a chip of one core."""
    return engine.rpartition(".")[0]


def kind_of(engine: str) -> str:
    """The name of an engine within its core, such as `dma0` of `core1.dma0`."""
    return engine.rpartition(".")[2]


def core_name(number: int) -> str:
    """The name of a core by its number, such as `core1`."""
    return f"core{number}"


def core_number(name: str) -> int:
    """The number of a core by its name, the inverse of `core_name`."""
    return int(name.removeprefix("core"))


def is_transfer(engine: str) -> bool:
    """Whether an engine is a DMA engine."""
    return kind_of(engine).startswith(Engine.DMA)


class Space(StrEnum):
    """A memory that operands lie in."""

    DRAM = "dram"
    PACKED = "packed"  # DRAM, of weights that are stored in another form and decoded on their way
    L2 = "l2"
    SCRATCHPAD = "sram"
    ACCUMULATORS = "acc"

    @property
    def is_shared(self) -> bool:
        """Whether the memory is shared by all cores; only DMA engines access such memories."""
        return self in (Space.DRAM, Space.PACKED, Space.L2)

    @property
    def has_buffers(self) -> bool:
        """Whether addresses in the memory are relative to named buffers."""
        return self in (Space.DRAM, Space.PACKED)


@dataclass(frozen=True, slots=True)
class Affine:
    """`base` + Σ `steps[d]` × the counter of the loop at depth `d`, the outermost first; the last step is never 0."""

    base: int = 0
    steps: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.steps and not self.steps[-1]:
            length = max((depth + 1 for depth, step in enumerate(self.steps) if step), default=0)
            object.__setattr__(self, "steps", self.steps[:length])

    def at(self, counters: Sequence[int]) -> int:
        """The value for given loop counters, outermost first.

        Counters of inner loops without a step may be left out.
        """
        return self.base + sum(map(mul, self.steps, counters)) if self.steps else self.base

    def __add__(self, other: Affine | int) -> Affine:
        if isinstance(other, int):
            return Affine(self.base + other, self.steps) if other else self
        if not other.steps:
            return Affine(self.base + other.base, self.steps) if other.base else self
        if not self.steps:
            return Affine(self.base + other.base, other.steps) if self.base else other
        longer = max(len(self.steps), len(other.steps))
        padded = (steps + (0,) * (longer - len(steps)) for steps in (self.steps, other.steps))
        return Affine(self.base + other.base, tuple(map(sum, zip(*padded, strict=True))))

    def __mul__(self, factor: int) -> Affine:
        if factor == 1 or not (self.base or self.steps):
            return self
        return Affine(self.base * factor, tuple(step * factor for step in self.steps))

    __radd__, __rmul__ = __add__, __mul__

    def bounds(self, counts: Sequence[int]) -> tuple[int, int]:
        """The minimum and the maximum over all iterations of loops of these counts."""
        ends = [step * (count - 1) for step, count in zip(self.steps, counts, strict=False)]
        return self.base + sum(min(end, 0) for end in ends), self.base + sum(max(end, 0) for end in ends)


ZERO = Affine()


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis of the box that an instruction iterates over.

    Attributes:
        size: Number of elements along it.
        start: The coordinate of its first element in the tiled tensor.
        total: The tensor's size along the axis; elements whose coordinate is not in 0 … total − 1 lie outside of the
            tensor and are skipped. 0: `size`.
    """

    size: int
    start: Affine = ZERO
    total: int = 0

    def __post_init__(self) -> None:
        if not self.total:
            object.__setattr__(self, "total", self.size)

    def is_clipped(self, counts: Sequence[int]) -> bool:
        """Whether, in some iteration of loops of these counts, some element lies outside of the tensor."""
        if not self.start.steps:
            return self.start.base < 0 or self.start.base + self.size > self.total
        low, high = self.start.bounds(counts)
        return low < 0 or high + self.size > self.total

    def inside(self, counters: Sequence[int]) -> tuple[int, int]:
        """The range of the axis that lies inside the tensor: its first element, and one past its last."""
        start = self.start.at(counters)
        return max(0, -start), min(self.size, self.total - start)


@dataclass(frozen=True, slots=True)
class Tile:
    """Location of an operand: element (i, j, …) of the box is at `address` + i·strides[0] + j·strides[1] + ….

    Attributes:
        space: The memory.
        address: Bytes from the beginning of the memory or, in DRAM, of the buffer.
        strides: Bytes, one for each axis of the instruction; 0 where the operand does not have the axis.
        buffer: Name of the buffer in DRAM; in the scratchpad and accumulators, name of the core, which is empty on a
            chip of one core; empty in L2.
        slots, slot_bytes, turn: Multiple buffering: `slot_bytes` × (`turn` mod `slots`) is added to `address`, where
            `turn` changes from iteration to iteration.
    """

    space: Space
    dtype: str
    address: Affine
    strides: tuple[int, ...]
    buffer: str = ""
    slots: int = 1
    slot_bytes: int = 0
    turn: Affine = ZERO

    def place(self, counters: Sequence[int]) -> int:
        """The byte address for given loop counters."""
        address = self.address.at(counters)
        return address if self.slots == 1 else address + self.slot_bytes * (self.turn.at(counters) % self.slots)


@dataclass(frozen=True, slots=True)
class Token:
    """A counter that one engine raises and others wait for, which orders their instructions.

    Attributes:
        engine: Name of the engine that raises it: `matrix`, `output`, `vector`, `dma0`, …; on a chip of several cores
            after the core's name, as in `core1.matrix`.
        number: Number of the token among those of the engine.
    """

    engine: str
    number: int

    def __str__(self) -> str:
        return f"{self.engine}.{self.number}"


@dataclass(frozen=True, slots=True)
class Wait:
    """A condition: the token has been raised at least `count` times since the program's start."""

    token: Token
    count: Affine


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """Base class of instructions.

    Attributes:
        engine: Name of the engine that executes it.
        waits: Conditions that must hold before it starts.
        signals: Tokens that it raises when it has ended.
    """

    engine: str
    waits: tuple[Wait, ...] = ()
    signals: tuple[Token, ...] = ()

    @property
    def axes(self) -> tuple[Axis, ...]:
        return ()

    @property
    def reads(self) -> tuple[Tile, ...]:
        return ()

    @property
    def writes(self) -> tuple[Tile, ...]:
        return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Fence(Instruction):
    """An instruction that only waits for tokens and raises tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer(Instruction):
    """Copies a box of elements between two memories, unchanged.

    Attributes:
        box: The axes, up to five.
        fill: Value written in place of elements outside of the tensor (`Axis.total`); None: nothing is written there.
        index: A tile of int32, for a gather: the element at (i, j, …) is read from (index[i, j, …], j, …) of the
            source. An index outside 0 … `index_limit` − 1 is an error. None: no gather.
        scatters: The index applies to the target instead of the source.
        others: Further targets, in the scratchpads of other cores: a multicast over the network. From DRAM or the L2,
            the core of `target` passes on what it reads.
    """

    box: tuple[Axis, ...]
    source: Tile
    target: Tile
    fill: float | int | None = None
    index: Tile | None = None
    index_limit: int = 0
    scatters: bool = False
    others: tuple[Tile, ...] = ()

    @property
    def axes(self) -> tuple[Axis, ...]:
        return self.box

    @property
    def path(self) -> tuple[str, ...] | None:
        """The sending and the receiving cores of a transfer over the network; None if it crosses no network."""
        source, target = self.source, self.target
        if source.space.is_shared:
            return (target.buffer, *(tile.buffer for tile in self.others)) if self.others else None
        crosses = not target.space.is_shared and source.buffer != target.buffer
        return (source.buffer, *(tile.buffer for tile in self.writes)) if crosses else None

    @property
    def chosen(self) -> Tile | None:
        """The operand that the index applies to (the target of a scatter, else the source); None without an index."""
        return None if self.index is None else self.target if self.scatters else self.source

    @property
    def reads(self) -> tuple[Tile, ...]:
        return (self.source,) if self.index is None else (self.source, self.index)

    @property
    def writes(self) -> tuple[Tile, ...]:
        return (self.target, *self.others)


def has_whole_groups(axis: Axis, of: int) -> bool:
    """Whether an axis has only whole groups of `of` consecutive elements, in all iterations of the loops around it."""
    numbers = (axis.start.base, *axis.start.steps, axis.total, 0 if axis.size == axis.total else axis.size)
    return not any(number % of for number in numbers)


class Role(StrEnum):
    """Role of an axis of a matrix product."""

    BATCH = "b"  # of all three operands
    ROW = "m"  # of the left operand and the sums
    COLUMN = "n"  # of the right operand and the sums
    SUM = "k"  # of the left and the right operand
    WINDOW = "w"  # summed as well: a position in the window of a convolution


@dataclass(frozen=True, slots=True, kw_only=True)
class Multiply(Instruction):
    """sums[b, m, n] (+)= Σ over k and w of left[b, m, k, w] × right[b, n, k, w], on the matrix engine.

    Integers are multiplied exactly and summed in int32, floats in float32.

    Attributes:
        box, roles: The axes and the role of each. A convolution is a product whose left operand has overlapping
            strides.
        sums: A tile in the accumulators.
        begins: Depths of loops. The sums start at zero in iterations in which the counters of all these loops are 0,
            and are added to in the others; an empty tuple always adds. None: the sums always start at zero.
        left_zero: Zero point: an integer that is subtracted from each element of the left operand.
        right_zeros: Zero points of the right operand, one for each column. None: all are 0.
        sparsity: (N, M): of M consecutive elements of the right operand along the summed axis, counted from the
            tensor's first, at most N are not zero, and products with the zeros are left out. None: none are left out.
    """

    box: tuple[Axis, ...]
    roles: tuple[Role, ...]
    left: Tile
    right: Tile
    sums: Tile
    begins: tuple[int, ...] | None = None
    left_zero: int = 0
    right_zeros: Tile | None = None
    sparsity: tuple[int, int] | None = None

    @property
    def axes(self) -> tuple[Axis, ...]:
        return self.box

    @property
    def reads(self) -> tuple[Tile, ...]:
        return (self.left, self.right) if self.right_zeros is None else (self.left, self.right, self.right_zeros)

    @property
    def writes(self) -> tuple[Tile, ...]:
        return (self.sums,)

    def starts(self, counters: Sequence[int]) -> bool:
        """Whether the sums start at zero in the iteration with these loop counters."""
        return self.begins is None or (bool(self.begins) and not any(counters[depth] for depth in self.begins))


Value: TypeAlias = int | float
"""Operand of a vector program: the number of a register (an int), or a constant (a float)."""


@dataclass(frozen=True, slots=True)
class Step:
    """One operation of a vector program; its result is the next register.

    Attributes:
        op: The name of an element-wise op of the compiler's op table, or of `npu_model.machine.arithmetic.OPERATIONS`.
        operands: Registers, by number, and constants.
        attrs: The op's attributes, in the order of its declaration; for a reduction, a running sum or a coordinate, the
            axes.
    """

    op: str
    operands: tuple[Value, ...]
    attrs: tuple[Value, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute(Instruction):
    """A vector program: element-wise operations and reductions over a box, on the vector engine or the output stage.

    Registers 0, 1, … hold the inputs, as float32 or int32; each step defines the next register. Stored registers are
    rounded once, to the dtype of their tile.

    Attributes:
        stores: (register, tile) pairs.
        begins, carried: Accumulation over loops. `carried` are (input, value) pairs: in iterations in which the
            counters of all loops at the depths `begins` are 0, such an input is `value` instead of what its tile holds.
    """

    box: tuple[Axis, ...]
    inputs: tuple[Tile, ...]
    steps: tuple[Step, ...]
    stores: tuple[tuple[int, Tile], ...]
    begins: tuple[int, ...] = ()
    carried: tuple[tuple[int, float], ...] = ()

    @property
    def axes(self) -> tuple[Axis, ...]:
        return self.box

    @property
    def reads(self) -> tuple[Tile, ...]:
        return self.inputs

    @property
    def writes(self) -> tuple[Tile, ...]:
        return tuple(tile for _, tile in self.stores)

    def begin(self, counters: Sequence[int]) -> bool:
        """Whether the carried inputs have their initial values in the iteration with these loop counters."""
        return not any(counters[depth] for depth in self.begins)


@dataclass(frozen=True, slots=True)
class Loop:
    """A hardware loop, which executes its body `count` times."""

    count: int
    body: tuple[Node, ...]


Node: TypeAlias = Instruction | Loop


@dataclass(frozen=True, slots=True)
class Section:
    """The instructions of one kernel call.

    Attributes:
        node, kernel: Names of the graph node and of the kernel that the instructions implement, for reports.
        comment: Shapes, for reports.
    """

    node: str
    kernel: str
    comment: str
    body: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Buffer:
    """A named buffer in DRAM.

    Attributes:
        size: Bytes of its values.
        stored: Bytes that it takes in DRAM, where it is decoded on its way; 0 for one that lies there as it is.
        pattern: N:M sparsity of its form, as in `2:4`; empty for other forms.
    """

    name: str
    size: int
    stored: int = 0
    pattern: str = ""

    @property
    def dram_bytes(self) -> int:
        """Bytes that it takes in DRAM."""
        return self.stored or self.size


@dataclass(frozen=True, slots=True)
class TileProgram:
    """A program for one chip.

    Attributes:
        chip: The chip's name.
        digest: Hash of the chip's numbers: a program runs on no other chip.
        buffers: DRAM that it reads and writes.
        preload: Sections that run once per set of weights: they load weights that stay resident in the scratchpad or
            L2.
        sections: Sections that run in each run of the program.
    """

    chip: str
    digest: str
    buffers: tuple[Buffer, ...]
    preload: tuple[Section, ...]
    sections: tuple[Section, ...]


def instructions(nodes: Sequence[Node], counts: tuple[int, ...] = ()) -> Iterator[tuple[Instruction, tuple[int, ...]]]:
    """Each instruction of nested loops once, with the iteration counts of the loops around it, the outermost first."""
    for node in nodes:
        if isinstance(node, Loop):
            yield from instructions(node.body, (*counts, node.count))
        else:
            yield node, counts
