"""`Mapper`: a bounded search for the best tilings of kernel calls.

Each tiling is emitted once, as a *sketch*: the amounts of work of its instructions, which are equal on all chips. From
a chip's costs of this work follow the cycles of each engine, and of DRAM for each operand. The estimate of a call is
the time of its busiest engine or of DRAM, plus the first loads and the last stores. An operand that stays in the
scratchpad takes no DRAM time and no room for its tiles, so that one search gives the estimates for any choice of
resident operands. Equal calls are searched once, and chips that share their sketches emit a tiling once.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from npu_compiler.program.kernels import KernelCall
from npu_model.chip import Chip
from npu_model.isa.instructions import Engine, Space
from npu_model.lowering.emitter import DOUBLE, DoesNotFit, Draft, Emitter, Place
from npu_model.lowering.families import LOWERINGS, CannotLower, Operands, Tiling, operands_of
from npu_model.lowering.forms import Form, Pattern, SparseCall
from npu_model.lowering.shared import Shared
from npu_model.machine.costs import Costs, Moves, Work, work_of

MOST_CANDIDATES = 40
MOST_TRIED = 400  # tilings of one size that are looked at for one call, those that do not fit included
_HIDDEN = 0.5  # part of the first loads and last stores that the calls around hide, where there is room for both
_REACH = 3  # calls behind which the first loads of a call may go on
_LIKELY = 6  # tilings of a call that are compared beside those of the calls around
_TRAFFIC = 0.1  # part of the cycles of DRAM that is added, since the calls around wait for DRAM too
_ISSUE = 16.0  # cycles that an instruction is taken to cost besides, so that of equal tilings the shortest is taken


@dataclass(frozen=True)
class Flows:
    """Costs of a tiling's transfers on a chip, by position of the operand among the call's views.

    Attributes:
        dram: Position → cycles of DRAM.
        fill: Position → cycles of the first and last transfers, including latencies.
        flow: Position → cycles of all transfers of the operand, including latencies, overlapped by double buffering.
        l2: Position → cycles of the shared L2 if the operand lies there; empty on a chip without.
        l2_fill, l2_flow: `fill` and `flow` of operands that lie in the shared L2.
    """

    dram: Mapping[int, float]
    fill: Mapping[int, float]
    flow: Mapping[int, float]
    l2: Mapping[int, float]
    l2_fill: Mapping[int, float]
    l2_flow: Mapping[int, float]


@dataclass(frozen=True)
class Candidate:
    """A tiling of a call with its costs on a chip.

    Attributes:
        busy: Cycles of the slowest computing engine, plus one iteration of each of the others.
        room: Position of an operand among the call's views → scratchpad bytes for its tiles.
        scratchpad: Scratchpad bytes in all.
        once: Cycles of one iteration of all computing engines.
        executions: Number of executed instructions.
        chained: Cycles if a tile's loads wait until the tile before is stored: of all computing engines, and for each
            tile the latencies until its loads and its results are complete.
        flows: Costs of its transfers.
    """

    tiling: Tiling
    busy: float
    room: Mapping[int, int]
    scratchpad: int
    once: float
    executions: int
    chained: float
    flows: Flows

    def needs(self, resident: Collection[int]) -> int:
        """Bytes of the scratchpad that the call allocates, if these operands are resident there."""
        return max(0, self.scratchpad - sum(self.room.get(position, 0) for position in resident))


@dataclass(frozen=True)
class Sketch:
    """The work of a tiling of a call with all operands in DRAM, independent of the chip's speeds.

    Attributes:
        moves: For each transfer, the operand's position among the call's views (-1 for none), its work, and its
            executions.
        computes: For each other instruction, its engine, its work, and its executions.
        room: Position of an operand → scratchpad bytes for its tiles.
        scratchpad, accumulators: Allocated bytes in all.
        executions: Number of executed instructions.
        flows, candidates: Its costs on chips, by the number of the chip's parts that they depend on (`Shared.number`).
    """

    tiling: Tiling
    moves: tuple[tuple[int, Work | None, int], ...]
    computes: tuple[tuple[str, Work | None, int], ...]
    room: Mapping[int, int]
    scratchpad: int
    accumulators: int
    executions: int
    flows: dict[int, Flows] = field(default_factory=dict, compare=False, repr=False)
    candidates: dict[int, Candidate] = field(default_factory=dict, compare=False, repr=False)


class _Estimates(NamedTuple):
    """Estimates of a call's candidates, as arrays with an element for each.

    Attributes:
        needs: Bytes of the scratchpad.
        fill: Cycles of the first and last transfers.
        apart, beside: Cycles if neighbouring calls leave no room in the scratchpad for its first loads, and if they do.
    """

    needs: NDArray[Any]
    fill: NDArray[Any]
    apart: NDArray[Any]
    beside: NDArray[Any]


class Choices:
    """The tilings of a call on a chip, with estimates.

    Args:
        candidates: Its tilings that fit the chip.
        inputs, outputs: Numbers of the call's views.
        serial: Whether loads wait for earlier stores; so if there are fewer than three DMA engines.
    """

    def __init__(self, candidates: Sequence[Candidate], inputs: int, outputs: int, serial: bool) -> None:
        self.candidates = candidates
        self._inputs, self._operands, self._serial = inputs, inputs + outputs, serial
        self._busy, self._once, self._chained, self._issue = np.array(
            [(each.busy, each.once, each.chained, each.executions * _ISSUE) for each in candidates]
        ).T
        self._scratchpad = np.array([each.scratchpad for each in candidates])
        self._room = self._by_operand([each.room for each in candidates])
        flows = [each.flows for each in candidates]
        self._dram, self._flow, self._fill, self._l2, self._l2_flow, self._l2_fill = (
            self._by_operand([getattr(each, name) for each in flows])
            for name in ("dram", "flow", "fill", "l2", "l2_flow", "l2_fill")
        )
        self._estimated: dict[tuple[frozenset[int], frozenset[int]], _Estimates] = {}
        self._steps: dict[tuple[frozenset[int], frozenset[int]], tuple[list[int], list[float]]] = {}
        self._likely: dict[tuple[frozenset[int], int, frozenset[int]], list[_Option]] = {}

    def _by_operand(self, rows: Sequence[Mapping[int, float]]) -> NDArray[Any]:
        """Numbers by candidate and position as a matrix; its last column is position -1 (transfers of no operand)."""
        return np.array([[row.get(position, 0) for position in (*range(self._operands), -1)] for row in rows])

    def _estimates(self, resident: frozenset[int], in_l2: frozenset[int]) -> _Estimates:
        """Estimates of each candidate with these operands in the scratchpad, and those in the shared L2."""
        key = resident, in_l2
        if key not in self._estimated:
            positions = (*range(self._operands), -1)
            kept = np.array([position in resident for position in positions])
            shared = np.array([position in in_l2 for position in positions]) & ~kept
            outside = ~kept & ~shared
            needs = np.maximum(0, self._scratchpad - self._room @ kept)
            moved, fill = self._dram @ outside, self._fill @ outside
            flow = (self._flow * outside).max(axis=1)
            moved_l2 = self._l2 @ shared
            if shared.any():
                fill = fill + self._l2_fill @ shared
                flow = np.maximum(flow, (self._l2_flow * shared).max(axis=1))
            if self._serial:
                loads, stores = ~kept[: self._inputs], ~kept[self._inputs : self._operands]
                busy = np.maximum(self._busy, self._chained) if loads.any() and stores.any() else self._busy
                apart = beside = busy + (moved + moved_l2) * (1 + _TRAFFIC) + self._issue
            else:
                apart, beside = (
                    np.maximum.reduce(
                        [self._busy + fill * hidden, np.maximum(moved, moved_l2) + self._once * hidden, flow]
                    )
                    + (moved + moved_l2) * _TRAFFIC
                    + self._issue
                    for hidden in (1.0, _HIDDEN)
                )
            self._estimated[key] = _Estimates(needs, fill, apart, beside)
        return self._estimated[key]

    def ranked(self, resident: Collection[int], room: int) -> list[Candidate]:
        """The candidates that fit into `room` bytes with these operands in the scratchpad, the best first."""
        needs, _, apart, beside = self._estimates(frozenset(resident), frozenset())
        order = np.argsort(np.where(2 * needs <= room, beside, apart), kind="stable")
        return [self.candidates[number] for number in order if needs[number] <= room]

    def estimate(self, resident: frozenset[int], room: int, in_l2: frozenset[int] = frozenset()) -> float:
        """Cycles of the best candidate that fits into `room` bytes; infinite if none does.

        Args:
            resident, in_l2: Positions of the operands in the scratchpad, and in the shared L2.
        """
        rooms, estimates = self.by_room(resident, in_l2)
        number = bisect_right(rooms, room)
        return estimates[number - 1] if number else math.inf

    def least_room(self, resident: frozenset[int], room: int) -> int:
        """Minimum number of bytes with which the estimate is as good as with `room` bytes."""
        rooms, _ = self.by_room(resident, frozenset())
        number = bisect_right(rooms, room)
        return rooms[number - 1] if number else room

    def by_room(self, resident: frozenset[int], in_l2: frozenset[int]) -> tuple[list[int], list[float]]:
        """The amounts of room at which the estimate improves, in ascending order, and the estimates."""
        steps = self._steps.get((resident, in_l2))
        if steps is None:
            needs, _, apart, beside = (each.tolist() for each in self._estimates(resident, in_l2))
            points = [*zip(needs, apart, strict=True), *((2 * n, e) for n, e in zip(needs, beside, strict=True))]
            rooms: list[int] = []
            estimates: list[float] = []
            for room, estimate in sorted(points):
                if not estimates or estimate < estimates[-1]:
                    rooms.append(room)
                    estimates.append(estimate)
            steps = self._steps[resident, in_l2] = rooms, estimates
        return steps

    def likely(self, resident: frozenset[int], room: int, in_l2: frozenset[int] = frozenset()) -> list[_Option]:
        """The few best candidates that fit into `room` bytes, by either estimate (see `_Option`)."""
        key = resident, room, in_l2
        if key not in self._likely:
            needs, fill, apart, beside = self._estimates(resident, in_l2)
            (fitting,) = np.nonzero(needs <= room)
            best = [fitting[np.argsort(each[fitting], kind="stable")[:_LIKELY]] for each in (apart, beside)]
            self._likely[key] = [
                _Option(self.candidates[n], int(needs[n]), float(fill[n]), float(apart[n]), float(beside[n]))
                for n in dict.fromkeys(np.concatenate(best).tolist())
            ]
        return self._likely[key]


@dataclass(frozen=True)
class _Option:
    """A candidate for one of a program's calls, with the scratchpad bytes that it needs and its estimates.

    Attributes:
        fill: Cycles of its first and last transfers.
        apart: Cycles if the calls before leave no scratchpad room, so that its first loads cannot overlap with them.
        beside: Cycles if they do.
    """

    candidate: Candidate
    needs: int
    fill: float
    apart: float
    beside: float


@dataclass(frozen=True)
class _Path:
    """A choice of candidates for the first calls of a sequence, in a search by dynamic programming.

    Attributes:
        cycles: Total cycles of these calls.
        last: The last few options and the cycles of each, the latest first.
        before: The path without its last call; None for the empty path.
    """

    cycles: float
    last: tuple[tuple[_Option, float], ...]
    before: _Path | None

    def then(self, option: _Option, room: int) -> _Path:
        """Extend the path by an option for the next call, which may use `room` bytes of the scratchpad."""
        own, wanted, taken = option.beside, option.fill * _HIDDEN, option.needs
        for other, cycles in self.last:
            taken += other.needs
            if taken > room:
                own = option.apart
                break
            wanted -= cycles
            if wanted <= 0:
                break
        return _Path(self.cycles + own, ((option, own), *self.last[: _REACH - 1]), self)


@dataclass(frozen=True)
class Placed:
    """A call with the locations of its operands.

    Attributes:
        choices: Its tilings.
        resident, in_l2: Positions of its operands in the scratchpad, and in the shared L2.
        room: Bytes of the scratchpad for its tiles.
    """

    choices: Choices
    resident: frozenset[int]
    room: int
    in_l2: frozenset[int] = frozenset()

    @property
    def estimate(self) -> float:
        """Cycles of the best candidate that fits; infinite if none does."""
        return self.choices.estimate(self.resident, self.room, self.in_l2)


def in_sequence(calls: Sequence[Placed]) -> list[Candidate]:
    """The best tilings of consecutive calls, where a call's first loads may overlap with the computation before.

    For each call, at least one candidate has to fit.
    """
    paths = [_Path(0.0, (), None)]
    for call in calls:
        paths = [
            min((path.then(option, call.room) for path in paths), key=lambda path: path.cycles)
            for option in call.choices.likely(call.resident, call.room, call.in_l2)
        ]
    taken = []
    path: _Path | None = min(paths, key=lambda path: path.cycles)
    while path is not None and path.last:
        taken.append(path.last[0][0].candidate)
        path = path.before
    return taken[::-1]


class Mapper:
    """Searches tilings for the calls of programs on one chip.

    Args:
        shared: Cache of results that several chips share. None: a new one.
        most: Maximum number of tilings of a call that are compared.
        forms: Weight → its form in DRAM, for those that were measured. None: of all weights only shapes are known.
    """

    def __init__(
        self,
        chip: Chip,
        shared: Shared | None = None,
        most: int = MOST_CANDIDATES,
        forms: Mapping[str, Form] | None = None,
    ) -> None:
        self.chip, self.most, self.forms = chip, most, forms or {}
        self.shared = shared or Shared()
        self._costs = Costs(chip)
        l2 = None if chip.l2 is None else (chip.l2.bytes_per_cycle, chip.l2.latency_ns)
        moving = chip.sram.bandwidth, chip.outside, chip.clock_ghz, l2
        self._moving = self.shared.number(("transfers", moving))
        self._working = self.shared.number(("work", moving, repr((chip.matrix, chip.vector, chip.output))))
        self._searched: dict[int, Choices | CannotLower] = {}

    def choices(self, call: KernelCall) -> Choices:
        """The tilings of a call that fit the chip, with estimates.

        Raises:
            CannotLower: the chip cannot run the call, or no tiling fits.
        """
        key = self.shared.signatures.get(call, None, lambda: self.shared.number(_signature(call)))
        result = self._searched.get(key)
        if result is None:
            try:
                serial = self.chip.dma.channels < 3
                candidates = self._search(operands_of(call), key)
                result = Choices(candidates, len(call.inputs), len(call.outputs), serial)
            except CannotLower as error:
                result = error
            self._searched[key] = result
        if isinstance(result, CannotLower):
            raise result
        return result

    def ranked(self, call: KernelCall, resident: Collection[int], room: int) -> list[Candidate]:
        """The tilings of a call that fit into `room` bytes with these operands in the scratchpad, the best first."""
        return self.choices(call).ranked(resident, room)

    def draft(self, call: KernelCall, tiling: Tiling, places: Mapping[str, Place], room: tuple[int, int]) -> Draft:
        """Generate a call's section in a tiling, with its tiles in `room` (first byte, size) of the scratchpad.

        Raises:
            DoesNotFit: the room or the accumulators are too small.
        """
        chip, first = self.chip, room[0]
        own = tuple(places[view.buffer] for view in (*call.inputs, *call.outputs))
        key = tuple(tiling.items()), own, first, chip.dma.channels, chip.sram.alignment, chip.output is not None

        def emit() -> Draft:
            emitter = new_emitter(chip, places, room, _sparsity(call))
            LOWERINGS[call.kernel].emit(emitter, operands_of(call), tiling)
            return emitter.finish()

        draft = self.shared.drafts.get(call, key, emit)
        sums = chip.matrix.accumulator_bytes if chip.matrix is not None else 0
        if draft.scratchpad > room[1] or draft.accumulators > sums:
            raise DoesNotFit(Space.SCRATCHPAD, draft.scratchpad)
        return draft

    def _search(self, operands: Operands, signature: int) -> list[Candidate]:
        call = operands.call
        if call.kernel not in LOWERINGS:
            raise CannotLower(f"the NPU has no lowering for '{call.kernel}'")
        found: list[Candidate] = []
        tried = 0
        for tiling in LOWERINGS[call.kernel].tilings(operands, self.chip):
            if len(found) >= self.most or (found and (tiling is None or tried >= MOST_TRIED)):
                break
            if tiling is None:
                tried = 0
            if tiling is None or tried >= MOST_TRIED:
                continue
            tried += 1
            sketch = self._sketch(operands, tiling, signature)
            if sketch is not None:
                found.append(self._candidate(sketch, len(call.inputs)))
        if not found:
            raise CannotLower(
                f"its smallest tiles do not fit {self.chip.sram.size} bytes of scratchpad, or the accumulators; "
                "give the chip more"
            )
        return found

    def _sketch(self, operands: Operands, tiling: Tiling, signature: int) -> Sketch | None:
        """The sketch (amounts of work) of a tiling, or None if it does not fit the chip."""
        chip = self.chip
        key = signature, chip.sram.alignment, chip.output is not None, tuple(tiling.items())
        sums = chip.matrix.accumulator_bytes if chip.matrix is not None else 0
        room = {Space.SCRATCHPAD: chip.sram.size, Space.ACCUMULATORS: sums}
        found = self.shared.sketches.get(key)
        if found is None or (isinstance(found, DoesNotFit) and found.size <= room[found.space]):
            try:
                found = _sketch(operands, tiling, chip)
            except DoesNotFit as error:
                found = DoesNotFit(error.space, error.size)  # without the frames that it passed
            self.shared.sketches[key] = found
        if isinstance(found, DoesNotFit) or found.scratchpad > chip.sram.size or found.accumulators > sums:
            return None
        return found

    def _candidate(self, sketch: Sketch, inputs: int) -> Candidate:
        """The costs of a sketch of a call with so many inputs."""
        candidate = sketch.candidates.get(self._working)
        if candidate is None:
            candidate = sketch.candidates[self._working] = self._priced(sketch, inputs)
        return candidate

    def _priced(self, sketch: Sketch, inputs: int) -> Candidate:
        flows = sketch.flows.get(self._moving)
        if flows is None:
            flows = sketch.flows[self._moving] = self._flows(sketch)
        costs, waits = self._costs, 0.0
        busy: dict[str, float] = {}
        once: dict[str, float] = {}
        for engine, work, times in sketch.computes:
            cost = costs.of(work)
            busy[engine] = busy.get(engine, 0.0) + times * cost.cycles
            once[engine] = once.get(engine, 0.0) + cost.cycles + cost.latency
            waits += cost.latency
        stored = [times for position, _, times in sketch.moves if position >= inputs]
        lag = max(stored, default=0) * (waits + self.chip.dram_latency_cycles)
        around = sum(once.values())
        slowest = max((cycles + around - once[engine] for engine, cycles in busy.items()), default=0.0)
        return Candidate(
            sketch.tiling,
            slowest,
            sketch.room,
            sketch.scratchpad,
            around,
            sketch.executions,
            sum(busy.values()) + lag,
            flows,
        )

    def _flows(self, sketch: Sketch) -> Flows:
        """The costs of a sketch's transfers."""
        costs, latency, shared_latency = self._costs, self.chip.dram_latency_cycles, self.chip.l2_latency_cycles
        dram, fill, flow, l2, l2_fill, l2_flow = (dict[int, float]() for _ in range(6))
        for position, work, times in sketch.moves:
            if self.chip.l2 is not None and isinstance(work, Moves):
                own = costs.of(work.in_l2).cycles
                l2[position] = l2.get(position, 0.0) + times * own
                l2_fill[position] = l2_fill.get(position, 0.0) + own + shared_latency
                l2_flow[position] = l2_flow.get(position, 0.0) + times * (own + shared_latency) / DOUBLE
            cycles = costs.of(work).cycles
            fill[position] = fill.get(position, 0.0) + cycles + latency
            dram[position] = dram.get(position, 0.0) + times * cycles
            flow[position] = flow.get(position, 0.0) + times * (cycles + latency) / DOUBLE
        return Flows(dram, fill, flow, l2, l2_fill, l2_flow)


