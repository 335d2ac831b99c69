"""Charts of simulations, drawn by matplotlib: utilization over time and roofline of a run, or the chips of a sweep."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from npu_compiler.errors import InputError
from npu_compiler.files import write_atomically
from npu_compiler.installing import install_command
from npu_model.analysis.result import Result
from npu_model.analysis.sweep import Point
from npu_model.isa.instructions import is_transfer

SUFFIXES = (".png", ".svg", ".pdf")
_STEPS = 200  # intervals of the picture over time
_COLORS = {"matrix": "#2563eb", "vector": "#16a34a", "output": "#7c3aed", "dma": "#d97706", "best": "#dc2626"}


def check_picture(path: Path) -> None:
    """Raise `InputError` if matplotlib is not installed or does not draw files with that suffix."""
    if path.suffix.lower() not in SUFFIXES:
        raise InputError(f"cannot draw '{path}': choose a name that ends in {', '.join(SUFFIXES)}")
    _pyplot()


def draw_run(result: Result, path: Path) -> None:
    """Draw the utilization of the engines over time, and the roofline with a point for each kernel call.

    Args:
        result: A result that was made with spans.

    Raises:
        InputError: matplotlib is not installed, or the file cannot be written.
    """
    plot = _pyplot()
    figure, (over_time, roofline) = plot.subplots(1, 2, figsize=(13, 4.6), layout="constrained")
    _draw_utilization(over_time, result)
    _draw_roofline(roofline, result)
    figure.suptitle(f"{result.program} on {result.chip.name}: {1e3 * result.seconds:.3g} ms")
    _save(plot, figure, path)


def draw_sweep(points: Sequence[Point], name: str, path: Path) -> None:
    """Draw the chips of a sweep by area, latency and energy, with the Pareto front as a line.

    Args:
        name: Title: the program's name.

    Raises:
        InputError: matplotlib is not installed, or the file cannot be written.
    """
    plot = _pyplot()
    figure, axes = plot.subplots(figsize=(8, 5), layout="constrained")
    drawn = [point for point in points if not point.problem]
    x, y = [point.area for point in drawn], [1e3 * point.seconds for point in drawn]
    dots = axes.scatter(x, y, c=[1e3 * point.joules for point in drawn], cmap="viridis", s=28, zorder=3)
    figure.colorbar(dots, label="energy (mJ)")
    front = sorted((point for point in drawn if point.is_best), key=lambda point: point.area)
    axes.plot([p.area for p in front], [1e3 * p.seconds for p in front], color=_COLORS["best"], label="Pareto front")
    for point in front:
        text = ", ".join(f"{key} {_short(value)}" for key, value in point.values.items())
        where = (point.area, 1e3 * point.seconds)
        axes.annotate(text, where, textcoords="offset points", xytext=(4, 5), fontsize=6.5)
    axes.set(xscale="log", yscale="log", xlabel="area (mm², rough)", ylabel="latency (ms)", title=name)
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    _save(plot, figure, path)


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise InputError(f"a picture needs matplotlib: {install_command('charts')}") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot

    return matplotlib.pyplot


def _save(plot: Any, figure: Any, path: Path) -> None:
    content = io.BytesIO()
    figure.savefig(content, format=path.suffix[1:].lower(), dpi=150)
    plot.close(figure)
    try:
        write_atomically(path, content.getvalue())
    except OSError as error:
        raise InputError(f"cannot write '{path}': {error.strerror or error}") from error


def _short(value: float) -> str:
    for unit, size in (("G", 1024**3), ("M", 1024**2), ("K", 1024)):
        if value >= size and value % size == 0:
            return f"{value / size:g}{unit}"
    return f"{value:g}"


def _draw_utilization(axes: Any, result: Result) -> None:
    import numpy as np

    chip = result.chip
    edges = np.linspace(0.0, result.cycles, _STEPS + 1)
    lines: dict[str, Any] = {}
    for span in result.spans:
        name = "dma" if is_transfer(span.engine) else span.engine
        busy = lines.setdefault(name, np.zeros(_STEPS))
        first, last = (min(_STEPS - 1, int(cycle / result.cycles * _STEPS)) for cycle in (span.start, span.end))
        part = slice(first, last + 1)
        busy[part] += np.clip(np.minimum(edges[1:][part], span.end) - np.maximum(edges[:-1][part], span.start), 0, None)
    width = result.cycles / _STEPS
    labels = {"matrix": "matrix engine", "vector": "vector engine", "output": "output stage", "dma": "DMA, any queue"}
    for name, values in sorted(lines.items()):
        shares_of_step = 100 * np.minimum(values / width, 1.0)
        axes.stairs(shares_of_step, 1e3 * chip.seconds(1) * edges, color=_COLORS[name], label=labels[name], lw=1.3)
    axes.set(xlabel="time (ms)", ylabel="in use (%)", ylim=(0, 105), xlim=(0, 1e3 * result.seconds))
    axes.legend(loc="upper right", fontsize=8)
    axes.grid(alpha=0.3)


def _draw_roofline(axes: Any, result: Result) -> None:
    import numpy as np

    chip = result.chip
    products = [call for call in result.calls if call.macs and call.dram_bytes]
    dtypes = sorted({dtype for call in products for dtype in call.counts.macs})
    for index, dtype in enumerate(dtypes):
        mine = [call for call in products if dtype in call.counts.macs]
        intensity = [call.macs / call.dram_bytes for call in mine]
        rate = [1e-12 * call.macs / max(chip.seconds(call.end - call.start), 1e-15) for call in mine]
        axes.scatter(intensity, rate, s=14, alpha=0.7, color=f"C{index}", label=f"calls in {dtype}", zorder=3)
        peak = 1e-12 * chip.peak_macs(dtype) * chip.clock_ghz * 1e9
        x = np.geomspace(0.1, max(1e4, 2 * max(intensity)), 100)
        roof = np.minimum(peak, 1e-3 * chip.outside.bandwidth_gb_s * x)
        axes.plot(x, roof, color=f"C{index}", lw=1.2)
    axes.set(xscale="log", yscale="log", xlabel="MACs per byte of DRAM traffic", ylabel="10¹² MACs per second")
    axes.grid(alpha=0.3, which="both")
    if products:
        axes.legend(fontsize=8)


__all__ = ["check_picture", "draw_run", "draw_sweep"]
