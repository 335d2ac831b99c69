"""`Machine`: runs a tile program on a chip: in time, on data, or both, with the same cycles.

Engines work side by side, each on one instruction at a time and in the order of its queue:

1. An instruction is ready when its engine has begun all before it and is free, and all counts that it waits for have
   been reached. Instructions start in the order in which they become ready.
2. A transfer from or to DRAM begins when DRAM is free, occupies it for its bytes, and ends a latency later; its engine
   is free for the next transfer meanwhile. All engines share DRAM.
   The shared L2 serves transfers in the same way, beside DRAM; one between the two occupies both.
3. A transfer from one core's scratchpad to another's begins when the one's link out and the other's link in are free,
   occupies both for its bytes, and ends some hops later.
4. Any other instruction keeps its engine for its cycles. A product ends the depth of the array later where folds
   overlap; the engine begins the next one meanwhile.
5. Where the chip's file says how the scratchpad's banks lie, what touches it also waits for them (`sram_banks.py`).
6. At its end an instruction raises its tokens, which other cores see some hops later; an engine's instructions end in
   their order.
7. A section's instructions start after its launch. Launches take their time one after the other, beside all else where
   the chip overlaps them; otherwise a launch begins when the section before has ended.

Times are whole cycles. If data are computed, an instruction does all its work when it starts; since what it needs has
ended by then, the order of starts is one that a chip might have taken. Neither times nor the order depend on data, so a
program that has run is computed again in the order of its first run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from enum import StrEnum
from heapq import heappop, heappush

import numpy as np

from npu_model.chip import Chip
from npu_model.isa.instructions import (
    Instruction,
    Loop,
    Node,
    Section,
    Space,
    Tile,
    TileProgram,
    Token,
    core_name,
    is_transfer,
)
from npu_model.machine.blas import one_thread
from npu_model.machine.costs import Cost, Costs
from npu_model.machine.execution import Executed, Execution, execute, located
from npu_model.machine.memory import MachineError, Memory
from npu_model.machine.races import Races
from npu_model.machine.sram_banks import SramBanks
from npu_model.machine.streams import Entry, Prepared, Raised, Streams

_MOST_KEPT = 2**18  # executions whose order is kept for the next run


class Cause(StrEnum):
    """Cause of a stall of all engines."""

    DRAM_BANDWIDTH = "dram bandwidth"
    DRAM_LATENCY = "dram latency"
    LAUNCH = "launch"
    DEPENDENCY = "dependency"
    SRAM_PORTS = "sram ports"
    L2 = "shared l2"


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
    network_bytes: int = 0
    l2_read: int = 0
    l2_written: int = 0
    operations: int = 0
    macs: dict[str, int] = field(default_factory=dict)
    busy: dict[str, int] = field(default_factory=dict)
    progress: int = 0
    stalls: dict[Cause, int] = field(default_factory=dict)

    def add(self, cost: Cost, engine: str, times: int) -> None:
        """Enter the work of an instruction that was executed so many times."""
        self.instructions += times
        self.dram_read += times * cost.dram_read
        self.dram_written += times * cost.dram_written
        self.sram_bytes += times * cost.sram_bytes
        self.network_bytes += times * cost.network
        self.l2_read += times * cost.l2_read
        self.l2_written += times * cost.l2_written
        self.operations += times * cost.operations
        self.busy[engine] = self.busy.get(engine, 0) + times * cost.cycles
        if cost.macs:
            self.macs[cost.dtype] = self.macs.get(cost.dtype, 0) + times * cost.macs

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
    """Result of a run: cycles in all, and by section."""

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
        self._executions: dict[tuple[int, ...], Execution] = {}
        self._first: tuple[Run, list[Executed]] | None = None
        self._own: dict[tuple[Space, str], Memory] = {}
        if memory is not None:
            sums = chip.matrix.accumulator_bytes if chip.matrix else 0
            if chip.l2 is not None:
                self._own[Space.L2, ""] = Memory("the L2", chip.l2.size, checked)
            for core in [""] if chip.cores is None else map(core_name, range(chip.cores.count)):
                of_core = f" of {core}" if core else ""
                self._own[Space.SCRATCHPAD, core] = Memory(f"the scratchpad{of_core}", chip.sram.size, checked)
                self._own[Space.ACCUMULATORS, core] = Memory(f"the accumulators{of_core}", sums, checked)

    def preload(self) -> Run:
        """Bring weights that stay into the scratchpad; once, and again when weights change."""
        return self._run(self.program.preload, {})

    def run(self, *, spans: bool = False, lanes: Sequence[Sequence[int]] | None = None) -> Run:
        """Run the program once.

        Args:
            lanes: Numbers of sections that are launched one after the other, beside those of other lanes, which use
                other engines. Default: all in one lane.

        Raises:
            MachineError: an instruction does what no correct program does; names the instruction, node and address.
        """
        if self._first is not None and not spans:
            run, order = self._first
            with _computing():
                for executed in order:
                    execute(*executed)
            return run
        first: list[Executed] | None = [] if self.memory is not None and not self.checked else None
        run = self._run(self.program.sections, token_totals(self.program.preload), spans, first, lanes)
        if first is not None and len(first) <= _MOST_KEPT:
            self._first = run, first
        return run

    def run_section(self, index: int) -> None:
        """Compute one section by itself, for looking at what is between sections; all before it have been."""
        raised = token_totals((*self.program.preload, *self.program.sections[:index]))
        self._run(self.program.sections[index : index + 1], raised)

    def memories(self, tile: Tile) -> Memory:
        """The memory that an operand is in."""
        if not tile.space.has_buffers:
            return self._own[tile.space, tile.buffer]
        assert self.memory is not None
        return self.memory[tile.buffer]

    def execution(self, instruction: Instruction, varying: Sequence[int]) -> Execution:
        """The executor of an instruction of the program, which is made once.

        Args:
            varying: Axes of which some elements do not exist in some rounds.
        """
        key = (id(instruction), *varying)
        execution = self._executions.get(key)
        if execution is None:
            execution = self._executions[key] = Execution(instruction, varying, self.memories)
        return execution

    def _run(
        self,
        sections: Sequence[Section],
        raised: Mapping[Token, int],
        spans: bool = False,
        order: list[Executed] | None = None,
        lanes: Sequence[Sequence[int]] | None = None,
    ) -> Run:
        scheduler = _Scheduler(self, sections, raised, spans, order, lanes or [range(len(sections))])
        with _computing() if self.memory is not None else nullcontext():
            return scheduler.run()


@contextmanager
def _computing() -> Iterator[None]:
    """Compute without warnings and with one thread of BLAS."""
    with np.errstate(all="ignore"), one_thread():
        yield


def token_totals(sections: Sequence[Section]) -> dict[Token, int]:
    """Number of times that sections raise each token."""
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


def engines_of(nodes: Sequence[Node]) -> set[str]:
    """Names of the engines that execute something of these."""
    found: set[str] = set()
    for node in nodes:
        found |= engines_of(node.body) if isinstance(node, Loop) else {node.engine}
    return found


@dataclass(slots=True, eq=False)
class _Queue:
    """An engine's state.

    Attributes:
        current: Its next instruction.
        free: When the engine is free for it.
        ended: When all before it have ended.
        ready, missing: When it can start, as far as is known, and for how many tokens it still waits.
        lane: The sections that it executes.
    """

    name: str
    stream: Iterator[Entry] = field(default_factory=lambda: iter(()))
    current: Entry | None = None
    free: int = 0
    ended: int = 0
    missing: int = 0
    ready: int = 0
    lane: _Lane | None = None


@dataclass(eq=False)
class _Lane:
    """Sections that are launched one after the other.

    Attributes:
        batches: Those that are not launched yet; those of a batch together.
        launched: Those of the last batch that was.
        ended: When all before these had ended.
        queues: Numbers of the queues that execute them.
    """

    batches: list[Sequence[int]]
    queues: list[int] = field(default_factory=list)
    launched: Sequence[int] = ()
    ended: int = 0


class _Scheduler:
    """One run: queues, tokens and time."""

    def __init__(
        self,
        machine: Machine,
        sections: Sequence[Section],
        raised: Mapping[Token, int],
        spans: bool,
        order: list[Executed] | None,
        lanes: Sequence[Sequence[int]],
    ) -> None:
        self.machine = machine
        self.order = order
        self.sections = sections
        self.counts = [Counts() for _ in sections]
        self.spans: list[Span] = []
        self.keeps_spans = spans
        self.streams = Streams(sections, machine.costs, raised)
        self.heap: list[tuple[int, int]] = []
        engines = [self.streams.engines(number) for number in range(len(sections))]
        names = sorted(set().union(*engines))
        self.queues = [_Queue(name) for name in names]
        computing = {name for name in names if not is_transfer(name)}
        self.moves_only = [not each & computing for each in engines]
        self.launched = [0] * len(sections)
        overlapped = machine.chip.launch.overlapped
        self.lanes = [_Lane([lane] if overlapped else [[number] for number in lane]) for lane in lanes]
        for lane, numbers in zip(self.lanes, lanes, strict=True):
            own = set().union(*(engines[number] for number in numbers))
            lane.queues = [number for number, name in enumerate(names) if name in own]
            for number in lane.queues:
                self.queues[number].lane = lane
        self.last = self.frontier = self.exposed = 0
        self.dram_free = self.l2_free = 0
        self.out_free: dict[str, int] = {}  # core → when its link out of it is free; and into it
        self.in_free: dict[str, int] = {}
        self.banks = SramBanks(machine.chip) if machine.chip.sram.bank_bytes is not None else None
        self.latency = round(machine.chip.dram_latency_cycles)
        self.l2_latency = round(machine.chip.l2_latency_cycles)
        self.races = Races(names) if machine.checked else None

    def run(self) -> Run:
        for lane in self.lanes:
            self._launch(lane)
        self._run_all()
        self._check_finished()
        for counts, work in zip(self.counts, self.streams.work, strict=True):
            for (engine, each), times in work.items():
                counts.add(each, engine, times)
        if self.counts:
            tail = self.last - self.frontier  # the last results leave
            latency = min(tail, self.latency)
            final = max(self.counts, key=lambda counts: counts.end)
            final.stall(Cause.DRAM_LATENCY, latency)
            final.stall(Cause.DRAM_BANDWIDTH, tail - latency)
        return Run(self.last, self.counts, self.spans)

    def _launch(self, lane: _Lane) -> None:
        """Launch a lane's next sections, when all before them have ended, until there is something to execute."""
        launch = self.machine.chip.launch
        cost = round(1e3 * self.machine.chip.clock_ghz * launch.cost_us)
        while lane.batches:
            batch = lane.batches.pop(0)
            lane.ended = max([lane.ended, *(self.counts[number].end for number in lane.launched)])
            lane.launched = batch
            for place, index in enumerate(batch, 1):
                self.launched[index] = lane.ended + place * cost
            for number in lane.queues:
                queue = self.queues[number]
                queue.stream = self.streams.stream(batch, queue.name)
                self._next(number, queue)
            if any(self.queues[number].current is not None for number in lane.queues):
                return

    def _run_all(self) -> None:
        heap, queues = self.heap, self.queues
        looks_closer = self.machine.memory is not None or self.races is not None or self.keeps_spans
        while heap:
            start, number = heappop(heap)
            queue = queues[number]
            assert queue.current is not None
            prepared, counters, cost, waits = queue.current
            index, cycles, conflicts = prepared.section, cost.cycles, 0
            if prepared.moves:
                start, end = self._moved(prepared.path, start, cost)
            else:
                end = start + cycles + cost.latency
            queue.free = start + cycles
            if self.banks is not None:
                conflicts = self.banks.delay(prepared.instruction, counters, start, cost)
                queue.free, end, cycles = queue.free + conflicts, end + conflicts, cycles + conflicts
            if end < queue.ended:
                end = queue.ended
            queue.ended = end
            counts = self.counts[index]
            if end > counts.end:
                counts.end = end
                self.last = max(self.last, end)
            if start < counts.start or counts.start < 0:
                counts.start = start
            if cycles and start + cycles > self.frontier and (not prepared.moves or self.moves_only[index]):
                self._advance(counts, prepared, waits, start, cost, conflicts)
            if looks_closer:
                self._look_closer(queue, number, start)
            for raised in prepared.signals:
                raised.times.append(end + raised.delay)
                raised.from_l2 = prepared.moves and bool(cost.l2_read or cost.l2_written)
                if raised.waiting:
                    self._wake(raised)
            if not self._next(number, queue):
                self._finish(queue)

    def _moved(self, path: tuple[str, str] | None, start: int, cost: Cost) -> tuple[int, int]:
        """Begin and end of a transfer that is ready at `start`; it occupies what it moves through for its cycles."""
        cycles, latency = cost.cycles, cost.latency
        if cost.l2_read or cost.l2_written:
            start, latency = max(start, self.l2_free), self.l2_latency
            if cost.dram_read or cost.dram_written:
                start, latency = max(start, self.dram_free), latency + self.latency
                self.dram_free = start + cycles
            self.l2_free = start + cycles
        elif cost.dram_read or cost.dram_written:
            latency = self.latency
            self.exposed = min(latency, max(0, start - self.dram_free))
            start = max(start, self.dram_free)
            self.dram_free = start + cycles
        elif path is not None:
            start = self._on_network(path, start, cycles)
        return start, start + cycles + latency

    def _on_network(self, path: tuple[str, str], start: int, cycles: int) -> int:
        """The begin of a transfer between cores that is ready at `start`; it occupies their links for its cycles."""
        sender, receiver = path
        begin = max(start, self.out_free.get(sender, 0), self.in_free.get(receiver, 0))
        self.out_free[sender] = self.in_free[receiver] = begin + cycles
        return begin

    def _finish(self, queue: _Queue) -> None:
        """Launch the next sections of a queue's lane if they can begin."""
        lane = queue.lane
        if lane is not None and lane.batches and all(self.queues[each].current is None for each in lane.queues):
            self._launch(lane)

    def _next(self, number: int, queue: _Queue) -> bool:
        """Take the queue's next instruction, if there is one, and have it started when it is ready."""
        queue.current = entry = next(queue.stream, None)
        if entry is None:
            return False
        ready, missing = self.launched[entry[0].section], 0
        if queue.free > ready:
            ready = queue.free
        for raised, count in zip(entry[0].waits, entry[3], strict=True):
            times = raised.times
            if count >= len(times):
                raised.waiting.append((count, number))
                missing += 1
            elif times[count] > ready:
                ready = times[count]
        if missing:
            queue.ready, queue.missing = ready, missing
        else:
            heappush(self.heap, (ready, number))
        return True

    def _wake(self, raised: Raised) -> None:
        """Start those that waited for what has just been raised."""
        times, waiting = raised.times, raised.waiting
        raised.waiting = [each for each in waiting if each[0] >= len(times)]
        for count, number in waiting:
            if count < len(times):
                queue = self.queues[number]
                queue.ready = max(queue.ready, times[count])
                queue.missing -= 1
                if not queue.missing:
                    heappush(self.heap, (queue.ready, number))

    def _advance(
        self, counts: Counts, prepared: Prepared, waits: Sequence[int], start: int, cost: Cost, conflicts: int
    ) -> None:
        """Enter the time from the end of all computing so far to an instruction's: what it waited for, and its work.

        Args:
            conflicts: Cycles that it waits for banks of the scratchpad while it works.
        """
        at, end = self.frontier, start + cost.cycles + conflicts
        self.frontier = end
        if start > at:
            launched = min(start, max(at, self.launched[prepared.section]))
            counts.stall(Cause.LAUNCH, launched - at)
            if launched < start:
                tokens = zip(prepared.waits, waits, strict=True)
                held_up = [raised for raised, count in tokens if count and raised.times[count] == start]
                if held_up and held_up[0].from_l2:
                    counts.stall(Cause.L2, start - launched)
                elif held_up[0].is_data if held_up else prepared.moves:
                    latency = min(start - launched, self.exposed)
                    counts.stall(Cause.DRAM_LATENCY, latency)
                    counts.stall(Cause.DRAM_BANDWIDTH, start - launched - latency)
                else:
                    counts.stall(Cause.DEPENDENCY, start - launched)
            at = start
        ports = min(end - at, cost.port_cycles + conflicts)
        counts.stall(Cause.SRAM_PORTS, ports)
        counts.progress += end - at - ports

    def _look_closer(self, queue: _Queue, number: int, start: int) -> None:
        """Note a span, compute, and look for races, as this run does."""
        assert queue.current is not None
        prepared, counters, cost, waits = queue.current
        instruction = prepared.instruction
        if self.keeps_spans and cost.cycles:
            name = type(instruction).__name__.lower()
            self.spans.append(Span(prepared.section, queue.name, name, start, start + cost.cycles))
        node = self.sections[prepared.section].node
        if self.races is not None:
            try:
                self.races.step(number, prepared, counters, waits)
            except MachineError as error:
                raise located(error, node, instruction, counters) from error
        if self.machine.memory is not None:
            executed = node, self.machine.execution(instruction, prepared.varying), counters
            if self.order is not None and len(self.order) <= _MOST_KEPT:
                self.order.append(executed)
            execute(*executed)

    def _check_finished(self) -> None:
        reasons = []
        for queue in self.queues:
            if queue.current is None:
                continue
            prepared, _, _, waits = queue.current
            tokens = zip(prepared.waits, waits, strict=True)
            raised, count = next((raised, count) for raised, count in tokens if count >= len(raised.times))
            times = len(raised.times) - 1 + raised.before
            reasons.append(
                f"{queue.name} (node '{self.sections[prepared.section].node}') waits for {raised.token} to be raised "
                f"{count + raised.before} times, which it is {times} times"
            )
        if reasons:
            raise MachineError(f"deadlock: {'; '.join(reasons)}")


__all__ = ["Cause", "Counts", "Machine", "Run", "Span", "engines_of", "token_totals"]
