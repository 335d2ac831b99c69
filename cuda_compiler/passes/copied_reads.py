"""Lets calls read what copies copy from, so that the copies disappear.

Given:   v = var(x as [2, 4, 8, 9]);  t = copy(v[:, :, None, None], repeated to [2, 4, 8, 9]);  y = x / t as [2, 32, 9]
Result:  v = var(x as [2, 4, 8, 9]);  y as [2, 4, 8, 9] = x as [2, 4, 8, 9] / v[:, :, None, None]

Such a copy is what remains of a reshape that no strides express: here of [2, 4, 8, …], whose elements repeat along one
of two dimensions, to [2, 32, …]. An element-wise call may have its dimensions divided instead, as long as all of its
operands are, and so may a reduction. Convolutions and pooling read images with gaps between their pixels, and a batched
product becomes one of more and smaller matrices.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from math import prod

from cuda_compiler.op_classify import classify, is_elementwise
from cuda_compiler.passes.packed_operands import copy
from cuda_compiler.passes.source_readings import (
    ATTENTION,
    PRODUCT,
    Found,
    attention_reading,
    elementwise_reading,
    image_reading,
    product_reading,
    reduction_reading,
)
from cuda_compiler.passes.view_steps import through
from npu_compiler.graph.dtypes import HALF_DTYPES
from npu_compiler.ops.reductions import REDUCTIONS
from npu_compiler.program.kernels import Family, KernelCall, readers_and_writers
from npu_compiler.program.placement import is_copy
from npu_compiler.program.plan import BufferAllocation, ExecutionPlan

_REDUCTION_KERNELS = frozenset(f"{name}_kernel" for name in REDUCTIONS)
_IMAGE_FAMILIES = (Family.CONV, Family.POOL)


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
        if plan.buffers[name].kind != "arena" or name in kept or not _fill(copies.values(), plan.buffers[name]):
            continue
        sources = {at: copying.inputs[0].buffer for at, copying in copies.items()}
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


def _fill(copies: Collection[KernelCall], buffer: BufferAllocation) -> bool:
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
        return elementwise_reading(call, found)
    if call.kernel in _REDUCTION_KERNELS:
        return reduction_reading(call, found)
    if any(view.dtype != part.view.dtype for view, part in found.items()):
        return None
    if call.kernel == PRODUCT:
        return product_reading(call, found)
    if call.kernel == ATTENTION:
        return attention_reading(call, found)
    return image_reading(call, found) if classify(call) in _IMAGE_FAMILIES else None
