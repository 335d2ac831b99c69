"""`Profiler`: where the time of a run goes, kernel by kernel."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Entry:
    """Totals of one kernel or transfer: seconds, calls, and bytes (transfers only)."""

    seconds: float = 0.0
    calls: int = 0
    bytes: int = 0


@dataclass
class Profiler:
    """Passed to `Executor.run` or `DAGExecutor.execute`; times add up over runs.

    A profiled run synchronizes after every kernel, so its total is larger than an unprofiled run's.
    """

    kernels: dict[str, Entry] = field(default_factory=lambda: defaultdict(Entry))
    transfers: dict[str, Entry] = field(default_factory=lambda: defaultdict(Entry))
    total: float = 0.0
    runs: int = 0

    def add_kernel(self, name: str, seconds: float) -> None:
        entry = self.kernels[name]
        entry.seconds += seconds
        entry.calls += 1

    def add_transfer(self, name: str, seconds: float, size: int) -> None:
        entry = self.transfers[name]
        entry.seconds += seconds
        entry.calls += 1
        entry.bytes += size

    def add_run(self, seconds: float) -> None:
        self.total += seconds
        self.runs += 1

    def to_dict(self) -> dict[str, Any]:
        """Milliseconds per run, most expensive first."""
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
                {"name": name, "ms": 1e3 * e.seconds / runs, "calls": e.calls / runs, "bytes": e.bytes / runs}
                for name, e in self.transfers.items()
            ],
        }

    def report(self) -> str:
        """A table: kernel, milliseconds and calls per run, share."""
        data = self.to_dict()
        lines = [f"{'kernel':36} {'ms/run':>10} {'calls':>7} {'share':>7}"]
        for row in data["kernels"]:
            lines.append(f"{row['name']:36} {row['ms']:10.3f} {row['calls']:7.0f} {row['share']:7.1%}")
        for row in data["transfers"]:
            lines.append(f"{row['name']:36} {row['ms']:10.3f} {row['calls']:7.0f} {row['bytes']:.0f} bytes")
        lines.append(f"{'total (with profiling)':36} {data['total_ms']:10.3f}")
        return "\n".join(lines)
