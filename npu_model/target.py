"""`NPUTarget`: compiles op-level programs to the tile programs of one chip."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from npu_compiler.program.plan import ExecutionPlan
from npu_compiler.program.target import OpLevelTarget
from npu_compiler.target_config import OP_LEVEL
from npu_model.chip import Chip
from npu_model.isa.encoding import encode
from npu_model.lowering.program import lower_program


class NPUTarget(OpLevelTarget):
    """The kernels of the op table, each with the instructions that compute it on a chip.

    Args:
        chip: The chip that programs are made for.
    """

    def __init__(self, chip: Chip) -> None:
        self.chip = chip
        self.config = replace(OP_LEVEL, name=f"npu:{chip.name}", channel_alignment_bytes=1, rounds_caches=False)

    @property
    def key(self) -> str:
        from npu_model.lowering.program import chip_digest

        return f"{self.config.name}:{chip_digest(self.chip)}"

    def supports(self, op_type: str, attrs: Mapping[str, Any]) -> bool:
        return True

    def assemble(self, plan: ExecutionPlan) -> ExecutionPlan:
        """The plan with its tile program."""
        return replace(plan, machine_code=encode(lower_program(plan, self.chip)))
