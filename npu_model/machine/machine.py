"""`Machine`: simulates a tile program on a chip: its timing, its results, or both, with the same cycles.

Engines run concurrently, each on one instruction at a time and in program order:

1. An instruction is ready when its engine has begun all earlier ones and is free, and all counts that it waits for have
   been reached. Instructions start in the order in which they become ready.
2. A transfer from or to DRAM begins when DRAM is free, occupies it for the time of its bytes, and ends a latency later;
   its engine is free for the next transfer meanwhile. All engines share DRAM. The shared L2 serves transfers in the
   same way, independently of DRAM; a transfer between the two occupies both.
3. A transfer between cores' scratchpads begins when the sender's outgoing and the receivers' incoming links are free,
   occupies all of them for the time of its bytes, and ends after the latency of the most hops. A transfer from DRAM
   or the L2 to several cores occupies both these and the links out of the core that reads and into the others.
4. Any other instruction occupies its engine for its cycles. With overlapped folds, a product's results are complete
   later by the depth of the array, while the engine begins the next product.
5. If the chip's file describes the scratchpad's banks, accesses also wait for busy banks (`sram_banks.py`).
6. At its end an instruction raises its tokens, which other cores see after the network's latency; an engine's
   instructions end in order. DMA engines, which do not reach the accumulators, see a product's tokens as soon as its
   operands have entered the array: the bytes of these are free then.
7. A section's instructions start after its launch. Launches happen one after the other, in the background if the chip
   overlaps them; otherwise a launch begins when the previous section has ended.

Times are whole cycles. If data are computed, an instruction does all its work when it starts; everything it depends on
has ended by then, so this order is one that a chip could have taken. Neither times nor the order depend on data, so
later runs of a program recompute its results in the order of the first run.
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
    """Causes of stalls, in which no computing engine makes progress."""

    DRAM_BANDWIDTH = "dram bandwidth"
    DRAM_LATENCY = "dram latency"
    LAUNCH = "launch"
    DEPENDENCY = "dependency"
    SRAM_PORTS = "sram ports"
    L2 = "shared l2"


@dataclass
class Counts:
    """Statistics of a section (kernel call) in a run.

    Attributes:
        busy: Engine → cycles in which it was occupied.
        progress: Cycles by which the section advanced the time up to which computing is complete; `progress` and
            `stalls` of all sections add up to the cycles of the run. In a section that only moves data, moves count as
            computing.
        stalls: Cause → cycles in which no engine computed because of a wait of this section's instructions.
        macs: Dtype → multiply-accumulates.
        start, end: Cycle in which its first instruction started (-1 if none did), and in which its last one ended.
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
        """Add the cost of `times` executions of an instruction."""
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
    """The execution of an instruction on an engine, from cycle `start` to cycle `end`, for traces."""

    section: int
    engine: str
    name: str
    start: int
    end: int


@dataclass
class Run:
    """Result of a run: its total cycles, statistics by section, and spans for a trace if they were asked for."""

    cycles: int
    sections: list[Counts]
    spans: list[Span]

    @property
    def dram_bytes(self) -> int:
        """Bytes moved from and to DRAM."""
        return sum(counts.dram_read + counts.dram_written for counts in self.sections)


class Machine:
    """A simulated chip that runs one tile program.

    Args:
        memory: Buffer name → its bytes in DRAM (uint8). None: runs are timed, but no data are computed.
        checked: Whether to raise an error at reads of bytes that were never written, and at races between engines.
    """

    def __init__(
        self, chip: Chip, program: TileProgram, memory: Mapping[str, Memory] | None = None, checked: bool = False
    ) -> None:
        self.chip, self.program = chip, program
        self.memory = memory
        self.checked = checked
        self.costs = Costs(chip, program.buffers)
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
        """Load the weights that stay on the chip; call it before the first run and after weights have changed."""
        return self._run(self.program.preload, {})

    def run(self, *, spans: bool = False, lanes: Sequence[Sequence[int]] | None = None) -> Run:
        """Run the program once, and return its cycles and statistics.

        Args:
            spans: Whether to record the span of each instruction for a trace.
            lanes: Numbers of the sections of each lane. A lane's sections are launched in order; lanes are independent
                of each other and use different engines. None: all sections are in one lane.

        Raises:
            MachineError: the program is incorrect, such as a deadlock; the message names the instruction and its node.
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
        """Compute one section by itself, to inspect values between sections.

        All earlier sections have been computed before.
        """
        raised = token_totals((*self.program.preload, *self.program.sections[:index]))
        self._run(self.program.sections[index : index + 1], raised)

    def memories(self, tile: Tile) -> Memory:
        """The memory in which an operand lies."""
        if not tile.space.has_buffers:
            return self._own[tile.space, tile.buffer]
        assert self.memory is not None
        return self.memory[tile.buffer]

    def execution(self, instruction: Instruction, varying: Sequence[int]) -> Execution:
        """The `Execution` of an instruction of the program, which is built on first use.

        Args:
            varying: Axes of which, in some iterations, some elements lie outside of the tensor.
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
    """Context in which NumPy gives no floating-point warnings and BLAS uses one thread."""
    with np.errstate(all="ignore"), one_thread():
        yield


