"""`Mapper`: the tiling of a call, by a bounded search over its lowering.

A candidate is emitted and its instructions are added up. The estimate is the time of the busiest engine, of DRAM, or
of the transfers that two places of a piece let be under way at a time, whichever is most; and what comes before and
behind: the first loads and the last stores, which nothing hides. Equal calls are mapped once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice

from npu_compiler.program.kernels import KernelCall
from npu_model.chip import Chip
from npu_model.isa.instructions import Engine, Node, instructions
from npu_model.lowering.emitter import DOUBLE, DoesNotFit, Draft, Emitter, Place
from npu_model.lowering.families import LOWERINGS, CannotLower, Operands, Tiling, operands_of
from npu_model.machine.costs import Costs

MOST_CANDIDATES = 48
_ISSUE = 8.0  # cycles that each instruction is taken to cost besides, so that of equal tilings the shortest is taken


@dataclass(frozen=True)
class Choice:
    """A tiling, what it is estimated to take, in cycles, and the bytes of the scratchpad that it uses."""

    tiling: Tiling
    estimate: float
    scratchpad: int
    emit: Callable[[Emitter], None]


class Mapper:
    """Chooses tilings for the calls of programs on one chip."""

    def __init__(self, chip: Chip) -> None:
        self.chip = chip
        self._costs = Costs(chip)
        self._chosen: dict[object, Choice | CannotLower] = {}

    def choice(self, call: KernelCall, places: Mapping[str, Place], room: int) -> Choice:
        """The best tiling of those tried, for operands in these places and `room` bytes of the scratchpad.

        Raises:
            CannotLower: the chip cannot run the call, or none of the tilings fits.
        """
        operands = operands_of(call)
        key = _signature(call, places, room)
        if key not in self._chosen:
            try:
                self._chosen[key] = self._search(operands, places, room)
            except CannotLower as error:
                self._chosen[key] = error
        chosen = self._chosen[key]
        if isinstance(chosen, CannotLower):
            raise chosen
        lowering = LOWERINGS[call.kernel]
        return Choice(
            chosen.tiling, chosen.estimate, chosen.scratchpad, lambda e: lowering.emit(e, operands, chosen.tiling)
        )

    def _search(self, operands: Operands, places: Mapping[str, Place], room: int) -> Choice:
        from npu_model.lowering.program import new_emitter

        kernel = operands.call.kernel
        if kernel not in LOWERINGS:
            raise CannotLower(f"the NPU has no lowering for '{kernel}'")
        lowering = LOWERINGS[kernel]
        best: Choice | None = None
        tried = 0
        for tiling in islice(lowering.tilings(operands, self.chip), 4096):
            emitter = new_emitter(self.chip, places, (0, room))
            try:
                lowering.emit(emitter, operands, tiling)
            except DoesNotFit:
                continue
            draft = emitter.finish()
            estimate = self._estimate(draft)
            tried += 1
            if best is None or estimate < best.estimate:
                best = Choice(tiling, estimate, draft.scratchpad, lambda e: None)
            if tried >= MOST_CANDIDATES:
                break
        if best is None:
            raise CannotLower(
                f"its smallest tiles do not fit {room} bytes of the scratchpad, or the accumulators; give the chip more"
            )
        return best

    def _estimate(self, draft: Draft) -> float:
        busy: dict[str, float] = {}
        dram = fill = trips = issued = 0.0
        latency = self.chip.dram_latency_cycles
        for instruction, counts in instructions(draft.body):
            cost = self._costs.cost(instruction, [axis.size for axis in instruction.axes])
            times = math.prod(counts)
            issued += times * _ISSUE
            busy[instruction.engine] = busy.get(instruction.engine, 0.0) + times * cost.cycles
            if cost.dram_read or cost.dram_written:
                dram += times * cost.cycles
                trips = max(trips, times * (cost.cycles + latency) / DOUBLE)
            fill += cost.cycles + (latency if instruction.engine.startswith(Engine.DMA) else 0)
        return max([*busy.values(), dram, trips]) + fill + issued


def _signature(call: KernelCall, places: Mapping[str, Place], room: int) -> object:
    """What calls have in common that are mapped alike."""
    views = tuple(
        (view.shape, view.strides, view.dtype, places[view.buffer].space, view.buffer in seen)
        for seen in [set[str]()]
        for view in (*call.inputs, *call.outputs)
    )
    return call.kernel, views, len(call.inputs), repr(sorted(call.params.items())), room


__all__ = ["Choice", "Mapper", "Node"]
