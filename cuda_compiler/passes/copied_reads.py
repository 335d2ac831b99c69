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
from cuda_compiler.passes.view_steps import Located, divided, through
from cuda_compiler.rules.channel_packs import PACK, is_packed
from npu_compiler.graph.dtypes import HALF_DTYPES
from npu_compiler.ops.reductions import REDUCTIONS
from npu_compiler.program.kernels import Family, KernelCall, readers_and_writers
from npu_compiler.program.placement import is_copy
from npu_compiler.program.plan import BufferAllocation, ExecutionPlan
from npu_compiler.program.views import View

_REDUCTION_KERNELS = frozenset(f"{name}_kernel" for name in REDUCTIONS)
_IMAGE_FAMILIES = (Family.CONV, Family.POOL)

Found = dict[View, Located]
"""View of a copy's target → the same elements of its source."""


def read_sources(plan: ExecutionPlan) -> ExecutionPlan:
    """The plan without copies whose readers can all read their sources, at no more cost than the copies' target."""
    kept = {view.buffer for view in plan.output_views.values()}
    updated = set(plan.donations.values())  # inputs in whose memory outputs are computed
    calls: list[KernelCall | None] = list(plan.calls)
    readers, writers = readers_and_writers(plan.calls)
    for name, places in sorted(writers.items(), key=lambda written: min(written[1])):
        copies = {at: call for at in places if (call := calls[at]) is not None and is_copy(call)}
        reading = sorted(readers.get(name, ()))
        if len(copies) < len(places) or not reading or reading[0] < max(places):
            continue
        if plan.buffers[name].kind != "arena" or name in kept or not _fill(list(copies.values()), plan.buffers[name]):
            continue
        sources = {at: call.inputs[0].buffer for at, call in copies.items()}
        changes = any(first < at <= reading[-1] for first, source in sources.items() for at in writers.get(source, ()))
        if changes or not updated.isdisjoint(sources.values()):
            continue
        there = {at: reader for at in reading if (reader := calls[at]) is not None}
        found = {at: _reading(call, list(copies.values())) for at, call in there.items()}
        moved = {at: call for at, call in found.items() if call is not None}
        if len(moved) == len(there):
            for at in copies:
                calls[at] = None
        else:  # copies of the copies need not wait for them
            moved = {at: call for at, call in moved.items() if is_copy(call)}
        for at, reader in moved.items():
            calls[at] = reader
            readers[name].remove(at)
            for view in reader.inputs:
                readers.setdefault(view.buffer, set()).add(at)
    return replace(plan, calls=[call for call in calls if call is not None])


def _fill(copies: Sequence[KernelCall], buffer: BufferAllocation) -> bool:
    """Whether copies fill a buffer, with values as exact as their sources'."""
    for copying in copies:
        source, target = copying.inputs[0], copying.outputs[0]
        exact = source.dtype == target.dtype or (source.dtype in HALF_DTYPES and target.dtype == "float32")
        repeats = any(size > 1 and stride == 0 for size, stride in zip(target.shape, target.strides, strict=True))
        if not exact or repeats or target.buffer == source.buffer:
            return False
    return sum(copying.outputs[0].numel for copying in copies) == prod(buffer.alloc_shape) > 0


def _reading(call: KernelCall, copies: Sequence[KernelCall]) -> KernelCall | None:
    """A call that reads the copies' sources where the given one reads their target; None if it cannot, or is slower so.

    Each of its views of the target has to have elements of one copy only.
    """
    if call.kernel == "to_channels_last" and call.inputs[0].shape == call.outputs[0].shape:
        call = copy(call.inputs[0], call.outputs[0], call.node)
    name = copies[0].outputs[0].buffer
    found: Found = {}
    for view in call.inputs:
        if view.buffer == name:
            parts = (through(view, copying.outputs[0], copying.inputs[0]) for copying in copies)
            elements = next((part for part in parts if part is not None), None)
            if elements is None:
                return None
            found[view] = elements
    if is_elementwise(call):
        return _elementwise_reading(call, found)
    if call.kernel in _REDUCTION_KERNELS:
        return _reduction_reading(call, found)
    if classify(call) in _IMAGE_FAMILIES and all(view.dtype == part.view.dtype for view, part in found.items()):
        return _image_reading(call, found)
    return None


def _elementwise_reading(call: KernelCall, found: Found) -> KernelCall | None:
    """An element-wise call that reads what is `found`; None if its threads would read it less side by side."""
    views = [*call.inputs, *call.outputs]
    moved = divided([found.get(view) or Located.of(view) for view in views])
    if moved is None:
        return None
    out = moved[-1]
    inner = next((dim for dim in reversed(range(out.rank)) if out.shape[dim] > 1), None)
    if inner is not None and any(
        new.strides[inner] > 1 and old.strides[-1] <= 1 for old, new in zip(views, moved, strict=True)
    ):
        return None
    count = len(call.inputs)
    return replace(call, inputs=tuple(moved[:count]), outputs=tuple(moved[count:]))


def _reduction_reading(call: KernelCall, found: Found) -> KernelCall | None:
    """A reduction over what is `found`, whose kernel reads it in the order of memory."""
    (x,), (out,) = call.inputs, call.outputs
    kept = x.rank - call.params["reduce_dims"]
    result = replace(out, shape=(*out.shape, *x.shape[kept:]), strides=(*out.strides, *(0 for _ in x.shape[kept:])))
    moved = divided((found[x], Located.of(result)))
    if moved is None:
        return None
    kept = sum(len(steps) for steps in found[x].steps[:kept])
    x, result = moved
    out = replace(result, shape=result.shape[:kept], strides=result.strides[:kept])
    return replace(call, inputs=(x,), outputs=(out,), params={**call.params, "reduce_dims": x.rank - kept})


def _image_reading(call: KernelCall, found: Found) -> KernelCall | None:
    """A call over images that reads what is `found`, if that can be read in vectors of as many channels as the copy."""
    inputs = []
    for view in call.inputs:
        moved = found[view].undivided if view in found else view
        if moved is None or view in found and not (moved.rank == 4 and _pack(moved) >= max(_pack(view), 1)):
            return None
        inputs.append(moved)
    return replace(call, inputs=tuple(inputs))


def _pack(image: View) -> int:
    """The largest number of channels that can be read as an aligned vector; 0 if channels do not lie side by side."""
    return next((pack for pack in (PACK, 4, 2, 1) if is_packed(image, pack)), 0)
