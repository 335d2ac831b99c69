"""Drops copies that move nothing, and writes results directly to where a copy would move them.

Given:   y = conv2d(x), in memory as [1, 8, 8, 16];  t = copy(y as [64, 16]);  z = layernorm(t)
Result:  y = conv2d(x);  z = layernorm(y as [64, 16])

Such a copy remains where `channels_last` has changed the layout that it was made for. Copies into concatenations go by
`npu_compiler.program.placement`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from cuda_compiler.elementwise.grouping import place_of
from cuda_compiler.op_classify import is_elementwise
from cuda_compiler.passes.concatenations import read_pieces
from npu_compiler.program.kernels import KernelCall
from npu_compiler.program.placement import is_copy, place_in_targets, takes_as_declared
from npu_compiler.program.plan import ExecutionPlan
from npu_compiler.program.views import View

# Kernels of this target that are declared nowhere, and read images of any strides.
_OWN = ("to_channels_last",)


def drop_copies(plan: ExecutionPlan) -> ExecutionPlan:
    """The plan without copies between arena buffers that leave the order of elements in memory unchanged.

    Readers of such a copy read its source instead.
    """
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


def write_in_place(plan: ExecutionPlan) -> ExecutionPlan:
    """The plan in which tensors are computed where a copy would move them, as `place_in_targets` says."""

    def takes(before: KernelCall, after: KernelCall) -> bool:
        """Whether the CUDA target's kernels can compute a call with other strides."""
        return before.kernel in _OWN or takes_as_declared(before, after)

    plan, apart = read_pieces(plan, takes)
    return place_in_targets(plan, takes, apart=apart | _read_in_parts(plan))


def _read_in_parts(plan: ExecutionPlan) -> set[str]:
    """The buffers that a single element-wise call reads, some of whose elements are copies.

    These copy a part of another buffer or an element-wise result. The call shall read or compute them where they are,
    as `inline_reads` lets it do where all elements are copies.
    """
    readers: dict[str, list[KernelCall]] = {}
    for call in plan.calls:
        for view in call.inputs:
            readers.setdefault(view.buffer, []).append(call)
    kept = {view.buffer for view in plan.output_views.values()}
    computed = {view.buffer for call in plan.calls if not is_elementwise(call) for view in call.outputs}
    return {
        call.outputs[0].buffer
        for call in plan.calls
        if is_copy(call)
        and call.outputs[0].buffer not in kept
        and (
            call.inputs[0].buffer not in computed
            or call.inputs[0].numel < prod(plan.buffers[call.inputs[0].buffer].alloc_shape)
        )
        and [is_elementwise(reader) for reader in readers.get(call.outputs[0].buffer, ())] == [True]
    }


def _moves_nothing(call: KernelCall, plan: ExecutionPlan) -> bool:
    if not is_copy(call):
        return False
    source, target = call.inputs[0], call.outputs[0]
    run = ((target.numel,), (1,))
    places = [place_of(view) for view in (source, target)]
    whole = prod(plan.buffers[target.buffer].alloc_shape) == target.numel
    return source.dtype == target.dtype and whole and all((place.sizes, place.strides) == run for place in places)


def _stays(calls: Sequence[KernelCall], index: int, movable: set[str]) -> bool:
    """Whether a copy's readers can read its source instead.

    The source must keep its value until their last read, and nothing but the copy may write the target.
    """
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
    """The call with each input view of the target's buffer replaced by the same view of the source's buffer."""
    moved = source.offset - target.offset
    return replace(
        call,
        inputs=tuple(
            replace(view, buffer=source.buffer, offset=view.offset + moved) if view.buffer == target.buffer else view
            for view in call.inputs
        ),
    )
