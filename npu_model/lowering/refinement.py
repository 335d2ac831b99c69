"""`refined`: the choice of tilings of a short program by simulation of the whole program.

Estimates of single calls do not see how calls overlap. In a long program their errors are small beside the whole; in
one of a few calls they decide. So a short program is simulated with other tilings of one call after the other, and with
nothing that stays in the scratchpad, and each change that makes it notably faster is kept. If it moves more bytes from
and to DRAM than the program as it is estimated, it must be faster by a larger factor than that. The work is bounded by
the number of instructions that are simulated, so that long programs are taken as they are estimated.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from npu_compiler.errors import ConstraintError
from npu_compiler.program.plan import ExecutionPlan
from npu_model.chip import Chip
from npu_model.isa.instructions import TileProgram
from npu_model.lowering.mapper import Candidate, Mapper
from npu_model.lowering.program import PlacedProgram, link_program, nothing_stays, placed_program
from npu_model.lowering.residency import Residency
from npu_model.machine.machine import Machine, Run

_MOST_CALLS = 4
_WORTH = 0.03  # part of a program's cost that a change saves at least
_MOST_TRIED = 12  # tilings that are simulated
_MOST_EXECUTIONS = 5_000  # instructions that are simulated in all, a tenth of a second


def refined(plan: ExecutionPlan, chip: Chip, mapper: Mapper, residency: Residency) -> tuple[TileProgram, Run | None]:
    """Link a plan with the tilings that are fastest in simulation, or by estimates if the program is long.

    Returns:
        The program and its simulation, which is None if the program is long.

    Raises:
        ConstraintError: some call does not fit.
    """
    if len(plan.calls) > _MOST_CALLS:
        return link_program(plan, chip, mapper, residency), None
    search = _Search(chip)
    for own in (
        (residency, nothing_stays(plan, chip)) if residency.addresses and chip.dram is not None else (residency,)
    ):
        try:
            placed = placed_program(plan, chip, mapper, own)
            search.improve(placed, placed.candidates())
        except ConstraintError:  # values that stay leave too little room for some call
            continue
    if search.best is None:
        return link_program(plan, chip, mapper, residency), None
    return search.best


class _Search:
    """A search for the fastest program.

    Attributes:
        best: The fastest program so far and its simulation; None before the first.
    """

    def __init__(self, chip: Chip) -> None:
        self._chip, self._left, self._tried = chip, _MOST_EXECUTIONS, 0
        self._bytes = 0  # of the first program
        self._least = math.inf  # cost of the best program
        self.best: tuple[TileProgram, Run] | None = None

    def improve(self, placed: PlacedProgram, candidates: list[Candidate]) -> None:
        """Simulate a program, then with other tilings of each call in turn; of each call, the fastest is kept."""
        cost = self._cost(placed, candidates)
        for number, other in _others(placed, candidates):
            if self._left <= 0 or self._tried >= _MOST_TRIED:
                return
            changed = [*candidates[:number], other, *candidates[number + 1 :]]
            try:
                own = self._cost(placed, changed)
            except ConstraintError:
                continue
            if own < cost * (1 - _WORTH):
                cost, candidates[:] = own, changed

    def _cost(self, placed: PlacedProgram, candidates: list[Candidate]) -> float:
        """The simulated cycles of a program, times the factor by which it moves more bytes than the first one."""
        self._tried += 1
        program = placed.linked(candidates)
        run = Machine(self._chip, program).run()
        self._left -= sum(counts.instructions for counts in run.sections)
        self._bytes = self._bytes or run.dram_bytes
        cost = run.cycles * max(1.0, run.dram_bytes / max(1, self._bytes))
        if self.best is None or cost < self._least * (1 - _WORTH):
            self.best, self._least = (program, run), cost
        return cost


def _others(placed: PlacedProgram, candidates: list[Candidate]) -> Iterator[tuple[int, Candidate]]:
    """Number of a call and another likely tiling of it, for all calls; the likeliest tilings of all calls first."""
    options = [call.choices.likely(call.resident, call.room, call.in_l2) for call in placed.calls]
    for rank in range(max(map(len, options), default=0)):
        for number, own in enumerate(options):
            if rank < len(own) and own[rank].candidate is not candidates[number]:
                yield number, own[rank].candidate


__all__ = ["refined"]
