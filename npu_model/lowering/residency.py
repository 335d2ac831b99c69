"""Residency: the values that stay in the scratchpad, within a run or from run to run.

An intermediate value stays from the call that makes it to the last one that reads it, a weight from run to run. Values
that stay are placed from the scratchpad's end downwards; a call's pieces have what is below the lowest of those that
live then. A value stays if the calls' estimates say that the program becomes faster: calls that touch it move fewer
bytes, and all calls that it outlives have less room. Weights that fit without taking room from any call stay too, those
first that are loaded the most often for their size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from npu_compiler.program.kernels import KernelCall
from npu_compiler.program.plan import ExecutionPlan
from npu_model.chip import Chip
from npu_model.lowering.mapper import Mapper


@dataclass
class Residency:
    """Addresses of the values that stay in the scratchpad.

    Attributes:
        addresses: Buffer → address in the scratchpad.
        rooms: Bytes from 0 on that the pieces of each call may use.
        weights: The buffers that stay from run to run.
    """

    addresses: dict[str, int]
    rooms: list[int]
    weights: list[str] = field(default_factory=list)


@dataclass
class _Live:
    name: str
    size: int
    first: int
    last: int
    users: list[int]


def choose_residency(plan: ExecutionPlan, chip: Chip, mapper: Mapper) -> Residency:
    """The values of a plan that stay in the scratchpad of a chip."""
    calls = plan.calls
    alignment = chip.sram.alignment
    size = chip.sram.size // alignment * alignment
    found = Residency({}, [size] * len(calls))
    resident: list[frozenset[str]] = [frozenset()] * len(calls)
    estimates = [mapper.estimate(call, (), size) for call in calls]
    outputs = {view.buffer for view in plan.output_views.values()}
    placed: list[tuple[_Live, int]] = []
    for value in sorted(_values(plan), key=lambda v: (-len(v.users) / v.size, v.first)):
        if value.name in outputs:
            continue
        address = _highest_free(value, placed, size, alignment)
        if address is None:
            continue
        span = range(value.first, value.last + 1)
        rooms = {index: min(found.rooms[index], address) for index in span}
        after = {}
        for index in span:
            names = resident[index] | {value.name} if index in value.users else resident[index]
            if names == resident[index] and rooms[index] == found.rooms[index]:
                continue
            after[index] = mapper.estimate(calls[index], positions(calls[index], names), rooms[index])
        gain = sum(estimates[index] - new for index, new in after.items())
        if not math.isfinite(gain) or gain <= 0:
            continue
        found.addresses[value.name] = address
        placed.append((value, address))
        for index in span:
            found.rooms[index] = rooms[index]
            if index in value.users:
                resident[index] |= {value.name}
        for index, new in after.items():
            estimates[index] = new
    _keep_weights(plan, found, resident, mapper, alignment)
    return found


def positions(call: KernelCall, names: Sequence[str] | frozenset[str]) -> frozenset[int]:
    """The positions of a call's operands that lie in these buffers."""
    return frozenset(i for i, view in enumerate((*call.inputs, *call.outputs)) if view.buffer in names)


def _values(plan: ExecutionPlan) -> list[_Live]:
    """The intermediate values of a plan with their lifetimes."""
    users: dict[str, list[int]] = {}
    for index, call in enumerate(plan.calls):
        for name in {view.buffer for view in (*call.inputs, *call.outputs)}:
            users.setdefault(name, []).append(index)
    return [
        _Live(name, max(1, plan.buffers[name].size_bytes), calls[0], calls[-1], calls)
        for name, calls in users.items()
        if plan.buffers[name].kind == "arena"
    ]


def _highest_free(value: _Live, placed: Sequence[tuple[_Live, int]], size: int, alignment: int) -> int | None:
    """The highest address where a value overlaps none that lives at the same time."""
    others = sorted(
        ((address, address + other.size) for other, address in placed
         if other.first <= value.last and value.first <= other.last),
        reverse=True,
    )  # fmt: skip
    end = size
    for first, behind in others:
        address = (end - value.size) // alignment * alignment
        if address >= behind:
            return address
        end = min(end, first)
    address = (end - value.size) // alignment * alignment
    return address if address > 0 else None


def _keep_weights(
    plan: ExecutionPlan, found: Residency, resident: list[frozenset[str]], mapper: Mapper, alignment: int
) -> None:
    """Keep weights in the scratchpad where that takes no room that a call uses."""
    if not plan.calls:
        return
    spare = found.rooms[:]
    readers: dict[str, list[int]] = {}
    traffic: dict[str, float] = {}
    for index, call in enumerate(plan.calls):
        best = next(iter(mapper.ranked(call, positions(call, resident[index]), found.rooms[index])), None)
        if best is None:
            return
        needed = best.needs(positions(call, resident[index]))
        spare[index] -= needed if 2 * needed > found.rooms[index] else 2 * needed
        for position, view in enumerate(call.inputs):
            if plan.buffers[view.buffer].is_constant:
                readers.setdefault(view.buffer, []).append(index)
                traffic[view.buffer] = traffic.get(view.buffer, 0.0) + best.dram.get(position, 0.0)
    free = min(spare)
    end = min(found.rooms)
    order = sorted(readers, key=lambda name: -traffic[name] / max(1, plan.buffers[name].size_bytes))
    for name in order:
        size = -(-plan.buffers[name].size_bytes // alignment) * alignment
        if not size or size > free or not traffic[name]:
            continue
        end -= size
        free -= size
        found.addresses[name] = end
        found.weights.append(name)
    found.rooms = [min(room, end) for room in found.rooms]
