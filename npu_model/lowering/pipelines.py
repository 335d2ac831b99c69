"""Pipelines: consecutive layers on consecutive cores, which work on different pieces of the batch at the same time.

Given: y = a(x) on core 0; z = b(y) on core 1, for a batch of 4
Result: core 0: a(x[0]), a(x[1]), a(x[2]), a(x[3]); core 1, one step later: b(y[0]), b(y[1]), …

Each call is divided along the outermost dimension of its result. A network is computed so only if all its calls can be
divided and no piece reads what another one computes. The intermediate values of a piece are values by themselves.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import zip_longest

from npu_compiler.graph.dtypes import itemsize
from npu_compiler.program.kernels import KernelCall
from npu_compiler.program.plan import BufferAllocation, ExecutionPlan
from npu_compiler.program.views import View
from npu_model.lowering.cascades import StripedPlan
from npu_model.lowering.division import batch_of, pieces_of_batch

_MOST_CALLS = 2_000  # of all pieces
_MOST_PIECES = 4  # for each core


def pipelined(plan: ExecutionPlan, cores: Sequence[int], count: int) -> Iterator[StripedPlan]:
    """Ways to divide a plan's batch into pieces that pass through the cores one after the other.

    Args:
        cores: For each call of the plan, the core that computes it, in ascending order.
        count: Number of cores.
    """
    batch = math.gcd(*(batch_of(call) for call in plan.calls))
    most = min(_MOST_PIECES * count, _MOST_CALLS // max(1, len(plan.calls)))
    numbers = [pieces for pieces in range(2, min(batch, most) + 1) if batch % pieces == 0]
    for pieces in numbers[-2:]:
        own = _pieces(plan, pieces)
        if own is None:
            return
        calls, buffers = own
        yield StripedPlan.of_groups(plan, buffers, list(_side_by_side(calls, cores, count)), "micro-batches")


def _pieces(plan: ExecutionPlan, count: int) -> tuple[list[list[KernelCall]], dict[str, BufferAllocation]] | None:
    """The calls of each piece of the batch, and the buffers of all; None if a piece needs another one's values."""
    outputs = {view.buffer for view in plan.output_views.values()}
    between = {name for name, buffer in plan.buffers.items() if buffer.kind == "arena" and name not in outputs}
    buffers = {name: buffer for name, buffer in plan.buffers.items() if name not in between}
    pieces: list[list[KernelCall]] = [[] for _ in range(count)]
    for call in plan.calls:
        parts = pieces_of_batch(call, count)
        if parts is None or any(view.buffer in plan.donations for view in call.outputs):
            return None
        for number, part in enumerate(parts):
            own = [
                [_of_piece(view, plan.buffers[view.buffer], number, count) if view.buffer in between else view
                 for view in views]
                for views in (part.inputs, part.outputs)
            ]  # fmt: skip
            inputs, results = ([view for view in views if view is not None] for views in own)
            if len(inputs) + len(results) < len(part.inputs) + len(part.outputs):
                return None
            pieces[number].append(replace(part, inputs=tuple(inputs), outputs=tuple(results)))
    for name in between:
        buffer = plan.buffers[name]
        elements = buffer.size_bytes // itemsize(buffer.dtype) // count
        for number in range(count):
            piece = _name(name, number)
            buffers[piece] = BufferAllocation(piece, "arena", (elements,), buffer.dtype)
    return pieces, buffers


def _of_piece(view: View, buffer: BufferAllocation, number: int, count: int) -> View | None:
    """A view of a value's piece as a value by itself; None if the view leaves that piece."""
    elements, rest = divmod(buffer.size_bytes // itemsize(buffer.dtype), count)
    reach = [stride * (size - 1) for stride, size in zip(view.strides, view.shape, strict=True)]
    first = view.offset + sum(min(0, each) for each in reach) - number * elements
    last = view.offset + sum(max(0, each) for each in reach) - number * elements
    if rest or view.dtype != buffer.dtype or first < 0 or last >= elements:
        return None
    return replace(view, buffer=_name(view.buffer, number), offset=view.offset - number * elements)


def _name(buffer: str, number: int) -> str:
    return f"{buffer} of piece {number}"


def _side_by_side(
    pieces: Sequence[Sequence[KernelCall]], cores: Sequence[int], count: int
) -> Iterator[list[tuple[KernelCall, int | None]]]:
    """The calls that cores compute at the same time: core c is c pieces behind core 0."""
    for time in range(len(pieces) + count - 1):
        working = [
            [(call, core) for call, own in zip(pieces[time - core], cores, strict=True) if own == core]
            for core in range(count)
            if 0 <= time - core < len(pieces)
        ]
        for place in zip_longest(*working):
            yield [each for each in place if each is not None]


__all__ = ["pipelined"]
