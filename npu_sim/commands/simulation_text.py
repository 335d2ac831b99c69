"""The text that the command `simulate` prints for a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable
from typing import TYPE_CHECKING, Any

from npu_sim.commands.units import format_time

if TYPE_CHECKING:
    from npu_model import CallResult, Chip, Result

_ROWS = 12  # of the table of calls
_SLOW = 0.25  # of the rate of the fastest dtype


def as_json(results: list[Result], chip: Chip, tokens: int | None) -> dict[str, Any]:
    if tokens is None:
        return results[0].to_dict()
    prefill, decode = results
    return {
        "chip": chip.name,
        "prompt_tokens": tokens,
        "time_to_first_token_us": 1e6 * prefill.seconds,
        "tokens_per_second": 1 / decode.seconds,
        "prefill": prefill.to_dict(),
        "decode": decode.to_dict(),
    }


def result_lines(result: Result, full: bool) -> list[str]:
    """Format a run as text: totals, stalls, energy, and the kernel calls that take the most time.

    Args:
        full: List every call by itself, in order.
    """
    from npu_compiler.program.describe import format_bytes

    chip, seconds, way = result.chip, result.chip.seconds, result.chip.outside_name
    energy = result.energy
    named = [(cause.replace("dram", way.lower()), cycles) for cause, cycles in result.stalls.items()]
    stalls = ", ".join(f"{cause} {cycles / result.cycles:.1%}" for cause, cycles in named)
    busy = ", ".join(f"{engine} {cycles / result.cycles:.1%}" for engine, cycles in result.busy.items())
    kept = f", {format_bytes(result.kept_weight_bytes)} of weights kept on the chip" if result.kept_weight_bytes else ""
    parts = ", ".join(f"{name} {1e3 * value:.3g}" for name, value in vars(energy).items() if value)
    products = ", ".join(f"{dtype} {count / result.macs:.1%}" for dtype, count in _macs([result]).items())
    lines = [
        f"{result.program} on {chip.name}: {format_time(result.seconds)}, {result.cycles:.0f} cycles "
        f"(the roofline allows {format_time(seconds(result.roofline_cycles))})",
        f"  in use   matrix peak {result.utilization:.1%}, {way} bandwidth {result.bandwidth_utilization:.1%}",
        *([f"  products {products}"] if products else []),
        f"  busy     {busy}",
        f"  stalls   {stalls}",
        f"  {way:<8} {format_bytes(result.dram_bytes)}, at least {format_bytes(result.compulsory_bytes)}{kept}",
        *weight_lines(result),
        *([f"  L2       {format_bytes(result.l2_bytes)} read and written"] if chip.l2 else []),
        f"  SRAM     {format_bytes(result.sram_bytes)} read and written; a call uses up to "
        f"{format_bytes(result.sram_used)}",
        *([f"  network  {format_bytes(result.network_bytes)} moved between cores"] if chip.cores else []),
        *([f"  energy   {1e3 * energy.total:.3g} mJ: {parts}"] if energy.total else []),
        f"  {'time':>10} {'share':>6}  {'calls':>5} {'tiles':>7}  {'tile':20} {way:>10}  {'engine':8}kernel, node",
    ]
    groups = [[call] for call in result.calls] if full else _alike(result.calls)
    for calls in groups if full else groups[:_ROWS]:
        first, cycles = calls[0], sum(call.cycles for call in calls)
        lines.append(
            f"  {format_time(seconds(cycles)):>10} {cycles / result.cycles:6.1%}  {len(calls):5} {first.tiles:7}  "
            f"{first.tile:20.20} {format_bytes(first.dram_bytes):>10}  "
            f"{_busiest(first):7} {first.kernel}, {first.node}"
        )
    if not full and len(groups) > _ROWS:
        rest = sum(len(calls) for calls in groups[_ROWS:])
        lines.append(f"  … and {rest} more calls (--full)")
    return lines


def weight_lines(result: Result) -> list[str]:
    """A line with the number of weights, and their bytes in DRAM, that are sparse, compressed, or stored as they are.

    There is none for a chip that stores all weights as they are.
    """
    from npu_compiler.program.describe import format_bytes

    forms: dict[str, list[int]] = {}
    for own in result.weights:
        form = own.pattern or ("compressed" if own.stored else "as they are")
        forms.setdefault(form, []).append(own.dram_bytes)
    parts = [f"{len(sizes)} {form} ({format_bytes(sum(sizes))})" for form, sizes in forms.items()]
    return [f"  weights  {', '.join(parts)}"] if parts else []


def slow_dtype(results: Iterable[Result]) -> str | None:
    """Return a warning if the runs multiply in a dtype at a quarter of the chip's fastest rate or less, else None."""
    results = list(results)
    chip, counts = results[0].chip, _macs(results)
    if chip.matrix is None or not counts:
        return None
    rates = chip.matrix.rates
    dtype = min(counts, key=lambda each: rates.get(each, 0.0))
    fastest = max(rates, key=lambda each: rates[each])
    if not 0 < rates.get(dtype, 0.0) <= _SLOW * rates[fastest]:
        return None
    return f"{chip.name} multiplies {dtype} at {rates[dtype] / rates[fastest]:.3g} times the rate of {fastest}"


def _macs(results: Iterable[Result]) -> dict[str, int]:
    """Return dtype → total multiply-accumulates of the runs, without dtypes that have none."""
    total: Counter[str] = Counter()
    for result in results:
        for call in result.calls:
            total.update(call.counts.macs)
    return {dtype: count for dtype, count in total.items() if count}


def _busiest(call: CallResult) -> str:
    """Return the engine (hardware unit) that is busy longest during a kernel call; empty if none is busy."""
    busy = call.counts.busy
    return max(busy, key=lambda engine: busy[engine]) if busy else ""


def _alike(calls: Iterable[CallResult]) -> list[list[CallResult]]:
    """Group calls of the same kernel, work and tiles; groups that take the most time in total come first."""
    groups: dict[Hashable, list[CallResult]] = {}
    for call in calls:
        key = (call.kernel, call.macs, call.counts.operations, call.tiles, call.tile, call.dram_bytes)
        groups.setdefault(key, []).append(call)
    return sorted(groups.values(), key=lambda group: (-sum(call.cycles for call in group), group[0].index))
