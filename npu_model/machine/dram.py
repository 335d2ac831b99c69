"""`Banks`: the time in which DRAM is busy with a transfer, from its channels, banks and rows.

Addresses are interleaved over the channels, `interleave_bytes` at a time. Within a channel they fill a row of a bank,
then a row of the next bank; ranks count as further banks. A channel serves a transfer in the order of its addresses:

1. A run of consecutive bytes takes whole bursts, at the channel's share of the bandwidth.
2. Accesses to an open row follow without delay. Another row of a bank is opened when the bank's last access has ended,
   which takes `trp_ns` + `trcd_ns`; meanwhile other banks are served. The controller looks ahead over the transfer.
3. A transfer's first row in each bank is opened while the previous transfer is served: it counts as latency.
4. In `trfc_ns` of each `trefi_ns` the channel refreshes and serves nothing; the loss is spread over all transfers.

A transfer ends when its last channel has. So transfers that use few channels, or many rows of one bank, are slow, and
none is faster than the flat bandwidth.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache

import numpy as np

from npu_model.chip import Dram

_NO_VISIT = -1
_MOST_KEPT = 16  # DRAMs whose transfers are remembered


class Banks:
    """Timing model of a DRAM whose file describes banks, in cycles of a chip's clock."""

    def __init__(self, dram: Dram, clock_ghz: float) -> None:
        banks = dram.banks
        assert banks is not None
        self._banks, self._burst = banks, dram.burst_bytes
        self._rate = dram.bandwidth_gb_s * dram.efficiency / banks.channels  # bytes per nanosecond
        self._opening = banks.trp_ns + banks.trcd_ns
        self._known: dict[tuple[object, ...], float] = {}
        self._cycles_per_ns = clock_ghz / (1 - banks.trfc_ns / banks.trefi_ns)

    @cached_property
    def period(self) -> int:
        """Transfers whose addresses differ by a multiple of this many bytes take equal time."""
        return self._banks.channels * self._banks.row_bytes

    def cycles(self, address: int, strides: Sequence[int], extents: Sequence[int], size: int) -> float:
        """Cycles in which DRAM is busy with a box of elements of `size` bytes; strides are in bytes."""
        walked = sorted(zip(map(abs, strides), extents, strict=True))
        key = (address % self.period, size, *walked)
        if key not in self._known:
            self._known[key] = self._busy_ns(*_runs(address % self.period, walked, size)) * self._cycles_per_ns
        return self._known[key]

    def _busy_ns(self, starts: np.ndarray, length: int) -> float:
        """Nanoseconds until the last of the channels has served runs of `length` bytes at these addresses."""
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
        """Whether sequential reads never wait: while the other banks are read, a bank can open its next row."""
        others = self._banks.banks * self._banks.ranks - 1
        return others * self._banks.row_bytes / self._rate >= self._opening

    def _held(self, address: np.ndarray) -> np.ndarray:
        """Number of bytes below an address that lie in each channel; shape [channel, address]."""
        count, each = self._banks.channels, self._banks.interleave_bytes
        channels = np.arange(count)[:, None]
        held: np.ndarray = address // (each * count) * each + (address % (each * count) - channels * each).clip(0, each)
        return held

    def _visits(self, starts: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Channel, row and bytes of each visit to a row, sorted by channel and then in the order of the transfer.

        Args:
            starts: First address of each run of `length` consecutive bytes.
        """
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
        """Split runs by channel: for each part its channel and its byte range there, sorted by channel."""
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
        """Nanoseconds in which a channel serves visits to these rows, of these durations, in order."""
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


@lru_cache(maxsize=_MOST_KEPT)
def banks_of(dram: Dram, clock_ghz: float) -> Banks:
    """The timing model of a DRAM, one for all programs, since it remembers the times of transfers."""
    return Banks(dram, clock_ghz)


def _up(number: np.ndarray, multiple: int) -> np.ndarray:
    """Round numbers up to a multiple."""
    return -(-number // multiple) * multiple


def runs(address: int, strides: Sequence[int], extents: Sequence[int], size: int) -> tuple[np.ndarray, int]:
    """Start addresses of the contiguous runs of bytes in a box of elements of `size` bytes, and their length."""
    return _runs(address, sorted(zip(map(abs, strides), extents, strict=True)), size)


def _runs(address: int, walked: Sequence[tuple[int, int]], size: int) -> tuple[np.ndarray, int]:
    length, starts = size, np.array([address], np.int64)
    for stride, extent in walked:
        if stride == length:
            length *= extent
        else:
            starts = (np.arange(extent, dtype=np.int64)[:, None] * stride + starts).ravel()
    return starts, length


__all__ = ["Banks", "banks_of", "runs"]
