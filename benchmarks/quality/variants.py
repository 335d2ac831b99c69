"""Variants of quantizing a language model, and the models quantized by them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from benchmarks.quality.page import Figure
from benchmarks.quality.windows import Weights
from npu_compiler.graph.quantization import QuantizedArray, QuantizedFormat
from npu_runtime.packing import to_numpy
from npu_runtime.torch_arrays import numpy_to_tensor
from npu_sim.llm import Checkpoint
from npu_sim.quantizing.layerwise import Layerwise
from npu_sim.quantizing.quantizer import calibration_ids, calibration_tokens, quantized_layers, with_written
from npu_sim.quantizing.tuning import MOST_WRITTEN, ROWS, Tuner


@dataclass(frozen=True)
class Variant:
    """A way to quantize a language model.

    Attributes:
        format: The format of the weights.
        method: `gptq`, which compensates rounding errors, or `rtn`, which does not.
        steps: Number of tuning steps.
        written: Number of parts of the calibration text that the model writes itself.
    """

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


@dataclass(frozen=True)
class Calibration:
    """Calibration text.

    Attributes:
        names: Names of its files.
        text: The text.
        samples: Number of parts of the text that rounding uses.
    """

    names: tuple[str, ...]
    text: str
    samples: int

    def label(self, ids: torch.Tensor) -> str:
        """Return a description of the calibration for a figure: its texts, and the number of tokens in `ids`."""
        texts = self.names[0] if len(self.names) == 1 else f"{len(self.names)} texts"
        return f"{texts}: {ids.numel():,} tokens"


def quantize_all(
    checkpoint: Checkpoint, names: Sequence[str], calibration: Calibration, device: str | None
) -> Iterator[tuple[Figure, Weights]]:
    """Yield each variant's figure, with its sizes, and the dequantized weights; for a tuned variant, all parameters."""
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
            layers = quantized_layers(Layerwise(checkpoint, device), variant.format, ids, compensate=calibrated)
            rounded[untuned] = {layer.name: array for array, layer in layers}
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
