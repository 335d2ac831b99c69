"""Residency: the choice of values that stay in the scratchpad, within a run or from run to run.

An intermediate value stays from the call that produces it to the last one that reads it, a weight from run to run.
Resident values are placed from the scratchpad's end downwards; a call's pieces (tiles) use the bytes below the lowest
value that is live during the call. A value stays if the calls' estimates say that the program becomes faster: calls
that use it move fewer bytes, but all calls while it is live have less room.

Weights and intermediate values compete for the same bytes. Several fractions of the scratchpad are tried for weights:
those that save the most cycles per byte fill the fraction, intermediate values get the rest, and further weights take
what no call uses. The fraction with the best estimate is taken.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import TypeAlias

from npu_compiler.program.kernels import KernelCall
from npu_compiler.program.plan import ExecutionPlan
from npu_model.chip import Chip
from npu_model.lowering.mapper import Choices, Mapper

_SHARES = 8  # shares of the scratchpad that are tried for weights
_NONE: frozenset[int] = frozenset()  # no operands


@dataclass
class Residency:
    """Addresses of the values that stay in the scratchpad.

    Attributes:
        addresses: Buffer → address in the scratchpad.
        rooms: For each call, the bytes from address 0 on that its tiles may use.
        weights: The buffers that stay from run to run.
        cycles: The sum of all calls' estimates.
    """

    addresses: dict[str, int]
    rooms: list[int]
    weights: list[str] = field(default_factory=list)
    cycles: float = math.inf


@dataclass(eq=False)
class _Value:
    """A value that may stay: its bytes, its first and last call.

    Attributes:
        users: Number of a call that accesses it → its positions among the call's operands.
    """

    name: str
    size: int
    first: int
    last: int
    users: dict[int, frozenset[int]]


_Steps: TypeAlias = tuple[list[int], list[float]]
"""The amounts of room at which a call's estimate improves, and the estimates (`Choices.by_room`)."""


