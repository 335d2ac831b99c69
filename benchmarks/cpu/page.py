"""The results of the CPU benchmark as tables in the terminal, as a Markdown page and as a chart."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.cuda.page import milliseconds, plain_ticks
from benchmarks.figures import OURS, Figure, Run

WRONG = 0.1  # relative error from which on a contender's result counts as wrong
QUANTIZED = ("llama.cpp Q8_0", "llama.cpp Q4_1")  # for information: they compute with fewer bits than all others
LANGUAGE_TASKS = ("decode", "prefill")
QUANTIZED_TASKS = ("q4_1", "q8_0")
FAMILIES = {
    "PyTorch eager": "#999999",
    "torch.compile": "#e69f00",
    "ONNX Runtime": "#56b4e9",
    "OpenVINO": "#cc79a7",
    "llama.cpp": "#009e73",
}  # with their colours, distinguishable with colour blindness

_PANEL_INCHES, _ROW_INCHES = 1.1, 0.26  # height of a chart's panel without its rows, and of a row

_HEAD = """\
# The CPU device, measured

`python -m benchmarks.cpu` measures what this page shows: our CPU device against the libraries that a user
would pick, on the same weights and the same number of threads. All contenders of a row ran in one process, in turns.
Milliseconds are medians; the best of ours is bold.

SmolLM2-135M decodes one token at position 128 of a cache of 512, or reads a prompt of 128 tokens. llama.cpp's times are
those that its server reports; its quantized files are shown for information and do not count as best peer, since all
others have weights of at least 16 bits. `torch.compile` treats the weights of the networks as constants (`freezing`).
"OpenVINO default" computes at the precision that OpenVINO chooses for the CPU, where that is not float32.

With weights in few bits, SmolLM2-135M Q4_1 and Q8_0, we and llama.cpp run the same file: the one that is shipped, and
one whose matrices are converted to Q8_0. We compute as with bfloat16, and llama.cpp with activations in 8 bits.

The floor is a bound from what the machine does at best in the same run: for decode, the bytes of our weights as stored
at the bandwidth that PyTorch's sum reads; for the rest, the FLOP at the rate of PyTorch's float32 matrix product.
Winograd convolutions do fewer FLOP than that counts, and 16-bit matrix units and integers do more per second, so a time
can be below it. *Peer / ours* is the time of the best peer divided by our best: above 1, ours is faster.

<!-- chart: cpu -->
"""


def is_right(figure: Figure, name: str) -> bool:
    """Whether a contender's relative error with respect to PyTorch in float32 is at most `WRONG`."""
    return figure.errors[name] <= WRONG


def best(figure: Figure, ours: bool) -> tuple[str, float] | None:
    """Return the fastest contender and its milliseconds; wrong and quantized contenders do not count.

    None if there is no such contender.

    Args:
        ours: Consider our contenders only; otherwise only the peers (other libraries).
    """
    entries = [
        (name, ms)
        for name, ms in figure.ms.items()
        if name.startswith(OURS) == ours and name not in QUANTIZED and is_right(figure, name)
    ]
    return min(entries, key=lambda entry: entry[1], default=None)


def ratio(figure: Figure) -> float | None:
    """The best peer's time divided by our best; None if either was not measured."""
    peer, own = best(figure, ours=False), best(figure, ours=True)
    return peer[1] / own[1] if peer and own else None


def title(figure: Figure) -> str:
    if figure.task in LANGUAGE_TASKS:
        return f"{figure.model} {figure.task}"
    if figure.task in QUANTIZED_TASKS:
        return (
            f"{figure.model} prefill of {figure.case['tokens']}"
            if "tokens" in figure.case
            else f"{figure.model} decode"
        )
    return f"{figure.model}, batch {figure.case['batch']}"


def terminal_table(figure: Figure) -> Table:
    """Return a table with a row for each contender."""
    table = Table(title=f"{title(figure)}: floor {milliseconds(figure.floor_ms)} ms ({figure.floor})")
    for heading in ("contender", "median ms", "× ours", "× floor", "relative error"):
        table.add_column(heading, justify="left" if heading == "contender" else "right")
    own = best(figure, ours=True)
    for name, ms in figure.ms.items():
        error = f"{figure.errors[name]:.1e}{'' if is_right(figure, name) else ' WRONG'}"
        times_ours = "" if own is None else f"{ms / own[1]:.2f}"
        table.add_row(name, milliseconds(ms), times_ours, f"{ms / figure.floor_ms:.2f}", error)
    return table


def document(runs: Sequence[Run]) -> str:
    """Return the Markdown page for runs on one or several machines; its chart is drawn when the site is built."""
    return "\n".join([_HEAD, *(_section(run) for run in runs)])


