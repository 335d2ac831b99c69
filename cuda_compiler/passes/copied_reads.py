"""Lets calls read what copies copy from, so that the copies disappear.

Given:   v = var(x as [2, 4, 8, 9]);  t = copy(v[:, :, None, None], repeated to [2, 4, 8, 9]);  y = x / t as [2, 32, 9]
Result:  v = var(x as [2, 4, 8, 9]);  y as [2, 4, 8, 9] = x as [2, 4, 8, 9] / v[:, :, None, None]

Such a copy is what remains of a reshape that no strides express: here of [2, 4, 8, …], whose elements repeat along one
of two dimensions, to [2, 32, …]. An element-wise call may have its dimensions divided instead, as long as all of its
operands are, and so may a reduction. Convolutions and pooling read images with gaps between their pixels.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from cuda_compiler.op_classify import classify, is_elementwise
from cuda_compiler.passes.packed_operands import copy
from cuda_compiler.passes.view_steps import Located, divided, through
from cuda_compiler.rules.channel_packs import is_packed
from npu_compiler.graph.dtypes import HALF_DTYPES
from npu_compiler.ops.reductions import REDUCTIONS
from npu_compiler.program.kernels import Family, KernelCall, readers_and_writers
from npu_compiler.program.placement import is_copy
from npu_compiler.program.plan import ExecutionPlan
from npu_compiler.program.views import View

_REDUCTION_KERNELS = frozenset(f"{name}_kernel" for name in REDUCTIONS)
_IMAGE_FAMILIES = (Family.CONV, Family.POOL)

Found = dict[View, Located]
"""View of a copy's target → the same elements of its source."""


def read_sources(plan: ExecutionPlan) -> ExecutionPlan:
    """The plan without copies whose readers can all read their source, at no more cost than the copy's target."""
    kept = {view.buffer for view in plan.output_views.values()}
    movable = {name for name, buffer in plan.buffers.items() if buffer.kind == "arena" and name not in kept}
    updated = set(plan.donations.values())  # inputs in whose memory outputs are computed
    calls: list[KernelCall | None] = list(plan.calls)
    readers, writers = readers_and_writers(plan.calls)
    for index, copying in enumerate(calls):
        if copying is None or not is_copy(copying) or not _may_go(copying, plan, movable):
            continue
        source, target = copying.inputs[0], copying.outputs[0]
        reading = sorted(readers.get(target.buffer, ()))
        if not reading or writers[target.buffer] != {index} or reading[0] < index:
            continue
        changes = any(index < at <= reading[-1] for at in writers.get(source.buffer, ()))
        if changes or source.buffer in updated:
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
        readers.setdefault(source.buffer, set()).update(moved)
    return replace(plan, calls=[call for call in calls if call is not None])


def _may_go(copying: KernelCall, plan: ExecutionPlan, movable: set[str]) -> bool:
    """Whether a copy fills a whole buffer of the arena, with values as exact as its source's."""
    source, target = copying.inputs[0], copying.outputs[0]
    exact = source.dtype == target.dtype or (source.dtype in HALF_DTYPES and target.dtype == "float32")
    whole = prod(plan.buffers[target.buffer].alloc_shape) == target.numel > 0
    return exact and whole and target.buffer in movable and target.buffer != source.buffer and target.is_dense


def _reading(call: KernelCall, target: View, source: View) -> KernelCall | None:
    """A call that reads a copy's source where the given one reads its target; None if it cannot, or is slower so."""
    if call.kernel == "to_channels_last" and call.inputs[0].shape == call.outputs[0].shape:
        call = copy(call.inputs[0], call.outputs[0], call.node)
    sought = {view: through(view, target, source) for view in call.inputs if view.buffer == target.buffer}
    found = {view: elements for view, elements in sought.items() if elements is not None}
    if len(found) < len(sought):
        return None
    if is_elementwise(call):
        return _elementwise_reading(call, found)
    if call.kernel in _REDUCTION_KERNELS:
        return _reduction_reading(call, found)
    if classify(call) in _IMAGE_FAMILIES and source.dtype == target.dtype:
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
    """A call over images that reads what is `found`, if its channels can be read as aligned vectors."""
    inputs = []
    for view in call.inputs:
        moved = found[view].undivided if view in found else view
        if moved is None or view in found and not (moved.rank == 4 and is_packed(moved)):
            return None
        inputs.append(moved)
    return replace(call, inputs=tuple(inputs))
