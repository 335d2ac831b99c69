"""Quantization of a network to 8 bits, with weights per output channel and activations per tensor.

Ranges of activations come from calibration images. The result is IR with nodes that quantize and dequantize, as
PyTorch's PT2E produces it, and weights for it. The compiler turns it into integer kernels; any other reader of such IR
computes the same values in floats.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from npu_compiler.compiler import normalize
from npu_compiler.errors import InputError, WeightError
from npu_compiler.fusions.quantization_points import ActivationRange, IntegerWeight, Layer, Points, quantized_graph
from npu_compiler.graph.model import IRGraph, OpNode, TensorSpec, unique_name
from npu_compiler.graph.reader import read_ir
from npu_compiler.graph.weight_recipe import apply_recipe, from_key
from npu_compiler.graph.writer import graph_to_dict
from npu_compiler.passes.batch_norm import fold_batch_norm
from npu_compiler.passes.dead_code import eliminate_dead_code
from npu_runtime.packing import to_numpy
from npu_runtime.pytorch import require_torch
from npu_sim.vision.models import QUANTIZED_IR, QUANTIZED_WEIGHTS

if TYPE_CHECKING:
    import torch

    from npu_runtime.cpu_fallback import CPUPartition

RANGES = ("mse", "percentile", "minmax")
PERCENTILE = 99.99
_BINS = 2048
_CLIPS = np.linspace(0.3, 1.0, 36)  # shares of a range that a search by error tries
_WEIGHT_CLIPS = np.linspace(0.7, 1.0, 16)
_REPORTED_IMAGES = 4


@dataclass(frozen=True)
class LayerReport:
    """Effect of 8 bits on one layer.

    Attributes:
        layer: The weight's key.
        signal_to_noise: Signal-to-noise ratio in decibels of the layer's output with quantized input and weight.
        saved_bytes: Bytes that the weight takes less than in 32-bit floats.
        kept: Whether the layer stays in floats.
    """

    layer: str
    signal_to_noise: float
    saved_bytes: int
    kept: bool


@dataclass(frozen=True)
class QuantizedNetwork:
    """A network quantized to 8 bits.

    Attributes:
        ir: The IR, for `npu_compiler.compile` and everything else that takes IR.
        weights: Weights by the keys that the IR names.
        report: An entry for each layer, the lowest signal-to-noise ratio first.
    """

    ir: dict[str, Any]
    weights: dict[str, np.ndarray]
    report: tuple[LayerReport, ...]

    def save(self, folder: Path) -> None:
        """Write `model.json` (the IR) and `model.safetensors` (the weights) to a folder, creating it if necessary.

        Raises:
            InputError: the files cannot be written.
        """
        from safetensors.numpy import save

        from npu_compiler.files import write_atomically
        from npu_sim.extract import write_ir

        try:
            folder.mkdir(parents=True, exist_ok=True)
            contiguous = {key: np.ascontiguousarray(value) for key, value in self.weights.items()}
            write_atomically(folder / QUANTIZED_WEIGHTS, save(contiguous))
        except OSError as error:
            raise InputError(f"cannot write '{folder}': {error.strerror or error}") from error
        write_ir(self.ir, folder / QUANTIZED_IR)


def quantize_network(
    ir: Mapping[str, Any] | IRGraph,
    weights: Mapping[str, Any],
    images: Sequence[np.ndarray],
    *,
    ranges: str = "mse",
    keep: Collection[str] = (),
    keep_worst: int = 0,
) -> QuantizedNetwork:
    """Quantize the convolutions and linear layers of a network with one input.

    Args:
        ir: IR of the network in float32.
        weights: State dict of the network, of arrays or torch tensors.
        images: Calibration inputs, each of the shape of the network's input, already preprocessed.
        ranges: Choice of an activation's range: `mse` has the least mean squared error, `percentile` excludes the most
            extreme values beyond `PERCENTILE`, and `minmax` includes all values.
        keep: Keys of weights whose layers stay in floats.
        keep_worst: The number of further layers that stay in floats: those with the lowest signal-to-noise ratio.

    Raises:
        InputError: there are no images, or they do not fit the network or are not finite; an argument is unknown; or
            the network has no layer to quantize.
        WeightError: weights are missing or have a wrong shape.
    """
    require_torch("calibrating a network")
    if ranges not in RANGES:
        raise InputError(f"unknown way to choose ranges '{ranges}'; choose one of {', '.join(RANGES)}")
    if keep_worst < 0:
        raise InputError(f"the number of layers to keep is {keep_worst}")
    graph, state = _plain_graph(read_ir(ir), weights)
    spec = _check_images(graph, images)
    layers = Points(graph).layers
    if not layers:
        raise InputError(f"{graph.name} has no convolution or linear of float32 weights to quantize")
    keys = {layer.node: _key(graph, layer) for layer in layers}
    if unknown := sorted(set(keep) - set(keys.values())):
        raise InputError(f"no layer has the weight '{unknown[0]}'; they are {', '.join(keys.values())}")
    points = Points(graph)
    calibration = _Calibration(graph, state, points, spec.name, images)
    limits = {name: calibration.range_of(name, ranges) for name in points.tensors}
    integers = {layer.weight: quantize_weight(state[_key(graph, layer)]) for layer in layers}
    ratios = _signal_to_noise(graph, state, layers, limits, integers, spec.name, images[:_REPORTED_IMAGES])
    worst = sorted((node for node in keys if keys[node] not in keep), key=lambda node: ratios[node])[:keep_worst]
    kept = {node for node in keys if keys[node] in keep or node in worst}
    report = [
        LayerReport(keys[layer.node], ratios[layer.node], 3 * state[keys[layer.node]].size, layer.node in kept)
        for layer in layers
    ]
    return _rounded_network(graph, state, kept, limits, integers, images, report)


def _rounded_network(
    graph: IRGraph,
    state: Mapping[str, np.ndarray],
    kept: set[str],
    limits: Mapping[str, ActivationRange],
    integers: Mapping[str, IntegerWeight],
    images: Sequence[np.ndarray],
    report: Sequence[LayerReport],
) -> QuantizedNetwork:
    """Return the network with all layers quantized, each for its quantized inputs, except those kept in floats.

    Args:
        kept: Nodes of the layers that stay in floats.
        limits: Tensor → its range, for all tensors that may be quantized.
        integers: Weight tensor → its integers when each element is rounded by itself.
    """
    from npu_sim.quantizing.networks.layer_rounding import round_layers

    quantized = [layer for layer in Points(graph).layers if layer.node not in kept]
    wanted = {name: limits[name] for name in Points(graph, kept).tensors}
    alone = {layer.weight: integers[layer.weight] for layer in quantized}
    graph, state, together = round_layers(graph, state, quantized, wanted, alone, images)
    result, codes = quantized_graph(graph, wanted, together)
    read = {key for recipe in result.weights.values() for key in recipe.keys()}
    return QuantizedNetwork(
        graph_to_dict(result),
        {key: value for key, value in {**state, **codes}.items() if key in read},
        tuple(sorted(report, key=lambda line: line.signal_to_noise)),
    )


def _plain_graph(graph: IRGraph, weights: Mapping[str, Any]) -> tuple[IRGraph, dict[str, np.ndarray]]:
    """Return the graph with batch norms folded into convolutions and each weight under its own key, and the weights."""
    shapes = {next(recipe.keys()): graph.tensors[name].shape for name, recipe in graph.weights.items()}
    problems = [f"missing: '{key}'" for key in shapes if key not in weights]
    given = {key: to_numpy(weights[key]) for key in shapes if key in weights}
    problems += [
        f"wrong shape: '{key}' is {list(given[key].shape)}, the model expects {list(shape)}"
        for key, shape in shapes.items()
        if key in given and given[key].shape != shape
    ]
    if problems:
        raise WeightError(f"the weights do not fit {graph.name}:\n" + "\n".join(f"  - {x}" for x in problems))
    graph = eliminate_dead_code(fold_batch_norm(normalize(graph)))
    state: dict[str, np.ndarray] = {}
    recipes = {}
    for name, recipe in graph.weights.items():
        key = (
            next(recipe.keys()) if recipe.op != "multiply_add" else unique_name(f"{next(recipe.keys())}.folded", state)
        )
        key = unique_name(key, state) if recipe.op != "key" else key
        state[key] = np.asarray(apply_recipe(recipe, given))
        recipes[name] = from_key(key)
    return replace(graph, weights=recipes), state


def _check_images(graph: IRGraph, images: Sequence[np.ndarray]) -> TensorSpec:
    """Return the network's only input. Raises `InputError` if there are several, or an image does not fit it."""
    if len(graph.inputs) != 1:
        raise InputError(f"{graph.name} has {len(graph.inputs)} inputs; calibration is for networks with one")
    spec = graph.tensors[graph.inputs[0]]
    if len(images) == 0:
        raise InputError("there are no calibration images; give at least one, better some dozens")
    for index, image in enumerate(images):
        if tuple(np.shape(image)) != spec.shape:
            shapes = f"{list(np.shape(image))}, but {graph.name} takes {list(spec.shape)}"
            raise InputError(f"calibration image {index} has shape {shapes}")
        if not np.isfinite(image).all():
            raise InputError(f"calibration image {index} holds values that are not finite")
    return spec


