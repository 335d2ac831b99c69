"""Drops copies that move nothing.

Given:   y = conv2d(x), in memory as [1, 8, 8, 16];  t = copy(y as [64, 16]);  z = layernorm(t)
Result:  y = conv2d(x);  z = layernorm(y as [64, 16])

Such copies were made for a layout that `channels_last` has changed since.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from cuda_compiler.elementwise.grouping import place_of
from npu_compiler.program.elementwise import elementwise_kernel
from npu_compiler.program.kernels import KernelCall
from npu_compiler.program.plan import ExecutionPlan
from npu_compiler.program.views import View


def drop_copies(plan: ExecutionPlan) -> ExecutionPlan:
    """The plan without copies from an arena buffer to another one in the same order of memory."""
    kept = {view.buffer for view in plan.output_views.values()}
    movable = {name for name, buffer in plan.buffers.items() if buffer.kind == "arena" and name not in kept}
    calls = list(plan.calls)
    index = 0
    while index < len(calls):
        if _moves_nothing(calls[index], plan) and _stays(calls, index, movable):
            copy = calls.pop(index)
            source, target = copy.inputs[0], copy.outputs[0]
            calls[index:] = [_reading(call, target, source) for call in calls[index:]]
        else:
            index += 1
    return replace(plan, calls=calls)


def _moves_nothing(call: KernelCall, plan: ExecutionPlan) -> bool:
    decl = elementwise_kernel(call)
    if decl is None or decl.op.name != "copy" or list(call.params["scalars"]) != [None]:
        return False
    source, target = call.inputs[0], call.outputs[0]
    run = ((target.numel,), (1,))
    places = [place_of(view) for view in (source, target)]
    whole = prod(plan.buffers[target.buffer].alloc_shape) == target.numel
    return source.dtype == target.dtype and whole and all((place.sizes, place.strides) == run for place in places)


def _stays(calls: Sequence[KernelCall], index: int, movable: set[str]) -> bool:
    """Whether the source holds its value as long as the target is read, and nothing else writes the target."""
    source, target = calls[index].inputs[0].buffer, calls[index].outputs[0].buffer
    if source == target or not {source, target} <= movable:
        return False
    reads = [at for at, call in enumerate(calls) if any(view.buffer == target for view in call.inputs)]
    writes = [at for at, call in enumerate(calls) if any(view.buffer == target for view in call.outputs)]
    if writes != [index] or any(at < index for at in reads):
        return False
    between = calls[index + 1 : max(reads, default=index) + 1]
    return not any(view.buffer == source for call in between for view in call.outputs)


def _reading(call: KernelCall, target: View, source: View) -> KernelCall:
    """The call with every view of the target over the source."""
    moved = source.offset - target.offset
    return replace(
        call,
        inputs=tuple(
            replace(view, buffer=source.buffer, offset=view.offset + moved) if view.buffer == target.buffer else view
            for view in call.inputs
        ),
    )
