"""Assigns arena offsets: buffers whose lifetimes do not overlap share memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from npu_compiler.program.elementwise import elementwise_kernel
from npu_compiler.program.kernels import KernelCall
from npu_compiler.program.plan import BufferAllocation, ExecutionPlan
from npu_compiler.program.views import View


def inputs_of_elementwise(call: KernelCall) -> Sequence[View]:
    """The inputs of an element-wise call, and none of another call."""
    return () if elementwise_kernel(call) is None else call.inputs


def plan_memory(
    plan: ExecutionPlan, alignment: int, may_overwrite: Callable[[KernelCall], Sequence[View]] = inputs_of_elementwise
) -> ExecutionPlan:
    """Fill in lifetimes and offsets of every arena buffer, and the arena's size in bytes.

    Largest buffers are placed first, each at the lowest offset that is free throughout its lifetime (greedy by size;
    Pisarchyk and Lee, "Efficient Memory Management for Deep Neural Net Inference", 2020).

    Args:
        may_overwrite: Returns the inputs of a call whose elements it reads no later than it writes those of its output
            in the same places. The output may take such an input's memory if no later call reads that.
    """
    lifetimes = _lifetimes(plan.calls)
    buffers = {}
    for name, buffer in plan.buffers.items():
        first, last = lifetimes.get(name, (-1, -1))
        buffers[name] = replace(buffer, first_use=first, last_use=last)
    arena = sorted(
        (b for b in buffers.values() if b.kind == "arena"), key=lambda b: (-b.size_bytes, b.first_use, b.name)
    )
    reuse = _in_place_pairs(plan, buffers, may_overwrite)
    placed: list[BufferAllocation] = []
    for buffer in arena:
        offset = _lowest_free_offset(buffer, placed, reuse, alignment)
        placed.append(replace(buffer, offset=offset))
    buffers.update({buffer.name: buffer for buffer in placed})
    size = max((buffer.offset + buffer.size_bytes for buffer in placed), default=0)
    return replace(plan, buffers=buffers, arena_bytes=-(-size // alignment) * alignment)


def _lifetimes(calls: list[KernelCall]) -> dict[str, tuple[int, int]]:
    lifetimes: dict[str, tuple[int, int]] = {}
    for index, call in enumerate(calls):
        for view in (*call.inputs, *call.outputs):
            first, _ = lifetimes.get(view.buffer, (index, index))
            lifetimes[view.buffer] = (first, index)
    return lifetimes


def _in_place_pairs(
    plan: ExecutionPlan,
    buffers: dict[str, BufferAllocation],
    may_overwrite: Callable[[KernelCall], Sequence[View]],
) -> set[tuple[str, str]]:
    """Pairs (input that no later call reads and its call may overwrite, output) that line up byte for byte."""
    pairs = set()
    for index, call in enumerate(plan.calls):
        if call.source in plan.sources or len(call.outputs) != 1:
            continue
        out = call.outputs[0]
        result = buffers[out.buffer]
        if result.kind != "arena" or result.first_use != index:
            continue
        for view in may_overwrite(call):
            source = buffers[view.buffer]
            aligned = (view.strides, view.offset, view.dtype, view.shape) == (
                out.strides,
                out.offset,
                out.dtype,
                out.shape,
            )
            if source.kind == "arena" and source.last_use == index and aligned:
                others = sum(other.buffer == view.buffer for other in call.inputs)
                if others == 1 and source.size_bytes == result.size_bytes:
                    pairs.add((view.buffer, out.buffer))
    return pairs


def _overlap(a: BufferAllocation, b: BufferAllocation) -> bool:
    return a.first_use <= b.last_use and b.first_use <= a.last_use


def _lowest_free_offset(
    buffer: BufferAllocation, placed: list[BufferAllocation], reuse: set[tuple[str, str]], alignment: int
) -> int:
    """The offset of a buffer's in-place partner if the buffer may share it, else the lowest free offset.

    An offset is free if the buffer overlaps no placed buffer whose lifetime overlaps its own.
    """
    rivals = [other for other in placed if _overlap(buffer, other)]
    for partner in rivals:
        if {(partner.name, buffer.name), (buffer.name, partner.name)} & reuse:
            others = [other for other in rivals if other is not partner]
            if all(_disjoint(partner.offset, buffer.size_bytes, other) for other in others):
                return partner.offset
    offset = 0
    for other in sorted(rivals, key=lambda rival: rival.offset):
        if offset + buffer.size_bytes <= other.offset:
            break
        offset = max(offset, -(-(other.offset + other.size_bytes) // alignment) * alignment)
    return offset


def _disjoint(offset: int, size: int, other: BufferAllocation) -> bool:
    return offset + size <= other.offset or other.offset + other.size_bytes <= offset