def _key(graph: IRGraph, layer: Layer) -> str:
    return next(graph.weights[layer.weight].keys())


def quantize_weight(weight: np.ndarray) -> IntegerWeight:
    """Return a weight [o, ...] as int8 in -127..127, with the least-squares scale of each output channel.

    Raises:
        WeightError: the weight holds values that are not finite.
    """
    rows = np.asarray(weight, np.float32).reshape(len(weight), -1)
    if not np.isfinite(rows).all():
        raise WeightError("a weight with values that are not finite cannot be quantized")
    largest = np.abs(rows).max(axis=1) / 127
    largest[largest == 0] = 1.0
    best, least = largest.astype(np.float32), np.full(len(rows), np.inf)
    for share in _WEIGHT_CLIPS:
        scales = (largest * share).astype(np.float32)
        error = np.square(_rounded(rows, scales) * scales[:, None] - rows).sum(axis=1)
        better = error < least
        best[better], least[better] = scales[better], error[better]
    codes = _rounded(rows, best).astype(np.int8).reshape(weight.shape)
    return IntegerWeight(codes, best)


def _rounded(rows: np.ndarray, scales: np.ndarray) -> np.ndarray:
    return np.asarray(np.clip(np.rint(rows / scales[:, None]), -127, 127))


class _Calibration:
    """Ranges of a network's activations over the calibration images, with histograms."""

    def __init__(
        self, graph: IRGraph, state: Mapping[str, np.ndarray], points: Points, source: str, images: Sequence[np.ndarray]
    ) -> None:
        network = _watched(graph, state, points.tensors)
        self.low = dict.fromkeys(points.tensors, math.inf)
        self.high = dict.fromkeys(points.tensors, -math.inf)
        for values in _runs(network, source, images):
            for name in points.tensors:
                low, high = (float(end) for end in values[name].aminmax())
                if not math.isfinite(high - low):
                    raise InputError(f"tensor '{name}' of {graph.name} is not finite on a calibration image")
                self.low[name], self.high[name] = min(self.low[name], low), max(self.high[name], high)
        self.counts = {name: np.zeros(_BINS) for name in points.tensors}
        for values in _runs(network, source, images):
            for name in points.tensors:
                if self.high[name] > self.low[name]:
                    self.counts[name] += values[name].histc(_BINS, self.low[name], self.high[name]).numpy()

    def range_of(self, name: str, how: str) -> ActivationRange:
        """Return a tensor's range, which includes 0 so that 0 is represented exactly.

        Args:
            name: The tensor.
            how: `minmax`, `percentile` or `mse`; see `quantize_network`.
        """
        low, high = self.low[name], self.high[name]
        counts, width = self.counts[name], (high - low) / _BINS
        centres = low + width * (np.arange(_BINS) + 0.5)
        if how == "percentile":
            total = np.cumsum(counts) / max(counts.sum(), 1.0)
            rest = (100 - PERCENTILE) / 100
            low = centres[int(np.searchsorted(total, rest))] if low < 0 else low
            high = centres[min(int(np.searchsorted(total, 1 - rest)), _BINS - 1)]
        shares = _CLIPS if how == "mse" else (1.0,)
        tried = [_as_range(low * share, high * share) for share in shares]
        return min(reversed(tried), key=lambda limits: float(counts @ _squared_error(centres, limits)))


