"""The results of a CUDA benchmark run as Markdown tables and as a chart."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.figures import COMPILED, EAGER, OURS, TORCHAO, Account, Figure, Run

COLOURS = {OURS: "#0072b2", COMPILED: "#e69f00", EAGER: "#999999"}  # distinguishable with colour blindness
ROWS_OF_AN_ACCOUNT = 12
LONGEST_NAME = 60

_HEAD = """\
# The CUDA device, measured

`python -m benchmarks.cuda` writes this page and `cuda.json` beside it: {gpu}, {date}, PyTorch {torch}, CUDA {cuda}.
The run measured the peak rates of this GPU: it reads memory at {read_tb_per_s:.2f} TB/s and multiplies bfloat16
matrices at {bfloat16_tflop_per_s:.0f} TFLOP/s. The floor is a lower bound of the time: the bytes that a step must read
or the operations that it must do, at these rates. It leaves out activations.

All contenders of a row ran in one process, in turns, with the same weights. Milliseconds are medians over rounds of
many steps each, measured by device events and including host time. Before timing, the logits of each contender were
compared with those of PyTorch in float32 on new random inputs: Pearson r is above 0.999, or at least that of eager
PyTorch, and the argmax is the same except for near-ties.

For `torch.compile`, the model is written with fused QKV and gate+up projections, SDPA and a static cache, and compiled
in `mode="reduce-overhead"` with coordinate-descent tuning. Eager PyTorch runs the same model. Both call SDPA in the way
that is fastest for the shape. The ResNets are channels-last with BatchNorms folded by `freezing`, in the better of two
modes, or the one that the note names.

<!-- chart: cuda -->
"""

_FEW_BITS = """\
## Decode with weights in few bits

PyTorch has the dequantized weights in bfloat16. torchao quantizes these again in the same bits: int4 in groups of 128,
int8 and float8 with a scale for each row. The head of Qwen2.5-1.5B, which is its embedding too, is int8 where the other
weights are int4.

"""


_INTEGERS = """\
Weights and activations in 8 bits, as `npu-sim quantize-network` makes them; PyTorch computes in float16. The
note below has our float16 of the same run. The floor counts operations at twice the rate of bfloat16.

"""


def document(run: Run) -> str:
    """Return the Markdown page; its chart is drawn when the site is built."""
    parts = [_HEAD.format(**run.machine)]
    for cache_length in sorted({figure.case["cache"] for figure in _of(run, "decode")}):
        rows = [figure for figure in _of(run, "decode") if figure.case["cache"] == cache_length]
        parts.append(f"## Decode, cache {cache_length:,}\n\n" + _table(rows, "position", lambda f: f.case["position"]))
    if rows := _of(run, "large-decode"):
        parts.append("## Decode of a larger model\n\n" + _table(rows, "model, cache, position", _model_and_place))
    if rows := [*_of(run, "quantized-decode"), *_of(run, "large-quantized-decode")]:
        parts.append(_FEW_BITS + _table(rows, "model, cache, position", _model_and_place, (TORCHAO, COMPILED)))
    if rows := _of(run, "prefill"):
        parts.append("## Prefill\n\n" + _table(rows, "tokens", lambda f: f.case["tokens"]))
    if rows := _of(run, "vision"):
        parts.append("## ResNets, float16\n\n" + _table(rows, "model, batch", _network))
    if rows := _of(run, "quantized-vision"):
        parts.append("## Vision models in 8 bits\n\n" + _INTEGERS + _table(rows, "model, batch", _network))
    if run.other:
        facts = [f"| {name} | {value:,.2f} |" for name, value in run.other.items()]
        parts.append("\n".join(["## Start-up\n", "| measurement | value |", "|---|--:|", *facts]) + "\n")
    if run.figures:
        parts.append(_steady_table(run.figures))
    if run.accounts:
        parts.append(
            "## Time per kernel\n\nThe kernels of one step, by the GPU's time stamps. Their sum is more than the step's"
            " time where kernels overlap, and less where there are gaps between them.\n"
        )
        parts += [_account_table(account) for account in run.accounts]
    return "\n".join(parts)


def _of(run: Run, task: str) -> list[Figure]:
    return sorted((figure for figure in run.figures if figure.task == task), key=lambda figure: figure.key)


def _model_and_place(figure: Figure) -> str:
    return f"{figure.model}, {figure.case['cache']:,}, {figure.case['position']:,}"


def _network(figure: Figure) -> str:
    return f"{figure.model}, {figure.case['batch']}"


def _table(
    figures: Sequence[Figure],
    heading: str,
    label: Callable[[Figure], Any],
    shown: tuple[str, ...] = (COMPILED, EAGER),
) -> str:
    """Return a table of our times, lower bounds and peers; the last column is the first peer's time divided by ours."""
    peers = " | ".join(f"{'eager' if name == EAGER else name}, ms" for name in shown)
    lines = [
        f"| {heading} | ours, ms | floor, ms | floor / ours | {peers} | × {shown[0]} |",
        "|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for figure in figures:
        ours = figure.ms[OURS]
        peers = " | ".join(milliseconds(figure.ms.get(name)) for name in shown)
        speedup = f"{figure.ms[shown[0]] / ours:.2f}" if shown[0] in figure.ms else ""
        floor = f"{milliseconds(figure.floor_ms)} | {figure.floor_ms / ours:.0%}"
        lines.append(f"| {label(figure)} | **{milliseconds(ours)}** | {floor} | {peers} | {speedup} |")
    return "\n".join(lines) + "\n"


def milliseconds(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.3f}" if value < 10 else f"{value:.1f}"


def _steady_table(figures: Iterable[Figure]) -> str:
    lines = [
        "## Counters and errors of one step\n",
        "The backend's counters for one run, and the errors ‖logits - reference‖ / ‖reference‖ against float32.\n",
        "| step | kernels | graph launches | other counters | our error | PyTorch's error | note |",
        "|---|--:|--:|---|--:|--:|---|",
    ]
    for figure in figures:
        steady = dict(figure.steady)
        kernels, graphs = steady.pop("kernels", 0), steady.pop("graph_launches", 0)
        rest = ", ".join(f"{name} {count}" for name, count in steady.items())
        counts = f"{kernels} | {graphs} | {rest or 'none'}"
        errors = " | ".join(f"{figure.errors[name]:.2e}" if name in figure.errors else "" for name in (OURS, EAGER))
        lines.append(f"| {_title(figure)} | {counts} | {errors} | {figure.notes} |")
    return "\n".join(lines) + "\n"


def _title(entry: Figure | Account) -> str:
    case = ", ".join(f"{name} {value:,}" for name, value in entry.case.items())
    return f"{entry.model} {'' if entry.task == 'vision' else entry.task + ' '}({case})"


def _account_table(account: Account) -> str:
    busy = sum(ms for _, ms, _ in account.rows)
    lines = [
        f"### {_title(account)}: {milliseconds(account.step_ms)} ms, of which {milliseconds(busy)} ms in kernels\n",
        "| kernel | launches | µs | share |",
        "|---|--:|--:|--:|",
    ]
    shown, rest = account.rows[:ROWS_OF_AN_ACCOUNT], account.rows[ROWS_OF_AN_ACCOUNT:]
    if rest:
        shown = [*shown, (f"{len(rest)} others", sum(row[1] for row in rest), sum(row[2] for row in rest))]
    for name, ms, launches in shown:
        lines.append(f"| `{_short(name)}` | {launches:.0f} | {1000 * ms:.1f} | {ms / busy:.1%} |")
    return "\n".join(lines) + "\n"


def _short(name: str) -> str:
    plain = name.replace("|", "/").replace("`", "'")
    return plain if len(plain) <= LONGEST_NAME else plain[: LONGEST_NAME - 1] + "…"


def draw(run: Run, path: Path) -> None:
    """Draw the chart with three panels: decode by position, prefill, ResNets.

    The path's suffix decides the file format.
    """
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "npu-simulation"  # makes the file depend on the results only
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 3, figsize=(16, 5), width_ratios=(1.25, 1, 1), layout="constrained")
    _draw_decode(panels[0], _of(run, "decode"))
    _draw_bars(panels[1], _of(run, "prefill"), lambda f: f"{f.case['tokens']:,}", "prefill, by tokens of the prompt")
    _draw_bars(panels[2], _of(run, "vision"), lambda f: f"{f.model}\nbatch {f.case['batch']}", "float16 ResNets")
    figure.suptitle(f"npu-simulation on {run.machine['gpu']}, {run.machine['date']}: milliseconds a step, log scale")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)