def _section(run: Run) -> str:
    machine = run.machine
    parts = [
        f"## {_machine(run)}\n",
        f"Measured on {machine['date']}. PyTorch's sum reads {machine['read_gb_per_s']:.1f} GB/s; its float32 matrix "
        f"product runs at {machine['float32_gflop_per_s']:.0f} GFLOP/s. Versions: "
        + ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
        + ".\n",
    ]
    language = [figure for figure in run.figures if figure.task in LANGUAGE_TASKS]
    quantized = [figure for figure in run.figures if figure.task in QUANTIZED_TASKS]
    networks = [figure for figure in run.figures if figure.task not in LANGUAGE_TASKS + QUANTIZED_TASKS]
    for figures in (language, quantized, networks):
        if figures:
            parts += [_times(run, figures), _errors(figures)]
    return "\n".join(parts)


def _machine(run: Run) -> str:
    return f"{run.machine['cpu']}, {run.machine['level']}, {run.machine['threads']} threads"


def _names(figures: Sequence[Figure]) -> list[str]:
    """Return the contenders of any of the figures, in the order in which they were timed."""
    return list(dict.fromkeys(name for figure in figures for name in figure.ms))


def _times(run: Run, figures: Sequence[Figure]) -> str:
    names = _names(figures)
    lines = [
        f"| {_machine(run)}: ms | {' | '.join(names)} | floor | best peer | peer / ours |",
        "|---|" + "--:|" * (len(names) + 1) + "---|--:|",
    ]
    for figure in figures:
        own, peer, gain = best(figure, ours=True), best(figure, ours=False), ratio(figure)
        cells = [_cell(figure, name, own is not None and name == own[0]) for name in names]
        cells += [milliseconds(figure.floor_ms), peer[0] if peer else "", f"{gain:.2f}" if gain else ""]
        lines.append(f"| {title(figure)} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(figure: Figure, name: str, bold: bool) -> str:
    text = milliseconds(figure.ms.get(name))
    if name in figure.ms and not is_right(figure, name):
        return f"{text} (wrong)"
    return f"**{text}**" if bold else text


def _errors(figures: Sequence[Figure]) -> str:
    names = _names(figures)
    lines = [
        "Relative errors ‖output - reference‖ / ‖reference‖ against eager PyTorch in float32; above "
        f"{WRONG:g}, a result counts as wrong:\n",
        f"| output | {' | '.join(names)} |",
        "|---|" + "--:|" * len(names),
    ]
    for figure in figures:
        cells = (f"{figure.errors[name]:.1e}" if name in figure.errors else "" for name in names)
        lines.append(f"| {title(figure)} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def draw(runs: Sequence[Run], path: Path) -> None:
    """Draw the times of other libraries as multiples of ours, a panel for each machine.

    The path's suffix decides the file format.
    """
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "npu-simulation"  # makes the file depend on the results only
    import matplotlib.pyplot as plt

    tasks = [_own_times(run) for run in runs]
    heights = [_PANEL_INCHES + _ROW_INCHES * len(rows) for rows in tasks]
    figure, panels = plt.subplots(
        len(runs), 1, figsize=(8, sum(heights)), layout="constrained", squeeze=False, height_ratios=heights
    )
    for axes, run, rows in zip(panels[:, 0], runs, tasks, strict=True):
        _draw_machine(axes, run, rows)
    named = {label: line for axes in panels[:, 0] for line in axes.lines if (label := line.get_label())[0] != "_"}
    figure.legend(named.values(), named.keys(), loc="outside upper center", ncols=3, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)


def _own_times(run: Run) -> list[tuple[Figure, float]]:
    """Return the figures for which a result of ours is right, with the milliseconds of our fastest."""
    return [(figure, own[1]) for figure in run.figures if (own := best(figure, ours=True))]


def _draw_machine(axes: Any, run: Run, rows: Sequence[tuple[Figure, float]]) -> None:
    for family, colour in FAMILIES.items():
        points = [
            (ms / own_ms, index)
            for index, (figure, own_ms) in enumerate(rows)
            if (ms := _of_family(figure, family)) is not None
        ]
        if points:
            axes.plot(*zip(*points, strict=True), "o", color=colour, markersize=7, label=family)
    floors = [figure.floor_ms / own_ms for figure, own_ms in rows]
    axes.plot(floors, range(len(rows)), "|", color="black", markersize=12, markeredgewidth=1.5, label="floor")
    axes.axvline(1, color="#0072b2", linewidth=1.5, label=f"{OURS}, the best of its dtypes")
    axes.set_yticks(range(len(rows)), [title(figure) for figure, _ in rows], fontsize=9)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xscale("log")
    axes.grid(axis="y", linewidth=0.3)
    axes.set_axisbelow(True)
    axes.tick_params(axis="x", labelsize=9)
    axes.set_title(_machine(run), fontsize=10)
    axes.set_xlabel(f"time divided by that of {OURS}; right of the line, {OURS} is faster", fontsize=9)
    plain_ticks(axes.xaxis)


def _of_family(figure: Figure, family: str) -> float | None:
    """Return the milliseconds of the fastest contender of a family whose result is right; None if there is none."""
    counts = (name for name in figure.ms if name not in QUANTIZED and is_right(figure, name))
    times = [figure.ms[name] for name in counts if name.startswith(family)]
    return min(times, default=None)
