"""Computes few elements again in each element-wise call that reads them often, instead of in a kernel of their own.

Given:   v = var(x);  s = sqrt(v + 1e-5), of [2, 4];  y = x / s[:, :, None], of [2, 4, 900]
Result:  v = var(x);  y = x / sqrt(v[:, :, None] + 1e-5)

The calls become calls over all elements, which grouping makes one kernel with their reader: what they write does not
leave the registers.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from cuda_compiler.op_classify import is_elementwise
from cuda_compiler.passes.view_steps import Located, divided, through
from npu_compiler.program.kernels import KernelCall, readers_and_writers
from npu_compiler.program.plan import BufferAllocation, ExecutionPlan
from npu_compiler.program.views import View, contiguous_strides

_MOST = 1 << 20  # elements; more are worth a kernel
_OFTEN = 8  # times that each element is read
_MOST_READERS = 2
_MOST_CALLS = 8  # computed again for one reader
_REACH = 48  # calls between few elements and their reader


def compute_where_read(plan: ExecutionPlan) -> ExecutionPlan:
    """The plan without element-wise calls whose few results element-wise calls of many elements compute again."""
    kept = {view.buffer for view in plan.output_views.values()}
    updated = set(plan.donations.values())  # inputs in whose memory outputs are computed
    buffers = dict(plan.buffers)
    places: list[list[KernelCall]] = [[call] for call in plan.calls]
    readers, writers = readers_and_writers(plan.calls)
    for index in reversed(range(len(places))):
        call = places[index][-1]
        if len(places[index]) > 1 or not _is_of_few(call, buffers, kept) or len(writers[call.outputs[0].buffer]) > 1:
            continue
        reading = sorted(readers.get(call.outputs[0].buffer, ()))
        inputs = {view.buffer for view in call.inputs}
        if not 0 < len(reading) <= _MOST_READERS or not index < reading[0] <= reading[-1] <= index + _REACH:
            continue
        changes = any(index < at <= reading[-1] for name in inputs for at in writers.get(name, ()))
        if changes or not inputs.isdisjoint(updated):
            continue
        again = {at: _again(call, places[at], buffers) for at in reading}
        found = {at: calls for at, calls in again.items() if calls is not None}
        if len(found) < len(again):
            continue
        for at, calls in found.items():
            places[at] = calls
            for name in inputs:
                readers[name].add(at)
        for name in inputs:
            readers[name].discard(index)
        places[index] = []
    return replace(plan, calls=[call for calls in places for call in calls], buffers=buffers)


def _is_of_few(call: KernelCall, buffers: dict[str, BufferAllocation], kept: set[str]) -> bool:
    """Whether a call is element-wise and computes all of a small buffer of the arena."""
    if not is_elementwise(call) or len(call.outputs) != 1:
        return False
    (out,) = call.outputs
    buffer = buffers[out.buffer]
    whole = prod(buffer.alloc_shape) == out.numel and out.is_dense
    return whole and buffer.kind == "arena" and out.buffer not in kept and 0 < out.numel <= _MOST


def _again(call: KernelCall, calls: list[KernelCall], buffers: dict[str, BufferAllocation]) -> list[KernelCall] | None:
    """The calls, with the result of `call` computed again before each that reads it; None if one cannot.

    Args:
        calls: Calls of one element-wise kernel.
        buffers: All buffers, to which those of the results are added.
    """
    (out,) = call.outputs
    done: list[KernelCall] = []
    for reader in calls:
        views = {view for view in reader.inputs if view.buffer == out.buffer}
        if not views:
            done.append(reader)
            continue
        if not is_elementwise(reader) or reader.outputs[0].numel < _OFTEN * out.numel or len(views) > 1:
            return None
        (read,) = views
        own = [Located.of(view) for view in (*reader.inputs, *reader.outputs) if view != read]
        sought = [through(read, out, view) for view in call.inputs]
        elements = [each for each in sought if each is not None]
        moved = divided([*elements, *own]) if len(elements) == len(sought) else None
        if moved is None:
            return None
        shape = moved[0].shape
        name = f"{out.buffer}.again{len(buffers)}"
        result = View(name, shape, contiguous_strides(shape), 0, out.dtype)
        buffers[name] = BufferAllocation(name, "arena", shape, out.dtype)
        rest = iter(moved[len(elements) :])
        inputs = tuple(result if view == read else next(rest) for view in reader.inputs)
        done.append(replace(call, inputs=tuple(moved[: len(elements)]), outputs=(result,)))
        done.append(replace(reader, inputs=inputs, outputs=tuple(rest)))
    return done if len(done) <= _MOST_CALLS else None
