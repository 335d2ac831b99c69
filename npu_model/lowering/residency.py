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
from bisect import insort
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from npu_compiler.program.kernels import KernelCall
from npu_compiler.program.plan import ExecutionPlan
from npu_model.chip import Chip
from npu_model.lowering.mapper import Choices, Mapper

_SHARES = 8  # shares of the scratchpad that are tried for weights


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


@dataclass
class _Value:
    """A value that may stay: its bytes, its first and last call, and the calls that access it."""

    name: str
    size: int
    first: int
    last: int
    users: list[int]


def choose_residency(plan: ExecutionPlan, chip: Chip, mapper: Mapper, passing: Collection[str] = ()) -> Residency:
    """Choose the values of a plan that stay in a chip's scratchpad.

    Args:
        passing: Intermediate values that stay whenever they fit, whatever the estimates say.
    """
    alignment = chip.sram.alignment
    size = chip.sram.size // alignment * alignment
    calls = [(call, mapper.choices(call)) for call in plan.calls]
    values, weights = _values(plan, alignment)
    if chip.dram is None and chip.l2 is None:
        return _all_stay(values, weights, calls, size)
    weights = _by_gain(weights, calls, size)
    best = _Stay(calls, size)
    tried: set[frozenset[str]] = set()
    for share in range(_SHARES):
        pinned = _first_that_fit(weights, size * share // _SHARES)
        if (names := frozenset(weight.name for weight in pinned)) in tried:
            continue
        tried.add(names)
        stay = _Stay(calls, size)
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


def _all_stay(
    values: Sequence[_Value], weights: Sequence[_Value], calls: Sequence[tuple[KernelCall, Choices]], size: int
) -> Residency:
    """Keep as many values and weights as fit, in the best of some orders; for a chip that has no other memory."""
    orders = [values, sorted(values, key=lambda v: -v.size), sorted(values, key=lambda v: (v.first - v.last, -v.size))]
    tried = []
    for order in orders:
        stay = _Stay(calls, size)
        stay.pin(_first_that_fit(sorted(weights, key=lambda w: -w.size), size))
        for value in order:
            stay.keep(value, -math.inf)
        tried.append(stay)
    best = min(tried, key=lambda stay: (-len(stay.addresses), stay.cycles))
    return Residency(best.addresses, best.rooms, best.weights, best.cycles)


class _Stay:
    """A growing set of resident values, with the room, the resident operands and the estimate of each call."""

    def __init__(self, calls: Sequence[tuple[KernelCall, Choices]], size: int) -> None:
        self._calls, self._size = calls, size
        self.rooms = [size] * len(calls)
        self.addresses: dict[str, int] = {}
        self.weights: list[str] = []
        self._resident: list[frozenset[int]] = [frozenset()] * len(calls)
        self._estimates = [choices.estimate(frozenset(), size) for _, choices in calls]
        self._placed: list[tuple[int, int, _Value]] = []  # address and end, the highest first

    @property
    def cycles(self) -> float:
        """The sum of all calls' estimates, in cycles."""
        return sum(self._estimates)

    def spare(self) -> int:
        """Bytes below all resident values without which no call's estimate gets worse."""
        least = (
            choices.least_room(resident, room)
            for (_, choices), resident, room in zip(self._calls, self._resident, self.rooms, strict=True)
        )
        return min(self.rooms, default=0) - max(least, default=0)

    def pin(self, weights: Sequence[_Value]) -> None:
        """Keep weights from run to run, at addresses below all values that are resident so far."""
        if not weights:
            return
        end = min(self.rooms)
        for weight in weights:
            end -= weight.size
            self.addresses[weight.name] = end
            self.weights.append(weight.name)
            self._place(weight, end)
            for index in weight.users:
                self._resident[index] |= positions(self._calls[index][0], (weight.name,))
        self.rooms = [min(room, end) for room in self.rooms]
        self._estimates = [
            choices.estimate(resident, room)
            for (_, choices), resident, room in zip(self._calls, self._resident, self.rooms, strict=True)
        ]

    def _place(self, value: _Value, address: int) -> None:
        insort(self._placed, (address, address + value.size, value), key=lambda each: (-each[0], -each[1]))

    def keep(self, value: _Value, least: float) -> None:
        """Keep an intermediate value for its lifetime, if it fits and saves more than `least` estimated cycles."""
        address = self._highest_free(value)
        if address is None:
            return
        gain = 0.0
        changes = []
        for index in range(value.first, value.last + 1):
            call, choices = self._calls[index]
            room, resident = min(self.rooms[index], address), self._resident[index]
            if index in value.users:
                resident |= positions(call, (value.name,))
            estimate = choices.estimate(resident, room)
            gain += self._estimates[index] - estimate
            changes.append((index, room, resident, estimate))
        if not math.isfinite(gain) or gain <= least:
            return
        self.addresses[value.name] = address
        self._place(value, address)
        for index, room, resident, estimate in changes:
            self.rooms[index], self._resident[index], self._estimates[index] = room, resident, estimate

    def _highest_free(self, value: _Value) -> int | None:
        """The highest address at which a value overlaps none that is live at the same time; None if it does not fit."""
        end = self._size
        for first, behind, other in self._placed:
            if other.first > value.last or value.first > other.last:
                continue
            if end - value.size >= behind:
                return end - value.size
            end = min(end, first)
        return end - value.size if end > value.size else None


def positions(call: KernelCall, names: Collection[str]) -> frozenset[int]:
    """The positions, among a call's inputs and outputs, of operands that lie in these buffers."""
    return frozenset(i for i, view in enumerate((*call.inputs, *call.outputs)) if view.buffer in names)


def _values(plan: ExecutionPlan, alignment: int) -> tuple[list[_Value], list[_Value]]:
    """The intermediate values of a plan, ordered by accesses per byte in descending order, and its weights."""
    users: dict[str, list[int]] = {}
    for index, call in enumerate(plan.calls):
        for name in {view.buffer for view in (*call.inputs, *call.outputs)}:
            users.setdefault(name, []).append(index)
    outputs = {view.buffer for view in plan.output_views.values()}
    values, weights = [], []
    for name, calls in users.items():
        buffer = plan.buffers[name]
        size = -(-max(1, buffer.size_bytes) // alignment) * alignment
        if buffer.kind == "arena" and name not in outputs:
            values.append(_Value(name, size, calls[0], calls[-1], calls))
        elif buffer.is_constant and buffer.size_bytes:
            weights.append(_Value(name, size, 0, len(plan.calls) - 1, calls))
    return sorted(values, key=lambda v: (-len(v.users) / v.size, v.first)), weights


def _by_gain(weights: list[_Value], calls: Sequence[tuple[KernelCall, Choices]], size: int) -> list[_Value]:
    """The weights that save DRAM traffic, ordered by cycles, then by DRAM time, saved per byte, the best first."""
    gains: dict[str, tuple[float, float]] = {}
    for weight in weights:
        cycles = traffic = 0.0
        for index in weight.users:
            call, choices = calls[index]
            own = positions(call, (weight.name,))
            cycles += choices.estimate(frozenset(), size) - choices.estimate(own, size)
            traffic += sum(choices.ranked((), size)[0].dram.get(position, 0.0) for position in own)
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
