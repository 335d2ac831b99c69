"""Quality of quantized language models: perplexity, and divergence from the original model, on real English.

    python -m benchmarks.quality --text alice29.txt lcet10.txt --calibrate lee_background.cor --json quality.json
    python -m benchmarks.quality --json docs/measurements/quality.json --document docs/quantization.md

The first line measures, and the second one writes the results into the page. PyTorch computes in float32 with the
dequantized weights, so that the figures are those of the weights alone. All variants read the same windows in turn. The
JSON file has the results so far after each window; with `--add`, which puts them beside those in the file, it has them
at the end.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import platform
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.quality_page import SOURCES, Figure, Quality, draw, load_quality, table, write_section
from npu_compiler.graph.quantization import QuantizedArray, QuantizedFormat
from npu_runtime.packing import to_numpy
from npu_runtime.torch_arrays import numpy_to_tensor
from npu_sim.llm import Checkpoint, load_checkpoint
from npu_sim.llm.graph import dense_model
from npu_sim.quantizing.layerwise import Layerwise, computing_device
from npu_sim.quantizing.quantizer import calibration_ids, calibration_tokens, quantized_layers, with_written
from npu_sim.quantizing.tuning import MOST_WRITTEN, ROWS, Tuner


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
    if options.chart:
        draw(quality, options.chart)
    if options.document:
        write_section(quality, options.document)


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
