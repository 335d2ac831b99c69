"""`simulate`: the time, traffic and energy of a program on a chip, without computing any data."""

from __future__ import annotations

from collections.abc import Mapping

from npu_compiler.compiled_program import CompiledProgram
from npu_compiler.errors import InputError
from npu_compiler.program.plan import ExecutionPlan
from npu_model.analysis.result import Result, make_result
from npu_model.chip import Chip
from npu_model.collection import seldom_collected
from npu_model.isa.instructions import TileProgram
from npu_model.loading import load_tiles
from npu_model.lowering.cores import arranged, lower_arranged
from npu_model.lowering.forms import Form
from npu_model.lowering.mapper import Mapper
from npu_model.machine.machine import Machine, Run

# More memory, bandwidth or arrays make no program slower by more than this share of its time and, for each call, one
# access to DRAM: the mapper compares tilings of a call that runs by itself, by an estimate, while calls overlap.
MONOTONE_WITHIN = 0.05


def most_cycles(result: Result) -> float:
    """Upper bound of the program's cycles on a chip with more memory, bandwidth or arrays than the result's."""
    chip = result.chip
    access = chip.dram_latency_cycles + chip.outside.burst_bytes / chip.dram_bytes_per_cycle + chip.l2_latency_cycles
    return result.cycles * (1 + MONOTONE_WITHIN) + len(result.calls) * access


@seldom_collected()
def simulate(
    program: CompiledProgram, chip: Chip, *, spans: bool = False, forms: Mapping[str, Form] | None = None
) -> Result:
    """Simulate one run of a program on a chip, without the preload of weights that happens once.

    Args:
        program: A program compiled for this chip, or an op-level program, which is lowered for the chip first.
        spans: Whether to record the time span of each instruction, for traces and charts.
        forms: Forms of an op-level program's weights in DRAM, as `forms_of` measures them. None: only their shapes are
            known, and the chip's file says how compressed they are.

    Raises:
        InputError: the program is for another kind of target, or has no kernel calls.
        ConstraintError: the chip cannot run some calls of an op-level program; the message names all of them.
        DeviceError: the program was compiled for another chip.
    """
    tiles = lowered(program, chip, forms)
    return result_of(program, chip, tiles, Machine(chip, tiles).run(spans=spans))


def lowered(program: CompiledProgram, chip: Chip, forms: Mapping[str, Form] | None = None) -> TileProgram:
    """The tile program of a program for a chip: decoded if it was compiled for the chip, else lowered from op level.

    Raises as `simulate`. `forms` are those of `simulate`; None: only shapes are known.
    """
    plan = checked_plan(program)
    if program.target.startswith("npu:"):
        return load_tiles(program, chip)
    _, tiles = lower_arranged(plan, chip, Mapper(chip, forms=forms))
    return tiles


@seldom_collected()
def simulate_for(program: CompiledProgram, mapper: Mapper) -> Result:
    """Simulate a program on a mapper's chip; cycles, traffic and energy are those of `simulate`.

    An op-level program is lowered and run as it is, without encoding instructions or removing redundant waits.

    Args:
        mapper: Mapper of the chip, which keeps the tilings that it has found for programs with equal calls. Its
            `Shared` keeps results that several chips have in common.

    Raises as `simulate`.
    """
    if program.target.startswith("npu:"):
        return simulate(program, mapper.chip)
    arrangement = arranged(checked_plan(program), mapper.chip, mapper)
    run = arrangement.run or Machine(mapper.chip, arrangement.program).run()
    return result_of(program, mapper.chip, arrangement.program, run)


def checked_plan(program: CompiledProgram) -> ExecutionPlan:
    """The plan of a program that can be simulated.

    Raises `InputError` if the program is for another target or has no kernel calls.
    """
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
    """Build a `Result` from a run of a program's tile program."""
    kept = sum(counts.dram_read for counts in Machine(chip, tiles).preload().sections)
    return make_result(program.name, program.plan, chip, tiles, run, kept)


__all__ = ["MONOTONE_WITHIN", "lowered", "most_cycles", "result_of", "simulate", "simulate_for"]
