"""Event-driven simulation of a program's calls, cut into tiles, on a chip.

The units of the chip work side by side, each on one thing at a time and in the order of the program:

1. DMA channels carry transfers. A transfer waits for a free channel and for the latency of DRAM, then for its turn at
   DRAM, whose bandwidth all channels share.
2. The matrix arrays compute a tile together; the vector unit applies what follows, or computes a call that multiplies
   nothing.
3. There is room for two tiles: a tile is loaded once the one two before it is computed. That holds across calls, so a
   call's first weights are loaded while the call before computes. What a call before has to make is waited for.
4. A tile is stored after the next one is loaded.

So each time is a maximum of others plus a constant, and the order of all queues is that of the program: nothing becomes
slower because something else becomes faster.

Tiles of a call are alike. Once everything moves by the same number of cycles from tile to tile, the rest are not
simulated one by one.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from npu_model.chip import Chip
from npu_model.mapper import Tiling

_SAME = 1e-9  # relative; between cycles that differ by rounding only


class Cause(StrEnum):
    """Why neither the arrays nor the vector unit get on."""

    DRAM_BANDWIDTH = "dram bandwidth"
    DRAM_LATENCY = "dram latency"
    LAUNCH = "launch"
    DEPENDENCY = "dependency"
    SRAM_PORTS = "sram ports"


@dataclass
class Span:
    """From when to when a unit worked for a call, in cycles."""

    start: float = -1.0
    end: float = -1.0

    def cover(self, start: float, end: float) -> None:
        if self.start < 0:
            self.start = start
        self.end = end


@dataclass
class CallTimes:
    """When the units worked for a call, in cycles since the program's begin.

    Attributes:
        progress: Cycles by which the call moved on the end of all computing.
        stalls: Cycles by which it waited instead, by cause.
    """

    loading: Span = field(default_factory=Span)
    arrays: Span = field(default_factory=Span)
    vector: Span = field(default_factory=Span)
    storing: Span = field(default_factory=Span)
    progress: float = 0.0
    stalls: dict[Cause, float] = field(default_factory=lambda: dict.fromkeys(Cause, 0.0))

    @property
    def cycles(self) -> float:
        """The part of the program's cycles that is this call's."""
        return self.progress + sum(self.stalls.values())

    @property
    def spans(self) -> tuple[Span, ...]:
        return self.loading, self.arrays, self.vector, self.storing

    @property
    def end(self) -> float:
        return max(span.end for span in self.spans)


@dataclass
class _Store:
    """A tile's results on their way to DRAM: for which call, from which cycle on, and how many bytes."""

    call: int
    ready: float
    size: float


@dataclass(frozen=True)
class _Snapshot:
    """All clocks after a tile, and a call's progress and stalls."""

    clocks: tuple[float, ...]
    tallies: tuple[float, ...]