def _draw_decode(axes: Any, figures: Sequence[Figure]) -> None:
    styles = dict(zip(sorted({figure.case["cache"] for figure in figures}), ("-", "--", ":"), strict=False))
    for cache_length, style in styles.items():
        rows = [figure for figure in figures if figure.case["cache"] == cache_length]
        positions = [figure.case["position"] for figure in rows]
        for name, colour in COLOURS.items():
            points = [(p, f.ms[name]) for p, f in zip(positions, rows, strict=True) if name in f.ms]
            if points:
                label = f"{name}, cache {cache_length:,}"
                axes.plot(*zip(*points, strict=True), style, color=colour, marker="o", markersize=3, label=label)
        label = f"floor, cache {cache_length:,}"
        axes.plot(positions, [figure.floor_ms for figure in rows], style, color="black", linewidth=1, label=label)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set_yscale("log")
    axes.set_title("Qwen2.5-1.5B bfloat16, decode of a token, by position")
    axes.set_xlabel("position in the cache")
    plain_ticks(axes.yaxis)
    if figures:
        axes.legend(fontsize=7, ncols=2)


def _draw_bars(axes: Any, figures: Sequence[Figure], label: Callable[[Figure], str], title: str) -> None:
    width = 0.27
    for offset, (name, colour) in enumerate(COLOURS.items()):
        places = [index + (offset - 1) * width for index in range(len(figures))]
        bars = axes.bar(places, [figure.ms.get(name, 0) for figure in figures], width, color=colour, label=name)
        axes.bar_label(bars, [milliseconds(figure.ms.get(name)) for figure in figures], fontsize=6, padding=1)
    for index, figure in enumerate(figures):
        floor_label = "floor" if index == 0 else None
        axes.plot([index - 0.45, index + 0.45], [figure.floor_ms] * 2, color="black", linewidth=1, label=floor_label)
    axes.set_xticks(range(len(figures)), [label(figure) for figure in figures])
    axes.set_yscale("log")
    axes.set_ylim(0.7 * min((figure.floor_ms for figure in figures), default=1))
    axes.set_title(title)
    plain_ticks(axes.yaxis)
    if figures:
        axes.legend(fontsize=7)


def plain_ticks(axis: Any) -> None:
    """Use ticks at 1, 2, 5, 10, …; powers of ten alone are too few on a log axis of one or two decades."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.set_minor_formatter(NullFormatter())
    axis.grid(linewidth=0.3)
