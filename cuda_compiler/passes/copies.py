"""Drops copies that move nothing, and writes results directly to where a copy would move them.

Given:   y = conv2d(x), in memory as [1, 8, 8, 16];  t = copy(y as [64, 16]);  z = layernorm(t)
Result:  y = conv2d(x);  z = layernorm(y as [64, 16])

Given:   y = conv2d(x);  t[:, :16] = copy(y)
Result:  t[:, :16] = conv2d(x)

Given:   y[::2] = a + b;  y[1::2] = a - b;  t[:16] = copy(y)
Result:  t[:16:2] = a + b;  t[1:16:2] = a - b

The first kind remains where `channels_last` has changed the layout that a copy was made for, the others come from
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
        if not is_copy(copy) or plan.buffers[copy.inputs[0].buffer].kind != "arena":
            continue
        source, target = copy.inputs[0], copy.outputs[0]
        touching = [at for at, call in enumerate(calls) if source.buffer in _touched(call)]
        if len(touching) < 2 or source.buffer in kept or plan.buffers[target.buffer].donor is not None:
            continue
        *writers, last = touching
        if calls[last] is not copy:
            continue
        move = _elsewhere if len(writers) == 1 else _part_elsewhere
        moved = {at: move(calls[at], source, target) for at in writers}
        spared = all(
            written is not None and all(_spares(call, written.outputs[0]) for call in calls[at:last])
            for at, written in moved.items()
        )
        if spared:
            calls = [moved.get(at) or call for at, call in enumerate(calls) if at != last]
    return replace(plan, calls=calls)


def _touched(call: KernelCall) -> set[str]:
    return {view.buffer for view in (*call.inputs, *call.outputs)}


def _spares(call: KernelCall, target: View) -> bool:
    """Whether a call leaves the target's elements alone: it does not read their buffer, and writes none of them."""
    if any(view.buffer == target.buffer for view in call.inputs):
        return False
    return all(view.buffer != target.buffer or _are_apart(view, target) for view in call.outputs)


def _are_apart(first: View, second: View) -> bool:
    """Whether two views are provably disjoint: different columns of the same rows, for some length of a row."""
    steps = {
        stride for view in (first, second) for size, stride in zip(view.shape, view.strides, strict=True) if size > 1
    }
    for row in steps - {0, 1}:
        (begin, end), (other_begin, other_end) = (_columns(view, row) for view in (first, second))
        if max(end, other_end) <= row and (end <= other_begin or other_end <= begin):
            return True
    return False


def _columns(view: View, row: int) -> tuple[int, int]:
    """The range of columns that a view covers in rows of `row` elements; it ends beyond them if a row is left."""
    begin = end = view.offset % row
    for size, stride in zip(view.shape, view.strides, strict=True):
        if size > 1 and stride % row:
            end += (size - 1) * stride
    return begin, end + 1


def _elsewhere(call: KernelCall, source: View, target: View) -> KernelCall | None:
    """The call with its result written to `target` instead of `source`, which covers all of the result.

    None if the call's kernel cannot write there: its strides do not map to the target's, or break its vector accesses.
    """
    if len(call.outputs) != 1 or source.dtype != target.dtype or call.kernel not in _ANYWHERE:
        return None
    (copied,) = call.outputs
    if copied.buffer != source.buffer or copied.numel != source.numel or copied.offset != source.offset:
        return None
    moved = moved_view(copied, source, target)
    if moved is None:
        return None
    as_wide = all((mine == 1) == (own == 1) for mine, own in zip(moved.strides, copied.strides, strict=True))
    if not as_wide or moved.offset % PACK or any(stride % PACK for stride in moved.strides if stride != 1):
        return None
    (operand,) = KERNELS[call.kernel].outputs
    written = replace(call, outputs=(moved,))
    return None if operand.problem(moved, {}) else written


def _part_elsewhere(call: KernelCall, source: View, target: View) -> KernelCall | None:
    """An element-wise call with its result, a part of `source`, written to that part of `target` instead.

    None if it is another call, or reads elements of `source`.
    """
    if elementwise_kernel(call) is None or any(view.buffer == source.buffer for view in call.inputs):
        return None
    moved = moved_view(call.outputs[0], source, target)
    return None if moved is None else replace(call, outputs=(moved,))


def moved_view(part: View, source: View, target: View) -> View | None:
    """The view of `target` that corresponds to a view of elements of `source`; None if no strides express it."""
    if part.dtype != source.dtype or source.dtype != target.dtype:
        return None
    sizes, (steps, target_steps) = collapse(source.shape, source.strides, target.strides)
    order = sorted(range(len(sizes)), key=lambda dim: steps[dim], reverse=True)
    rest, offset, reach = part.offset - source.offset, target.offset, [0] * len(sizes)
    for dim in order:
        if steps[dim] == 0 or rest < 0:
            return None
        reach[dim], rest = divmod(rest, steps[dim])
        offset += reach[dim] * target_steps[dim]
    strides = []
    for size, stride in zip(part.shape, part.strides, strict=True):
        along = [dim for dim in order if steps[dim] <= stride and stride % steps[dim] == 0][:1]
        if size > 1 and not along:
            return None
        for dim in along:
            reach[dim] += (size - 1) * (stride // steps[dim])
        strides.append(stride // steps[along[0]] * target_steps[along[0]] if along else stride)
    if rest or any(last >= size for last, size in zip(reach, sizes, strict=True)):
        return None
    return View(target.buffer, part.shape, tuple(strides), offset, part.dtype)


def is_copy(call: KernelCall) -> bool:
    decl = elementwise_kernel(call)
    return decl is not None and decl.op.name == "copy" and list(call.params["scalars"]) == [None]


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
