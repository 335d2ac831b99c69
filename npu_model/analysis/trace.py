"""Simulated runs as timelines, which show the time span of each instruction on each engine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

from npu_compiler.timeline import Timeline
from npu_model.analysis.result import CallResult, Result
from npu_model.analysis.tenants import SharedRun
from npu_model.machine.machine import Span

MOST_SLICES = 50_000  # with more instructions than this, a call is one slice on an engine


def timeline(*results: Result) -> Timeline:
    """A trace with a track for each engine, a slice for each instruction, and counters of DRAM bandwidth and SRAM use.

    Args:
        results: Consecutive runs on one chip, made with spans.
    """
    chip = results[0].chip
    title = ", ".join(dict.fromkeys(result.program for result in results))
    seconds = sum(result.seconds for result in results)
    trace = Timeline({"program": title, "chip": chip.name, "latency_us": 1e6 * seconds})
    begin = 0.0
    for result in results:
        add_run(trace, result, begin)
        begin += 1e6 * result.seconds
    return trace


def add_run(trace: Timeline, result: Result, begin: float) -> None:
    """Add a run, made with spans, to a trace; it begins at the time `begin`, in microseconds."""
    chip, process = result.chip, f"chip {result.chip.name}"
    tracks = {name: trace.track(process, name) for name in sorted({span.engine for span in result.spans})}
    for span in _slices(result.spans):
        call = result.calls[span.section]
        start, length = (1e6 * chip.seconds(cycles) for cycles in (span.start, span.end - span.start))
        trace.slice(tracks[span.engine], f"{span.name} {call.node}", begin + start, length, _facts(call, result))
    for call in result.calls:
        at, end = (begin + 1e6 * chip.seconds(cycles) for cycles in (call.start, call.end))
        trace.counter(process, "SRAM bytes in use", at, call.sram_used)
        if call.dram_bytes and end > at:
            trace.counter(process, "GB/s from and to DRAM", at, 1e-3 * call.dram_bytes / (end - at))
            trace.counter(process, "GB/s from and to DRAM", end, 0.0)


def shared_timeline(run: SharedRun) -> Timeline:
    """A trace of programs that share a chip, with a track for each engine and a slice for each instruction."""
    chip, process = run.chip, f"chip {run.chip.name}"
    names = [tenant.alone.program for tenant in run.tenants]
    trace = Timeline({"program": ", ".join(names), "chip": chip.name, "latency_us": 1e6 * run.seconds})
    tracks = {name: trace.track(process, name) for name in sorted({span.engine for _, _, span in run.spans})}
    for number, node, span in run.spans:
        start, length = (1e6 * chip.seconds(cycles) for cycles in (span.start, span.end - span.start))
        facts = {"program": names[number], "tenant": number}
        trace.slice(tracks[span.engine], f"{span.name} {node}", start, length, facts)
    return trace


def _slices(spans: Sequence[Span]) -> Iterable[Span]:
    """The spans; if there are more than `MOST_SLICES`, those of each call on an engine are merged into one."""
    if len(spans) <= MOST_SLICES:
        return spans
    ordered = sorted(spans, key=lambda span: (span.engine, span.section))
    groups = (list(group) for _, group in groupby(ordered, key=lambda span: (span.engine, span.section)))
    return [
        Span(g[0].section, g[0].engine, f"{len(g)} instructions of", min(s.start for s in g), max(s.end for s in g))
        for g in groups
    ]


def _facts(call: CallResult, result: Result) -> dict[str, object]:
    counts, chip = call.counts, result.chip
    return {
        "kernel": call.kernel,
        "tiles": call.tiles,
        "tile": call.tile,
        "MACs": call.macs,
        "DRAM bytes": call.dram_bytes,
        "SRAM bytes": counts.sram_bytes,
        "stalls (us)": {str(cause): round(1e6 * chip.seconds(c), 3) for cause, c in counts.stalls.items() if c},
    }


__all__ = ["add_run", "shared_timeline", "timeline"]
