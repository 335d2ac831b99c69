"""Lets calls read what copies copy from, so that the copies disappear.

Given:   v = var(x as [2, 4, 8, 9]);  t = copy(v[:, :, None, None], repeated to [2, 4, 8, 9]);  y = x / t as [2, 32, 9]
Result:  v = var(x as [2, 4, 8, 9]);  y as [2, 4, 8, 9] = x as [2, 4, 8, 9] / v[:, :, None, None]

Such a copy is what remains of a reshape that no strides express: here of [2, 4, 8, …], whose elements repeat along one
of two dimensions, to [2, 32, …]. An element-wise call may have its dimensions divided instead, as long as all of its
operands are, and so may a reduction. Convolutions and pooling read images with gaps between their pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from cuda_compiler.op_classify import classify, is_elementwise
from cuda_compiler.passes.packed_operands import copy
from cuda_compiler.rules.channel_packs import is_packed
from npu_compiler.graph.dtypes import HALF_DTYPES
from npu_compiler.ops.reductions import REDUCTIONS
from npu_compiler.program.kernels import Family, KernelCall
from npu_compiler.program.placement import is_copy
from npu_compiler.program.plan import ExecutionPlan
from npu_compiler.program.views import Shape, View, collapse

_REDUCTION_KERNELS = frozenset(f"{name}_kernel" for name in REDUCTIONS)
_IMAGE_FAMILIES = (Family.CONV, Family.POOL)

Steps = list[tuple[int, int]]
"""(size, stride) of each part of a divided dimension, outermost first."""


def read_sources(plan: ExecutionPlan) -> ExecutionPlan:
    """The plan without copies whose readers can all read their source, at no more cost than the copy's target."""
    kept = {view.buffer for view in plan.output_views.values()}
    movable = {name for name, buffer in plan.buffers.items() if buffer.kind == "arena" and name not in kept}
    calls: list[KernelCall | None] = list(plan.calls)
    readers: dict[str, list[int]] = {}
    writers: dict[str, list[int]] = {}
    for index, call in enumerate(plan.calls):
        for views, touching in ((call.inputs, readers), (call.outputs, writers)):
            for name in {view.buffer for view in views}:
                touching.setdefault(name, []).append(index)
    for index, copying in enumerate(calls):
        if copying is None or not is_copy(copying) or not _may_go(copying, plan, movable):
            continue
        source, target = copying.inputs[0], copying.outputs[0]
        reading = readers.get(target.buffer, [])
        if not reading or writers[target.buffer] != [index] or reading[0] < index:
            continue
        if any(index < at <= reading[-1] for at in writers.get(source.buffer, ())):
            continue
        there = {at: reader for at in reading if (reader := calls[at]) is not None}
        found = {at: _reading(call, target, source) for at, call in there.items()}
        moved = {at: call for at, call in found.items() if call is not None}
        if len(moved) == len(there):
            calls[index] = None
        else:  # copies of the copy need not wait for it
            moved = {at: call for at, call in moved.items() if is_copy(call)}
        for at, reader in moved.items():
            calls[at] = reader
            readers[target.buffer].remove(at)
        readers[source.buffer] = sorted({*readers.get(source.buffer, ()), *moved})
    return replace(plan, calls=[call for call in calls if call is not None])


def _may_go(copying: KernelCall, plan: ExecutionPlan, movable: set[str]) -> bool:
    """Whether a copy fills a whole buffer of the arena, with values as exact as its source's."""
    source, target = copying.inputs[0], copying.outputs[0]
    exact = source.dtype == target.dtype or (source.dtype in HALF_DTYPES and target.dtype == "float32")
    whole = prod(plan.buffers[target.buffer].alloc_shape) == target.numel
    return exact and whole and target.buffer in movable and target.buffer != source.buffer and _is_dense(target)


def _is_dense(view: View) -> bool:
    """Whether the elements of a view fill an interval of memory, in any order of its dimensions."""
    steps = sorted((stride, size) for size, stride in zip(view.shape, view.strides, strict=True) if size > 1)
    expected = 1
    for stride, size in steps:
        if stride != expected:
            return False
        expected *= size
    return view.numel > 0


def _reading(call: KernelCall, target: View, source: View) -> KernelCall | None:
    """A call that reads a copy's source where the given one reads its target; None if it cannot, or is slower so."""
    if call.kernel == "to_channels_last" and call.inputs[0].shape == call.outputs[0].shape:
        call = copy(call.inputs[0], call.outputs[0], call.node)
    through = {view: _through(view, target, source) for view in call.inputs if view.buffer == target.buffer}
    found = {view: steps for view, steps in through.items() if steps is not None}
    if len(found) < len(through):
        return None
    if is_elementwise(call):
        return _elementwise_reading(call, found)
    if call.kernel in _REDUCTION_KERNELS:
        return _reduction_reading(call, found)
    if classify(call) in _IMAGE_FAMILIES and source.dtype == target.dtype:
        return _image_reading(call, found)
    return None