def _sketch(operands: Operands, tiling: Tiling, chip: Chip) -> Sketch:
    call = operands.call
    views = (*call.inputs, *call.outputs)
    places = {v.buffer: Place(Space.DRAM, v.buffer, 0, 2**62) for v in views}
    emitter = new_emitter(chip, places, (0, chip.sram.size), _sparsity(call))
    LOWERINGS[call.kernel].emit(emitter, operands, tiling)
    positions: dict[str, int] = {"": -1}
    for position, view in enumerate(views):
        positions.setdefault(view.buffer, position)
    moves, computes = [], []
    executions = 0
    for instruction, times, name in emitter.executions():
        work = work_of(instruction, [axis.size for axis in instruction.axes])
        executions += times
        if instruction.engine.startswith(Engine.DMA):
            moves.append((positions[name], work, times))
        else:
            computes.append((instruction.engine, work, times))
    room = {positions[name]: size for name, size in emitter.rooms().items()}
    return Sketch(tiling, tuple(moves), tuple(computes), room, emitter.used, emitter.used_accumulators, executions)


def new_emitter(
    chip: Chip, places: Mapping[str, Place], room: tuple[int, int], sparsity: Pattern | None = None
) -> Emitter:
    """Create an emitter for a section on a chip that may use `room` (first byte, size) of the scratchpad.

    `sparsity` is that of its weight; None if the matrix engine skips no zeros.
    """
    sums = chip.matrix.accumulator_bytes if chip.matrix is not None else 0
    channels, has_output = chip.dma.channels, chip.output is not None
    return Emitter(places, channels, room, (0, sums), chip.sram.alignment, has_output, sparsity)


def _sparsity(call: KernelCall) -> Pattern | None:
    return call.sparsity if isinstance(call, SparseCall) else None


def _signature(call: KernelCall) -> Hashable:
    """Return a key that is equal for calls with the same kernel, parameters, shapes, strides and aliasing."""
    names: dict[str, int] = {}
    views = tuple(
        (view.shape, view.strides, view.dtype, names.setdefault(view.buffer, len(names)))
        for view in (*call.inputs, *call.outputs)
    )
    return call.kernel, views, len(call.inputs), repr(sorted(call.params.items())), _sparsity(call)


__all__ = ["Candidate", "Choices", "Mapper", "Placed", "in_sequence", "new_emitter"]
