"""Stores an operand of batched products in the order in memory of what it is computed from.

Given:   t = x.transpose(-1, -2) / s, row-major;  y = batched_matmul(a, t)
Result:  t = x / s, row-major;  y = batched_matmul(a, t.transpose(-1, -2))

cuBLASLt multiplies both orders equally fast, but element-wise kernels that transpose are slow and fuse with nothing.
"""

from __future__ import annotations

from dataclasses import replace

from npu_compiler.program.elementwise import elementwise_kernel
from npu_compiler.program.kernels import KernelCall
from npu_compiler.program.plan import ExecutionPlan
from npu_compiler.program.views import View, contiguous_strides

_PRODUCT = "batched_matmul_kernel"


def order_operands(plan: ExecutionPlan) -> ExecutionPlan:
    """The plan with transposed element-wise results, which only batched products read, in the order of their source."""
    kept = {view.buffer for view in plan.output_views.values()}
    movable = {name for name, buffer in plan.buffers.items() if buffer.kind == "arena" and name not in kept}
    touching: dict[str, list[int]] = {}
    for index, call in enumerate(plan.calls):
        for name in {view.buffer for view in (*call.inputs, *call.outputs)}:
            touching.setdefault(name, []).append(index)
    calls, buffers = list(plan.calls), dict(plan.buffers)
    for index, call in enumerate(plan.calls):
        if elementwise_kernel(call) is None or not _transposes(call) or call.outputs[0].buffer not in movable:
            continue
        out = call.outputs[0]
        first, *readers = touching[out.buffer]
        if first != index or not all(_multiplies(calls[at], out) for at in readers):
            continue
        turned = out.transpose(-1, -2)
        stored = replace(turned, strides=contiguous_strides(turned.shape))
        inputs = tuple(view.transpose(-1, -2) for view in call.inputs)
        calls[index] = replace(call, inputs=inputs, outputs=(stored,))
        buffers[out.buffer] = replace(buffers[out.buffer], alloc_shape=stored.shape)
        for at in readers:
            operands = tuple(stored.transpose(-1, -2) if view == out else view for view in calls[at].inputs)
            calls[at] = replace(calls[at], inputs=operands)
    return replace(plan, calls=calls, buffers=buffers)


def _transposes(call: KernelCall) -> bool:
    """Whether a result is row-major, and each operand that is as large walks memory along the dimension before last."""
    out = call.outputs[0]
    large = [view for view in call.inputs if 0 not in view.strides]
    side_by_side = all(view.rank > 1 and view.strides[-1] > 1 == view.strides[-2] for view in large)
    same = all(view.shape == out.shape for view in call.inputs)
    return bool(large) and side_by_side and same and out.is_contiguous and out.offset == 0


def _multiplies(call: KernelCall, operand: View) -> bool:
    """Whether a call is a batched product that reads the operand's buffer as exactly this operand."""
    views = [view for view in (*call.inputs, *call.outputs) if view.buffer == operand.buffer]
    return call.kernel == _PRODUCT and call.outputs[0].buffer != operand.buffer and all(x == operand for x in views)
