"""`load_tiles`: decodes the tile program of a compiled program, and checks it for the chip that is to run it."""

from __future__ import annotations

from npu_compiler.compiled_program import CompiledProgram
from npu_compiler.errors import DeviceError, ProgramFormatError
from npu_compiler.program.plan import ExecutionPlan
from npu_model.chip import Chip
from npu_model.isa.encoding import decode
from npu_model.isa.instructions import TileProgram
from npu_model.isa.verifier import verify
from npu_model.lowering.mapper import Mapper
from npu_model.lowering.program import buffers_of, chip_digest


def load_tiles(program: CompiledProgram | ExecutionPlan, chip: Chip) -> TileProgram:
    """Decode and verify the tile program of a program for this chip.

    Raises:
        DeviceError: the program was compiled for another chip, or the chip's parameters have changed since.
        ProgramFormatError: the tile program is invalid, or does not correspond to the program's kernel calls.
    """
    plan = program.plan if isinstance(program, CompiledProgram) else program
    tiles = decode(plan.machine_code)
    if tiles.digest != chip_digest(chip):
        raise DeviceError(
            f"the program was compiled for another chip '{tiles.chip}': its numbers are not those of '{chip.name}'; "
            "compile it again"
        )
    if [(section.node, section.kernel) for section in tiles.sections] != [(c.node, c.kernel) for c in plan.calls]:
        raise ProgramFormatError("the tile program's sections are not those of the program's kernel calls")
    if [(b.name, b.size) for b in tiles.buffers] != [(b.name, b.size) for b in buffers_of(plan, Mapper(chip))]:
        raise ProgramFormatError("the tile program's buffers are not those of the program's kernel calls")
    verify(tiles, chip)
    return tiles


__all__ = ["load_tiles"]
