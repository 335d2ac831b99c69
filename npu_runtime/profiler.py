"""`Profiler`: measures the time of each kernel and transfer in a run."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from npu_compiler.program.kernels import KernelCall
from npu_compiler.timeline import Timeline
from npu_runtime.profile_trace import CallTime, Span, timeline_of


@dataclass
class Entry:
    """Totals of one kernel or transfer: seconds, calls, and bytes (transfers only)."""

    seconds: float = 0.0
    calls: int = 0
    bytes: int = 0


@dataclass
class Profiler:
    """Recorder of times, to pass to `Executor.run` or `DAGExecutor.execute`; times add up over runs.

    A profiled run synchronizes after every kernel, so its total is larger than an unprofiled run's.

    Attributes:
        clock: Function that returns seconds since some moment. With the clock of a device that simulates another
            (`Hardware.clock`), totals are in that one's time, in which the host's work takes none.
        kernels, transfers: Totals by name.
        total, runs: Seconds of all runs, and their number.
        calls: Every kernel call on a device, in order.
        host_spans, transfer_spans: Activities of the host, nested, and every transfer.
    """

    clock: Callable[[], float] = time.perf_counter
    kernels: dict[str, Entry] = field(default_factory=lambda: defaultdict(Entry))
    transfers: dict[str, Entry] = field(default_factory=lambda: defaultdict(Entry))
    total: float = 0.0
    runs: int = 0
    calls: list[CallTime] = field(default_factory=list)
    host_spans: list[Span] = field(default_factory=list)
    transfer_spans: list[Span] = field(default_factory=list)
    _depth: int = 0

    def add_kernel(self, name: str, seconds: float) -> None:
        """Add the time of a kernel to its totals."""
        entry = self.kernels[name]
        entry.seconds += seconds
        entry.calls += 1

    def add_call(self, timed: CallTime) -> None:
        """Add a kernel call to `calls`, and to the kernel's totals."""
        self.add_kernel(timed.call.kernel, timed.seconds)
        self.calls.append(timed)

    def seconds_per_call(self, calls: Sequence[KernelCall]) -> list[float]:
        """Return the seconds of each of a program's calls, of which a device may run some in pieces."""
        places: dict[tuple[str, str], list[int]] = defaultdict(list)
        for index, call in enumerate(calls):
            places[call.kernel, call.node].append(index)
        seconds, counts = [0.0] * len(calls), Counter[tuple[str, str]]()
        for timed in self.calls:
            key = timed.call.kernel, timed.call.node
            if key in places:
                seconds[places[key][counts[key] % len(places[key])]] += timed.seconds
                counts[key] += 1
        return seconds

    def add_transfer(self, name: str, seconds: float, size: int, tensor: str = "") -> None:
        """Add a transfer of `size` bytes that has just ended."""
        entry = self.transfers[name]
        entry.seconds += seconds
        entry.calls += 1
        entry.bytes += size
        now = self.clock()
        self.transfer_spans.append(Span(name, now - seconds, now, {"tensor": tensor, "bytes": size}))

    @contextmanager
    def run(self, name: str) -> Iterator[None]:
        """Context of a run of a program or plan; of nested runs, only the outermost counts."""
        start = self.clock()
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
        end = self.clock()
        self.host_spans.append(Span(name, start, end, {}))
        if self._depth == 0:
            self.total += end - start
            self.runs += 1

    @contextmanager
    def on_host(self, name: str, **args: Any) -> Iterator[None]:
        """Context that records an activity of the host for the trace, with the facts `args` shown beside it."""
        start = self.clock()
        yield
        self.host_spans.append(Span(name, start, self.clock(), args))

    def timeline(self) -> Timeline:
        """The records on tracks: host, transfers, each device's kernels and their blocks, and counters."""
        return timeline_of(self.calls, self.host_spans, self.transfer_spans)

    def save_trace(self, path: str | Path) -> None:
        """Write a trace of all profiled runs for Perfetto (ui.perfetto.dev); docs/profiling.md says what it shows.

        Raises:
            InputError: the file cannot be written (no such folder, no permission, disk full).
        """
        self.timeline().save(path)

    def to_dict(self) -> dict[str, Any]:
        """The totals as JSON data: runs, milliseconds of a run, and a list each of kernels and of transfers.

        An entry has milliseconds and calls per run, and its share of the time of all entries; the most expensive kernel
        comes first, transfers come in the order in which they first happened, with their bytes per run.
        """
        runs = max(self.runs, 1)
        spent = sum(e.seconds for e in (*self.kernels.values(), *self.transfers.values())) or 1.0
        ordered = sorted(self.kernels.items(), key=lambda item: -item[1].seconds)
        return {
            "runs": self.runs,
            "total_ms": 1e3 * self.total / runs,
            "kernels": [
                {"name": name, "ms": 1e3 * e.seconds / runs, "calls": e.calls / runs, "share": e.seconds / spent}
                for name, e in ordered
            ],
            "transfers": [
                {
                    "name": name,
                    "ms": 1e3 * e.seconds / runs,
                    "calls": e.calls / runs,
                    "share": e.seconds / spent,
                    "bytes": e.bytes / runs,
                }
                for name, e in self.transfers.items()
            ],
        }

    def report(self) -> str:
        """A table with the milliseconds and calls per run of each kernel, and its share of the time."""
        data = self.to_dict()
        named = "{name:36} {ms:10.3f} {calls:7.0f} "
        lines = [
            f"{'kernel':36} {'ms/run':>10} {'calls':>7} {'share':>7}",
            *((named + "{share:7.1%}").format_map(row) for row in data["kernels"]),
            *((named + "{bytes:.0f} bytes").format_map(row) for row in data["transfers"]),
            f"{'total (with profiling)':36} {data['total_ms']:10.3f}",
        ]
        return "\n".join(lines)


def moment(profiler: Profiler | None) -> float:
    """The time by a profiler's clock; 0 if there is no profiler."""
    return 0.0 if profiler is None else profiler.clock()
