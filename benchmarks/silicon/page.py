"""The page with the errors of each set of measurements, its scatter plots and its worst rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import vela
from benchmarks.silicon.runs import LEAST_US, Outcome, fitting_rows, rank_correlation, summary
from npu_compiler.files import write_atomically
from npu_model import Result

_INTRODUCTION = f"""\
Times that were measured on chips, beside those of `simulate` with the chip files of this package: the program of each
row is compiled, lowered and timed as any other. Sources: SCALE-Sim and SCALE-Sim-validation (MIT), PyTorchSim's
reference times, tt-metal's report on products (Apache-2.0), and the RKNN log in Embedfire's manual. Rows under
{LEAST_US:g} µs are left out. At most three numbers of a chip are fitted, on every third row of one set: the cost of a
launch, and the shares of DRAM's bandwidth and of the arrays' peak that are reached (its file says which). No row has
rules of its own. Errors are of all rows."""
# Sets that are also summed up together.
TOGETHER = {"v6e attention, both": ("v6e attention", "v6e paged attention")}
_VELA = Path(__file__).parents[2] / "docs" / "measurements" / "vela.json"
_COLORS = 16  # of the figure, which keeps its file small
WORST = 3  # rows of a set
NOTES = {
    "v6e GEMM": "Products of bfloat16; name: rows × summed × columns. Operands come from HBM.",
    "v6e GEMM, fusion span": "Odd shapes, without the copies of operands: only the cycles of the matrix engine are "
    "compared, and the cost of a launch.",
    "v6e FFN": "Two products with what lies between them. Nothing is fitted on this set.",
    "v6e attention": "An encoder's attention as its compiler wrote it: product, softmax, product. Nothing is fitted on "
    "this set. Scores are float32 between product and softmax, as JAX's `dot_product_attention` has them, and weights "
    "bfloat16. So scores and weights of the two slowest rows exceed the scratchpad together, and scores go through "
    "HBM: with scores of bfloat16, which fit, the errors of the two are -61% and -39%, and the mean of the set is "
    "20.9%. Two parts of the others' time were the model's own, and are gone: a load into the bytes of a product's "
    "operands waited until its results had left the array, and loads of values waited for the softmax, since they went "
    "to the bytes of scores (medians: 20.7% without all three, 8.8% with scores of float32 alone, 8.0% with all; "
    "means: 21.4%, 11.8%, 8.0%). "
    "Tried besides, and not taken: scores padded to 128 lanes in memory give a median of 8.8% and a mean of 11.3%; "
    "scores of bfloat16 in a scratchpad of 64 MiB 9.2% and 12.9%; a launch of 1 µs 8.2%, and 6144 lanes of the vector "
    "unit 8.5%.",
    "v6e paged attention": "Attention of a library's kernel. Fitted on this set: the cost of its launch.",
    "v4 GEMM": "Products of float16, which is not the chip's own type.",
    "Tenstorrent GEMM, tuned": "Device cycles of hand-picked configurations, on the n150.",
    "Tenstorrent GEMM, auto": "Device cycles of the library's choice. Fitted on rows of the p150.",
    "RK3588 layers": "Layers of int8 in a debug mode. Concatenations and transposed convolutions are left out: they "
    "have no kernel of int8 here.",
    "Whole models": "Forward passes of one prompt in bfloat16, with the logits of all tokens, and ResNet-50 in int8. "
    "Nothing is fitted on this set. The RK3588 is fitted on a debug mode, layer by layer; its maker's table has 1.84 "
    "times the frames of that mode's sum.",
}
_CAUSES = {
    "launch": "launches",
    "dram bandwidth": "DRAM's bandwidth",
    "dram latency": "DRAM's latency",
    "dependency": "waits between engines",
    "sram ports": "the scratchpad's ports",
    "shared l2": "the shared L2",
}


def document(outcomes: dict[str, list[Outcome]]) -> str:
    """Return the page in Markdown."""
    lines = [
        "# Simulated chips and silicon",
        "",
        *_INTRODUCTION.splitlines(),
        "",
        "Written by `python -m benchmarks.silicon FOLDER`; `--fit SET` fits the numbers again.",
        "",
        "| set | rows | median error | mean | 90th percentile | signed median | rank correlation |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    both = {
        name: [outcome for group in groups for outcome in outcomes[group]]
        for name, groups in TOGETHER.items()
        if all(group in outcomes for group in groups)
    }
    for group, each in (outcomes | both).items():
        middle, average, ninetieth, signed = summary(each)
        lines.append(
            f"| {group} | {len(each)} | {middle:.1%} | {average:.1%} | {ninetieth:.1%} | {signed:+.1%} "
            f"| {rank_correlation(each):.3f} |"
        )
    lines += ["", "![Simulated and measured times](../images/silicon.png)", ""]
    for group, each in outcomes.items():
        lines += [f"## {group}", "", *_section(group, each), ""]
    lines += _estimates()
    return "\n".join(lines).rstrip() + "\n"


def _section(group: str, outcomes: Sequence[Outcome]) -> list[str]:
    kept = {id(row) for row in fitting_rows([outcome.row for outcome in outcomes])}
    others = [outcome for outcome in outcomes if id(outcome.row) not in kept]
    middle, average, *_ = summary(others or outcomes)
    lines = [
        NOTES.get(group, ""),
        f"Rows that nothing could be fitted on: median error {middle:.1%}, mean {average:.1%}. The worst:",
        "",
        "| row | measured µs | simulated µs | error | where its simulated time goes |",
        "|---|--:|--:|--:|---|",
    ]
    worst = sorted(outcomes, key=lambda each: -abs(each.error))[:WORST]
    return lines + [
        f"| {each.row.name} | {each.row.us:,.1f} | {each.us:,.1f} | {each.error:+.0%} | {_shares(each.result)} |"
        for each in worst
    ]


def _estimates() -> list[str]:
    """Return the section with other simulators' estimates, from the file that their benchmark wrote."""
    return [
        "## Second opinions",
        "",
        "Estimates, not measurements: other tools' cycles for whole networks beside ours.",
        "",
        "Vela, the compiler of the Ethos-U, reports cycles by layer; ours are of `ethos-u65-512` in int8.",
        "A layer is a convolution or a linear with the sums and poolings up to the next; layers of a cascade",
        "count as one. Vela takes 4.2 million cycles for a ResNet's first layer, most of the difference of",
        "totals. Written by `python -m benchmarks.vela`.",
        "",
        vela.table(vela.load(_VELA)),
        "SCALE-Sim's cycles of the array alone, for whole ResNets, equal ours: see",
        "[the NPU model](../npu_model.md#cycles-against-scale-sim).",
        "",
    ]