def _through(view: View, target: View, source: View) -> tuple[list[Steps], int, View] | None:
    """The source's elements that a view of a copy's target has: the steps of each dimension, and the first element.

    Returns:
        None if a dimension cannot be divided so that each part of it steps through one dimension of the target.
    """
    dims = sorted((dim for dim in range(target.rank) if target.shape[dim] > 1), key=lambda dim: target.strides[dim])
    reach, rest, offset = {}, view.offset - target.offset, source.offset
    for dim in reversed(dims):
        reach[dim], rest = divmod(rest, target.strides[dim])
        offset += reach[dim] * source.strides[dim]
    result = []
    for size, stride in zip(view.shape, view.strides, strict=True):
        steps: Steps = []
        left, step = size, stride
        for dim in dims if stride else ():
            extent, inner = target.shape[dim], target.strides[dim]
            if left == 1 or step >= extent * inner:
                continue
            every, rest = divmod(step, inner)
            if rest or (every * (left - 1) >= extent and (extent % every or left % (extent // every))):
                return None
            count = left if every * (left - 1) < extent else extent // every
            steps.append((count, every * source.strides[dim]))
            reach[dim] += every * (count - 1)
            left, step = left // count, extent * inner
        if left > 1 and stride:
            return None
        result.append(_merged(steps[::-1] if stride else [(size, 0)]))
    if any(reach[dim] >= target.shape[dim] for dim in dims):
        return None
    return result, offset, source


def _merged(steps: Steps) -> Steps:
    sizes, (strides,) = collapse([size for size, _ in steps], [stride for _, stride in steps])
    return list(zip(sizes, strides, strict=True)) or [(1, 0)]


Found = dict[View, tuple[list[Steps], int, View]]


def _divided(views: Sequence[View], found: Found) -> list[View] | None:
    """Views of one shape with their dimensions divided so that strides express those that are `found` elsewhere."""
    rank = views[0].rank
    cuts = [{1} for _ in range(rank)]  # numbers of elements after which a dimension is divided
    for steps, _, _ in found.values():
        for dim in range(rank):
            inner = 1
            for size, _ in reversed(steps[dim]):
                inner *= size
                cuts[dim].add(inner)
    result = []
    for view in views:
        steps, offset, source = found.get(view) or (
            [[each] for each in zip(view.shape, view.strides, strict=True)],
            view.offset,
            view,
        )
        shape: list[int] = []
        strides: list[int] = []
        for dim in range(rank):
            bounds = sorted({*cuts[dim], view.shape[dim]})
            divided = _cut(steps[dim], bounds)
            if divided is None:
                return None
            shape += [size for size, _ in divided]
            strides += [stride for _, stride in divided]
        result.append(replace(source, shape=tuple(shape), strides=tuple(strides), offset=offset))
    return result


def _cut(steps: Steps, bounds: Sequence[int]) -> Steps | None:
    """The steps of a dimension, divided after given numbers of its elements; None if these do not divide each other."""
    divided: Steps = []
    for low, high in zip(bounds, bounds[1:], strict=False):
        if high % low:
            return None
        inner = 1
        for size, stride in reversed(steps):
            if low < inner * size:
                if low % inner:
                    return None
                divided.append((high // low, stride * (low // inner)))
                break
            inner *= size
    return divided[::-1] or [(1, 0)]


def _elementwise_reading(call: KernelCall, found: Found) -> KernelCall | None:
    """An element-wise call that reads what is `found`; None if its threads would read it less side by side."""
    views = [*call.inputs, *call.outputs]
    divided = _divided(views, found)
    if divided is None:
        return None
    out = divided[-1]
    inner = next((dim for dim in reversed(range(out.rank)) if out.shape[dim] > 1), None)
    if inner is not None and any(
        new.strides[inner] > 1 and old.strides[-1] <= 1 for old, new in zip(views, divided, strict=True)
    ):
        return None
    count = len(call.inputs)
    return replace(call, inputs=tuple(divided[:count]), outputs=tuple(divided[count:]))


def _reduction_reading(call: KernelCall, found: Found) -> KernelCall | None:
    """A reduction over what is `found`, whose kernel reads it in the order of memory."""
    (x,), (out,) = call.inputs, call.outputs
    kept = x.rank - call.params["reduce_dims"]
    result = replace(out, shape=(*out.shape, *x.shape[kept:]), strides=(*out.strides, *(0 for _ in x.shape[kept:])))
    divided = _divided((x, result), found)
    if divided is None:
        return None
    steps = found[x][0]
    kept = sum(len(each) for each in steps[:kept])
    x, result = divided
    out = replace(result, shape=result.shape[:kept], strides=result.strides[:kept])
    return replace(call, inputs=(x,), outputs=(out,), params={**call.params, "reduce_dims": x.rank - kept})


def _image_reading(call: KernelCall, found: Found) -> KernelCall | None:
    """A call over images that reads what is `found`, if its channels can be read as aligned vectors."""
    inputs = []
    for view in call.inputs:
        if view in found:
            steps, offset, source = found[view]
            if view.rank != 4 or any(len(each) > 1 for each in steps):
                return None
            shape: Shape = tuple(each[0][0] for each in steps)
            view = replace(source, shape=shape, strides=tuple(each[0][1] for each in steps), offset=offset)
            if not is_packed(view):
                return None
        inputs.append(view)
    return replace(call, inputs=tuple(inputs))
