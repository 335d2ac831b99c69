"""The simulated NPU: chips, an instruction set, the lowering of op-level programs to it, and a machine that runs it."""

from typing import TYPE_CHECKING

from npu_compiler.deferred_import import deferred
from npu_compiler.partitioning.prices import Prices, priced_target
from npu_compiler.program.products import Product
from npu_compiler.program.target import CodegenTarget
from npu_compiler.version import __version__
from npu_model.chip import ArrayCycles, Chip, Dataflow, array_cycles, load_chip, parse_chip, shipped_chips

if TYPE_CHECKING:
    from npu_model.analysis.plan import PlanResult, simulate_plan
    from npu_model.analysis.result import CallResult, Energy, Result
    from npu_model.analysis.simulation import simulate
    from npu_model.device import NPUBackend
    from npu_model.lowering.forms import forms_of
    from npu_model.machine.machine import Cause
    from npu_model.target import ChipOpsTarget, NPUTarget

# Imported when used: they need the op table.
__getattr__ = deferred(
    "npu_model",
    {
        "CallResult": "analysis.result",
        "Cause": "machine.machine",
        "ChipOpsTarget": "target",
        "Energy": "analysis.result",
        "NPUBackend": "device",
        "NPUTarget": "target",
        "PlanResult": "analysis.plan",
        "forms_of": "lowering.forms",
        "Result": "analysis.result",
        "simulate": "analysis.simulation",
        "simulate_plan": "analysis.plan",
    },
)


@priced_target.register
def _target_of_chip(chip: Chip) -> tuple[CodegenTarget, Prices]:
    """The target and the cost estimates of a chip, for `npu_compiler.partition`."""
    from npu_model.target import NPUTarget

    target = NPUTarget(chip)
    return target, target.prices


__all__ = [
    "__version__",
    "ArrayCycles",
    "CallResult",
    "Cause",
    "Chip",
    "ChipOpsTarget",
    "Dataflow",
    "Energy",
    "NPUBackend",
    "NPUTarget",
    "PlanResult",
    "Product",
    "Result",
    "array_cycles",
    "forms_of",
    "load_chip",
    "parse_chip",
    "shipped_chips",
    "simulate",
    "simulate_plan",
]