def _shares(result: Result) -> str:
    """Return the largest three shares of a run's time, among computing and the causes of stalls, as text."""
    total = result.cycles
    shares = {"computing": sum(call.counts.progress for call in result.calls)}
    shares |= {_CAUSES[cause.value]: cycles for cause, cycles in result.stalls.items()}
    largest = sorted(shares.items(), key=lambda item: -item[1])[:3]
    return ", ".join(f"{name} {cycles / total:.0%}" for name, cycles in largest if cycles > 0.02 * total)


def draw(outcomes: Mapping[str, Sequence[Outcome]], path: Path) -> None:
    """Draw simulated against measured times as a PNG: a scatter plot for each set, with lines at ±20 %."""
    import io

    import matplotlib
    from PIL import Image

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    columns = 3
    rows = -(-len(outcomes) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(3.6 * columns, 3.4 * rows), squeeze=False)
    for axis in axes.flat[len(outcomes) :]:
        axis.set_axis_off()
    for axis, (group, each) in zip(axes.flat, outcomes.items(), strict=False):
        _scatter(axis, group, each)
    figure.tight_layout()
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    plt.close(figure)
    small = io.BytesIO()
    Image.open(buffer).convert("RGB").quantize(_COLORS).save(small, format="png", optimize=True)
    write_atomically(path, small.getvalue())


def _scatter(axis: Any, group: str, outcomes: Sequence[Outcome]) -> None:
    measured, simulated = [each.row.us for each in outcomes], [each.us for each in outcomes]
    ends = [0.8 * min(*measured, *simulated), 1.25 * max(*measured, *simulated)]
    for factor, style in ((1.0, "-"), (0.8, ":"), (1.2, ":")):
        axis.plot(ends, [factor * end for end in ends], style, color="#888888", linewidth=0.8)
    axis.scatter(measured, simulated, s=9, color="#3b6fb6", alpha=0.6, linewidths=0)
    axis.set(xscale="log", yscale="log", xlim=ends, ylim=ends, xlabel="measured µs", ylabel="simulated µs")
    axis.set_title(group, fontsize=10)
