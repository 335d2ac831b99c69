"""Detection of races, accesses to the same bytes that no token orders, by vector clocks.

Each engine has a clock: for every engine, the number of its instructions that are certain to have ended, and the number
of those that are certain to have read their operands. Waiting for a token merges the clock of the instruction that
raised it to that count; to a DMA engine, a product's token says only that its operands have been read. Two accesses to
the same bytes, one of them a write, are a race if the earlier one is not covered by the clock of the later one's
engine; whether they overlapped in time in this run does not matter. (C. Fidge, "Timestamps in Message-Passing Systems
That Preserve the Partial Ordering", 1988.)

Each engine's accesses are kept in order of time, where a repeated access to the same bytes replaces the previous one.
An access is compared only with those of other engines that are not yet covered by its engine's clock.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from npu_compiler.graph.dtypes import itemsize
from npu_model.isa.instructions import Instruction, Tile, Transfer
from npu_model.machine.memory import MachineError
from npu_model.machine.streams import Prepared

_MOST_KEPT = 4096  # accesses of an engine to a memory, before those that all engines have seen are forgotten


@dataclass(frozen=True, slots=True)
class _Box:
    """The bytes of an access: elements of `size` bytes at `address` + Σ i·stride, within `first` … `end` − 1."""

    first: int
    end: int
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    size: int

    def mask(self, first: int, end: int) -> np.ndarray:
        """Whether the access touches each byte from `first` to `end` − 1."""
        flags = np.zeros(self.end - self.first, bool)
        place = self.address - self.first
        np.ndarray((*self.shape, self.size), bool, flags.data, place, (*self.strides, 1))[...] = True
        return flags[first - self.first : end - self.first]

    def overlaps(self, other: _Box) -> tuple[int, int] | None:
        """The first byte that both accesses touch and one past the last; None if they have no byte in common."""
        first, end = max(self.first, other.first), min(self.end, other.end)
        if first >= end:
            return None
        common = np.flatnonzero(self.mask(first, end) & other.mask(first, end))
        return (first + int(common[0]), first + int(common[-1]) + 1) if len(common) else None


class _Accesses:
    """The reads, or the writes, of one memory in a run.

    A time is the engine's own entry in its clock: the number of its instructions up to the one that accessed.

    Attributes:
        by_engine: For each engine, the bytes of an access → the time of the engine's latest access to them.
        latest: For each engine, the time of its latest access to any bytes; 0 before the first.
    """

    def __init__(self, engines: int) -> None:
        self.by_engine: list[dict[_Box, int]] = [{} for _ in range(engines)]
        self.latest = [0] * engines


class Races:
    """Race detector for one run.

    Args:
        engines: Names of all engines.
    """

    def __init__(self, engines: Sequence[str]) -> None:
        self._names = list(engines)
        self._clocks = [[0] * (2 * len(engines)) for _ in engines]  # instructions that have ended, then: that have read
        self._ended = [0] * len(engines)  # for each engine, its own instructions that others have seen the end of
        self._accesses: dict[tuple[str, str], tuple[_Accesses, _Accesses]] = {}
        self._boxes: dict[int, tuple[Instruction, dict[tuple[int, ...], list[tuple[Tile, _Box, bool]]]]] = {}

    def step(self, engine: int, prepared: Prepared, counters: Sequence[int], waits: Sequence[int]) -> None:
        """Record an instruction's accesses and compare them with those of other engines.

        Args:
            engine: Number of the instruction's engine.
            waits: For each token that it waited for, the count to which it had to be raised in this run.

        Raises:
            MachineError: one of the accesses is a race.
        """
        clock = self._clocks[engine]
        for raised, count in zip(prepared.waits, waits, strict=True):
            if count:
                seen = raised.clocks[count - 1]
                self._ended[engine] = max(self._ended[engine], seen[engine])
                for i, time in enumerate(seen):
                    if time > clock[i]:
                        clock[i] = time
        clock[engine] += 1
        clock[engine + len(self._names)] += 1
        for tile, box, writes in self._touched(prepared, counters):
            address = tile.place(counters)
            moved = _Box(
                box.first + address, box.end + address, box.address + address, box.shape, box.strides, box.size
            )
            self._access(engine, tile, moved, writes)
        reading = [*clock[:engine], self._ended[engine], *clock[engine + 1 :]]
        for raised in prepared.signals:
            before, now = raised.clocks, reading if raised.after_reads else clock
            before.append(tuple(map(max, now, before[-1])) if before else tuple(now))

    def _touched(self, prepared: Prepared, counters: Sequence[int]) -> list[tuple[Tile, _Box, bool]]:
        """The operands of an instruction, with their bytes relative to their address and whether it writes them."""
        instruction = prepared.instruction
        own = self._boxes.setdefault(id(instruction), (instruction, {}))[1]
        ranges = tuple(x for position in prepared.varying for x in instruction.axes[position].inside(counters))
        if ranges not in own:
            own[ranges] = list(_touched(instruction, counters))
        return own[ranges]

    def _access(self, engine: int, tile: Tile, box: _Box, writes: bool) -> None:
        key = (tile.space.value, tile.buffer)
        if key not in self._accesses:
            self._accesses[key] = _Accesses(len(self._names)), _Accesses(len(self._names))
        reads_of, writes_of = self._accesses[key]
        clock = self._clocks[engine]
        for others, they_write in ((writes_of, True), (reads_of, False)) if writes else ((writes_of, True),):
            first = 0 if they_write else len(self._names)
            for other, latest in enumerate(others.latest):
                if latest > clock[first + other] and other != engine:
                    self._compare(tile, box, writes, others.by_engine[other], other, clock[first + other], they_write)
        own = writes_of if writes else reads_of
        kept = own.by_engine[engine]
        kept.pop(box, None)
        kept[box] = own.latest[engine] = clock[engine]
        if len(kept) > _MOST_KEPT:
            seen = min(each[engine] for each in self._clocks)  # whoever has seen an end has seen the reads
            own.by_engine[engine] = {box: time for box, time in kept.items() if time > seen}

    def _compare(
        self, tile: Tile, box: _Box, writes: bool, others: dict[_Box, int], other: int, seen: int, they_write: bool
    ) -> None:
        for its_box, time in reversed(others.items()):
            if time <= seen:
                return
            if box.first < its_box.end and its_box.first < box.end and (common := box.overlaps(its_box)):
                place = f"{tile.space.value}{f' {tile.buffer!r}' if tile.buffer else ''}"
                raise MachineError(
                    f"race: bytes {common[0]} to {common[1]} of {place} are {'written' if writes else 'read'} while "
                    f"{self._names[other]} may still {'write' if they_write else 'read'} them"
                )


def _touched(instruction: Instruction, counters: Sequence[int]) -> Iterator[tuple[Tile, _Box, bool]]:
    """The operands that an instruction accesses in one iteration, with their bytes relative to their address."""
    ranges = [axis.inside(counters) for axis in instruction.axes]
    is_empty = any(end <= first for first, end in ranges)
    if isinstance(instruction, Transfer) and instruction.fill is not None:
        yield instruction.target, _box(instruction.target, [(0, axis.size) for axis in instruction.axes]), True
    if is_empty:
        return
    chosen, rows = None, 0
    if isinstance(instruction, Transfer) and instruction.index is not None:
        chosen, rows = instruction.target if instruction.scatters else instruction.source, instruction.index_limit
    for tile, writes in [*((t, False) for t in instruction.reads), *((t, True) for t in instruction.writes)]:
        yield tile, _box(tile, [(0, rows), *ranges[1:]] if tile is chosen else ranges), writes


def _box(tile: Tile, ranges: Sequence[tuple[int, int]]) -> _Box:
    address = low = high = 0
    shape, strides = [], []
    for (first, end), stride in zip(ranges, tile.strides, strict=True):
        address += first * stride
        if stride and end - first > 1:
            shape.append(end - first)
            strides.append(stride)
            low += min(0, (end - first - 1) * stride)
            high += max(0, (end - first - 1) * stride)
    size = itemsize(tile.dtype)
    return _Box(address + low, address + high + size, address, tuple(shape), tuple(strides), size)


__all__ = ["Races"]
