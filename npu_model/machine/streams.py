"""`Streams`: the sequence of instructions that each engine executes, with loops unrolled and costs computed in advance.

Loops are unrolled some hundreds of instructions at a time, and the costs of many iterations are computed at once, so
that starting an instruction takes only a few operations.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, repeat
from typing import TypeAlias

from npu_model.isa.instructions import (
    Affine,
    Engine,
    Instruction,
    Loop,
    Node,
    Section,
    Token,
    Transfer,
    core_of,
    is_transfer,
    kind_of,
)
from npu_model.machine.costs import Cost, Costs

_AHEAD = 256  # instructions, about: each is a few objects, and the garbage collector visits those that live long

Counters: TypeAlias = tuple[int, ...]


@dataclass(slots=True, eq=False)
class Raised:
    """The times at which a token was raised in this run, as seen by engines of one kind in cores at an equal distance.

    Attributes:
        token: The token.
        before: Number of times it was raised before this run.
        is_data: Whether a DMA engine raises it.
        delay: Cycles from the end of the instruction that raises it until those cores see it.
        after_reads: Whether it counts from when the instruction has read its operands, not from when its results are
            complete: so DMA engines see a product's tokens, as they do not reach the accumulators.
        times: The cycle in which it was raised for the nth time; 0, the run's start, for n = 0.
        waiting: (count, number of the engine) of the instructions that wait for it.
        clocks: For each time that it was raised, the vector clock of what has ended by then (`races.py`).
        from_l2: Whether the instruction that raised it last moved data from or to the shared L2.
    """

    token: Token
    before: int
    is_data: bool
    delay: int = 0
    after_reads: bool = False
    times: list[int] = field(default_factory=lambda: [0])
    waiting: list[tuple[int, int]] = field(default_factory=list)
    clocks: list[tuple[int, ...]] = field(default_factory=list)
    from_l2: bool = False


@dataclass(slots=True, eq=False)
class Prepared:
    """An instruction of a section, prepared for execution.

    Attributes:
        section: Number of its section.
        moves: Whether it is a transfer.
        sizes: Its engine → 1, the number of instructions that it executes in an iteration of the innermost loop.
        waits, counts: The tokens that it waits for, and how often each must have been raised since the program's start.
        signals: The tokens that it raises, once for each way in which some engine that waits for it sees it.
        varying: Axes of which, in some iterations, some elements lie outside of the tensor.
        outside: DRAM address of a transfer, if its time depends on it (on a chip with DRAM banks); else None.
        fixed: Its cost, if that is equal in all iterations; else None.
        by_extents: Its costs so far, by extents of the `varying` axes and the position of the address among DRAM rows.
        path: The sending and the receiving cores of a transfer over the network; None for other instructions.
    """

    instruction: Instruction
    section: int
    moves: bool
    sizes: Mapping[str, int]
    waits: list[Raised]
    counts: list[Affine]
    signals: list[Raised]
    varying: list[int]
    outside: Affine | None
    fixed: Cost | None
    by_extents: dict[tuple[int, ...], Cost]
    path: tuple[str, ...] | None


@dataclass(slots=True, eq=False)
class _Rounds:
    count: int
    body: list[_Rounds | Prepared]
    sizes: Mapping[str, int]


Entry: TypeAlias = tuple[Prepared, Counters, Cost, tuple[int, ...]]
"""An execution: instruction, loop counters, cost, and for each token that it waits for, how often that has to be
raised in this run (at least 0).
"""


class Streams:
    """The instructions that engines execute in each section.

    Args:
        raised: Token → number of times it was raised before this run.

    Attributes:
        work: For each section, (engine, cost) → number of executions that have been streamed so far.
    """

    def __init__(self, sections: Sequence[Section], costs: Costs, raised: Mapping[Token, int]) -> None:
        self._tokens: dict[Token, list[Raised]] = {}
        self.work: list[Counter[tuple[str, Cost]]] = [Counter() for _ in sections]
        self._costs = costs
        self._raised = raised
        self._signalled: list[Prepared] = []
        self._sections = [self._nodes(section.body, (), number) for number, section in enumerate(sections)]
        for prepared in self._signalled:
            tokens = prepared.instruction.signals
            prepared.signals = [raised for token in tokens for raised in self._tokens.get(token, ())]

    @property
    def executions(self) -> int:
        """Total number of instructions that are executed, over all loop iterations."""
        return sum(size for nodes in self._sections for node in nodes for size in node.sizes.values())

    def engines(self, section: int) -> set[str]:
        """Names of the engines that execute at least one instruction of a section."""
        return {name for node in self._sections[section] for name in node.sizes}

    def stream(self, sections: Sequence[int], engine: str) -> Iterator[Entry]:
        """The executions of one engine in these sections, in order."""
        return chain.from_iterable(self._stream(self._sections[number], engine, ()) for number in sections)

    def _nodes(self, nodes: Sequence[Node], counts: tuple[int, ...], section: int) -> list[_Rounds | Prepared]:
        result: list[_Rounds | Prepared] = []
        for node in nodes:
            if isinstance(node, Loop):
                body = self._nodes(node.body, (*counts, node.count), section)
                sizes: Counter[str] = Counter()
                for inner in body:
                    for name, size in inner.sizes.items():
                        sizes[name] += size * node.count
                result.append(_Rounds(node.count, body, sizes))
            else:
                result.append(self._prepared(node, counts, section))
        return result

    def _prepared(self, instruction: Instruction, counts: tuple[int, ...], section: int) -> Prepared:
        axes = instruction.axes
        varying = [position for position, axis in enumerate(axes) if axis.is_clipped(counts)]
        outside = self._outside(instruction)
        fixed = None if varying or outside else self._costs.cost(instruction, [axis.size for axis in axes])
        prepared = Prepared(
            instruction,
            section,
            isinstance(instruction, Transfer),
            {instruction.engine: 1},
            [self._token(wait.token, instruction.engine) for wait in instruction.waits],
            [wait.count for wait in instruction.waits],
            [],
            varying,
            outside,
            fixed,
            {},
            instruction.path if isinstance(instruction, Transfer) else None,
        )
        if instruction.signals:
            self._signalled.append(prepared)
        return prepared

    def _outside(self, instruction: Instruction) -> Affine | None:
        """The DRAM address of a transfer on a chip with DRAM banks; None for other instructions and chips."""
        if self._costs.banks is None or not isinstance(instruction, Transfer):
            return None
        tiles = (instruction.source, instruction.target)
        return next((tile.address for tile in tiles if tile.space.has_buffers), None)

    def _token(self, token: Token, engine: str) -> Raised:
        """A token as an engine sees it: with the network's delay, and of a product after its reads if it is for DMA."""
        delay = self._costs.delay(core_of(token.engine), core_of(engine))
        after_reads = kind_of(token.engine) == Engine.MATRIX and is_transfer(engine)
        known = self._tokens.setdefault(token, [])
        for raised in known:
            if (raised.delay, raised.after_reads) == (delay, after_reads):
                return raised
        known.append(Raised(token, self._raised.get(token, 0), is_transfer(token.engine), delay, after_reads))
        return known[-1]

    def _stream(self, nodes: Sequence[_Rounds | Prepared], engine: str, counters: Counters) -> Iterator[Entry]:
        for node in nodes:
            size = node.sizes.get(engine, 0)
            if not size:
                continue
            if isinstance(node, Prepared) and node.fixed is not None:
                self.work[node.section][engine, node.fixed] += 1
                tokens = zip(node.waits, node.counts, strict=True)
                waits = tuple([max(0, count.at(counters) - raised.before) for raised, count in tokens])
                yield node, counters, node.fixed, waits
                continue
            if isinstance(node, Prepared) or size <= _AHEAD:
                yield from self._unrolled([node], engine, [counters])
                continue
            each = size // node.count
            if each > _AHEAD:
                for counter in range(node.count):
                    yield from self._stream(node.body, engine, (*counters, counter))
                continue
            step = _AHEAD // each
            for first in range(0, node.count, step):
                rounds = [(*counters, counter) for counter in range(first, min(node.count, first + step))]
                yield from self._unrolled(node.body, engine, rounds)

    def _unrolled(self, nodes: Sequence[_Rounds | Prepared], engine: str, rounds: Sequence[Counters]) -> list[Entry]:
        """The executions of one engine in order, if `nodes` run once for each tuple of outer loop counters."""
        parts: list[list[Entry]] = []
        for node in nodes:
            if engine not in node.sizes:
                continue
            if isinstance(node, Prepared):
                parts.append(self._executions(node, rounds))
            else:
                inner = [(*counters, counter) for counters in rounds for counter in range(node.count)]
                parts.append(self._unrolled(node.body, engine, inner))
        if len(parts) <= 1:
            return parts[0] if parts else []
        if all(len(part) == len(rounds) for part in parts):
            return list(chain.from_iterable(zip(*parts, strict=True)))
        sizes = [len(part) // len(rounds) for part in parts]
        return [
            entry
            for number in range(len(rounds))
            for part, size in zip(parts, sizes, strict=True)
            for entry in part[number * size : (number + 1) * size]
        ]

    def _executions(self, node: Prepared, rounds: Sequence[Counters]) -> list[Entry]:
        costs = self._costs_of(node, rounds)
        if not node.waits:
            return list(zip([node] * len(rounds), rounds, costs, repeat(()), strict=False))
        waits = []
        for raised, count in zip(node.waits, node.counts, strict=True):
            waits.append([n if n > 0 else 0 for n in _values(count + -raised.before, rounds)])
        return list(zip([node] * len(rounds), rounds, costs, zip(*waits, strict=True), strict=True))

    def _costs_of(self, node: Prepared, rounds: Sequence[Counters]) -> Sequence[Cost]:
        work, engine = self.work[node.section], node.instruction.engine
        if node.fixed is not None:
            work[engine, node.fixed] += len(rounds)
            return [node.fixed] * len(rounds)
        axes = node.instruction.axes
        columns = []
        for position in node.varying:
            size, total = axes[position].size, axes[position].total
            starts = _values(axes[position].start, rounds)
            columns.append([max(0, min(size, total - start) - max(0, -start)) for start in starts])
        banks = self._costs.banks
        if node.outside is None or banks is None:
            columns.append([0] * len(rounds))
        else:
            columns.append([address % banks.period for address in _values(node.outside, rounds)])
        keys = list(zip(*columns, strict=True))
        for key, times in Counter(keys).items():
            if key not in node.by_extents:
                extents = [axis.size for axis in axes]
                for position, extent in zip(node.varying, key, strict=False):
                    extents[position] = extent
                node.by_extents[key] = self._costs.cost(node.instruction, extents, key[-1])
            work[engine, node.by_extents[key]] += times
        return [node.by_extents[key] for key in keys]


def _values(affine: Affine, rounds: Sequence[Counters]) -> list[int]:
    """The values of an affine number for each tuple of loop counters."""
    values = [affine.base] * len(rounds)
    for depth, step in enumerate(affine.steps):
        if step:
            values = [value + step * counters[depth] for value, counters in zip(values, rounds, strict=True)]
    return values


__all__ = ["Entry", "Prepared", "Raised", "Streams"]
