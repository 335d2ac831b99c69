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
        banks = chip.outside.banks
        assert banks is not None
        self._banks, self._burst = banks, chip.outside.burst_bytes
        self._rate = chip.outside.bandwidth_gb_s * chip.outside.efficiency / banks.channels  # bytes per nanosecond
        self._opening = banks.trp_ns + banks.trcd_ns
        self._known: dict[tuple[object, ...], float] = {}
        self._cycles_per_ns = chip.clock_ghz / (1 - banks.trfc_ns / banks.trefi_ns)

    @cached_property
    def period(self) -> int:
        """Addresses that differ by a multiple of this many bytes take transfers of equal time."""
        return self._banks.channels * self._banks.row_bytes

    def cycles(self, address: int, strides: Sequence[int], extents: Sequence[int], size: int) -> float:
        """Cycles in which DRAM is busy with a box of elements of `size` bytes; strides are bytes."""
        walked = sorted(zip(map(abs, strides), extents, strict=True))
        key = (address % self.period, size, *walked)
        if key not in self._known:
            self._known[key] = self._busy_ns(*_runs(address % self.period, walked, size)) * self._cycles_per_ns
        return self._known[key]

    def _busy_ns(self, starts: np.ndarray, length: int) -> float:
        """Nanoseconds of the channel that is busy for longest."""
        if len(starts) == 1 and self._turns_without_waiting:
            first, end = self._held(starts), self._held(starts + length)
            return float((_up(end, self._burst) - first // self._burst * self._burst)[end > first].max() / self._rate)
        channel, row, bytes_ = self._visits(starts, length)
        busy: dict[bytes, float] = {}
        begin = 0
        for behind in (np.flatnonzero(np.diff(channel, append=-1)) + 1).tolist():
            part = slice(begin, behind)
            key = (row[part] - row[begin]).tobytes() + bytes_[part].tobytes()
            if key not in busy:
                busy[key] = self._channel_ns(row[part], bytes_[part] / self._rate)
            begin = behind
        return max(busy.values())

    @cached_property
    def _turns_without_waiting(self) -> bool:
        """Whether a bank's next row is open when all other banks have been read."""
        others = self._banks.banks * self._banks.ranks - 1
        return others * self._banks.row_bytes / self._rate >= self._opening

    def _held(self, address: np.ndarray) -> np.ndarray:
        """Bytes that each channel holds of all before an address; by channel, then address."""
        count, each = self._banks.channels, self._banks.interleave_bytes
        channels = np.arange(count)[:, None]
        held: np.ndarray = address // (each * count) * each + (address % (each * count) - channels * each).clip(0, each)
        return held

    def _visits(self, starts: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Channel, row of the channel, and bytes of each stay in a row; by channel, in the order of the transfer."""
        row_bytes = self._banks.row_bytes
        owner, first, end = self._pieces(starts, length)
        first, end = first // self._burst * self._burst, _up(end, self._burst)
        rows = (end - 1) // row_bytes - first // row_bytes + 1
        behind = np.arange(rows.sum()) - np.repeat(np.cumsum(rows) - rows, rows)
        row = np.repeat(first // row_bytes, rows) + behind
        begins_at = np.maximum(np.repeat(first, rows), row * row_bytes)
        stay = np.minimum(np.repeat(end, rows), (row + 1) * row_bytes) - begins_at
        owner = np.repeat(owner, rows)
        begins = np.flatnonzero((np.diff(owner, prepend=-1) != 0) | (np.diff(row, prepend=-1) != 0))
        return owner[begins], row[begins], np.add.reduceat(stay, begins)

    def _pieces(self, starts: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Channel and range of its bytes, for each run and each channel that the run touches; by channel, then run."""
        count, each = self._banks.channels, self._banks.interleave_bytes
        blocks = (length + each - 2) // each + 1  # the most that a run touches
        if blocks > count:
            first, end = self._held(starts), self._held(starts + length)
            owner = np.repeat(np.arange(count), len(starts))
            touched = (end > first).ravel()
            return owner[touched], first.ravel()[touched], end.ravel()[touched]
        block = (starts // each)[:, None] + np.arange(blocks)
        first = np.maximum(starts[:, None], block * each) - block * each
        end = np.minimum((starts + length)[:, None], (block + 1) * each) - block * each
        touched = (end > first).ravel()
        block, first, end = block.ravel()[touched], first.ravel()[touched], end.ravel()[touched]
        order = np.argsort(block % count, kind="stable")
        base = (block // count * each)[order]
        return (block % count)[order], base + first[order], base + end[order]

    def _channel_ns(self, row: np.ndarray, durations: np.ndarray) -> float:
        """Nanoseconds of a channel for its stays in rows."""
        bank = row % (self._banks.banks * self._banks.ranks)
        behind = np.cumsum(durations)
        order = np.argsort(bank, kind="stable")
        before = np.full(len(bank), _NO_VISIT)
        changes = (bank[order[1:]] == bank[order[:-1]]) & (row[order[1:]] != row[order[:-1]])
        before[order[1:][changes]] = order[:-1][changes]
        again = np.flatnonzero(before != _NO_VISIT)
        if not (behind[again] - durations[again] - behind[before[again]] < self._opening).any():
            return float(behind[-1])
        ends: list[float] = []
        now = 0.0
        for previous, duration in zip(before.tolist(), durations.tolist(), strict=True):
            if previous != _NO_VISIT:
                now = max(now, ends[previous] + self._opening)
            now += duration
            ends.append(now)
        return now


def _up(number: np.ndarray, multiple: int) -> np.ndarray:
    """Numbers rounded up to a multiple."""
    return -(-number // multiple) * multiple


def runs(address: int, strides: Sequence[int], extents: Sequence[int], size: int) -> tuple[np.ndarray, int]:
    """Addresses of the runs of consecutive bytes of a box, in their order, and the length of each."""
    return _runs(address, sorted(zip(map(abs, strides), extents, strict=True)), size)


def _runs(address: int, walked: Sequence[tuple[int, int]], size: int) -> tuple[np.ndarray, int]:
    length, starts = size, np.array([address], np.int64)
    for stride, extent in walked:
        if stride == length:
            length *= extent
        else:
            starts = (np.arange(extent, dtype=np.int64)[:, None] * stride + starts).ravel()
    return starts, length


__all__ = ["Banks", "runs"]
