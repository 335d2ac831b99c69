"""Placement in the shared L2: the choice of values that lie there instead of in DRAM.

The L2 is software-managed, not a cache. A weight in it is loaded once per set of weights; an intermediate value is
written there by the call that produces it, and never reaches DRAM. The values that stay in a scratchpad are chosen
first, as if there were no L2. The rest is a knapsack problem, solved greedily: values are ordered by estimated cycles
saved per byte, then by DRAM time saved, and each is put at the lowest address that is free while it is live. A value
that saves no DRAM traffic, or makes estimates worse, stays in DRAM. Several fractions of the L2 are tried as its size,
and the best estimate is taken, so that twice the L2 never has a worse estimate.

On a chip without DRAM all values have to lie in a scratchpad or the L2, so large or long-lived ones are placed first.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from npu_compiler.errors import ConstraintError
from npu_compiler.program.describe import format_bytes
from npu_compiler.program.kernels import KernelCall
from npu_compiler.program.plan import BufferAllocation, ExecutionPlan
from npu_model.chip import Chip
from npu_model.isa.instructions import Space
from npu_model.lowering.emitter import Place
from npu_model.lowering.mapper import Placed
from npu_model.lowering.residency import positions

_SHARES = 8  # parts of the L2 that are tried as its size


@dataclass(frozen=True)
class Use:
    """A call, or a core's part of one, with the locations of its operands.

    Attributes:
        time: Number of the call in the plan; equal for all parts of a call.
        placed: The call with its tilings and the operands that stay in the scratchpad.
        kept: Names of the operands' buffers that lie in a scratchpad.
    """

    call: KernelCall
    time: int
    placed: Placed
    kept: Collection[str]

    def with_l2(self, names: Collection[str]) -> Placed:
        """The call with its operands of these names in the L2, unless they are in the scratchpad."""
        return replace(self.placed, in_l2=positions(self.call, names) - self.placed.resident)


@dataclass(frozen=True)
class _Value:
    """A value that may lie in the L2: its bytes, the first and last call of its lifetime, and its uses."""

    name: str
    size: int
    first: int
    last: int
    users: tuple[int, ...]


def choose_l2(
    uses: Sequence[Use], buffers: Mapping[str, BufferAllocation], plan: ExecutionPlan, chip: Chip
) -> dict[str, int]:
    """Choose the buffers that lie in the L2; return buffer → its address there.

    Args:
        buffers: All buffers that the calls access.
        plan: The plan, whose outputs are left in DRAM.
    """
    if chip.l2 is None:
        return {}
    values = _values(uses, buffers, plan, chip.sram.alignment)
    if chip.dram is None:
        tried = [_placed(sorted(values, key=key), chip.l2.size) for key in (_by_size, _by_life)]
        return max(tried, key=len)
    ranked = _by_gain(values, uses)
    best: tuple[float, dict[str, int]] | None = None
    for share in range(1, _SHARES + 1):
        addresses = _improving(ranked, uses, chip.l2.size * share // _SHARES)
        cycles = sum(use.with_l2(addresses).estimate for use in uses)
        if best is None or cycles <= best[0]:
            best = cycles, addresses
    assert best is not None
    return best[1]


def l2_place(address: int, size: int) -> Place:
    """The location of a value at an address of the L2."""
    return Place(Space.L2, "", address, size)


def check_places(
    names: Collection[str], buffers: Mapping[str, BufferAllocation], plan: ExecutionPlan, chip: Chip
) -> None:
    """Raise `ConstraintError` if a chip without DRAM has no room for some value of a plan.

    Args:
        names: The buffers that have a location on the chip.
        buffers: All buffers that the calls access.
    """
    if chip.dram is not None:
        return
    outputs = {view.buffer for view in plan.output_views.values()}
    left = [
        b for n, b in buffers.items() if (b.is_constant or b.kind == "arena") and n not in outputs and n not in names
    ]
    lacking = sum(buffer.size_bytes for buffer in left)
    if lacking:
        l2 = "" if chip.l2 is None else f" and the L2 of {format_bytes(chip.l2.size)}"
        memories = f"scratchpad of {format_bytes(chip.sram.size)}{l2}"
        raise ConstraintError(
            [
                f"chip '{chip.name}' has no DRAM, and {format_bytes(lacking)} of weights and intermediate values do "
                f"not fit the {memories} beside the rest; give the chip more of these or [dram]"
            ]
        )


def _values(
    uses: Sequence[Use], buffers: Mapping[str, BufferAllocation], plan: ExecutionPlan, alignment: int
) -> list[_Value]:
    """The weights and intermediate values that some call accesses outside of the scratchpads."""
    users: dict[str, list[int]] = {}
    for number, use in enumerate(uses):
        for name in {view.buffer for view in (*use.call.inputs, *use.call.outputs)} - set(use.kept):
            users.setdefault(name, []).append(number)
    outputs = {view.buffer for view in plan.output_views.values()}
    last = max((use.time for use in uses), default=0)
    values = []
    for name, numbers in users.items():
        buffer = buffers[name]
        size = -(-max(1, buffer.size_bytes) // alignment) * alignment
        times = [uses[number].time for number in numbers]
        if buffer.is_constant and buffer.size_bytes:
            values.append(_Value(name, size, 0, last, tuple(numbers)))
        elif buffer.kind == "arena" and name not in outputs:
            values.append(_Value(name, size, min(times), max(times), tuple(numbers)))
    return values


def _by_size(value: _Value) -> tuple[int, int]:
    return -value.size, value.first


def _by_life(value: _Value) -> tuple[int, int]:
    return value.first - value.last, -value.size


def _by_gain(values: Sequence[_Value], uses: Sequence[Use]) -> list[_Value]:
    """The values that save DRAM traffic, in descending order of estimated cycles saved per byte."""
    gains: dict[str, tuple[float, float]] = {}
    for value in values:
        cycles = traffic = 0.0
        for number in value.users:
            use = uses[number]
            cycles += use.placed.estimate - use.with_l2((value.name,)).estimate
            best = use.placed.choices.ranked(use.placed.resident, use.placed.room)
            own = positions(use.call, (value.name,)) - use.placed.resident
            traffic += sum(best[0].flows.dram.get(position, 0.0) for position in own) if best else 0.0
        gains[value.name] = cycles / value.size, traffic / value.size
    saving = [value for value in values if gains[value.name][1] and gains[value.name][0] >= 0]
    return sorted(saving, key=lambda value: gains[value.name], reverse=True)


def _improving(values: Sequence[_Value], uses: Sequence[Use], size: int) -> dict[str, int]:
    """Place values in `size` bytes of L2, in order, skipping those that do not fit or make the estimates worse."""
    addresses: dict[str, int] = {}
    placed: list[tuple[_Value, int]] = []
    estimates = [use.placed.estimate for use in uses]
    for value in values:
        address = _lowest_free(value, placed, size)
        if address is None:
            continue
        names = {*addresses, value.name}
        own = {number: uses[number].with_l2(names).estimate for number in value.users}
        if sum(own.values()) > sum(estimates[number] for number in own):
            continue
        addresses[value.name] = address
        placed.append((value, address))
        for number, estimate in own.items():
            estimates[number] = estimate
    return addresses


def _placed(values: Sequence[_Value], size: int) -> dict[str, int]:
    """Place values in `size` bytes of L2, in order, skipping those that do not fit; return name → address."""
    placed: list[tuple[_Value, int]] = []
    for value in values:
        address = _lowest_free(value, placed, size)
        if address is not None:
            placed.append((value, address))
    return {value.name: address for value, address in placed}


def _lowest_free(value: _Value, placed: Sequence[tuple[_Value, int]], size: int) -> int | None:
    """The lowest address at which a value overlaps none that is live at the same time; None if it does not fit."""
    address = 0
    for other, first in sorted(placed, key=lambda each: each[1]):
        if other.first > value.last or value.first > other.last:
            continue
        if address + value.size <= first:
            break
        address = max(address, first + other.size)
    return address if address + value.size <= size else None


__all__ = ["Use", "check_places", "choose_l2", "l2_place"]
