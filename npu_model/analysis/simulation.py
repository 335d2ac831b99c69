"""`simulate`: a program on a chip. Tries several divisions of SRAM and takes the fastest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from npu_compiler.compiled_program import CompiledProgram
from npu_compiler.errors import InputError
from npu_compiler.program.plan import ExecutionPlan
from npu_model.chip import Chip
from npu_model.mapper import Mapper, Tiling, no_tile
from npu_model.residency import Residency, demand_of, divide
from npu_model.result import Result, make_result
from npu_model.simulator import CallTimes, Machine
from npu_model.work import Work, call_work

# More SRAM, bandwidth or arrays make no program slower by more than this share: the mapper compares tilings of a call
# that runs by itself, while the simulator lets calls overlap.
MONOTONE_WITHIN = 0.05
_WORTHWHILE = 0.001  # a division of SRAM that can save no larger share of the time is not tried
_SHARES = 6  # the tiles get 1/2, 1/4, … of SRAM, rounded down to a power of two


def simulate(program: CompiledProgram, chip: Chip) -> Result:
    """One run of a program on a chip; what runs once per set of weights is left out.

    Weights stay in SRAM between runs if that is faster and there is room for all of them.

    Raises:
        InputError: the program is not for the op-level target or has no calls, or a kernel fits no SRAM of this chip.
    """
    import npu_compiler.ops  # noqa: F401  (declares the kernels)

    if program.contains_code:
        raise InputError(
            f"'{program.name}' was compiled for {program.target}, whose kernels only that target knows; the NPU model "
            "takes programs compiled with --target op_level"
        )
    plan = program.plan
    if not plan.calls:
        raise InputError(f"'{program.name}' has no kernel calls to simulate: its outputs are its inputs or constants")
    caches = frozenset(plan.donations.values())
    works = [call_work(call, caches) for call in plan.calls]
    constants = frozenset(name for name, buffer in plan.buffers.items() if buffer.is_constant)
    dependencies = _dependencies(plan)
    launched = _as_launched(chip, works)
    mapper = Mapper(chip)
    best: _Found | None = None
    unfit: Work | None = None
    for residency in _divisions(plan, chip):
        tilings = _tilings(works, residency, constants, mapper)
        if isinstance(tilings, Work):
            unfit = tilings
            continue
        if best is not None and _least_cycles(tilings, chip) > best.cycles * (1 - _WORTHWHILE):
            continue
        times = Machine(launched).run(tilings, dependencies)
        cycles = sum(call.cycles for call in times)
        if best is None or cycles < best.cycles:
            best = _Found(cycles, residency, tilings, times)
    if best is None:
        assert unfit is not None
        raise no_tile(unfit.call.node, unfit.call.kernel, chip)
    return make_result(program, chip, works, best.tilings, best.times, best.residency)


@dataclass(frozen=True)
class _Found:
    """A division of SRAM, and what the program takes with it."""

    cycles: float
    residency: Residency
    tilings: list[Tiling]
    times: list[CallTimes]


def _least_cycles(tilings: Sequence[Tiling], chip: Chip) -> float:
    """Cycles that these tilings take at least: all of their transfers, or all of their computing."""
    moved = sum(tiling.tiles * (tiling.constants + tiling.inputs + tiling.outputs) for tiling in tilings)
    arrays = sum(tiling.tiles * tiling.array_cycles for tiling in tilings)
    vector = sum(tiling.tiles * tiling.vector_cycles for tiling in tilings)
    return max(moved / chip.dram_bytes_per_cycle, arrays, vector)


def _as_launched(chip: Chip, works: Sequence[Work]) -> Chip:
    """The chip with the cost of a launch that holds for a program of these calls."""
    rows = max((product.m for work in works for product in work.operations.products), default=0)
    if not 0 < rows <= chip.launch.resident_rows:
        return chip
    return replace(chip, launch=replace(chip.launch, cost_us=chip.launch.resident_us, product_us=0.0))


def _divisions(plan: ExecutionPlan, chip: Chip) -> list[Residency]:
    size = chip.sram.size
    power = 1 << (size.bit_length() - 1)
    shares = sorted({size, *(power >> step for step in range(0 if power < size else 1, _SHARES))}, reverse=True)
    found = [divide(plan, size, share, keep) for keep in (True, False) for share in shares]
    return [division for division in found if division is not None]


def _tilings(
    works: Sequence[Work], residency: Residency, constants: frozenset[str], mapper: Mapper
) -> list[Tiling] | Work:
    """The tiling of each call; the first call that has none, if there is one."""
    tilings = []
    for work in works:
        tiling = mapper.tiling(demand_of(work, residency.buffers, constants), residency.tile_bytes)
        if tiling is None:
            return work
        tilings.append(tiling)
    return tilings


def _dependencies(plan: ExecutionPlan) -> list[frozenset[int]]:
    """For each call, the latest call before that wrote each buffer that it reads or writes."""
    writer: dict[str, int] = {}
    found = []
    for index, call in enumerate(plan.calls):
        found.append(frozenset(writer[v.buffer] for v in (*call.inputs, *call.outputs) if v.buffer in writer))
        writer.update({view.buffer: index for view in call.outputs})
    return found
