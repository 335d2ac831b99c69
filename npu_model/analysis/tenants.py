"""`share`: simulates two or more programs that start at once on one chip, and compares each with its run alone.

With sharing by cores, each program has some of the cores for itself; DRAM and the network are shared. With sharing by
time, all programs use all engines: their kernel calls take turns, and each program has a part of the scratchpads and
accumulators. Either way, the programs are joined into one tile program for the machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import zip_longest
from typing import Any

from npu_compiler.compiled_program import CompiledProgram
from npu_compiler.errors import ConstraintError, InputError
from npu_compiler.program.describe import format_bytes
from npu_compiler.program.plan import ExecutionPlan
from npu_model.analysis.result import Result
from npu_model.analysis.simulation import checked_plan, result_of
from npu_model.chip import Chip, SharedL2
from npu_model.isa.instructions import Section, Space, TileProgram, core_name, instructions
from npu_model.isa.verifier import verify
from npu_model.lowering.cores import lower_arranged
from npu_model.lowering.mapper import Mapper
from npu_model.lowering.program import chip_digest
from npu_model.lowering.relocation import Relocation
from npu_model.machine.machine import Machine, Run, Span


class Sharing(StrEnum):
    """Ways in which programs share a chip."""

    TIME = "time"
    CORES = "cores"


@dataclass(frozen=True)
class Tenant:
    """One of the programs that share a chip, with its results.

    Attributes:
        share: Description of its part of the chip.
        alone: The result of a run with the whole chip for itself.
        shared: The result of the run together with the others: cycles until it has ended, and its own work.
    """

    share: str
    alone: Result
    shared: Result

    @property
    def slowdown(self) -> float:
        """Latency in the shared run, divided by the latency alone."""
        return self.shared.cycles / self.alone.cycles

    def to_dict(self) -> dict[str, Any]:
        """The results as JSON data; times in microseconds."""
        return {
            "program": self.alone.program,
            "share": self.share,
            "alone_us": 1e6 * self.alone.seconds,
            "latency_us": 1e6 * self.shared.seconds,
            "slowdown": self.slowdown,
            "dram_bytes": self.shared.dram_bytes,
            "alone_dram_bytes": self.alone.dram_bytes,
            "busy_us": self.shared.to_dict(calls=False)["busy_us"],
        }


@dataclass(frozen=True)
class SharedRun:
    """Results of several programs that ran together on one chip.

    Attributes:
        cycles: Cycles until all programs have ended.
        spans: Time spans of instructions, each with the tenant's number and the node; empty unless they were asked for.
    """

    chip: Chip
    sharing: Sharing
    cycles: int
    tenants: tuple[Tenant, ...]
    spans: tuple[tuple[int, str, Span], ...] = ()

    @property
    def seconds(self) -> float:
        """Time until all programs have ended, in seconds."""
        return self.chip.seconds(self.cycles)

    @property
    def joules(self) -> float:
        """Energy of all programs in joules, with static energy until the last one has ended."""
        moving = sum(tenant.shared.energy.total - tenant.shared.energy.static for tenant in self.tenants)
        return moving + self.chip.energy.static_watts * self.seconds

    def to_dict(self) -> dict[str, Any]:
        """The run as JSON data; times in microseconds, energy in microjoules."""
        one_by_one = sum(tenant.alone.seconds for tenant in self.tenants)
        return {
            "chip": self.chip.name,
            "share": self.sharing.value,
            "latency_us": 1e6 * self.seconds,
            "one_after_the_other_us": 1e6 * one_by_one,
            "energy_uj": 1e6 * self.joules,
            "tenants": [tenant.to_dict() for tenant in self.tenants],
        }


@dataclass(frozen=True)
class Share:
    """A tenant's part of a chip.

    Attributes:
        chip: The part as a chip by itself.
        place: Relocation of that chip's instructions to the whole chip.
        text: Description of the part.
    """

    chip: Chip
    place: Relocation
    text: str


@dataclass(frozen=True)
class Joined:
    """The joined tile program of all tenants.

    Attributes:
        program: The joined program.
        sections: For each tenant, the numbers of its sections in `program`.
        tiles: For each tenant, its tile program for its part as a chip by itself.
        shares: The tenants' parts of the chip.
    """

    program: TileProgram
    sections: tuple[tuple[int, ...], ...]
    tiles: tuple[TileProgram, ...]
    shares: tuple[Share, ...]


def share(programs: Sequence[CompiledProgram], chip: Chip, sharing: Sharing, *, spans: bool = False) -> SharedRun:
    """Simulate programs that start at once on one chip.

    Args:
        programs: Op-level programs, two or more.
        spans: Whether to record the time span of each instruction.

    Raises:
        InputError: a program is already compiled for a chip, or the chip has too little to share: cores, scratchpad, L2
            or tokens.
        ConstraintError: the chip, or a program's part of it, cannot run some call.
    """
    alone = [_alone(program, chip) for program in programs]
    joined = join(programs, chip, sharing)
    verify(joined.program, chip)
    lanes = joined.sections if sharing is Sharing.CORES else None
    run = Machine(chip, joined.program).run(spans=spans, lanes=lanes)
    tenants, owners = [], {}
    for number, own in enumerate(joined.sections):
        owners.update(dict.fromkeys(own, number))
        counts = [run.sections[section] for section in own]
        part = Run(max(each.end for each in counts), counts, [])
        result = result_of(programs[number], joined.shares[number].chip, joined.tiles[number], part)
        tenants.append(Tenant(joined.shares[number].text, alone[number], result))
    nodes = [section.node for section in joined.program.sections]
    marked = tuple((owners[span.section], nodes[span.section], span) for span in run.spans)
    return SharedRun(chip, sharing, run.cycles, tuple(tenants), marked)


def join(programs: Sequence[CompiledProgram], chip: Chip, sharing: Sharing) -> Joined:
    """Lower several programs, each for its part of a chip, and join them into one tile program. Raises as `share`."""
    plans = [_plan_for_any_chip(program) for program in programs]
    shares = shares_of(chip, len(plans), sharing)
    tiles: list[TileProgram] = []
    for model, plan, own in zip(programs, plans, shares, strict=True):
        try:
            tiles.append(lower_arranged(plan, own.chip, Mapper(own.chip))[1])
        except ConstraintError as error:
            problems = [f"'{model.name}' with {own.text}: {problem}" for problem in error.violations]
            raise ConstraintError(problems, error.nodes) from error
    tokens, moved = 0, []
    for number, (each, own) in enumerate(zip(tiles, shares, strict=True)):
        moved.append(replace(own.place, tokens=tokens, buffers=f"{number}/").program(each))
        tokens += _tokens(each) if sharing is Sharing.TIME else 0
    if sharing is Sharing.TIME and tokens > chip.control.tokens:
        raise InputError(
            f"the programs need {tokens} tokens of an engine together; chip '{chip.name}' has {chip.control.tokens} "
            "('control.tokens'), so share it by cores, or give it more"
        )
    sections, numbers = _in_turn([each.sections for each in moved])
    program = TileProgram(
        chip.name,
        chip_digest(chip),
        tuple(buffer for each in moved for buffer in each.buffers),
        tuple(section for each in moved for section in each.preload),
        sections,
    )
    return Joined(program, numbers, tuple(tiles), tuple(shares))


def _alone(program: CompiledProgram, chip: Chip) -> Result:
    _, tiles = lower_arranged(_plan_for_any_chip(program), chip, Mapper(chip))
    return result_of(program, chip, tiles, Machine(chip, tiles).run())


def _plan_for_any_chip(program: CompiledProgram) -> ExecutionPlan:
    if program.target.startswith("npu:"):
        raise InputError(
            f"'{program.name}' was compiled for {program.target}, the whole chip; to share a chip, give its IR file or "
            "a program compiled with --target op_level"
        )
    return checked_plan(program)


def _tokens(tiles: TileProgram) -> int:
    """Number of tokens that a program needs of an engine: the highest number it uses, plus one."""
    return 1 + max(
        (
            token.number
            for section in (*tiles.preload, *tiles.sections)
            for instruction, _ in instructions(section.body)
            for token in (*instruction.signals, *(wait.token for wait in instruction.waits))
        ),
        default=-1,
    )


def shares_of(chip: Chip, count: int, sharing: Sharing) -> list[Share]:
    """Divide a chip among programs. Raises `InputError` if it has too few cores, or too little scratchpad or L2."""
    return _by_cores(chip, count) if sharing is Sharing.CORES else _by_time(chip, count)


def _by_cores(chip: Chip, count: int) -> list[Share]:
    """Divide the cores evenly among the programs, in order; the first programs get one more if there is a remainder."""
    if chip.core_count < count:
        cores = f"{chip.core_count} core{'s' * (chip.core_count > 1)}"
        raise InputError(
            f"chip '{chip.name}' has {cores} for {count} programs; share it by time, or give it more in [cores]"
        )
    shares, first = [], 0
    for number in range(count):
        size = chip.core_count // count + (number < chip.core_count % count)
        own = None if size == 1 or chip.cores is None else replace(chip.cores, count=size)
        names = [""] if own is None else [core_name(core) for core in range(size)]
        place = {name: core_name(first + core) for core, name in enumerate(names)}
        l2, shifts = _part_of_l2(chip, number, count)
        last = f" to core{first + size - 1}" if size > 1 else ""
        shares.append(Share(replace(chip, cores=own, l2=l2), Relocation(place, shifts), f"core{first}{last}"))
        first += size
    return shares


def _by_time(chip: Chip, count: int) -> list[Share]:
    """Divide the scratchpads and accumulators evenly among the programs."""
    step = chip.sram.alignment
    size = chip.sram.size // count // step * step
    sums = 0 if chip.matrix is None else chip.matrix.accumulator_bytes // count // step * step
    if size < 1024 or (chip.matrix is not None and sums < step):
        raise InputError(f"the scratchpad of chip '{chip.name}' is too small for {count} programs")
    own = replace(
        chip,
        sram=replace(chip.sram, size=size),
        matrix=None if chip.matrix is None else replace(chip.matrix, accumulator_bytes=sums),
    )
    shares = []
    for number in range(count):
        l2, shifts = _part_of_l2(chip, number, count)
        place = {Space.SCRATCHPAD: number * size, Space.ACCUMULATORS: number * sums, **shifts}
        shares.append(Share(replace(own, l2=l2), Relocation(shifts=place), f"{format_bytes(size)} of scratchpad"))
    return shares


def _part_of_l2(chip: Chip, number: int, count: int) -> tuple[SharedL2 | None, dict[Space, int]]:
    """A tenant's part of the L2, and the shift of its addresses; the bandwidth stays shared. None without an L2."""
    if chip.l2 is None:
        return None, {}
    size = chip.l2.size // count // chip.sram.alignment * chip.sram.alignment
    if size < 1024:
        raise InputError(f"the L2 of chip '{chip.name}' is too small for {count} programs")
    return replace(chip.l2, size=size), {Space.L2: number * size}


def _in_turn(programs: Sequence[Sequence[Section]]) -> tuple[tuple[Section, ...], tuple[tuple[int, ...], ...]]:
    """Interleave the sections of programs; return them, and for each program the numbers of its sections."""
    sections: list[Section] = []
    numbers: list[list[int]] = [[] for _ in programs]
    for each in zip_longest(*programs):
        for own, section in zip(numbers, each, strict=True):
            if section is not None:
                own.append(len(sections))
                sections.append(section)
    return tuple(sections), tuple(map(tuple, numbers))


__all__ = ["Joined", "Share", "SharedRun", "Sharing", "Tenant", "join", "share", "shares_of"]
