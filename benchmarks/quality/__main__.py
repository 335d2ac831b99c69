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
from pathlib import Path
from typing import Any

import torch

from benchmarks.quality.page import SOURCES, Figure, Quality, draw, load_quality, table, write_section
from benchmarks.quality.variants import VARIANTS, Calibration, quantize_all
from benchmarks.quality.windows import add_window, read_window, windows
from npu_sim.llm import load_checkpoint
from npu_sim.llm.graph import dense_model
from npu_sim.quantizing.layerwise import computing_device


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
    """Measure all variants that the options name, write the results and return them."""
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
            logits = reference if weights is original else read_window(model, weights, window)
            add_window(figure, logits, reference, window)
        if before is None:
            quality.save(options.json)
        print(f"{quality.reference.tokens} tokens\n{table(quality)}", flush=True)
    if before is not None:
        quality = with_others(quality, before)
        quality.save(options.json)
    return quality


def with_others(quality: Quality, before: Quality) -> Quality:
    """Merge new figures into those of an earlier run on the same windows; they replace figures of the same variants.

    The reference's figures are the earlier run's: both differ only by the rounding of float32 sums.
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
