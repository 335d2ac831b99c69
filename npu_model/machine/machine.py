"""`Machine`: runs a tile program on a chip: in time, on data, or both, with the same cycles.

Engines work side by side, each on one instruction at a time and in the order of its queue:

1. An instruction is ready when its engine has begun all before it and is free, and all counts that it waits for have
   been reached. Instructions start in the order in which they become ready.
2. A transfer from or to DRAM begins when DRAM is free, occupies it for its bytes, and ends a latency later; its engine is
   free for the next transfer meanwhile. All engines share DRAM.
3. Any other instruction keeps its engine for its cycles.
4. At its end an instruction raises its tokens.
5. A section's instructions start after its launch. Launches take their time one after the other, beside all else where
   the chip overlaps them; otherwise a launch begins when the section before has ended.

Times are whole cycles. If data are computed, an instruction does all its work when it starts; since what it needs has
ended by then, the order of starts is one that a chip might have taken.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from npu_model.chip import Chip
from npu_model.isa.instructions import (
    Engine,
    Instruction,
    Loop,
    Node,
    Section,
    Space,
    Tile,
    TileProgram,
    Token,
    Transfer,
)
from npu_model.machine.arithmetic import execute
from npu_model.machine.costs import Cost, Costs
from npu_model.machine.memory import MachineError, Memory
from npu_model.machine.races import Races


class Cause(StrEnum):
    """Why no engine gets on."""

    DRAM_BANDWIDTH = "dram bandwidth"
    DRAM_LATENCY = "dram latency"
    LAUNCH = "launch"
    DEPENDENCY = "dependency"
    SRAM_PORTS = "sram ports"


@dataclass
class Counts:
    """The work of a section, as it was done.

    Attributes:
        busy: Engine → cycles.
        progress: Cycles by which it moved on the end of all computing; with `stalls`, over all sections, they add up to
            the cycles of the run. In a section that only moves data, moving is what counts as computing.
        stalls: Cause → cycles that all engines which compute waited for an instruction of this section.
        macs: Dtype → multiply-accumulates.
        start, end: When its first instruction started and its last one ended, in cycles.
    """

    start: int = -1
    end: int = 0
    instructions: int = 0
    dram_read: int = 0
    dram_written: int = 0
    sram_bytes: int = 0
    operations: int = 0
    macs: dict[str, int] = field(default_factory=dict)
    busy: dict[str, int] = field(default_factory=dict)
    progress: int = 0
    stalls: dict[Cause, int] = field(default_factory=dict)

    def add(self, cost: Cost, engine: str, start: int, end: int) -> None:
        self.start = start if self.start < 0 else min(self.start, start)
        self.end = max(self.end, end)
        self.instructions += 1
        self.dram_read += cost.dram_read
        self.dram_written += cost.dram_written
        self.sram_bytes += cost.sram_bytes
        self.operations += cost.operations
        self.busy[engine] = self.busy.get(engine, 0) + cost.cycles
        if cost.macs:
            self.macs[cost.dtype] = self.macs.get(cost.dtype, 0) + cost.macs

    def stall(self, cause: Cause, cycles: int) -> None:
        if cycles > 0:
            self.stalls[cause] = self.stalls.get(cause, 0) + cycles


@dataclass(frozen=True, slots=True)
class Span:
    """An instruction's execution, for traces."""

    section: int
    engine: str
    name: str
    start: int
    end: int


@dataclass
class Run:
    """What happened in a run: cycles in all, and by section."""

    cycles: int
    sections: list[Counts]
    spans: list[Span]


