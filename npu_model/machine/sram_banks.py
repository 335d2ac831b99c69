"""`SramBanks`: the time that instructions lose because others access the same banks of the scratchpad.

Addresses are interleaved over the banks, `bank_bytes` at a time. The bytes that an instruction reads and writes are
assumed to be spread evenly over the banks that its operands touch. A bank moves `ports` × `bytes_per_cycle` bytes in a
cycle and serves instructions in the order of their starts. An instruction occupies its engine until the last of its
banks has served it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from npu_compiler.graph.dtypes import itemsize
from npu_model.chip import Chip
from npu_model.isa.instructions import Instruction, Space, Tile
from npu_model.machine.costs import Cost


@dataclass(frozen=True, slots=True)
class _Operand:
    """An operand in a scratchpad, with its first byte and one past its last, relative to its address."""

    tile: Tile
    low: int
    high: int


class SramBanks:
    """The banks of all scratchpads of a chip whose file gives `bank_bytes`."""

    def __init__(self, chip: Chip) -> None:
        sram = chip.sram
        assert sram.bank_bytes is not None
        self._banks, self._each = sram.banks, sram.bank_bytes
        self._rate = sram.ports * sram.bytes_per_cycle
        self._free: dict[str, list[int]] = {}
        self._operands: dict[int, tuple[_Operand, ...]] = {}

    def delay(self, instruction: Instruction, counters: Sequence[int], start: int, cost: Cost) -> int:
        """Cycles by which an instruction that begins at `start` is delayed by busy banks.

        It then occupies its own banks.
        """
        touched: dict[str, set[int]] = {}
        for operand in self._of(instruction):
            place = operand.tile.place(counters)
            touched.setdefault(operand.tile.buffer, set()).update(
                self._between(place + operand.low, place + operand.high)
            )
        count = sum(map(len, touched.values()))
        if not count or not cost.sram_bytes:
            return 0
        served, end = -(-cost.sram_bytes // (count * self._rate)), start + cost.cycles
        last = end
        for core, banks in touched.items():
            free = self._free.setdefault(core, [0] * self._banks)
            for bank in banks:
                free[bank] = max(free[bank], start) + served
                last = max(last, free[bank])
        return last - end

    def _between(self, first: int, end: int) -> range | set[int]:
        """The numbers of the banks that a range of addresses touches."""
        begin, behind = first // self._each, (end - 1) // self._each + 1
        if behind - begin >= self._banks:
            return range(self._banks)
        return {block % self._banks for block in range(begin, behind)}

    def _of(self, instruction: Instruction) -> tuple[_Operand, ...]:
        own = self._operands.get(id(instruction))
        if own is None:
            tiles = (*instruction.reads, *instruction.writes)
            own = tuple(_operand(tile, instruction) for tile in tiles if tile.space is Space.SCRATCHPAD)
            self._operands[id(instruction)] = own
        return own


def _operand(tile: Tile, instruction: Instruction) -> _Operand:
    reach = [stride * (axis.size - 1) for axis, stride in zip(instruction.axes, tile.strides, strict=True)]
    low, high = sum(min(0, bytes_) for bytes_ in reach), sum(max(0, bytes_) for bytes_ in reach)
    return _Operand(tile, low, high + itemsize(tile.dtype))


__all__ = ["SramBanks"]
