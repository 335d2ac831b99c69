"""`NPUTarget`: compiles op-level programs to tile programs for one chip, and refuses ops that the chip lacks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

from npu_compiler.graph.model import IRGraph, OpNode
from npu_compiler.partitioning.lone_nodes import LoneNodes
from npu_compiler.partitioning.prices import Prices, prices_of
from npu_compiler.program.plan import ExecutionPlan
from npu_compiler.program.target import OpLevelTarget
from npu_compiler.target_config import OP_LEVEL
from npu_model.capabilities import Capabilities
from npu_model.chip import Chip
from npu_model.isa.encoding import encode
from npu_model.kept_code import kept_code
from npu_model.lowering.cores import lower_arranged
from npu_model.lowering.forms import Form
from npu_model.lowering.mapper import Mapper
from npu_model.lowering.program import chip_digest
from npu_model.prices import ChipPrices


class ChipOpsTarget(OpLevelTarget):
    """A target with the op table's kernels, restricted to the ops that a chip supports; it generates no instructions.

    Args:
        chip: The chip whose ops are supported.
    """

    def __init__(self, chip: Chip) -> None:
        self.chip = chip
        self.lone = LoneNodes()
        self.capabilities = Capabilities(chip, self.lone)

    @property
    def supports_all(self) -> bool:
        return not self.capabilities.is_limited

    def supports(self, op_type: str, attrs: Mapping[str, Any]) -> bool:
        return not op_type.startswith("npu.") or self.supports_all or self.capabilities.has_fused(op_type)

    def refusal(self, node: OpNode, graph: IRGraph, compute_dtype: str) -> str | None:
        return self.capabilities.refusal(node, graph, compute_dtype)


class UnassembledTarget(ChipOpsTarget):
    """A target with the calls of `NPUTarget`, but without tile programs: `simulate_for` lowers the calls itself.

    Args:
        chip: The chip that programs are simulated on.
    """

    def __init__(self, chip: Chip) -> None:
        super().__init__(chip)
        self.config = replace(OP_LEVEL, channel_alignment_bytes=1)

    @property
    def key(self) -> str:
        return f"{self.config.name}:{chip_digest(self.chip)}"


class NPUTarget(ChipOpsTarget):
    """A target that compiles for one chip: the op table's kernels, with tile programs.

    Args:
        chip: The chip that programs are compiled for.
        forms: Weight → its form in DRAM, as `forms_of` measures it. None: of all weights only shapes are known.
    """

    def __init__(self, chip: Chip, forms: Mapping[str, Form] | None = None) -> None:
        super().__init__(chip)
        self._mapper = Mapper(chip, forms=forms)
        self.config = replace(OP_LEVEL, name=f"npu:{chip.name}", channel_alignment_bytes=1)

    @property
    def key(self) -> str:
        forms = self._mapper.forms
        return f"{self.config.name}:{chip_digest(self.chip)}" + (f":{sorted(forms.items())}" if forms else "")

    @cached_property
    def prices(self) -> ChipPrices:
        """Estimated times of the chip, its host and their link.

        Raises `InputError` if the chip's file lacks host or link.
        """
        return ChipPrices(self.chip, self._mapper, self.lone)

    def assemble(self, plan: ExecutionPlan) -> ExecutionPlan:
        """Add the tile program to a plan. Raises `ConstraintError`, which names all calls that the chip cannot run."""

        def lower() -> ExecutionPlan:
            arranged, tiles = lower_arranged(plan, self.chip, self._mapper)
            return replace(arranged, machine_code=encode(tiles))

        return kept_code(plan, self.chip, lower, self._mapper.forms)


@prices_of.register
def _prices_of_chip(target: NPUTarget) -> Prices | None:
    """The cost estimates of the target's chip; None if the chip's file has no host or no link."""
    return None if target.chip.host is None or target.chip.link is None else target.prices
