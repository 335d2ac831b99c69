"""`without_implied_waits`: removes waits that are implied by other waits and the order within each engine.

The order in which instructions have to run is a graph: edges lead from each execution to the next one of its engine,
and from one that raises a token to those that wait for that count. A wait is redundant if another path connects its
ends. The graph is acyclic, so all redundant waits can be removed at once. An instruction in a loop keeps a wait that is
needed in any iteration. An edge from a product to a DMA engine says that its operands have been read, and nothing of
its results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from npu_model.chip import Chip
from npu_model.isa.instructions import Instruction, Loop, Node, Section, TileProgram
from npu_model.machine.costs import Costs
from npu_model.machine.machine import token_totals
from npu_model.machine.streams import Entry, Raised, Streams

_MOST_EXECUTIONS = 20_000  # of a program, a tenth of a second; longer ones keep all their waits


def without_implied_waits(program: TileProgram, chip: Chip) -> TileProgram:
    """Remove redundant waits from the program's sections; a program with too many executions is returned unchanged."""
    streams = Streams(program.sections, Costs(chip, program.buffers), token_totals(program.preload))
    if streams.executions > _MOST_EXECUTIONS:
        return program
    needed = _Order(streams, len(program.sections)).needed()
    return replace(program, sections=tuple(_kept(section, needed) for section in program.sections))


class _Order:
    """A traversal of a program's executions, in an order that its tokens allow, with a vector clock for each engine.

    A clock counts, for every engine, the executions that have ended, and behind these the ones that have read.
    """

    def __init__(self, streams: Streams, sections: int) -> None:
        names = sorted(set().union(*(streams.engines(number) for number in range(sections))))
        self._engines = {name: number for number, name in enumerate(names)}
        self._streams = [streams.stream(range(sections), name) for name in names]
        self._clocks: list[tuple[int, ...]] = [(0,) * (2 * len(names)) for _ in names]
        self._ended = [0] * len(names)  # for each engine, its own executions that others have seen the end of
        self._sources: dict[Raised, list[tuple[int, ...]]] = {}
        self._needed: dict[int, set[int]] = {}

    def needed(self) -> Mapping[int, set[int]]:
        """Id of an instruction → positions of those of its waits that are not redundant in some iteration."""
        current = [next(stream, None) for stream in self._streams]
        progress = True
        while progress:
            progress = False
            for number, stream in enumerate(self._streams):
                while (entry := current[number]) is not None and self._is_ready(entry):
                    self._execute(number, entry)
                    current[number] = next(stream, None)
                    progress = True
        return self._needed

    def _is_ready(self, entry: Entry) -> bool:
        waits = zip(entry[0].waits, entry[3], strict=True)
        return all(count <= len(self._sources.get(raised, ())) for raised, count in waits)

    def _execute(self, number: int, entry: Entry) -> None:
        prepared, _, _, counts = entry
        clock = self._clocks[number]
        sources = [
            (position, self._entry(raised), self._sources[raised][count - 1])
            for position, (raised, count) in enumerate(zip(prepared.waits, counts, strict=True))
            if count
        ]
        joined = clock
        for position, engine, source in sources:
            self._ended[number] = max(self._ended[number], source[number])
            time = source[engine]
            if clock[engine] >= time:
                continue
            is_implied = len(sources) > 1 and any(
                other[engine] >= time and (other[its_engine] != time or its_engine != engine or later < position)
                for later, its_engine, other in sources
                if later != position
            )
            if not is_implied:
                self._needed.setdefault(id(prepared.instruction), set()).add(position)
            joined = tuple(map(max, joined, source))
        reading = number + len(self._engines)
        joined = tuple(time + (place in (number, reading)) for place, time in enumerate(joined))
        self._clocks[number] = joined
        for raised in prepared.signals:
            seen = (*joined[:number], self._ended[number], *joined[number + 1 :]) if raised.after_reads else joined
            self._sources.setdefault(raised, []).append(seen)

    def _entry(self, raised: Raised) -> int:
        """The entry of a clock that a wait for a token is about."""
        engine = self._engines[raised.token.engine]
        return engine + len(self._engines) if raised.after_reads else engine


def _kept(section: Section, needed: Mapping[int, set[int]]) -> Section:
    return replace(section, body=_nodes(section.body, needed))


def _nodes(nodes: Sequence[Node], needed: Mapping[int, set[int]]) -> tuple[Node, ...]:
    return tuple(
        Loop(node.count, _nodes(node.body, needed)) if isinstance(node, Loop) else _with_waits(node, needed)
        for node in nodes
    )


def _with_waits(node: Instruction, needed: Mapping[int, set[int]]) -> Instruction:
    kept = needed.get(id(node), set())
    return replace(node, waits=tuple(wait for number, wait in enumerate(node.waits) if number in kept))
