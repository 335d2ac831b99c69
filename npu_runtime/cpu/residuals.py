"""Lets convolutions write over the tensor that they add, so that fewer bytes pass through the caches."""

from __future__ import annotations

from collections.abc import Sequence

from npu_compiler.program.kernels import KERNELS, KernelCall
from npu_compiler.program.memory_planner import inputs_of_elementwise, plan_memory
from npu_compiler.program.plan import ExecutionPlan
from npu_compiler.program.views import View


def write_over_residuals(plan: ExecutionPlan, alignment: int) -> ExecutionPlan:
    """The plan, its memory planned anew if a convolution adds a residual: the result may take the residual's memory."""
    adds = any(call.kernel == "conv2d_kernel" and call.params["has_residual"] for call in plan.calls)
    return plan_memory(plan, alignment, _may_overwrite) if adds else plan


def _may_overwrite(call: KernelCall) -> Sequence[View]:
    """The inputs of an element-wise call, or a convolution's residual: each element is read before it is written."""
    if call.kernel != "conv2d_kernel":
        return inputs_of_elementwise(call)
    residual = KERNELS[call.kernel].inputs_of(call)["residual"]
    return () if residual is None else (residual,)
