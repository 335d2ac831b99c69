"""Records of a profiler, and their timeline: host, transfers, devices and counters.

All times are the host's. A device that measures a kernel by its own clock tells only its duration, so the kernel's
slice ends when the host saw it end.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from npu_compiler.program.kernels import KernelCall
from npu_compiler.program.plan import ExecutionPlan
from npu_compiler.program.views import View
from npu_compiler.timeline import Timeline
from npu_runtime.hardware import Ceilings, Hardware, PhaseTime

HOST = "host"
_MOST_OPERANDS = 16  # of a call that a slice lists: a resident kernel has hundreds


@dataclass(frozen=True, slots=True)
class CallTime:
    """The time of one kernel call in one run.

    Attributes:
        plan: The plan that contains the call, as number `index`.
        ended: Time at which it had ended, by the profiler's clock.
        seconds: Seconds that it took, by the device's clock if it has one.
        phases: Activity of the device's parts, if the device recorded that; of the first run only.
    """

    plan: ExecutionPlan
    index: int
    hardware: Hardware
    ended: float
    seconds: float
    phases: Sequence[PhaseTime] = ()

    @property
    def call(self) -> KernelCall:
        return self.plan.calls[self.index]


@dataclass(frozen=True, slots=True)
class Span:
    """Activity of the host, or a transfer, from `start` to `end` by the host's clock.

    Attributes:
        args: Further facts, JSON values by name.
    """

    name: str
    start: float
    end: float
    args: Mapping[str, Any]


def timeline_of(calls: Sequence[CallTime], host_spans: Sequence[Span], transfer_spans: Sequence[Span]) -> Timeline:
    """The timeline of some records; its zero is the beginning of the earliest record."""
    devices = {id(timed.hardware): timed.hardware for timed in calls}
    timeline = Timeline({"devices": [hardware.device for hardware in devices.values()]})
    starts = [span.start for span in (*host_spans, *transfer_spans)] + [timed.ended - timed.seconds for timed in calls]
    builder = _Builder(timeline, min(starts, default=0.0))
    builder.add_spans("runs", host_spans)
    builder.add_spans("transfers", transfer_spans)
    for hardware in devices.values():
        builder.add_device(hardware, [timed for timed in calls if timed.hardware is hardware])
    return timeline


def arena_use(plan: ExecutionPlan) -> list[int]:
    """Bytes of the arena's buffers that hold values during each call."""
    changes = [0] * (len(plan.calls) + 1)
    for buffer in plan.buffers.values():
        if buffer.kind == "arena" and buffer.last_use >= 0:  # else only the prologue uses it
            changes[max(buffer.first_use, 0)] += buffer.size_bytes
            changes[buffer.last_use + 1] -= buffer.size_bytes
    return list(accumulate(changes[:-1]))


class _Builder:
    def __init__(self, timeline: Timeline, zero: float) -> None:
        self._timeline, self._zero = timeline, zero

    def _at(self, seconds: float) -> float:
        """A time by the host's clock, converted to microseconds since the timeline's zero."""
        return max(1e6 * (seconds - self._zero), 0.0)

    def add_spans(self, thread: str, spans: Iterable[Span]) -> None:
        track = self._timeline.track(HOST, thread)
        for span in spans:
            start = self._at(span.start)
            self._timeline.slice(track, span.name, start, max(self._at(span.end) - start, 0.0), span.args)

    def add_device(self, hardware: Hardware, calls: Sequence[CallTime]) -> None:
        process, ceilings = hardware.device, hardware.ceilings
        track = self._timeline.track(process, "kernels")
        arenas = {id(timed.plan): arena_use(timed.plan) for timed in calls}
        free = 0.0  # when the call before had ended: two clocks may disagree by a little
        for timed in calls:
            start = max(self._at(timed.ended - timed.seconds), free)
            duration = 1e6 * timed.seconds
            free = start + duration
            self._timeline.slice(track, timed.call.kernel, start, duration, call_facts(timed, ceilings))
            self._timeline.counter(process, "arena", start, arenas[id(timed.plan)][timed.index], "bytes in use")
            rate = timed.call.bytes_moved / timed.seconds / 1e9 if timed.seconds else 0.0
            self._timeline.counter(process, "bandwidth", start, rate, "GB/s")
            self._timeline.counter(process, "bandwidth", free, 0.0, "GB/s")
            for phase in timed.phases:
                part = self._timeline.track(f"{process}, inside of kernels", phase.part)
                self._timeline.slice(part, phase.name, start + phase.start / 1000, phase.duration / 1000)
        if calls:
            self._timeline.counter(process, "arena", free, 0.0, "bytes in use")


def call_facts(timed: CallTime, ceilings: Ceilings) -> dict[str, Any]:
    """A kernel call's entry in a trace: its node, tensors, bytes and operations, their rates, and the roofline."""
    call, seconds = timed.call, timed.seconds
    facts: dict[str, Any] = {
        "node": call.node,
        "inputs": _listed(call.inputs),
        "outputs": _listed(call.outputs),
        "bytes": call.bytes_moved,
        "FLOP": call.flops,
    }
    if seconds > 0:
        facts |= {"GB/s": call.bytes_moved / seconds / 1e9, "GFLOP/s": call.flops / seconds / 1e9}
        if (least := ceilings.least_seconds(call)) is not None:
            facts |= {"share of the roofline": least[0] / seconds, "roofline limit": least[1]}
    return facts


def _listed(views: Sequence[View]) -> list[str]:
    texts = [f"{view.dtype}{list(view.shape)}" for view in views[:_MOST_OPERANDS]]
    return texts + [f"and {len(views) - _MOST_OPERANDS} more"] * (len(views) > _MOST_OPERANDS)
