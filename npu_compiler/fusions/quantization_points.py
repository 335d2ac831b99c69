"""Inserts quantization points into a float network, from which `fuse_integers` makes one integer kernel of each layer.

    Given:   c = conv2d(x, w, b);  r = relu(c)
    Result:  q = quantize(x);  f = dequantize(q);  v = dequantize(codes of w)
             c = conv2d(f, v, b);  r = relu(c)

A layer is a convolution or a linear with a known weight. Its input is quantized, and so are the operands of sums and
of means. The residual sum and the activation that follow a layer stay floats, since its kernel computes them too.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import numpy as np

from npu_compiler.fusions.conv import is_zero_padding
from npu_compiler.fusions.engine import activation
from npu_compiler.graph.model import IRGraph, OpNode, TensorSpec, unique_name
from npu_compiler.graph.weight_recipe import from_key
from npu_compiler.ops.registry import find_op

_LAYERS = ("aten.conv2d", "aten.linear")
_MEANS = ("aten.mean", "aten.adaptive_avg_pool2d")
_PER_TENSOR = "quantized_decomposed.{}_per_tensor.default"
_PER_CHANNEL = "quantized_decomposed.dequantize_per_channel.default"


@dataclass(frozen=True)
class Layer:
    """A convolution or linear of a network.

    Attributes:
        node: The name of its node.
        source: The tensor that is quantized as its input: its input before views, paddings and max pooling, which work
            on integers.
        weight, bias: Names of its weight and its bias; `bias` is None if it has none.
        result: The tensor that its kernel computes, after the residual sum and the activation that are fused with it.
    """

    node: str
    source: str
    weight: str
    bias: str | None
    result: str


@dataclass(frozen=True)
class ActivationRange:
    """The scale and zero point by which a tensor is quantized to uint8: rint(x / scale) + zero_point."""

    scale: float
    zero_point: int


@dataclass(frozen=True)
class IntegerWeight:
    """A weight [o, ...] as int8, and the scale [o] of each output channel."""

    codes: np.ndarray
    scales: np.ndarray

    def dequantize(self) -> np.ndarray:
        """The weight in float32 [o, ...]."""
        return np.asarray(self.codes * self.scales.reshape(-1, *[1] * (self.codes.ndim - 1)))


class Points:
    """The layers and tensors of a float graph that can be quantized.

    Args:
        keep: Names of nodes of layers that stay floats.

    Attributes:
        layers: Layers in the graph's order.
        tensors: Tensors to quantize, in order, if all layers but those in `keep` are quantized.
    """

    def __init__(self, graph: IRGraph, keep: Collection[str] = ()) -> None:
        self.graph = graph
        self._producers, self._consumers = graph.producers(), graph.consumers()
        ends: dict[str, str] = {}
        taken: set[str] = set()
        inside: set[str] = set()
        for node in reversed(graph.nodes):
            if self._is_layer(node) or (node.base == "aten.add" and node.name not in taken):
                ends[node.name] = self._end(node, taken, inside)
        self.layers = [self._layer(node, ends[node.name]) for node in graph.nodes if self._is_layer(node)]
        wanted = {layer.source for layer in self.layers if layer.node not in keep}
        for node in graph.nodes:
            if node.base == "aten.add" and len(node.inputs) == 2:
                wanted |= {self._source(name) for name in node.inputs if name not in inside}
            elif node.base in _MEANS and len(graph.tensors[node.inputs[0]].shape) == 4:
                wanted.add(self._source(node.inputs[0]))
        constants = {*graph.weights, *graph.constants}
        in_order = [*graph.inputs, *(out for node in graph.nodes for out in node.outputs)]
        floats = {name for name in wanted - constants if graph.tensors[name].dtype == "float32"}
        self.tensors = [name for name in in_order if name in floats]

    def _is_layer(self, node: OpNode) -> bool:
        weights = self.graph.weights
        is_product = node.base in _LAYERS and len(node.inputs) >= 2
        return is_product and all(name in weights for name in node.inputs[1:]) and self._is_float(node.inputs[1])

    def _is_float(self, name: str) -> bool:
        return self.graph.tensors[name].dtype == "float32"

    def _layer(self, node: OpNode, result: str) -> Layer:
        bias = node.inputs[2] if len(node.inputs) > 2 else None
        return Layer(node.name, self._source(node.inputs[0]), node.inputs[1], bias, result)

    def _end(self, node: OpNode, taken: set[str], inside: set[str]) -> str:
        """The last tensor that the kernel of a layer or a sum computes.

        Adds the fused sum to `taken`, and intermediate tensors to `inside`.
        """
        tensor = node.outputs[0]
        reader = self._only_reader(tensor, taken)
        if reader is not None and reader.base == "aten.add" and node.base in _LAYERS:
            same = {self.graph.tensors[name].shape for name in (*reader.inputs, tensor)}
            if len(same) == 1 and len(set(reader.inputs)) == 2:
                taken.add(reader.name)
                inside.add(tensor)
                tensor = reader.outputs[0]
                reader = self._only_reader(tensor, taken)
        if reader is not None and activation(reader) is not None and len(reader.inputs) == 1:
            inside.add(tensor)
            tensor = reader.outputs[0]
        return tensor

    def _only_reader(self, name: str, taken: set[str]) -> OpNode | None:
        readers = self._consumers.get(name, [])
        alone = len(readers) == 1 and name not in self.graph.outputs and readers[0].name not in taken
        return readers[0] if alone else None

    def _source(self, name: str) -> str:
        node = self._producers.get(name)
        while node is not None and self._shows_integers(node):
            name = node.inputs[0]
            node = self._producers.get(name)
        return name

    def _shows_integers(self, node: OpNode) -> bool:
        op = find_op(node.op_type)
        is_view = op is not None and op.view is not None and op.moves and not op.is_cast and len(node.inputs) == 1
        return is_view or node.base == "aten.max_pool2d" or is_zero_padding(node, self.graph)


def quantized_graph(
    graph: IRGraph, ranges: Mapping[str, ActivationRange], weights: Mapping[str, IntegerWeight]
) -> tuple[IRGraph, dict[str, np.ndarray]]:
    """The graph with quantization points, and the integer weights that replace float weights, by `state_dict` key.

    Args:
        ranges: Tensor → its range; all readers of the tensor then read it quantized and dequantized.
        weights: Weight tensor → its integers, stored under new keys: `<key>.codes` and `<key>.scales`.
    """
    tensors, recipes, state = dict(graph.tensors), dict(graph.weights), {}
    nodes: list[OpNode] = []
    renamed: dict[str, str] = {}

    def add(
        stem: str, like: str, dtype: str, op_type: str, inputs: tuple[str, ...], attrs: Mapping[str, object]
    ) -> str:
        name = unique_name(stem, tensors)
        tensors[name] = replace(tensors[like], name=name, dtype=dtype)
        nodes.append(OpNode(name, op_type, inputs, (name,), dict(attrs)))
        return name

    def add_range(name: str) -> None:
        if name not in ranges:
            return
        activation = ranges[name]
        attrs = {
            "scale": activation.scale,
            "zero_point": activation.zero_point,
            "quant_min": 0,
            "quant_max": 255,
            "dtype": "uint8",
        }
        codes = add(f"{name}.quantized", name, "uint8", _PER_TENSOR.format("quantize"), (name,), attrs)
        renamed[name] = add(f"{name}.rounded", name, "float32", _PER_TENSOR.format("dequantize"), (codes,), attrs)

    for name, weight in weights.items():
        key = recipes.pop(name).params["key"]
        parts = []
        for part, array in (("codes", weight.codes), ("scales", weight.scales)):
            tensor = unique_name(f"{name}.{part}", tensors)
            tensors[tensor] = TensorSpec(tensor, array.shape, array.dtype.name)
            recipes[tensor], state[f"{key}.{part}"] = from_key(f"{key}.{part}"), array
            parts.append(tensor)
        attrs = {"axis": 0, "quant_min": -127, "quant_max": 127, "dtype": "int8"}
        renamed[name] = add(f"{name}.rounded", name, "float32", _PER_CHANNEL, tuple(parts), attrs)
        del tensors[name]
    for name in graph.inputs:
        add_range(name)
    for node in graph.nodes:
        nodes.append(node.rename_inputs(renamed))
        for name in node.outputs:
            add_range(name)
    return replace(graph, nodes=nodes, tensors=tensors, weights=recipes), state
