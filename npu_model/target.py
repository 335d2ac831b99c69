"""`NPUTarget`: compiles op-level programs to the tile programs of one chip."""

from __future__ import annotations

from dataclasses import replace

from npu_compiler.program.plan import ExecutionPlan
from npu_compiler.program.target import OpLevelTarget
from npu_compiler.target_config import OP_LEVEL
from npu_model.chip import Chip
from npu_model.isa.encoding import encode
from npu_model.lowering.mapper import Mapper
from npu_model.lowering.program import chip_digest, lower_program


class NPUTarget(OpLevelTarget):
    """The kernels of the op table, each with the instructions that compute it on a chip.

    Args:
        chip: The chip that programs are made for.
    """

    def __init__(self, chip: Chip) -> None:
        self.chip = chip
        self._mapper = Mapper(chip)
        self.config = replace(OP_LEVEL, name=f"npu:{chip.name}", channel_alignment_bytes=1)

    @property
    def key(self) -> str:
        return f"{self.config.name}:{chip_digest(self.chip)}"

    def assemble(self, plan: ExecutionPlan) -> ExecutionPlan:
        """The plan with its tile program. Raises `ConstraintError`, with the nodes of all calls that the chip lacks."""
        return replace(plan, machine_code=encode(lower_program(plan, self.chip, self._mapper)))
