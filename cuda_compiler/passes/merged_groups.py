"""Joins groups of a convolution that are too odd for tensor cores, so that its images can be stored as theirs are.

Given:   y = conv2d(x: [1, 12, 8, 8], w: [48, 6, 3, 3], 2 groups)
Result:  y = conv2d(x: [1, 12, 8, 8], w': [48, 12, 3, 3], 1 group); each output channel of w' has zeros for the inputs
         of the other group
"""

from __future__ import annotations

from dataclasses import replace

from cuda_compiler.passes.packed_operands import PackedOperands, copy
from cuda_compiler.rules.conv import merged_groups
from npu_compiler.graph.dtypes import HALF_DTYPES, is_float
from npu_compiler.program.kernels import KernelCall
from npu_compiler.program.plan import BufferKind, ExecutionPlan


def merge_groups(plan: ExecutionPlan) -> ExecutionPlan:
    """The plan with fewer groups in convolutions of 16-bit floats whose groups tensor cores do not take."""
    operands = PackedOperands(plan)
    for call in plan.calls:
        operands.calls.append(_merged(operands, call) if _is_of_halves(call) else call)
    return replace(
        plan,
        prologue=[*plan.prologue, *operands.prologue],
        calls=operands.calls,
        buffers={**plan.buffers, **operands.buffers},
    )


def _is_of_halves(call: KernelCall) -> bool:
    """Whether a call is a convolution of 16-bit floats, with a weight of any floats."""
    if call.kernel != "conv2d_kernel":
        return False
    dtype = call.inputs[0].dtype
    return dtype in HALF_DTYPES and call.outputs[0].dtype == dtype and is_float(call.inputs[1].dtype)


def _merged(operands: PackedOperands, call: KernelCall) -> KernelCall:
    """The convolution with a weight of joined groups; as it is if tensor cores take its groups."""
    weight = call.inputs[1]
    parts, (outputs, inner, *window) = call.params["groups"], weight.shape
    joined = merged_groups(parts, inner, outputs // parts)
    if joined == 1:
        return call
    constant = operands.is_constant(weight)
    kind: BufferKind = "persistent" if constant else "arena"
    merged = operands.buffer(
        f"{call.node}.joined", (outputs, joined * inner, *window), weight.dtype, kind, (0, 1, 2, 3)
    )
    zeros = KernelCall("fill_kernel", "", (), (merged,), {"value": 0.0, "int_value": 0}, call.node)
    by_group = weight.reshape((parts // joined, joined, outputs // parts, inner, *window))
    assert by_group is not None
    step, across, *taps = merged.strides
    own = outputs // parts * step
    diagonal = replace(merged, shape=by_group.shape, strides=(joined * own, own + inner * across, step, across, *taps))
    (operands.prologue if constant else operands.calls).extend([zeros, copy(by_group, diagonal, call.node)])
    inputs = (call.inputs[0], merged, *call.inputs[2:])
    return replace(call, inputs=inputs, params={**call.params, "groups": parts // joined})
