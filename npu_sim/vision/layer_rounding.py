"""Rounding the layers of a network one after the other, each for the inputs that the rounded layers before it make.

The rounding errors of a weight are compensated (`npu_sim.quantizing.compensation`), but for grouped convolutions. What
is left of the error in the mean of each channel, that of activations and of earlier layers included, goes into the
bias: "empirical bias correction" of Nagel et al., "Data-Free Quantization through Weight Equalization and Bias
Correction" (2019), https://arxiv.org/abs/1906.04721.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from npu_compiler.fusions.quantization_points import ActivationRange, IntegerWeight, Layer
from npu_compiler.graph.model import IRGraph, OpNode, TensorSpec, unique_name
from npu_compiler.graph.quantization import QuantizedFormat
from npu_compiler.graph.weight_recipe import from_key
from npu_compiler.passes.dead_code import eliminate_dead_code
from npu_runtime.cpu_fallback import CPUPartition
from npu_runtime.torch_arrays import numpy_to_tensor
from npu_sim.quantizing.compensation import compensated
from npu_sim.quantizing.rounding import SEARCH

_INT8 = QuantizedFormat("int8")
_Values = dict[str, torch.Tensor]


def round_layers(
    graph: IRGraph,
    state: Mapping[str, np.ndarray],
    layers: Sequence[Layer],
    ranges: Mapping[str, ActivationRange],
    integers: Mapping[str, IntegerWeight],
    images: Sequence[np.ndarray],
) -> tuple[IRGraph, dict[str, np.ndarray], dict[str, IntegerWeight]]:
    """Compensate rounded weights and correct biases, in the graph's order.

    Args:
        graph: Of floats, with one input; each weight has a key of its own.
        state: Weights by key.
        layers: Those to round.
        ranges: Tensor → its range, for all tensors to round.
        integers: Weight tensor → its integers where each element is rounded by itself.
        images: float32 inputs of the graph.

    Returns:
        The graph and weights with new biases, and the integers of all weights.
    """
    by_node = {layer.node: layer for layer in layers}
    source, nodes, changed, found = graph.inputs[0], [], dict(state), dict(integers)
    tensors, recipes = dict(graph.tensors), dict(graph.weights)
    exact: list[_Values] = [{source: numpy_to_tensor(np.ascontiguousarray(x, np.float32))} for x in images]
    rounded = [{source: _rounded(values[source], ranges.get(source))} for values in exact]
    last = {name: index for index, node in enumerate(graph.nodes) for name in node.inputs}
    for index, node in enumerate(graph.nodes):
        layer, made = by_node.get(node.name), node.outputs
        _run(node, graph, state, exact)
        if layer is None:
            _run(node, graph, state, rounded)
        else:
            key = next(graph.weights[layer.weight].keys())
            if node.attrs.get("groups", 1) == 1 and not isinstance(node.attrs.get("padding"), str):
                found[layer.weight] = _compensated(state[key], node, [values[node.inputs[0]] for values in rounded])
            _run(node, graph, {**state, key: found[layer.weight].dequantize()}, rounded)
            shift = _mean_error(made[0], exact, rounded)
            old = state[next(graph.weights[layer.bias].keys())] if layer.bias is not None else np.float32(0)
            name = unique_name(f"{node.name}.bias", tensors)
            tensors[name] = TensorSpec(name, tuple(shift.shape), "float32")
            recipes[name], changed[name] = from_key(name), (old + shift.numpy()).astype(np.float32)
            node = replace(node, inputs=(*node.inputs[:2], name))
            for values in rounded:
                values[made[0]] += _along_channels(shift, values[made[0]])
        nodes.append(node)
        for values in rounded:
            values.update({name: _rounded(values[name], ranges.get(name)) for name in made})
        for values in (*exact, *rounded):
            for name in [name for name in values if last.get(name, -1) <= index]:
                del values[name]
    result = replace(graph, nodes=nodes, tensors=tensors, weights=recipes)
    return eliminate_dead_code(result), changed, found


def _run(node: OpNode, graph: IRGraph, state: Mapping[str, np.ndarray], images: Sequence[_Values]) -> None:
    """Add a node's results to the values of each image."""
    weights = {name: graph.weights[name] for name in node.inputs if name in graph.weights}
    constants = {name: graph.constants[name] for name in node.inputs if name in graph.constants}
    given = [name for name in dict.fromkeys(node.inputs) if name not in weights and name not in constants]
    made = list(node.outputs)
    part = CPUPartition(IRGraph(node.name, [node], graph.tensors, given, made, made, weights, constants), state)
    for values in images:
        values.update(part.run_tensors({name: values[name] for name in given}))


def _compensated(weight: np.ndarray, node: OpNode, inputs: Sequence[torch.Tensor]) -> IntegerWeight:
    """A weight [o, ...] rounded for its inputs. Their mean does not count, as the bias makes up for its error."""
    rows = torch.from_numpy(np.asarray(weight, np.float32).reshape(len(weight), -1))
    hessian, total, count = torch.zeros(rows.shape[1], rows.shape[1]), torch.zeros(rows.shape[1]), 0
    for value in inputs:
        seen = _columns(value, node, weight.shape)
        hessian.addmm_(seen.T, seen)
        total, count = total + seen.sum(0), count + len(seen)
    hessian -= torch.outer(total, total) / count
    array = compensated(rows, hessian, _INT8, SEARCH)
    return IntegerWeight(array.integers().astype(np.int8).reshape(weight.shape), array.scales[:, 0])


def _columns(value: torch.Tensor, node: OpNode, shape: tuple[int, ...]) -> torch.Tensor:
    """What each output element of a linear or convolution multiplies with its weight: [positions, k]."""
    if len(shape) == 2:
        return value.reshape(-1, shape[1])
    options = {
        name: node.attrs.get(name, default) for name, default in (("stride", 1), ("padding", 0), ("dilation", 1))
    }
    return torch.nn.functional.unfold(value, shape[2:], **options).transpose(1, 2).reshape(-1, int(np.prod(shape[1:])))


def _mean_error(name: str, exact: Sequence[_Values], rounded: Sequence[_Values]) -> torch.Tensor:
    """What a tensor lacks in the mean of each channel."""
    axes = [dim for dim in range(exact[0][name].ndim) if dim != channel_dim(exact[0][name])]
    errors = [(wanted[name] - found[name]).mean(axes) for wanted, found in zip(exact, rounded, strict=True)]
    return torch.stack(errors).mean(0)


def channel_dim(value: torch.Tensor) -> int:
    """The axis of channels: the second one of images, the last one of all others."""
    return 1 if value.ndim == 4 else value.ndim - 1


def _along_channels(channels: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return channels.reshape([-1 if dim == channel_dim(value) else 1 for dim in range(value.ndim)])


def _rounded(value: torch.Tensor, found: ActivationRange | None) -> torch.Tensor:
    """The numbers that the integers of a tensor stand for; the tensor itself where it has no range."""
    if found is None:
        return value
    return ((value / found.scale).round() + found.zero_point).clamp(0, 255).sub(found.zero_point).mul(found.scale)
