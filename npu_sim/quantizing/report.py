"""Report of the errors of quantized layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from npu_compiler.graph.quantization import QuantizedArray


@dataclass(frozen=True)
class LayerReport:
    """One linear layer.

    Attributes:
        name: Name of its weight.
        shape: [n, k].
        format: Storage format in words.
        weight_error: ‖W - Q‖ / ‖W‖.
        output_error: ‖(W - Q) X‖ / ‖W X‖ for the calibration inputs X, in which first tokens count more (see
            `layerwise.moments`); None without a calibration text.
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
        """The error by which layers are compared."""
        return self.weight_error if self.output_error is None else self.output_error


@dataclass(frozen=True)
class Report:
    """All layers that were quantized, those that were kept in 16 bits, and the size of the model.

    Attributes:
        model: The model's name.
        layers: Layers in the model's order.
        kept: The names of the weights that stay in 16 bits because their error was among the greatest.
        method: `rtn` or `gptq`.
        calibration_tokens: 0 without a calibration text.
        bytes_before: Bytes of the whole model in 16 bits.
        bytes_after: Bytes of the whole model as stored.
        requantized: Whether the model's weights were in few bits already.
        tuning_steps: 0 where the model was not tuned; otherwise the layers' errors are those before.
        divergences: Divergences of the quantized model from the original before and after tuning, as in `Tuned`.
        group: Number of consecutive weights that share a scale; 0 means a whole row.
        usual_group: The group size if it divided all rows.
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
        """The layers with the greatest errors, the greatest first."""
        return sorted(self.layers, key=lambda layer: layer.error, reverse=True)[:count]

    def keeping_worst(self, count: int) -> Report:
        """Return the report with the worst layers kept in 16 bits."""
        return replace(self, kept=tuple(layer.name for layer in self.worst(count)))

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON data."""
        return asdict(self)


def layer_report(
    name: str, weight: torch.Tensor, quantized: QuantizedArray, dequantized: torch.Tensor, hessian: torch.Tensor | None
) -> LayerReport:
    """The errors of one weight [n, k] by itself and, with the Hessian of its inputs, in its output."""
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
    """Bytes of the layers as they are stored in the end."""
    return sum(layer.bytes_before if layer.name in kept else layer.bytes_after for layer in layers)
