"""The report on a quantized model: each layer's error and the sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from npu_compiler.graph.quantization import QuantizedArray


@dataclass(frozen=True)
class LayerReport:
    """Errors and sizes of one linear layer; W is its weight and Q the quantized weight.

    Attributes:
        name: Name of its weight.
        shape: [n, k].
        format: Storage format in words.
        weight_error: ‖W - Q‖ / ‖W‖.
        output_error: ‖(W - Q) X‖ / ‖W X‖ for the calibration inputs X, in which each text's first token has more weight
            (see `layerwise.moments`); None without a calibration text.
        bytes_before: Bytes in 16 bits.
        bytes_after: Bytes as stored.
    """

    name: str
    shape: tuple[int, int]
    format: str
    weight_error: float
    output_error: float | None
    bytes_before: int
    bytes_after: int

    @property
    def error(self) -> float:
        """The error by which layers are ranked: that of the output if it is known, else that of the weight."""
        return self.weight_error if self.output_error is None else self.output_error


@dataclass(frozen=True)
class Report:
    """Report on a quantized model: its quantized layers, those kept in 16 bits, and its size.

    Attributes:
        model: The model's name.
        layers: Layers in the model's order.
        kept: The names of the weights that stay in 16 bits because their error was among the greatest.
        method: `rtn` or `gptq`.
        calibration_tokens: Number of tokens of the calibration text; 0 without one.
        bytes_before: Bytes of the whole model in 16 bits.
        bytes_after: Bytes of the whole model as stored.
        requantized: Whether the model's weights were quantized already.
        tuning_steps: Number of training steps; 0 if the model was not tuned. Errors of layers are those before tuning.
        divergences: Divergences of the quantized model from the original before and after tuning, as in `Tuned`. None
            if the model was not tuned.
        group: Number of consecutive weights that share a scale; 0 means a whole row.
        usual_group: The group size that would have been used if it divided all rows.
    """

    model: str
    layers: tuple[LayerReport, ...]
    kept: tuple[str, ...]
    method: str
    calibration_tokens: int
    bytes_before: int = 0
    bytes_after: int = 0
    requantized: bool = False
    tuning_steps: int = 0
    divergences: tuple[float, float] | None = None
    group: int = 0
    usual_group: int = 0

    def worst(self, count: int) -> list[LayerReport]:
        """Return the layers with the greatest errors, the greatest first."""
        return sorted(self.layers, key=lambda layer: layer.error, reverse=True)[:count]

    def keeping_worst(self, count: int) -> Report:
        """Return the report with the `count` layers with the greatest errors kept in 16 bits."""
        return replace(self, kept=tuple(layer.name for layer in self.worst(count)))

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON data."""
        return asdict(self)


def layer_report(
    name: str, weight: torch.Tensor, quantized: QuantizedArray, dequantized: torch.Tensor, hessian: torch.Tensor | None
) -> LayerReport:
    """Return the errors and sizes of one weight [n, k].

    Args:
        hessian: The sum of x xᵀ over the layer's inputs x, from which the error of its output follows. None: that error
            is unknown.
    """
    lost = weight - dequantized
    output_error = None
    if hessian is not None:
        output_error = _relative(*(((x @ hessian) * x).sum().clamp(min=0).sqrt() for x in (lost, weight)))
    return LayerReport(
        name=name,
        shape=quantized.shape,
        format=str(quantized.format),
        weight_error=_relative(lost.norm(), weight.norm()),
        output_error=output_error,
        bytes_before=2 * weight.numel(),
        bytes_after=quantized.size_bytes,
    )


def _relative(lost: torch.Tensor, whole: torch.Tensor) -> float:
    return float(lost / whole) if float(whole) > 0 else 0.0


def size_of(layers: Sequence[LayerReport], kept: Sequence[str]) -> int:
    """Return the bytes that the layers take as stored; those in `kept` are in 16 bits."""
    return sum(layer.bytes_before if layer.name in kept else layer.bytes_after for layer in layers)