def _as_range(low: float, high: float) -> ActivationRange:
    low, high = min(low, 0.0), max(high, 0.0)
    scale = float(np.float32((high - low) / 255 or 1.0))
    return ActivationRange(scale, int(np.clip(np.rint(-low / scale), 0, 255)))


def _squared_error(values: np.ndarray, limits: ActivationRange) -> np.ndarray:
    codes = np.clip(np.rint(values / limits.scale) + limits.zero_point, 0, 255)
    return np.asarray(np.square((codes - limits.zero_point) * limits.scale - values))


def _watched(graph: IRGraph, state: Mapping[str, np.ndarray], names: Sequence[str]) -> CPUPartition:
    """Return the network for PyTorch, with the named tensors as its outputs."""
    from npu_runtime.cpu_fallback import CPUPartition

    outputs = list(dict.fromkeys(names))
    return CPUPartition(replace(graph, outputs=outputs, output_names=outputs), state)


def _runs(network: CPUPartition, source: str, images: Sequence[np.ndarray]) -> Iterator[dict[str, torch.Tensor]]:
    from npu_runtime.torch_arrays import numpy_to_tensor

    for image in images:
        given = {source: numpy_to_tensor(np.ascontiguousarray(image, np.float32))}
        yield {**given, **network.run_tensors(given)}