def token_totals(sections: Sequence[Section]) -> dict[Token, int]:
    """Number of times that the sections raise each token, over all iterations of their loops."""
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
    """Names of the engines that execute at least one of these instructions."""
    found: set[str] = set()
    for node in nodes:
        found |= engines_of(node.body) if isinstance(node, Loop) else {node.engine}
    return found


@dataclass(slots=True, eq=False)
class _Queue:
    """State of an engine in a run.

    Attributes:
        current: Its next instruction; None if it has none until the next launch.
        free: Cycle from which it can begin an instruction.
        ended: Cycle in which all earlier instructions have ended.
        ready, missing: Earliest cycle in which the next instruction can start as far as is known, and the number of
            tokens whose count it still waits for.
        lane: The lane (sequence of sections, see `_Lane`) that it executes; None before it is assigned.
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
    """A sequence of sections that are launched in order.

    Attributes:
        batches: Batches of sections that are not launched yet; the sections of a batch are launched together.
        launched: The sections of the batch that was launched last.
        ended: Cycle in which all sections of earlier batches had ended.
        queues: Numbers of the engines that execute the lane's sections.
    """

    batches: list[Sequence[int]]
    queues: list[int] = field(default_factory=list)
    launched: Sequence[int] = ()
    ended: int = 0


class _Scheduler:
    """One run of a program: an event simulation of engines and tokens."""

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
        """Launch a lane's next batch of sections after the previous one has ended.

        Batches without instructions are skipped.
        """
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
                raised.times.append((queue.free if raised.after_reads else end) + raised.delay)
                raised.from_l2 = prepared.moves and bool(cost.l2_read or cost.l2_written)
                if raised.waiting:
                    self._wake(raised)
            if not self._next(number, queue):
                self._finish(queue)

    def _moved(self, path: tuple[str, ...] | None, start: int, cost: Cost) -> tuple[int, int]:
        """Begin and end of a transfer that is ready at `start`.

        It occupies DRAM, the L2 or network links for its cycles.
        """
        cycles, latency = cost.cycles, cost.latency
        if cost.l2_read or cost.l2_written:
            start, latency = max(start, self.l2_free), latency + self.l2_latency
            if cost.dram_read or cost.dram_written:
                start, latency = max(start, self.dram_free), latency + self.latency
            if path is not None:
                start = self._on_network(path, start, cycles)
            if cost.dram_read or cost.dram_written:
                self.dram_free = start + cycles
            self.l2_free = start + cycles
        elif cost.dram_read or cost.dram_written:
            self.exposed = min(self.latency, max(0, start - self.dram_free))
            start, latency = max(start, self.dram_free), latency + self.latency
            if path is not None:
                start = self._on_network(path, start, cycles)
            self.dram_free = start + cycles
        elif path is not None:
            start = self._on_network(path, start, cycles)
        return start, start + cycles + latency

    def _on_network(self, path: tuple[str, ...], start: int, cycles: int) -> int:
        """Begin of a transfer between cores that is ready at `start`; it occupies their links for its cycles."""
        sender, *receivers = path
        begin = max(start, self.out_free.get(sender, 0), *(self.in_free.get(core, 0) for core in receivers))
        self.out_free[sender] = begin + cycles
        self.in_free.update(dict.fromkeys(receivers, begin + cycles))
        return begin

    def _finish(self, queue: _Queue) -> None:
        """Launch the next sections of an engine's lane if all engines of the lane have finished the previous ones."""
        lane = queue.lane
        if lane is not None and lane.batches and all(self.queues[each].current is None for each in lane.queues):
            self._launch(lane)

    def _next(self, number: int, queue: _Queue) -> bool:
        """Fetch an engine's next instruction and schedule it for when it is ready; return False if there is none."""
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
        """Schedule the instructions that waited for a count that the token has just reached."""
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
        """Account for the time since computing last advanced: stalls by cause, then the instruction's own cycles.

        Args:
            conflicts: Cycles that it waits for busy banks of the scratchpad.
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
        """Record the span of an engine's current instruction, check for races and compute, as far as requested."""
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