def choose_residency(plan: ExecutionPlan, chip: Chip, mapper: Mapper, passing: Collection[str] = ()) -> Residency:
    """Choose the values of a plan that stay in a chip's scratchpad.

    Args:
        passing: Intermediate values that stay whenever they fit, whatever the estimates say.
    """
    alignment = chip.sram.alignment
    size = chip.sram.size // alignment * alignment
    choices = [mapper.choices(call) for call in plan.calls]
    values, weights = _values(plan, alignment)
    if chip.dram is None and chip.l2 is None:
        return _all_stay(values, weights, choices, size)
    weights = _by_gain(weights, choices, size)
    best = nothing = _Stay(choices, size)
    tried: set[frozenset[str]] = set()
    for share in range(_SHARES):
        pinned = _first_that_fit(weights, size * share // _SHARES)
        if (names := frozenset(weight.name for weight in pinned)) in tried:
            continue
        tried.add(names)
        stay = nothing.copy()
        stay.pin(pinned)
        for value in values:
            if value.name in passing:
                stay.keep(value, -math.inf)
        for value in values:
            if value.name not in passing:
                stay.keep(value, 0.0)
        stay.pin(_first_that_fit([weight for weight in weights if weight.name not in names], stay.spare()))
        if stay.cycles < best.cycles or len(tried) == 1:
            best = stay
    return Residency(best.addresses, best.rooms, best.weights, best.cycles)


def _all_stay(values: Sequence[_Value], weights: Sequence[_Value], choices: Sequence[Choices], size: int) -> Residency:
    """Keep as many values and weights as fit, in the best of some orders; for a chip that has no other memory."""
    orders = [values, sorted(values, key=lambda v: -v.size), sorted(values, key=lambda v: (v.first - v.last, -v.size))]
    tried = []
    for order in orders:
        stay = _Stay(choices, size)
        stay.pin(_first_that_fit(sorted(weights, key=lambda w: -w.size), size))
        for value in order:
            stay.keep(value, -math.inf)
        tried.append(stay)
    best = min(tried, key=lambda stay: (-len(stay.addresses), stay.cycles))
    return Residency(best.addresses, best.rooms, best.weights, best.cycles)


class _Stay:
    """A growing set of resident values, with the room, the resident operands and the estimate of each call.

    `_steps` are those of each call's resident operands, `_live` the bytes (first, end) that are taken during each call
    by intermediate values, and by all weights that were kept together.
    """

    def __init__(self, choices: Sequence[Choices], size: int) -> None:
        self._choices, self._size = choices, size
        self.rooms = [size] * len(choices)
        self.addresses: dict[str, int] = {}
        self.weights: list[str] = []
        self._resident: list[frozenset[int]] = [_NONE] * len(choices)
        self._steps = [each.by_room(_NONE, _NONE) for each in choices]
        self._estimates = [_estimate(steps, size) for steps in self._steps]
        self._live: list[frozenset[tuple[int, int]]] = [frozenset()] * len(choices)

    def copy(self) -> _Stay:
        """A copy of the set, which can grow in another way."""
        other = copy(self)
        other.rooms, other.addresses, other.weights = list(self.rooms), dict(self.addresses), list(self.weights)
        other._resident, other._steps = list(self._resident), list(self._steps)
        other._estimates, other._live = list(self._estimates), list(self._live)
        return other

    @property
    def cycles(self) -> float:
        """The sum of all calls' estimates, in cycles."""
        return sum(self._estimates)

    def spare(self) -> int:
        """Bytes below all resident values without which no call's estimate gets worse."""
        least = (
            choices.least_room(resident, room)
            for choices, resident, room in zip(self._choices, self._resident, self.rooms, strict=True)
        )
        return min(self.rooms, default=0) - max(least, default=0)

    def pin(self, weights: Sequence[_Value]) -> None:
        """Keep weights from run to run, at addresses below all values that are resident so far."""
        if not weights:
            return
        top = end = min(self.rooms)
        for weight in weights:
            end -= weight.size
            self.addresses[weight.name] = end
            self.weights.append(weight.name)
            for index, own in weight.users.items():
                self._resident[index] |= own
                self._steps[index] = self._choices[index].by_room(self._resident[index], _NONE)
        self._take(end, top, 0, len(self.rooms) - 1)
        self.rooms = [min(room, end) for room in self.rooms]
        self._estimates = [_estimate(steps, room) for steps, room in zip(self._steps, self.rooms, strict=True)]

    def _take(self, address: int, end: int, first: int, last: int) -> None:
        """Mark bytes as taken from the first to the last of some calls."""
        for index in range(first, last + 1):
            self._live[index] |= {(address, end)}

    def keep(self, value: _Value, least: float) -> None:
        """Keep an intermediate value for its lifetime, if it fits and saves more than `least` estimated cycles."""
        address = self._highest_free(value)
        if address is None:
            return
        gain = 0.0
        changes = []
        for index in range(value.first, value.last + 1):
            own, room = value.users.get(index), self.rooms[index]
            if own is None and room <= address:
                continue
            room, resident, steps = min(room, address), self._resident[index], self._steps[index]
            if own is not None:
                resident |= own
                steps = self._choices[index].by_room(resident, _NONE)
            estimate = _estimate(steps, room)
            gain += self._estimates[index] - estimate
            changes.append((index, room, resident, steps, estimate))
        if not math.isfinite(gain) or gain <= least:
            return
        self.addresses[value.name] = address
        self._take(address, address + value.size, value.first, value.last)
        for index, room, resident, steps, estimate in changes:
            self.rooms[index], self._resident[index] = room, resident
            self._steps[index], self._estimates[index] = steps, estimate

    def _highest_free(self, value: _Value) -> int | None:
        """The highest address at which a value overlaps none that is live at the same time; None if it does not fit."""
        end, size = self._size, value.size
        taken = set[tuple[int, int]]().union(*self._live[value.first : value.last + 1])
        for first, behind in sorted(taken, reverse=True):
            if end - size >= behind:
                return end - size
            if first < end:
                end = first
        return end - size if end > size else None


def _estimate(steps: _Steps, room: int) -> float:
    """A call's estimate with `room` bytes; infinite if no tiling fits."""
    number = bisect_right(steps[0], room)
    return steps[1][number - 1] if number else math.inf


def positions(call: KernelCall, names: Collection[str]) -> frozenset[int]:
    """The positions, among a call's inputs and outputs, of operands that lie in these buffers."""
    return frozenset(i for i, view in enumerate((*call.inputs, *call.outputs)) if view.buffer in names)


def _values(plan: ExecutionPlan, alignment: int) -> tuple[list[_Value], list[_Value]]:
    """The intermediate values of a plan, ordered by accesses per byte in descending order, and its weights."""
    users: dict[str, dict[int, frozenset[int]]] = {}
    for index, call in enumerate(plan.calls):
        for name in dict.fromkeys(view.buffer for view in (*call.inputs, *call.outputs)):
            users.setdefault(name, {})[index] = positions(call, (name,))
    outputs = {view.buffer for view in plan.output_views.values()}
    values, weights = [], []
    for name, calls in users.items():
        buffer = plan.buffers[name]
        size = -(-max(1, buffer.size_bytes) // alignment) * alignment
        if buffer.kind == "arena" and name not in outputs:
            values.append(_Value(name, size, min(calls), max(calls), calls))
        elif buffer.is_constant and buffer.size_bytes:
            weights.append(_Value(name, size, 0, len(plan.calls) - 1, calls))
    return sorted(values, key=lambda v: (-len(v.users) / v.size, v.first)), weights


def _by_gain(weights: list[_Value], choices: Sequence[Choices], size: int) -> list[_Value]:
    """The weights that save DRAM traffic, ordered by cycles, then by DRAM time, saved per byte, the best first."""
    gains: dict[str, tuple[float, float]] = {}
    for weight in weights:
        cycles = traffic = 0.0
        for index, own in weight.users.items():
            cycles += choices[index].estimate(_NONE, size) - choices[index].estimate(own, size)
            first = choices[index].ranked((), size)[0]
            traffic += sum(first.flows.dram.get(position, 0.0) for position in own)
        gains[weight.name] = cycles / weight.size, traffic / weight.size
    return sorted((weight for weight in weights if gains[weight.name][1]), key=lambda w: gains[w.name], reverse=True)


def _first_that_fit(weights: Sequence[_Value], room: int) -> list[_Value]:
    """Weights that fit into `room` bytes together, taken in order.

    Those that do not fit beside earlier ones are skipped.
    """
    chosen = []
    for weight in weights:
        if weight.size <= room:
            room -= weight.size
            chosen.append(weight)
    return chosen


__all__ = ["Residency", "choose_residency", "positions"]
