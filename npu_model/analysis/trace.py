"""A simulation as a timeline: what each unit of the chip did when."""

from __future__ import annotations

from npu_compiler.timeline import Timeline
from npu_model.result import CallResult, Result
from npu_model.simulator import Span


def timeline(result: Result) -> Timeline:
    """A track for each unit, a slice for each call on it, and counters of DRAM's bandwidth and of SRAM in use."""
    chip = result.chip
    process = f"chip {chip.name}"
    trace = Timeline({"program": result.program, "chip": chip.name, "latency_us": 1e6 * result.seconds})
    units = ("matrix arrays", "vector unit", "DMA in", "DMA out")
    tracks = {name: trace.track(process, name) for name in units}

    def at(cycles: float) -> float:
        return 1e6 * chip.seconds(cycles)

    for call, used in zip(result.calls, result.sram_used, strict=True):
        times, facts = call.times, _facts(call, result)
        for name, span in zip(units, (times.arrays, times.vector, times.loading, times.storing), strict=True):
            if span.start >= 0:
                trace.slice(tracks[name], call.node, at(span.start), at(span.end) - at(span.start), facts)
        trace.counter(process, "SRAM bytes in use", at(call.start), used + result.tile_bytes)
        _bandwidth(trace, process, result, times.loading, call.constant_bytes + call.input_bytes)
    return trace


def _bandwidth(trace: Timeline, process: str, result: Result, span: Span, size: int) -> None:
    seconds = result.chip.seconds(span.end - span.start)
    if size and seconds > 0:
        trace.counter(process, "GB/s from DRAM", 1e6 * result.chip.seconds(span.start), 1e-9 * size / seconds)
        trace.counter(process, "GB/s from DRAM", 1e6 * result.chip.seconds(span.end), 0.0)


def _facts(call: CallResult, result: Result) -> dict[str, object]:
    chip = result.chip
    peak = call.macs / chip.peak_macs(call.dtype) if call.macs else 0.0
    busy = max(call.array_cycles, call.vector_cycles)
    return {
        "kernel": call.kernel,
        "tiles": call.tiles,
        "tile": call.shape,
        "MACs": call.macs,
        "share of the peak": round(peak / busy, 4) if busy else 0.0,
        "DRAM bytes": call.dram_bytes,
        "SRAM bytes": call.sram_bytes,
        "stalls (us)": {str(cause): round(1e6 * chip.seconds(c), 3) for cause, c in call.stalls.items() if c},
    }
