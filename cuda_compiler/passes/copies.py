"""Drops copies that move nothing, and writes results directly to where a copy would move them.

Given:   y = conv2d(x), in memory as [1, 8, 8, 16];  t = copy(y as [64, 16]);  z = layernorm(t)
Result:  y = conv2d(x);  z = layernorm(y as [64, 16])

Given:   y = conv2d(x);  t[:, :16] = copy(y)
Result:  t[:, :16] = conv2d(x)

The first kind remains where `channels_last` has changed the layout that a copy was made for, the second kind comes from
concatenations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from cuda_compiler.elementwise.grouping import place_of
from cuda_compiler.rules.channel_packs import PACK
from npu_compiler.program.elementwise import elementwise_kernel
from npu_compiler.program.kernels import KERNELS, Family, KernelCall
from npu_compiler.program.plan import ExecutionPlan
from npu_compiler.program.views import View, collapse

# Kernels whose results may lie anywhere; they move so many elements at a time where addresses allow it.
_ANYWHERE = [name for name, decl in KERNELS.items() if decl.family in (Family.CONV, Family.POOL)]


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
    """The plan in which a result whose only reader is a copy is written directly to the copy's target."""
    kept = {view.buffer for view in plan.output_views.values()}
    calls = list(plan.calls)
    for copy in plan.calls:
        if not _is_copy(copy) or plan.buffers[copy.inputs[0].buffer].kind != "arena":
            continue
        source, target = copy.inputs[0], copy.outputs[0]
        touching = [at for at, call in enumerate(calls) if source.buffer in _touched(call)]
        if len(touching) != 2 or source.buffer in kept or plan.buffers[target.buffer].donor is not None:
            continue
        first, last = touching
        written = _elsewhere(calls[first], source, target) if calls[last] is copy else None
        if written is None or not all(_spares(call, written.outputs[0]) for call in calls[first:last]):
            continue
        calls[first] = written
        del calls[last]
    return replace(plan, calls=calls)


def _touched(call: KernelCall) -> set[str]:
    return {view.buffer for view in (*call.inputs, *call.outputs)}


def _spares(call: KernelCall, target: View) -> bool:
    """Whether a call leaves the target's elements alone: it does not read their buffer, and writes none of them."""
    if any(view.buffer == target.buffer for view in call.inputs):
        return False
    return all(view.buffer != target.buffer or _are_apart(view, target) for view in call.outputs)


def _are_apart(first: View, second: View) -> bool:
    """Whether two views are provably disjoint, as different columns of the same rows."""
    steps = [
        stride
        for view in (first, second)
        for size, stride in zip(view.shape, view.strides, strict=True)
        if size > 1 and stride > 1
    ]
    if not steps:
        return False
    row = min(steps)
    begins = [view.offset % row for view in (first, second)]
    widths = [
        max((size for size, stride in zip(view.shape, view.strides, strict=True) if stride == 1), default=1)
        for view in (first, second)
    ]
    inside = all(begin + width <= row for begin, width in zip(begins, widths, strict=True))
    apart = begins[0] + widths[0] <= begins[1] or begins[1] + widths[1] <= begins[0]
    return all(step % row == 0 for step in steps) and inside and apart


def _elsewhere(call: KernelCall, source: View, target: View) -> KernelCall | None:
    """The call with its result written to `target` instead of `source`, which covers all of the result.

    None if the call's kernel cannot write there: its strides do not map to the target's, or break its vector accesses.
    """
    if len(call.outputs) != 1 or source.dtype != target.dtype or call.kernel not in _ANYWHERE:
        return None
    (copied,) = call.outputs
    if copied.buffer != source.buffer or copied.numel != source.numel or copied.dtype != source.dtype:
        return None
    sizes, (steps, target_steps) = collapse(source.shape, source.strides, target.strides)
    strides, offset = [], target.offset
    if copied.offset != source.offset:
        return None
    for size, stride in zip(copied.shape, copied.strides, strict=True):
        covering = [
            stride // step * target_step
            for all_of_it, step, target_step in zip(sizes, steps, target_steps, strict=True)
            if step and stride % step == 0 and step <= stride and stride * size <= step * all_of_it
        ]
        if size > 1 and len(covering) != 1:
            return None
        strides.append(covering[0] if size > 1 else stride)
    as_wide = all((stride == 1) == (own == 1) for stride, own in zip(strides, copied.strides, strict=True))
    if not as_wide or offset % PACK or any(stride % PACK for stride in strides if stride != 1):
        return None
    moved = View(target.buffer, copied.shape, tuple(strides), offset, copied.dtype)
    (operand,) = KERNELS[call.kernel].outputs
    written = replace(call, outputs=(moved,))
    return None if operand.problem(moved, {}) else written


def _is_copy(call: KernelCall) -> bool:
    decl = elementwise_kernel(call)
    return decl is not None and decl.op.name == "copy" and list(call.params["scalars"]) == [None]


def _moves_nothing(call: KernelCall, plan: ExecutionPlan) -> bool:
    if not _is_copy(call):
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