class Machine:
    """A chip with a tile program.

    Args:
        memory: Buffer name → its bytes in DRAM (uint8); without it, a run takes its time but computes nothing.
        checked: Look for reads of what was never written, and for accesses that no token orders.
    """

    def __init__(
        self, chip: Chip, program: TileProgram, memory: Mapping[str, Memory] | None = None, checked: bool = False
    ) -> None:
        self.chip, self.program = chip, program
        self.memory = memory
        self.checked = checked
        self.costs = Costs(chip)
        if memory is not None:
            matrix = chip.matrix
            self._scratchpad = Memory("the scratchpad", chip.sram.size, checked)
            self._accumulators = Memory("the accumulators", matrix.accumulator_bytes if matrix else 0, checked)

    def preload(self) -> Run:
        """Bring weights that stay into the scratchpad; once, and again when weights change."""
        return self._run(self.program.preload, {}, spans=False)

    def run(self, *, spans: bool = False) -> Run:
        """Run the program once.

        Raises:
            MachineError: an instruction does what no correct program does; names the instruction, node and address.
        """
        raised = token_totals(self.program.preload)
        return self._run(self.program.sections, raised, spans)

    def run_section(self, index: int) -> None:
        """Compute one section by itself, for looking at what is between sections; all before it have been."""
        raised = token_totals((*self.program.preload, *self.program.sections[:index]))
        self._run(self.program.sections[index : index + 1], raised, spans=False)

    def memories(self, tile: Tile) -> Memory:
        """The memory that an operand is in."""
        if tile.space is Space.SCRATCHPAD:
            return self._scratchpad
        if tile.space is Space.ACCUMULATORS:
            return self._accumulators
        assert self.memory is not None
        return self.memory[tile.buffer]

    def _run(self, sections: Sequence[Section], raised: Mapping[Token, int], spans: bool) -> Run:
        scheduler = _Scheduler(self, sections, raised, spans)
        return scheduler.run()


def token_totals(sections: Sequence[Section]) -> dict[Token, int]:
    """How often sections raise each token."""
    totals: dict[Token, int] = {}

    def count(nodes: Sequence[Node], times: int) -> None:
        for node in nodes:
            if isinstance(node, Loop):
                count(node.body, times * node.count)
            else:
                for token in node.signals:
                    totals[token] = totals.get(token, 0) + times

    for section in sections:
        count(section.body, 1)
    return totals


@dataclass(slots=True)
class _Queue:
    """An engine's state: its next instruction, in which round, and when the engine is free."""

    name: str
    stream: Iterator[tuple[int, _Ready, tuple[int, ...]]]
    current: tuple[int, _Ready, tuple[int, ...]] | None = None
    free: int = 0
    missing: int = 0
    ready: int = 0
    cause: str = ""


class _Ready:
    """An instruction, prepared for being executed many times."""

    __slots__ = ("cost", "instruction", "moves", "signals", "waits")

    def __init__(self, instruction: Instruction, counts: Sequence[int], costs: Costs) -> None:
        self.instruction = instruction
        self.waits = [(wait.token, wait.count.base, wait.count.steps) for wait in instruction.waits]
        self.signals = instruction.signals
        self.moves = isinstance(instruction, Transfer)
        self.cost = _cost_function(instruction, counts, costs)


def _cost_function(
    instruction: Instruction, counts: Sequence[int], costs: Costs
) -> Callable[[tuple[int, ...]], Cost]:
    axes = instruction.axes
    varying = []
    for position, axis in enumerate(axes):
        low, high = axis.start.bounds(counts)
        if low < 0 or high + axis.size > axis.total:
            varying.append(position)
    if not varying:
        fixed = costs.cost(instruction, [axis.size for axis in axes])
        return lambda counters: fixed
    cached: dict[tuple[int, ...], Cost] = {}

    def cost(counters: tuple[int, ...]) -> Cost:
        extents = [axis.size for axis in axes]
        for position in varying:
            first, end = axes[position].inside(counters)
            extents[position] = max(0, end - first)
        key = tuple(extents)
        if key not in cached:
            cached[key] = costs.cost(instruction, key)
        return cached[key]

    return cost


def engines_of(nodes: Sequence[Node]) -> set[str]:
    """Names of the engines that execute something of these."""
    found: set[str] = set()
    for node in nodes:
        found |= engines_of(node.body) if isinstance(node, Loop) else {node.engine}
    return found


def _stream(
    sections: Sequence[tuple[int, Sequence[_PreparedNode]]], engine: str
) -> Iterator[tuple[int, _Ready, tuple[int, ...]]]:
    for index, nodes in sections:
        for ready, counters in _walk(nodes, engine, ()):
            yield index, ready, counters


_PreparedNode = tuple[int, "tuple[_PreparedNode, ...] | _Ready", frozenset[str]]


def _prepared(nodes: Sequence[Node], counts: tuple[int, ...], costs: Costs) -> tuple[_PreparedNode, ...]:
    """The nodes as (rounds, body or instruction, engines); 0 rounds stand for an instruction."""
    result: list[_PreparedNode] = []
    for node in nodes:
        if isinstance(node, Loop):
            body = _prepared(node.body, (*counts, node.count), costs)
            result.append((node.count, body, frozenset().union(*(each[2] for each in body))))
        else:
            result.append((0, _Ready(node, counts, costs), frozenset({node.engine})))
    return tuple(result)


