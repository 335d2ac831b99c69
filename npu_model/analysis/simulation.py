"""`simulate`: the time, traffic and energy of a program on a chip, without computing anything."""

from __future__ import annotations

from npu_compiler.compiled_program import CompiledProgram
from npu_compiler.errors import InputError
from npu_compiler.program.plan import ExecutionPlan
from npu_model.analysis.result import Result, make_result
from npu_model.chip import Chip
from npu_model.isa.instructions import TileProgram
from npu_model.loading import load_tiles
from npu_model.lowering.cores import arranged, lower_arranged
from npu_model.lowering.mapper import Mapper
from npu_model.lowering.shared import Shared
from npu_model.machine.machine import Machine, Run

# More memory, bandwidth or arrays make no program slower by more than this share of its time and, for each call, one
# access to DRAM: the mapper compares tilings of a call that runs by itself, by an estimate, while calls overlap.
MONOTONE_WITHIN = 0.05


def most_cycles(result: Result) -> float:
    """The most cycles that the program of a result takes on a chip that has more of anything."""
    chip = result.chip
    access = chip.dram_latency_cycles + chip.outside.burst_bytes / chip.dram_bytes_per_cycle + chip.l2_latency_cycles
    return result.cycles * (1 + MONOTONE_WITHIN) + len(result.calls) * access


def simulate(program: CompiledProgram, chip: Chip, *, spans: bool = False) -> Result:
    """One run of a program on a chip; what runs once per set of weights is left out.

    Args:
        program: Compiled for this chip; or for the op-level target, then it is lowered for the chip first.
        spans: Keep what each engine does when, for traces and pictures.

    Raises:
        InputError: the program is for another kind of target, or has no calls.
        ConstraintError: the chip cannot run a call of an op-level program; lists all of them.
        DeviceError: the program was compiled for another chip.
    """
    tiles = lowered(program, chip)
    return result_of(program, chip, tiles, Machine(chip, tiles).run(spans=spans))


def lowered(program: CompiledProgram, chip: Chip) -> TileProgram:
    """The instructions of a program for a chip: those that it was compiled to or, of an op-level program, new ones.

    Raises as `simulate`.
    """
    plan = checked_plan(program)
    if program.target.startswith("npu:"):
        return load_tiles(program, chip)
    _, tiles = lower_arranged(plan, chip, Mapper(chip))
    return tiles


def simulate_for(program: CompiledProgram, chip: Chip, shared: Shared) -> Result:
    """One run of a program on one of many chips, with the cycles, traffic and energy that `simulate` tells.

    Args:
        shared: Results of lowering for the other chips.
    """
    if program.target.startswith("npu:"):
        return simulate(program, chip)
    arrangement = arranged(checked_plan(program), chip, Mapper(chip, shared))
    run = arrangement.run or Machine(chip, arrangement.program).run()
    return result_of(program, chip, arrangement.program, run)


def checked_plan(program: CompiledProgram) -> ExecutionPlan:
    """The plan of a program that can be simulated. Raises `InputError` where it is for another target, or empty."""
    import npu_compiler.ops  # noqa: F401  (declares the kernels)

    if program.contains_code:
        raise InputError(
            f"'{program.name}' was compiled for {program.target}, whose kernels only that target knows; simulate takes "
            "programs compiled with --target op_level or npu:CHIP"
        )
    if not program.plan.calls:
        raise InputError(f"'{program.name}' has no kernel calls to simulate: its outputs are its inputs or constants")
    return program.plan


def result_of(program: CompiledProgram, chip: Chip, tiles: TileProgram, run: Run) -> Result:
    """A run of a program as a result."""
    kept = sum(counts.dram_read for counts in Machine(chip, tiles).preload().sections)
    return make_result(program.name, program.plan, chip, tiles, run, kept)


__all__ = ["MONOTONE_WITHIN", "lowered", "most_cycles", "result_of", "simulate", "simulate_for"]
