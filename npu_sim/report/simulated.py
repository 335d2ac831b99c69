"""Data of a simulated run for a report: hardware units over time, each call's waits, bytes and energy, and sweeps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from npu_compiler import CompiledProgram
    from npu_model import CallResult, Chip, Result
    from npu_model.analysis.scratchpad import Resident
    from npu_model.machine.machine import Span

MOST_SPANS = 20_000  # in a page; with more, neighbours on an engine are drawn as one


def simulated_facts(program: CompiledProgram, chip: Chip) -> dict[str, Any]:
    """Simulate a program on a chip and return the run as JSON data, with the units below.

    Returns:
        `chip`, `clock_hz`, `cycles`; `run`, seconds, and `least`, a lower bound for them. `utilization` of the matrix
        engine, `bandwidth_utilization` of DRAM. `roof`: bandwidth in bytes/s, and FLOP/s by dtype. `busy`: engine
        (hardware unit) → seconds. `computing` and `stalls` (cause → seconds), which add up to the run. `energy`: part →
        joules, or None if the chip's file declares no energies. `outside`: `DRAM`, or `link` on a chip without.
        `traffic`: memory level → bytes. `compulsory` and `kept`: bytes that must be transferred, and bytes of weights
        that stay on the chip. `calls`: see `_call`. `tracks`: engine → `[call, start, cycles]` for each time that it
        was busy, in cycles; neighbours closer than `gap`, in seconds, are joined. `scratchpad`: its bytes, and areas
        `[first byte, last byte, start, end, call, content]`, where start and end are cycles.

    Raises the errors that `npu_model.simulate` does.
    """
    from npu_model.analysis.scratchpad import residents
    from npu_model.analysis.simulation import lowered, result_of
    from npu_model.machine.machine import Machine

    tiles = lowered(program, chip)
    result = result_of(program, chip, tiles, Machine(chip, tiles).run(spans=True))
    return _facts(result, residents(tiles, result.calls, result.cycles))


def sweep_facts(
    program: CompiledProgram,
    chip: Chip,
    ranges: str,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """Simulate a program on a chip and on each variant of it in a sweep, and return the results as JSON data.

    Args:
        ranges: The variants, in the form that `parse_sweep` reads.
        progress: Called with (chips done, chips).

    Returns:
        `program` and `chip`: names. `knobs`: names of the numbers of the chip's file that were varied. `points`: a row
        for each chip, from `Point.to_dict`; the first is the chip itself.
    """
    from npu_model.analysis.sweep import parse_sweep, sweep

    chips = parse_sweep(ranges, chip)
    knobs = list(chips[0][0])
    own = {name: _setting(chip, name) for name in knobs}
    points = sweep(program, [(own, chip), *(each for each in chips if each[0] != own)], progress)
    return {
        "program": program.name,
        "chip": chip.name,
        "knobs": knobs,
        "points": [point.to_dict() for point in points],
    }


def _setting(chip: Chip, knob: str) -> float:
    from npu_model.analysis.sweep import KNOBS

    table, key = KNOBS[knob]
    value: float = getattr(chip if table is None else getattr(chip, table), key)
    return value


def _facts(result: Result, taken: Sequence[Resident]) -> dict[str, Any]:
    chip, seconds = result.chip, result.chip.seconds
    calls = [_call(call, chip) for call in result.calls]
    gap, tracks = _tracks(result.spans, result.cycles)
    has_energy = result.energy.total > 0
    if not has_energy:
        for call in calls:
            call["energy"] = None
    return {
        "chip": chip.name,
        "clock_hz": 1e9 * chip.clock_ghz,
        "cycles": result.cycles,
        "run": result.seconds,
        "least": seconds(result.roofline_cycles),
        "utilization": result.utilization,
        "bandwidth_utilization": result.bandwidth_utilization,
        "roof": {
            "bandwidth": 1e9 * chip.outside.bandwidth_gb_s,
            "flops": {
                dtype: 2e9 * chip.clock_ghz * chip.peak_macs(dtype)
                for dtype in sorted({dtype for call in result.calls for dtype in call.counts.macs})
            },
        },
        "busy": {engine: seconds(cycles) for engine, cycles in result.busy.items()},
        "computing": sum(call["computing"] for call in calls),
        "stalls": {str(cause): seconds(cycles) for cause, cycles in result.stalls.items()},
        "energy": vars(result.energy) if has_energy else None,
        "outside": chip.outside_name,
        "traffic": _traffic(result.calls, chip),
        "compulsory": result.compulsory_bytes,
        "kept": result.kept_weight_bytes,
        "calls": calls,
        "gap": seconds(gap),
        "tracks": tracks,
        "scratchpad": {
            "bytes": chip.sram.size,
            "areas": [[e.first, e.last, e.start, e.end, e.call, str(e.content)] for e in taken],
        },
    }


def _call(call: CallResult, chip: Chip) -> dict[str, Any]:
    """Return a simulated kernel call as JSON data.

    `own` is the seconds that the call adds to the run, of which `computing` and `stalls` are parts; `start` and `end`
    are the cycles at which its first instruction starts and its last one ends. `busy` is in seconds, `traffic` and
    `used` (of the scratchpad) in bytes, `energy` in joules. `engine` is the hardware unit that is busy longest during
    the call.
    """
    counts, seconds = call.counts, chip.seconds
    return {
        "own": seconds(call.cycles),
        "cycles": call.cycles,
        "start": call.start,
        "end": call.end,
        "computing": seconds(counts.progress),
        "stalls": {str(cause): seconds(cycles) for cause, cycles in counts.stalls.items() if cycles},
        "busy": {engine: seconds(cycles) for engine, cycles in counts.busy.items() if cycles},
        "engine": max(counts.busy, key=lambda engine: counts.busy[engine], default=""),
        "dtype": ", ".join(counts.macs),
        "macs": call.macs,
        "traffic": _traffic([call], chip),
        "energy": {**vars(call.energy), "static": chip.energy.static_watts * seconds(call.cycles)},
        "instructions": counts.instructions,
        "tiles": call.tiles,
        "tile": call.tile,
        "used": call.sram_used,
    }


def _traffic(calls: Sequence[CallResult], chip: Chip) -> dict[str, int]:
    shared = {
        "L2, read": sum(call.counts.l2_read for call in calls),
        "L2, written": sum(call.counts.l2_written for call in calls),
    }
    return {
        f"{chip.outside_name}, read": sum(call.counts.dram_read for call in calls),
        f"{chip.outside_name}, written": sum(call.counts.dram_written for call in calls),
        **({} if chip.l2 is None else shared),
        "scratchpad": sum(call.counts.sram_bytes for call in calls),
    }


def _tracks(spans: Sequence[Span], cycles: int) -> tuple[int, dict[str, list[list[int]]]]:
    """Return the gap in cycles up to which neighbouring spans were joined, and the busy spans of each engine.

    Spans of one call on one engine (hardware unit) are joined so that a page holds at most `MOST_SPANS`.
    """
    ordered = sorted(spans, key=lambda span: (span.engine, span.start))
    rows = [(engine, list(group)) for engine, group in groupby(ordered, key=lambda span: span.engine)]
    gap = 0
    while True:
        tracks = {engine: _joined(group, gap) for engine, group in rows}
        if sum(map(len, tracks.values())) <= MOST_SPANS or gap > cycles:
            return gap, tracks
        gap = max(1, cycles // 100_000, 2 * gap)


def _joined(spans: Sequence[Span], gap: int) -> list[list[int]]:
    joined: list[list[int]] = []
    for span in spans:
        if joined and joined[-1][0] == span.section and span.start - sum(joined[-1][1:]) <= gap:
            joined[-1][2] = max(joined[-1][2], span.end - joined[-1][1])
        elif span.end > span.start:
            joined.append([span.section, span.start, span.end - span.start])
    return joined
