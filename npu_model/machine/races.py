"""Accesses to the same bytes that no token orders, found by vector clocks.

Each engine has a clock: for each engine, the number of its instructions that are certain to have ended before. Waiting
for a token joins the clock of the instruction that raised it to that count. Two accesses to the same bytes, one of them
a write, are a race if the later one's engine does not have the earlier one in its clock; whether they overlapped in time
in this run does not matter. (C. Fidge, "Timestamps in Message-Passing Systems That Preserve the Partial Ordering", 1988.)
"""

from __future__ import annotations

from collections.abc import Sequence

from npu_model.isa.instructions import Instruction, Multiply, Section, Tile, Token, Transfer, instructions


class Races:
    """The accesses so far of the engines of a run.

    An access is forgotten when all engines have it in their clocks, or when its engine touches all of its bytes again
    and in no lesser way: what is ordered behind that is ordered behind the first. Memory that a single engine touches,
    or that nobody writes, has no races.
    """

    def __init__(self, engines: Sequence[str], sections: Sequence[Section]) -> None:
        self._names = list(engines)
        self._shared = _shared_memory(sections)
        self._clocks = [[0] * len(engines) for _ in engines]
        self._raised: dict[Token, list[tuple[int, ...]]] = {}
        self._accesses: dict[tuple[str, str], list[tuple[int, int, int, int, bool]]] = {}

    def step(
        self,
        engine: int,
        instruction: Instruction,
        counters: Sequence[int],
        counts: Sequence[tuple[Token, int]],
    ) -> str | None:
        """Note an instruction's accesses; returns what is wrong with them, in words.

        Args:
            engine: Its number.
            counts: What it waits for: tokens, and how often they have been raised in this run.
        """
        clock = self._clocks[engine]
        for token, count in counts:
            if count > 0:
                for i, time in enumerate(self._raised[token][count - 1]):
                    clock[i] = max(clock[i], time)
        clock[engine] += 1
        problem = None
        reads = list(instruction.reads)
        if isinstance(instruction, Multiply) and not instruction.starts(counters):
            reads.append(instruction.sums)
        for tile, writes in [*((t, False) for t in reads), *((t, True) for t in instruction.writes)]:
            problem = problem or self._access(engine, tile, instruction, counters, writes)
        for token in instruction.signals:
            before = self._raised.setdefault(token, [])
            joined = tuple(map(max, clock, before[-1])) if before else tuple(clock)
            before.append(joined)
        return problem

    def _access(
        self, engine: int, tile: Tile, instruction: Instruction, counters: Sequence[int], writes: bool
    ) -> str | None:
        first = tile.place(counters)
        end = first
        ranges = [axis.inside(counters) for axis in instruction.axes]
        if isinstance(instruction, Transfer) and tile is instruction.chosen:
            ranges[0] = (0, instruction.index_limit)
        for (begin, behind), stride in zip(ranges, tile.strides, strict=True):
            if behind <= begin:
                return None
            first += min(begin * stride, (behind - 1) * stride)
            end += max(begin * stride, (behind - 1) * stride)
        end += 1
        key = (tile.space.value, tile.buffer)
        if key not in self._shared:
            return None
        clock = self._clocks[engine]
        kept = []
        problem = None
        for other in self._accesses.get(key, ()):
            its_engine, its_time, its_first, its_end, it_writes = other
            ordered = clock[its_engine] >= its_time
            overlaps = first < its_end and its_first < end
            if overlaps and not ordered and (writes or it_writes) and its_engine != engine:
                place = f"{tile.space.value}{f' {tile.buffer!r}' if tile.buffer else ''}"
                problem = (
                    f"race: bytes {max(first, its_first)} to {min(end, its_end)} of {place} are "
                    f"{'written' if writes else 'read'} while {self._names[its_engine]} may still "
                    f"{'write' if it_writes else 'read'} them"
                )
            covered = its_engine == engine and first <= its_first and its_end <= end and (writes or not it_writes)
            if not covered and not (ordered and self._seen_by_all(its_engine, its_time)):
                kept.append(other)
        kept.append((engine, clock[engine], first, end, writes))
        self._accesses[key] = kept
        return problem

    def _seen_by_all(self, engine: int, time: int) -> bool:
        return all(clock[engine] >= time for clock in self._clocks)


def _shared_memory(sections: Sequence[Section]) -> set[tuple[str, str]]:
    """The memories and buffers that several engines touch, and one of them writes."""
    engines: dict[tuple[str, str], set[str]] = {}
    written: set[tuple[str, str]] = set()
    for section in sections:
        for instruction, _ in instructions(section.body):
            for tile in (*instruction.reads, *instruction.writes):
                engines.setdefault((tile.space.value, tile.buffer), set()).add(instruction.engine)
            written.update((tile.space.value, tile.buffer) for tile in instruction.writes)
    return {key for key in written if len(engines[key]) > 1}