class Machine:
    """The units of a chip, and until when each of them is busy, in cycles."""

    def __init__(self, chip: Chip) -> None:
        self._chip = chip
        self._per_cycle = chip.dram_bytes_per_cycle
        self._latency = chip.dram_latency_cycles
        self._sram = chip.sram.bandwidth
        self._launch = chip.launch.cost_us * 1e3 * chip.clock_ghz
        self._launch_of_product = self._launch + chip.launch.product_us * 1e3 * chip.clock_ghz
        self._channels = [0.0] * chip.dma.channels  # a heap
        self._dram = self._arrays = self._vector = self._sequencer = 0.0
        self._freed = (0.0, 0.0)  # when the tile before the last, and the last, were computed
        self._computed = self._stored = 0.0  # all that there was so far
        self._exposed = 0.0  # latency of the last load that nothing hid
        self._store: _Store | None = None
        self._calls: list[CallTimes] = []
        self._ready: list[float] = []  # call → when its results can be read

    def run(self, tilings: Sequence[Tiling], dependencies: Sequence[Collection[int]]) -> list[CallTimes]:
        """Run the calls in order.

        Args:
            dependencies: For each call, the calls before whose results it reads or replaces.
        """
        for tiling, needed in zip(tilings, dependencies, strict=True):
            self._calls.append(CallTimes())
            self._ready.append(0.0)
            self._call(tiling, needed)
        self._flush()
        if self._calls:
            self._calls[-1].stalls[Cause.DRAM_BANDWIDTH] += max(0.0, self._stored - self._computed)
        return self._calls

    def _call(self, tiling: Tiling, needed: Collection[int]) -> None:
        launched = self._launched(tiling)
        index = len(self._calls) - 1
        times = self._calls[index]
        periods = self._periods(tiling)
        history = [self._snapshot(times)]
        for done in range(1, tiling.tiles + 1):
            self._tile(times, tiling, launched, needed, flush_early=done == 1 and index - 1 in needed)
            history.append(self._snapshot(times))
            for period in periods:
                step = _common_step(history, period)
                if step is not None and (periods_left := (tiling.tiles - done) // period):
                    self._skip(times, tiling, step, history[-1 - period], periods_left)
                    for _ in range((tiling.tiles - done) % period):
                        self._tile(times, tiling, launched, needed)
                    return

    def _periods(self, tiling: Tiling) -> tuple[int, ...]:
        """After how many tiles all may repeat: two tiles lie in SRAM, and transfers take turns at the channels."""
        transfers = (tiling.constants > 0) + (tiling.inputs > 0) + (tiling.outputs > 0)
        turns = len(self._channels) // math.gcd(len(self._channels), transfers)
        return tuple(sorted({1, 2, turns, 2 * turns}))

    def _launched(self, tiling: Tiling) -> float:
        if not self._chip.launch.overlapped:
            self._flush()
            self._sequencer = max(self._sequencer, self._computed, self._stored)
        self._sequencer += self._launch_of_product if tiling.array_cycles else self._launch
        return self._sequencer

    def _tile(
        self, times: CallTimes, tiling: Tiling, launched: float, needed: Collection[int], flush_early: bool = False
    ) -> None:
        room = max(launched, self._freed[0])
        loaded = self._load(times, room, tiling.constants)
        if flush_early:
            self._flush()
        results = max((self._ready[index] for index in needed), default=0.0)
        loaded = max(loaded, self._load(times, max(room, results), tiling.inputs))
        self._flush()
        waits = (launched, results, max(loaded, launched, results))
        ports = tiling.sram_bytes / self._sram
        if tiling.array_cycles:
            start = max(self._arrays, *waits)
            self._arrays = start + max(tiling.array_cycles, ports)
            times.arrays.cover(start, self._arrays)
            self._attribute(times, start, self._arrays, tiling.array_cycles, waits)
            made = self._arrays
        else:
            made = max(waits)
        if tiling.vector_cycles:
            start = max(self._vector, made)
            cycles = tiling.vector_cycles if tiling.array_cycles else max(tiling.vector_cycles, ports)
            self._vector = start + cycles
            times.vector.cover(start, self._vector)
            self._attribute(times, start, self._vector, tiling.vector_cycles, waits)
            made = self._vector
        self._freed = (self._freed[1], made)
        index = len(self._calls) - 1
        self._ready[index] = max(self._ready[index], made)
        if tiling.outputs:
            self._store = _Store(index, made, tiling.outputs)

    def _load(self, times: CallTimes, ready: float, size: float) -> float:
        """When a load ends that may begin when `ready`."""
        if not size:
            return 0.0
        begin, end = self._transfer(ready, size)
        times.loading.cover(begin, end)
        return end

    def _flush(self) -> None:
        """Store what waits for it."""
        store = self._store
        if store is None:
            return
        self._store = None
        exposed = self._exposed
        begin, end = self._transfer(store.ready, store.size)
        self._exposed = exposed
        self._calls[store.call].storing.cover(begin, end)
        self._ready[store.call] = max(self._ready[store.call], end)
        self._stored = max(self._stored, end)

    def _transfer(self, ready: float, size: float) -> tuple[float, float]:
        """(first byte, last byte) of a transfer that may begin when `ready`."""
        start = max(ready, self._channels[0])
        begin = max(start + self._latency, self._dram)
        self._exposed = min(self._latency, begin - max(start, self._dram))
        self._dram = begin + size / self._per_cycle
        heapq.heapreplace(self._channels, self._dram)
        return begin, self._dram

    def _attribute(
        self, times: CallTimes, start: float, end: float, cycles: float, waits: tuple[float, float, float]
    ) -> None:
        """Enter the time from the end of all computing so far to `end`: progress, and what it waited for."""
        at, stalls = self._computed, times.stalls
        launched, results, _ = waits
        for until, cause in ((min(start, launched), Cause.LAUNCH), (min(start, results), Cause.DEPENDENCY)):
            if until > at:
                stalls[cause] += until - at
                at = until
        if start > at:
            latency = min(start - at, self._exposed)
            stalls[Cause.DRAM_LATENCY] += latency
            stalls[Cause.DRAM_BANDWIDTH] += start - at - latency
            at = start
        if end > at:
            ports = min(end - at, max(0.0, end - start - cycles))
            stalls[Cause.SRAM_PORTS] += ports
            times.progress += end - at - ports
            self._computed = end

    def _snapshot(self, times: CallTimes) -> _Snapshot:
        pending = 0.0 if self._store is None else self._store.ready
        own = (self._dram, self._arrays, self._vector, *self._freed, self._computed, self._stored, pending)
        return _Snapshot((*own, *sorted(self._channels)), (times.progress, *times.stalls.values()))

    def _skip(self, times: CallTimes, tiling: Tiling, step: float, before: _Snapshot, periods: int) -> None:
        """Let periods pass, in each of which all moves by `step` cycles, as it did since the snapshot."""
        shift = step * periods
        if tiling.constants or tiling.inputs or tiling.outputs:
            self._dram += shift
            self._channels = [channel + shift for channel in self._channels]
        if tiling.constants or tiling.inputs:
            times.loading.end += shift
        if tiling.array_cycles:
            self._arrays += shift
            times.arrays.end += shift
        if tiling.vector_cycles:
            self._vector += shift
            times.vector.end += shift
        if tiling.outputs and self._store is not None:
            self._stored += shift
            times.storing.end += shift
            self._store.ready += shift
        self._freed = (self._freed[0] + shift, self._freed[1] + shift)
        self._ready[-1] += shift
        self._computed += shift
        times.progress += (times.progress - before.tallies[0]) * periods
        for cause, earlier in zip(Cause, before.tallies[1:], strict=True):
            times.stalls[cause] += (times.stalls[cause] - earlier) * periods


def _common_step(history: Sequence[_Snapshot], period: int) -> float | None:
    """By how many cycles all clocks that moved did so in each of the last two periods; None where they differ."""
    if len(history) <= 2 * period:
        return None
    first, second, third = (history[-1 - back * period].clocks for back in (2, 1, 0))
    steps = [new - old for old, new in zip(second, third, strict=True) if new != old]
    if not steps:
        return None
    rounding = _SAME * max(third)
    if max(steps) - min(steps) > rounding:
        return None
    earlier = [new - old for old, new in zip(first, second, strict=True) if new != old]
    return max(steps) if all(abs(step - steps[0]) <= rounding for step in earlier) else None