def _signal_to_noise(
    graph: IRGraph,
    state: Mapping[str, np.ndarray],
    layers: Sequence[Layer],
    ranges: Mapping[str, ActivationRange],
    integers: Mapping[str, IntegerWeight],
    given: str,
    images: Sequence[np.ndarray],
) -> dict[str, float]:
    """Return node → signal-to-noise ratio in decibels of its output if only its own input and weight are quantized."""
    nodes = {node.name: node for node in graph.nodes}
    watched = _watched(graph, state, [x for layer in layers for x in _ends(nodes[layer.node])])
    alone = {}
    for layer in layers:
        node, weight = nodes[layer.node], integers[layer.weight]
        source, result = _ends(node)
        read = {name: graph.weights[name] for name in node.inputs[1:]}
        part = IRGraph(node.name, [node], graph.tensors, [source], [result], [result], read, {})
        alone[layer.node] = _watched(part, {**state, _key(graph, layer): weight.dequantize()}, [result])
    signal, noise = dict.fromkeys(alone, 0.0), dict.fromkeys(alone, 0.0)
    for values in _runs(watched, given, images):
        for layer in layers:
            limits, (source, result) = ranges[layer.source], _ends(nodes[layer.node])
            codes = ((values[source] / limits.scale).round() + limits.zero_point).clamp(0, 255)
            rounded = (codes - limits.zero_point) * limits.scale
            exact = values[result].double()
            lost = alone[layer.node].run_tensors({source: rounded})[result] - exact
            signal[layer.node] += float(exact.square().sum())
            noise[layer.node] += float(lost.square().sum())
    return {node: 10 * math.log10(max(signal[node], 1e-30) / max(noise[node], 1e-30)) for node in alone}


def _ends(node: OpNode) -> tuple[str, str]:
    """Return the names of a layer's input (not its weights) and of its output."""
    return node.inputs[0], node.outputs[0]
