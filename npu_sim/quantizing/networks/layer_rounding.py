"""Rounding of a network's layers one after the other, each for the inputs that the rounded layers before it produce.

The rounding errors of a weight are compensated (`npu_sim.quantizing.compensation`, or `rounding_search` if an output
element has few weights). Half of the error that earlier layers left in the inputs is compensated as well. The remaining
error in the mean of each channel is subtracted through the bias: "empirical bias correction" of Nagel et al.,
"Data-Free Quantization through Weight Equalization and Bias Correction" (2019), https://arxiv.org/abs/1906.04721.
"""

from __future__ import annotations

import math
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
from npu_sim.quantizing.compensation import PROPAGATION, compensated
from npu_sim.quantizing.networks.rounding_search import FEW, best_scales, damped, searched
from npu_sim.quantizing.rounding import SEARCH

_INT8 = QuantizedFormat("int8")
_POSITIONS = 20  # for each weight of a result: with fewer, what the inputs lack is not known well enough to make up for
_Values = dict[str, torch.Tensor]


def round_layers(
    graph: IRGraph,
    state: Mapping[str, np.ndarray],
    layers: Sequence[Layer],
    ranges: Mapping[str, ActivationRange],
    integers: Mapping[str, IntegerWeight],
    images: Sequence[np.ndarray],
) -> tuple[IRGraph, dict[str, np.ndarray], dict[str, IntegerWeight]]:
    """Round the layers' weights with compensation and correct their biases, in the graph's order.

    Args:
        graph: Graph of floats, with one input; each weight has a key of its own.
        state: Weights by key.
        layers: Layers to round.
        ranges: Tensor → its range, for all activations to quantize.
        integers: Weight tensor → its integers when each element is rounded by itself.
        images: float32 inputs of the graph.

    Returns:
        The graph and weights with new biases, and the integers of all weights.
    """
    by_node = {layer.node: layer for layer in layers}
    source, nodes, changed, integers_of = graph.inputs[0], [], dict(state), dict(integers)
    tensors, recipes = dict(graph.tensors), dict(graph.weights)
    exact: list[_Values] = [{source: numpy_to_tensor(np.ascontiguousarray(x, np.float32))} for x in images]
    rounded = [{source: _rounded(values[source], ranges.get(source))} for values in exact]
    last = {name: index for index, node in enumerate(graph.nodes) for name in node.inputs}
    for index, node in enumerate(graph.nodes):
        layer, outputs = by_node.get(node.name), node.outputs
        _run(node, graph, state, exact)
        if layer is None:
            _run(node, graph, state, rounded)
        else:
            key = next(graph.weights[layer.weight].keys())
            if not isinstance(node.attrs.get("padding"), str):
                inputs = ([values[node.inputs[0]] for values in network] for network in (exact, rounded))
                integers_of[layer.weight] = _compensated(state[key], node, *inputs)
            _run(node, graph, {**state, key: integers_of[layer.weight].dequantize()}, rounded)
            shift = _mean_error(outputs[0], exact, rounded)
            old = state[next(graph.weights[layer.bias].keys())] if layer.bias is not None else np.float32(0)
            name = unique_name(f"{node.name}.bias", tensors)
            tensors[name] = TensorSpec(name, tuple(shift.shape), "float32")
            recipes[name], changed[name] = from_key(name), (old + shift.numpy()).astype(np.float32)
            node = replace(node, inputs=(*node.inputs[:2], name))
            for values in rounded:
                values[outputs[0]] += _along_channels(shift, values[outputs[0]])
        nodes.append(node)
        for values in rounded:
            values.update({name: _rounded(values[name], ranges.get(name)) for name in outputs})
        for values in (*exact, *rounded):
            for name in [name for name in values if last.get(name, -1) <= index]:
                del values[name]
    result = replace(graph, nodes=nodes, tensors=tensors, weights=recipes)
    return eliminate_dead_code(result), changed, integers_of


def _run(node: OpNode, graph: IRGraph, state: Mapping[str, np.ndarray], images: Sequence[_Values]) -> None:
    """Run a node by PyTorch on the values of each image, and add its results to them."""
    weights = {name: graph.weights[name] for name in node.inputs if name in graph.weights}
    constants = {name: graph.constants[name] for name in node.inputs if name in graph.constants}
    given = [name for name in dict.fromkeys(node.inputs) if name not in weights and name not in constants]
    outputs = list(node.outputs)
    part = CPUPartition(IRGraph(node.name, [node], graph.tensors, given, outputs, outputs, weights, constants), state)
    for values in images:
        values.update(part.run_tensors({name: values[name] for name in given}))


