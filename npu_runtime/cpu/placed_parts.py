"""Computes the parts of concatenations where they lie in them, as `place_in_targets` says, where that is faster."""

from __future__ import annotations

from npu_compiler.program.kernels import KernelCall
from npu_compiler.program.memory_planner import plan_memory
from npu_compiler.program.placement import place_in_targets, takes_as_declared
from npu_compiler.program.plan import ExecutionPlan
from npu_compiler.program.views import View


def place_parts(plan: ExecutionPlan, alignment: int) -> ExecutionPlan:
    """The plan without copies of parts of concatenations, its memory planned anew.

    Given:  conv2d x v → y[1, 16, 8, 8]:[1024, 1, 128, 16]; copy y → z[1, 16, 8, 8]:[4096, 1, 512, 64]
    Result: conv2d x v → z[1, 16, 8, 8]:[4096, 1, 512, 64]
    """
    placed = place_in_targets(plan, _takes, widest=1)
    return plan if len(placed.calls) == len(plan.calls) else plan_memory(placed, alignment)


def _takes(before: KernelCall, after: KernelCall) -> bool:
    """Whether a call is as fast with other strides.

    Native kernels read and write images with their channels innermost at any distance of their pixels, but planar ones
    only as a whole: the images of a batch must follow each other.
    """
    pairs = zip((*before.inputs, *before.outputs), (*after.inputs, *after.outputs), strict=True)
    moved = [new for old, new in pairs if new != old]
    return takes_as_declared(before, after) and all(view.is_dense or _is_channels_last(view) for view in moved)


def _is_channels_last(view: View) -> bool:
    return view.rank == 4 and view.strides[1] == 1
