"""`Banks`: the time in which DRAM is busy with a transfer, from its channels, banks and rows.

Addresses go round the channels, `interleave_bytes` at a time. What a channel holds fills a row of a bank, then a row of
the next bank; ranks count as further banks. A channel serves a transfer in the order of its addresses:

1. A run of consecutive bytes takes whole bursts, at the channel's share of the bandwidth.
2. A row that is open is read on. Another row of a bank is opened when the bank's last access has ended, which takes
   `trp_ns` + `trcd_ns`; meanwhile other banks are served. The controller looks ahead as far as the transfer goes.
3. The rows that a transfer opens first are opened while the one before is served: that belongs to the latency.
4. In `trfc_ns` of each `trefi_ns` the channel refreshes and serves nothing, which is spread over all transfers.

A transfer ends when its last channel has. So one that reaches few channels, or many rows of one bank, is slow, and none
is faster than the flat bandwidth.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from npu_model.chip import Chip

_NO_VISIT = -1


class Banks:
    """The channels of a chip's DRAM, which has banks."""

    def __init__(self, chip: Chip) -> None:
        banks = chip.dram.banks
        assert banks is not None
        self._banks, self._burst = banks, chip.dram.burst_bytes
        self._rate = chip.dram.bandwidth_gb_s * chip.dram.efficiency / banks.channels  # bytes per nanosecond
        self._cycles_per_ns = chip.clock_ghz / (1 - banks.trfc_ns / banks.trefi_ns)

    @cached_property
    def period(self) -> int:
        """Addresses that differ by a multiple of this many bytes take transfers of equal time."""
        return self._banks.channels * self._banks.row_bytes

    def cycles(self, address: int, strides: Sequence[int], extents: Sequence[int], size: int) -> float:
        """Cycles in which DRAM is busy with a box of elements of `size` bytes; strides are bytes."""
        starts, length = runs(address, strides, extents, size)
        channel, row, bytes_ = self._visits(starts, length)
        ends = np.flatnonzero(np.diff(channel, append=-1)) + 1
        busy: dict[bytes, float] = {}
        first = 0
        for end in ends.tolist():
            part = slice(first, end)
            key = (row[part] - row[first]).tobytes() + bytes_[part].tobytes()
            if key not in busy:
                busy[key] = self._channel_ns(row[part], bytes_[part] / self._rate)
            first = end
        return max(busy.values()) * self._cycles_per_ns

    def _visits(self, starts: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Channel, row of the channel, and bytes of each stay in a row; by channel, in the order of the transfer."""
        count, each, row_bytes = self._banks.channels, self._banks.interleave_bytes, self._banks.row_bytes
        channels = np.arange(count)[:, None]

        def held(address: np.ndarray) -> np.ndarray:
            """Bytes that each channel holds of all before an address."""
            return address // (each * count) * each + np.clip(address % (each * count) - channels * each, 0, each)

        first, end = held(starts).ravel(), held(starts + length).ravel()
        owner = np.repeat(np.arange(count), len(starts))
        touched = end > first
        first, end, owner = first[touched] // self._burst * self._burst, end[touched], owner[touched]
        end = -(-end // self._burst) * self._burst
        rows = (end - 1) // row_bytes - first // row_bytes + 1
        behind = np.arange(rows.sum()) - np.repeat(np.cumsum(rows) - rows, rows)
        row = np.repeat(first // row_bytes, rows) + behind
        stay = np.minimum(np.repeat(end, rows), (row + 1) * row_bytes) - np.maximum(
            np.repeat(first, rows), row * row_bytes
        )
        owner = np.repeat(owner, rows)
        begins = np.flatnonzero((np.diff(owner, prepend=-1) != 0) | (np.diff(row, prepend=-1) != 0))
        return owner[begins], row[begins], np.add.reduceat(stay, begins)

    def _channel_ns(self, row: np.ndarray, durations: np.ndarray) -> float:
        """Nanoseconds of a channel for its stays in rows."""
        bank = row % (self._banks.banks * self._banks.ranks)
        opening = self._banks.trp_ns + self._banks.trcd_ns
        behind = np.cumsum(durations)
        order = np.argsort(bank, kind="stable")
        before = np.full(len(bank), _NO_VISIT)
        changes = (bank[order[1:]] == bank[order[:-1]]) & (row[order[1:]] != row[order[:-1]])
        before[order[1:][changes]] = order[:-1][changes]
        again = np.flatnonzero(before != _NO_VISIT)
        if not (behind[again] - durations[again] - behind[before[again]] < opening).any():
            return float(behind[-1])
        ends: list[float] = []
        now = 0.0
        for previous, duration in zip(before.tolist(), durations.tolist(), strict=True):
            if previous != _NO_VISIT and ends[previous] + opening > now:
                now = ends[previous] + opening
            now += duration
            ends.append(now)
        return now


def runs(address: int, strides: Sequence[int], extents: Sequence[int], size: int) -> tuple[np.ndarray, int]:
    """Addresses of the runs of consecutive bytes of a box, in their order, and the length of each."""
    length, starts = size, np.array([address], np.int64)
    for stride, extent in sorted(zip(map(abs, strides), extents, strict=True)):
        if stride == length:
            length *= extent
        else:
            starts = (np.arange(extent, dtype=np.int64)[:, None] * stride + starts).ravel()
    return starts, length


__all__ = ["Banks", "runs"]