def _compensated(
    weight: np.ndarray, node: OpNode, exact: Sequence[torch.Tensor], rounded: Sequence[torch.Tensor]
) -> IntegerWeight:
    """Return a weight [o, ...] rounded with compensation for its inputs.

    The mean of the inputs is left out, since the bias corrects its error.
    """
    groups = node.attrs.get("groups", 1)
    rows = torch.from_numpy(np.asarray(weight, np.float32)).reshape(groups, len(weight) // groups, -1)
    hessian, shift, count = _moments(exact, rounded, node, weight.shape)
    if count >= _POSITIONS * rows.shape[2]:
        rows = _matched(rows, hessian, shift)
    if rows.shape[2] <= FEW:
        codes, scales = searched(rows, hessian)
    else:
        arrays = [compensated(*one, _INT8, SEARCH) for one in zip(rows, hessian, strict=True)]
        codes = torch.stack([torch.from_numpy(array.numbers()) for array in arrays])
        scales = torch.stack([torch.from_numpy(array.scales[:, 0]) for array in arrays])
        scales = best_scales(codes.double(), rows.double(), damped(hessian), scales.double()).float()
    return IntegerWeight(codes.to(torch.int8).reshape(weight.shape).numpy(), scales.flatten().numpy())


def _matched(weight: torch.Tensor, hessian: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """Return weights, a matrix for each group, that better reproduce the float layer's outputs on quantized inputs.

    See `compensation.matched`, which does this for one matrix.
    """
    change = torch.cholesky_solve(shift.mT.double(), torch.linalg.cholesky(damped(hessian))).mT
    return weight + PROPAGATION * weight @ change.float()


def _moments(
    exact: Sequence[torch.Tensor], rounded: Sequence[torch.Tensor], node: OpNode, shape: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return sums of x xᵀ and (y - x) xᵀ over a layer's rounded inputs x and exact ones y, without their means.

    Returns:
        Both sums, [groups, k, k], and the number of positions that they are over.
    """
    hessian = shift = total = lost = torch.zeros(())
    # About the mean, which then takes no digits from the differences between large values.
    middle, count = _columns(rounded[0], node, shape).mean(2, keepdim=True), 0
    for value, wanted in zip(rounded, exact, strict=True):
        x, y = _columns(value, node, shape) - middle, _columns(wanted - value, node, shape)
        hessian, shift = hessian + x @ x.mT, shift + y @ x.mT
        total, lost, count = total + x.sum(2), lost + y.sum(2), count + x.shape[2]
    hessian = hessian - total[:, :, None] * total[:, None] / count
    return hessian, shift - lost[:, :, None] * total[:, None] / count, count


def _columns(value: torch.Tensor, node: OpNode, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the inputs that a weight's rows are multiplied with: [groups, k, positions].

    Args:
        node: A linear layer or a convolution.
        shape: Shape of the weight.
    """
    if len(shape) == 2:
        return value.reshape(1, -1, shape[1]).mT
    options = {
        name: node.attrs.get(name, default) for name, default in (("stride", 1), ("padding", 0), ("dilation", 1))
    }
    columns = torch.nn.functional.unfold(value, shape[2:], **options)
    groups, k = node.attrs.get("groups", 1), math.prod(shape[1:])
    return columns.reshape(-1, groups, k, columns.shape[2]).permute(1, 2, 0, 3).reshape(groups, k, -1)


def _mean_error(name: str, exact: Sequence[_Values], rounded: Sequence[_Values]) -> torch.Tensor:
    """Return the mean over all images of each channel's error in a tensor: exact value minus rounded value."""
    axes = [dim for dim in range(exact[0][name].ndim) if dim != channel_dim(exact[0][name])]
    errors = [(wanted[name] - stored[name]).mean(axes) for wanted, stored in zip(exact, rounded, strict=True)]
    return torch.stack(errors).mean(0)


def channel_dim(value: torch.Tensor) -> int:
    """Return the dimension of channels: the second one of 4-D tensors (images), the last one of all others."""
    return 1 if value.ndim == 4 else value.ndim - 1


def _along_channels(channels: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return channels.reshape([-1 if dim == channel_dim(value) else 1 for dim in range(value.ndim)])


def _rounded(value: torch.Tensor, limits: ActivationRange | None) -> torch.Tensor:
    """Return the tensor rounded to 8 bits and dequantized; unchanged if there is no range.

    Args:
        limits: The tensor's range. None: the tensor is not quantized.
    """
    if limits is None:
        return value
    return ((value / limits.scale).round() + limits.zero_point).clamp(0, 255).sub(limits.zero_point).mul(limits.scale)