def _walk(
    nodes: Sequence[_PreparedNode], engine: str, counters: tuple[int, ...]
) -> Iterator[tuple[_Ready, tuple[int, ...]]]:
    for count, content, engines in nodes:
        if engine not in engines:
            continue
        if isinstance(content, _Ready):
            yield content, counters
        else:
            for counter in range(count):
                yield from _walk(content, engine, (*counters, counter))


class _Scheduler:
    """One run: queues, tokens and time."""

    def __init__(self, machine: Machine, sections: Sequence[Section], raised: Mapping[Token, int], spans: bool) -> None:
        self.machine = machine
        self.sections = sections
        self.counts = [Counts() for _ in sections]
        self.spans: list[Span] = []
        self.keeps_spans = spans
        self.raised = raised
        self.times: dict[Token, list[int]] = {}
        self.waiting: dict[Token, list[tuple[int, _Queue]]] = {}
        self.heap: list[tuple[int, int, _Queue]] = []
        self.prepared = [(i, _prepared(section.body, (), machine.costs)) for i, section in enumerate(sections)]
        engines = [engines_of(section.body) for section in sections]
        names = sorted(set().union(*engines))
        self.queues = [_Queue(name, iter(())) for name in names]
        computing = {name for name in names if not name.startswith(Engine.DMA)}
        self.moves_only = [not each & computing for each in engines]
        self.launched = [0] * len(sections)
        self.last = self.frontier = self.exposed = 0
        self.dram_free = 0
        self.latency = round(machine.chip.dram_latency_cycles)
        self.races = Races(names, sections) if machine.checked else None

    def run(self) -> Run:
        launch, clock = self.machine.chip.launch, self.machine.chip.clock_ghz
        cost = round(1e3 * clock * launch.cost_us)
        numbers = {id(queue): number for number, queue in enumerate(self.queues)}
        together = [self.prepared] if launch.overlapped else [[each] for each in self.prepared]
        for sections in together:
            for index, _ in sections:
                self.launched[index] = (index + 1) * cost if launch.overlapped else self.last + cost
            for number, queue in enumerate(self.queues):
                queue.stream = _stream(sections, queue.name)
                self._next(number, queue)
            self._run_all(numbers)
            self._check_finished()
        if self.counts:
            tail = self.last - self.frontier  # the last results leave
            latency = min(tail, self.latency)
            final = max(self.counts, key=lambda counts: counts.end)
            final.stall(Cause.DRAM_LATENCY, latency)
            final.stall(Cause.DRAM_BANDWIDTH, tail - latency)
        return Run(self.last, self.counts, self.spans)

    def _run_all(self, numbers: Mapping[int, int]) -> None:
        computes = self.machine.memory is not None
        while self.heap:
            ready, number, queue = heapq.heappop(self.heap)
            assert queue.current is not None
            index, prepared, counters = queue.current
            cost = prepared.cost(counters)
            start = ready
            if prepared.moves and (cost.dram_read or cost.dram_written):
                self.exposed = min(self.latency, max(0, ready - self.dram_free))
                start = max(ready, self.dram_free)
                self.dram_free = queue.free = start + cost.cycles
                end = queue.free + self.latency
            else:
                end = queue.free = start + cost.cycles
            counts = self.counts[index]
            counts.add(cost, queue.name, start, end)
            if cost.cycles and (not prepared.moves or self.moves_only[index]):
                self._advance(counts, index, prepared, counters, start, cost)
            if self.keeps_spans and cost.cycles:
                name = type(prepared.instruction).__name__.lower()
                self.spans.append(Span(index, queue.name, name, start, start + cost.cycles))
            if computes:
                self._execute(index, prepared.instruction, counters)
            if self.races is not None:
                self._check_order(index, number, prepared, counters)
            self.last = max(self.last, end)
            self._signal(prepared.signals, end, numbers)
            self._next(number, queue)

    def _advance(
        self, counts: Counts, index: int, prepared: _Ready, counters: tuple[int, ...], start: int, cost: Cost
    ) -> None:
        """Enter the time from the end of all computing so far to an instruction's: what it waited for, and its work."""
        at, end = self.frontier, start + cost.cycles
        if end <= at:
            return
        self.frontier = end
        if start > at:
            launched = min(start, max(at, self.launched[index]))
            counts.stall(Cause.LAUNCH, launched - at)
            if launched < start:
                if self._waited_for_data(prepared, counters, start):
                    latency = min(start - launched, self.exposed)
                    counts.stall(Cause.DRAM_LATENCY, latency)
                    counts.stall(Cause.DRAM_BANDWIDTH, start - launched - latency)
                else:
                    counts.stall(Cause.DEPENDENCY, start - launched)
            at = start
        ports = min(end - at, cost.port_cycles)
        counts.stall(Cause.SRAM_PORTS, ports)
        counts.progress += end - at - ports

    def _waited_for_data(self, prepared: _Ready, counters: tuple[int, ...], start: int) -> bool:
        """Whether what held an instruction up to its start was a transfer, or DRAM."""
        for token, base, steps in prepared.waits:
            count = base - self.raised.get(token, 0)
            for step, counter in zip(steps, counters, strict=False):
                count += step * counter
            if count > 0 and self.times[token][count - 1] == start:
                return token.engine.startswith(Engine.DMA)
        return prepared.moves

    def _next(self, number: int, queue: _Queue) -> None:
        """Take the queue's next instruction, and have it started when it is ready."""
        queue.current = next(queue.stream, None)
        if queue.current is None:
            return
        index, prepared, counters = queue.current
        queue.ready, queue.missing = max(queue.free, self.launched[index]), 0
        for token, base, steps in prepared.waits:
            count = base - self.raised.get(token, 0)
            for step, counter in zip(steps, counters, strict=False):
                count += step * counter
            if count <= 0:
                continue
            times = self.times.setdefault(token, [])
            if len(times) >= count:
                queue.ready = max(queue.ready, times[count - 1])
            else:
                queue.missing += 1
                self.waiting.setdefault(token, []).append((count, queue))
        if not queue.missing:
            heapq.heappush(self.heap, (queue.ready, number, queue))

    def _signal(self, tokens: Sequence[Token], end: int, numbers: Mapping[int, int]) -> None:
        for token in tokens:
            times = self.times.setdefault(token, [])
            times.append(max(end, times[-1]) if times else end)
            waiting = self.waiting.get(token)
            if not waiting:
                continue
            still = []
            for count, queue in waiting:
                if count > len(times):
                    still.append((count, queue))
                    continue
                queue.ready = max(queue.ready, times[count - 1])
                queue.missing -= 1
                if not queue.missing:
                    heapq.heappush(self.heap, (queue.ready, numbers[id(queue)], queue))
            self.waiting[token] = still

    def _execute(self, index: int, instruction: Instruction, counters: tuple[int, ...]) -> None:
        try:
            execute(instruction, counters, self.machine.memories)
        except MachineError as error:
            raise MachineError(f"{self._where(index, instruction, counters)}: {error}") from None

    def _check_order(self, index: int, number: int, prepared: _Ready, counters: tuple[int, ...]) -> None:
        assert self.races is not None
        counts = []
        for token, base, steps in prepared.waits:
            count = base - self.raised.get(token, 0)
            for step, counter in zip(steps, counters, strict=False):
                count += step * counter
            counts.append((token, count))
        problem = self.races.step(number, prepared.instruction, counters, counts)
        if problem:
            raise MachineError(f"{self._where(index, prepared.instruction, counters)}: {problem}")

    def _where(self, index: int, instruction: Instruction, counters: tuple[int, ...]) -> str:
        section = self.sections[index]
        name = type(instruction).__name__.lower()
        rounds = f" in round {', '.join(map(str, counters))}" if counters else ""
        return f"{name} on {instruction.engine}{rounds} of node '{section.node}'"

    def _check_finished(self) -> None:
        stuck = [queue for queue in self.queues if queue.current is not None]
        if not stuck:
            return
        reasons = []
        for queue in stuck:
            missing = [
                f"{token} to be raised {count + self.raised.get(token, 0)} times, which it is "
                f"{len(self.times.get(token, ())) + self.raised.get(token, 0)} times"
                for token, waiting in self.waiting.items()
                for count, other in waiting
                if other is queue
            ]
            assert queue.current is not None
            reasons.append(f"{queue.name} (node '{self.sections[queue.current[0]].node}') waits for {missing[0]}")
        raise MachineError(f"deadlock: {'; '.join(reasons)}")


__all__ = ["Cause", "Counts", "Machine", "Run", "Span", "engines_of", "token_totals"]
