"""`Mapper`: the tilings of calls, by a bounded search over their lowering.

A candidate is emitted and its instructions are added up: cycles of each engine, and of DRAM by operand. The estimate of
a call is the time of its busiest engine, or of DRAM, and what comes before and behind: the first loads and the last
stores. An operand that stays in the scratchpad takes no DRAM and no room for its pieces, so that one search tells the
estimates for any choice of such operands. Equal calls are searched once.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from npu_compiler.program.kernels import KernelCall
from npu_model.chip import Chip
from npu_model.isa.instructions import Engine, Space, Token
from npu_model.lowering.emitter import DOUBLE, DoesNotFit, Emitter, Place
from npu_model.lowering.families import LOWERINGS, CannotLower, Lowering, Operands, Tiling, operands_of
from npu_model.machine.costs import Costs

MOST_CANDIDATES = 40
MOST_TRIED = 400  # tilings of one size that are looked at for one call, those that do not fit included
_HIDDEN = 0.5  # part of the first loads and last stores that the calls around hide, where there is room for both
_ISSUE = 16.0  # cycles that an instruction is taken to cost besides, so that of equal tilings the shortest is taken


@dataclass(frozen=True)
class Candidate:
    """A tiling of a call, as it was emitted.

    Attributes:
        busy: Cycles of the engines that compute: of the slowest, what the others do once before and behind included.
        dram: Cycles of DRAM, by position of the operand among the call's views.
        room: Bytes of the scratchpad for pieces, by position of the operand that they are moved from or to.
        scratchpad: Bytes of the scratchpad in all.
        fill: Cycles of the first transfers and the last ones, latencies included.
        once: Cycles of one round of the engines that compute.
        flow: Cycles that the transfers of an operand take one after the other, latencies included, where each piece has
            two places; by position.
        executions: Number of instructions that are executed.
        serial: Whether loads wait for the stores before them, which share their queue where there are fewer than three.
    """

    tiling: Tiling
    busy: float
    dram: Mapping[int, float]
    room: Mapping[int, int]
    scratchpad: int
    fill: float
    once: float
    flow: Mapping[int, float]
    executions: int
    serial: bool = False

    def needs(self, resident: Collection[int]) -> int:
        """Bytes of the scratchpad, with these operands in it already."""
        return self.scratchpad - sum(self.room.get(position, 0) for position in resident)

    def estimate(self, resident: Collection[int], room: int) -> float:
        """Cycles, with these operands in the scratchpad and `room` bytes of it for pieces."""
        moved = sum(cycles for position, cycles in self.dram.items() if position not in resident)
        if self.serial:
            return self.busy + moved + self.executions * _ISSUE
        fits_twice = 2 * self.needs(resident) <= room
        hidden = _HIDDEN if fits_twice else 1.0
        flow = max((cycles for position, cycles in self.flow.items() if position not in resident), default=0.0)
        return max(self.busy + self.fill * hidden, moved + self.once * hidden, flow) + self.executions * _ISSUE


class Mapper:
    """Searches tilings for the calls of programs on one chip."""

    def __init__(self, chip: Chip) -> None:
        self.chip = chip
        self._costs = Costs(chip)
        self._searched: dict[object, list[Candidate] | CannotLower] = {}

    def candidates(self, call: KernelCall) -> list[Candidate]:
        """Tilings of a call, with all operands in DRAM.

        Raises:
            CannotLower: the chip cannot run the call, or no tiling fits.
        """
        key = _signature(call)
        if key not in self._searched:
            try:
                self._searched[key] = self._search(operands_of(call))
            except CannotLower as error:
                self._searched[key] = error
        found = self._searched[key]
        if isinstance(found, CannotLower):
            raise found
        return found

    def ranked(self, call: KernelCall, resident: Collection[int], room: int) -> list[Candidate]:
        """The candidates that fit into `room` bytes with these operands in the scratchpad, the best first."""
        fitting = [each for each in self.candidates(call) if each.needs(resident) <= room]
        return sorted(fitting, key=lambda each: each.estimate(resident, room))

    def estimate(self, call: KernelCall, resident: Collection[int], room: int) -> float:
        """Cycles of the best candidate that fits; infinite where none does."""
        return min(
            (each.estimate(resident, room) for each in self.candidates(call) if each.needs(resident) <= room),
            default=math.inf,
        )

    def _search(self, operands: Operands) -> list[Candidate]:
        call = operands.call
        if call.kernel not in LOWERINGS:
            raise CannotLower(f"the NPU has no lowering for '{call.kernel}'")
        lowering = LOWERINGS[call.kernel]
        views = (*call.inputs, *call.outputs)
        places = {view.buffer: Place(Space.DRAM, view.buffer, 0, 2**62) for view in views}
        positions: dict[str, list[int]] = {}
        for position, view in enumerate(views):
            positions.setdefault(view.buffer, []).append(position)
        found: list[Candidate] = []
        tried = 0
        for tiling in lowering.tilings(operands, self.chip):
            if len(found) >= MOST_CANDIDATES or (found and (tiling is None or tried >= MOST_TRIED)):
                break
            if tiling is None:
                tried = 0
            if tiling is None or tried >= MOST_TRIED:
                continue
            tried += 1
            candidate = self._candidate(lowering, operands, tiling, places, positions)
            if candidate is not None:
                found.append(candidate)
        if not found:
            raise CannotLower(
                f"its smallest tiles do not fit {self.chip.sram.size} bytes of scratchpad, or the accumulators; "
                "give the chip more"
            )
        return found

    def _candidate(
        self,
        lowering: Lowering,
        operands: Operands,
        tiling: Tiling,
        places: Mapping[str, Place],
        positions: Mapping[str, list[int]],
    ) -> Candidate | None:
        emitter = new_emitter(self.chip, places, (0, self.chip.sram.size))
        try:
            lowering.emit(emitter, operands, tiling)
        except DoesNotFit:
            return None
        busy: dict[str, float] = {}
        once: dict[str, float] = {}
        dram: dict[int, float] = {}
        flow: dict[int, float] = {}
        fill = 0.0
        executions = 0
        latency = self.chip.dram_latency_cycles
        for instruction, times, name in emitter.executions():
            cost = self._costs.cost(instruction, [axis.size for axis in instruction.axes])
            engine = instruction.engine
            executions += times
            if engine.startswith(Engine.DMA):
                fill += cost.cycles + latency
                position = positions[name][0] if name else -1
                dram[position] = dram.get(position, 0.0) + times * cost.cycles
                flow[position] = flow.get(position, 0.0) + times * (cost.cycles + latency) / DOUBLE
            else:
                busy[engine] = busy.get(engine, 0.0) + times * cost.cycles
                once[engine] = once.get(engine, 0.0) + cost.cycles
        around = sum(once.values())
        slowest = max((cycles + around - once[engine] for engine, cycles in busy.items()), default=0.0)
        room = {positions[name][0]: size for name, size in emitter.rooms().items()}
        serial = self.chip.dma.channels < 3
        return Candidate(tiling, slowest, dram, room, emitter.used, fill, around, flow, executions, serial)


def new_emitter(
    chip: Chip, places: Mapping[str, Place], room: tuple[int, int], raised: Mapping[Token, int] | None = None
) -> Emitter:
    """An emitter for a section on a chip that may use `room` (first byte, size) of the scratchpad."""
    sums = chip.matrix.accumulator_bytes if chip.matrix is not None else 0
    return Emitter(places, chip.dma.channels, room, (0, sums), chip.sram.alignment, chip.output is not None, raised)


def emit_call(call: KernelCall, tiling: Tiling, emitter: Emitter) -> None:
    """Write a call's section in a tiling. Raises `DoesNotFit` where the emitter has less room than it needs."""
    LOWERINGS[call.kernel].emit(emitter, operands_of(call), tiling)


def _signature(call: KernelCall) -> object:
    """Return a key that is equal for calls that are mapped alike."""
    names: dict[str, int] = {}
    views = tuple(
        (view.shape, view.strides, view.dtype, names.setdefault(view.buffer, len(names)))
        for view in (*call.inputs, *call.outputs)
    )
    return call.kernel, views, len(call.inputs), repr(sorted(call.params.items()))


__all__ = ["Candidate", "Mapper", "emit_call", "new_emitter"]
