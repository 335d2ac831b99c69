"""Convolutions and products between quantized tensors as integer kernels.

    Given:   f = dequantize(x);  v = dequantize(w);  c = conv2d(f, v, b);  r = relu(c);  y = quantize(r)
    Result:  y = npu.integer_conv2d(x, w, scales, b) {activation=relu}        x, w, y: int8 or uint8

A residual sum is fused too. Max pooling, means of images and sums of two quantized tensors also become integer
kernels. Any other quantize or dequantize op of a whole tensor becomes `npu.quantize` or `npu.dequantize`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from npu_compiler.fusions.engine import activation
from npu_compiler.graph.dtypes import BYTE_DTYPES, FLOAT_DTYPES
from npu_compiler.graph.model import IRGraph, OpNode, TensorSpec, unique_name
from npu_compiler.ops.affine import check_parameters, limits
from npu_compiler.ops.byte_storage import storable_in_bytes
from npu_compiler.ops.conv import max_pool_window
from npu_compiler.ops.integer import MOST_TERMS
from npu_compiler.ops.registry import Args, find_op, well_formed
from npu_compiler.ops.windows import reach_the_image

_QUANTIZE, _DEQUANTIZE = "npu.quantize", "npu.dequantize"
_WEIGHT_OPS = tuple(f"quantized_decomposed.dequantize_{kind}.default" for kind in ("per_channel", "per_tensor"))
_NO_RESIDUAL = {"has_residual": False, "residual_scale": 1.0, "residual_zero_point": 0}
_NO_RESULT = {"out_scale": 1.0, "out_zero_point": 0, "low": 0, "high": 0}


def fuse_integers(graph: IRGraph) -> IRGraph:
    """Replace ops on quantized tensors by integer kernels; if there are none, return the graph unchanged."""
    named = _name_parameters(graph)
    if not any(node.op_type == _DEQUANTIZE for node in named.nodes):
        return graph
    moved = named
    while (changed := _move_through(moved)) is not moved:
        moved = changed
    fused = _Fuser(moved).run()
    return fused if any(node.op_type.startswith("npu.integer_") for node in fused.nodes) else graph


def _name_parameters(graph: IRGraph) -> IRGraph:
    """Replace quantize and dequantize ops with one known scale by `npu.quantize` and `npu.dequantize`."""
    return graph.with_nodes([_named(node, graph) for node in graph.nodes])


def _named(node: OpNode, graph: IRGraph) -> OpNode:
    kind = node.op_type.rpartition(".")[0]
    if kind not in ("quantized_decomposed.quantize_per_tensor", "quantized_decomposed.dequantize_per_tensor"):
        return node
    is_quantize = kind.endswith(".quantize_per_tensor")
    integers = graph.tensors[node.outputs[0] if is_quantize else node.inputs[0]]
    if integers.dtype not in BYTE_DTYPES or integers.name in graph.weights or integers.name in graph.constants:
        return node
    with well_formed(node):
        args = Args(node)
        scale, zero_point = (_number(graph, args, name) for name in ("scale", "zero_point"))
        if scale is None or zero_point is None:
            return node
        low, high = limits(node)
    try:
        check_parameters(scale, int(zero_point), low, high)
    except ValueError:
        return node  # parameters that are tensors may be anything; the node is computed as it is written
    if is_quantize:
        attrs = {"out_scale": float(scale), "out_zero_point": int(zero_point), "low": low, "high": high}
        return OpNode(node.name, _QUANTIZE, node.inputs[:1], node.outputs, attrs)
    attrs = {"x_scale": float(scale), "zero_point": int(zero_point)}
    return OpNode(node.name, _DEQUANTIZE, node.inputs[:1], node.outputs, attrs)


def _number(graph: IRGraph, args: Args, name: str) -> float | None:
    tensor = args.tensor(name)
    if tensor is None:
        value: float = args.node.attrs[name]
        return value
    constant = graph.constants.get(tensor)
    return None if constant is None or constant.size != 1 else float(constant.reshape(-1)[0])


def _move_through(graph: IRGraph) -> IRGraph:
    """Move views and max pooling before a dequantize or after a quantize op, so that they work on integers.

    Returns the same graph object if there is nothing to move.

    Given:   f = dequantize(x);  p = max_pool2d(f)        and      p = max_pool2d(f);  y = quantize(p)
    Result:  q = max_pool2d(x);  p = dequantize(q)                 q = quantize(f);  y = max_pool2d(q)
    """
    producers, consumers = graph.producers(), graph.consumers()
    for position, node in enumerate(graph.nodes):
        if node.op_type == _QUANTIZE:
            source = producers.get(node.inputs[0])
            if source is not None and _same_codes(source, node, graph):
                return _replaced(graph, position, [], {node.outputs[0]: source.inputs[0]})
            if source is not None and _moves(source, graph) and _only_reader(source, node, graph, consumers):
                return _swapped(graph, source, node)
        source = producers.get(node.inputs[0]) if _moves(node, graph) else None
        if source is not None and source.op_type == _DEQUANTIZE and node.outputs[0] not in graph.outputs:
            return _swapped(graph, source, node, keep_first=True)
    return graph


def _same_codes(source: OpNode, node: OpNode, graph: IRGraph) -> bool:
    """Whether `node` quantizes the result of the dequantize op `source` back to the integers it came from."""
    same_dtype = graph.tensors[source.inputs[0]].dtype == graph.tensors[node.outputs[0]].dtype
    scales = (source.attrs.get("x_scale"), source.attrs.get("zero_point"))
    whole = node.attrs["high"] - node.attrs["low"] >= 254 and node.outputs[0] not in graph.outputs
    same = scales == (node.attrs["out_scale"], node.attrs["out_zero_point"])
    return source.op_type == _DEQUANTIZE and same_dtype and same and whole


def _moves(node: OpNode, graph: IRGraph) -> bool:
    """Whether the node's result consists of elements of its input, or of maxima of them, and so may be integers."""
    op = find_op(node.op_type)
    is_view = op is not None and op.view is not None and op.moves and not op.is_cast
    is_pool = _is_max_pool(node) and _pools_images(node, graph)
    return (is_view or is_pool) and len(node.inputs) == len(node.outputs) == 1


def _pools_images(node: OpNode, graph: IRGraph) -> bool:
    """Whether a max pooling works on a batch of images, and each of its windows contains a pixel.

    A window without pixels gives minus infinity, for which there is no integer.
    """
    shape, result = graph.tensors[node.inputs[0]].shape, graph.tensors[node.outputs[0]].shape
    if len(shape) != 4:
        return False
    with well_formed(node):
        window = max_pool_window(node)
    sizes = dict(zip("hwpq", (*shape[2:], *result[2:]), strict=True))
    return reach_the_image(SimpleNamespace(**sizes, **window))


def _is_max_pool(node: OpNode) -> bool:
    return node.base in ("aten.max_pool2d", "npu.integer_max_pool2d")


def _only_reader(source: OpNode, node: OpNode, graph: IRGraph, consumers: Mapping[str, list[OpNode]]) -> bool:
    tensor = source.outputs[0]
    return consumers[tensor] == [node] and tensor not in graph.outputs


def _swapped(graph: IRGraph, first: OpNode, second: OpNode, keep_first: bool = False) -> IRGraph:
    """The graph with `second(first(x))` as `first(second(x))`.

    Args:
        keep_first: Keep the old `first(x)` too, for its other readers.
    """
    x, result = first.inputs[0], second.outputs[0]
    name = unique_name(f"{result}.moved", graph.tensors)
    quantizes = second.op_type == _QUANTIZE
    dtype = graph.tensors[result if quantizes else x].dtype
    shape = graph.tensors[x if quantizes else result].shape
    spec = TensorSpec(name, shape, dtype)
    inner = replace(second, name=name, inputs=(x,), outputs=(name,))
    outer = replace(first, name=second.name, inputs=(name,), outputs=(result,))
    inner, outer = (_on_integers(node) if _is_max_pool(node) else node for node in (inner, outer))
    nodes = [node for node in graph.nodes if keep_first or node is not first]
    position = nodes.index(second)
    return replace(
        graph, nodes=[*nodes[:position], inner, outer, *nodes[position + 1 :]], tensors={**graph.tensors, name: spec}
    )


def _on_integers(node: OpNode) -> OpNode:
    return replace(node, op_type="npu.integer_max_pool2d")


def _replaced(graph: IRGraph, position: int, nodes: list[OpNode], renamed: dict[str, str]) -> IRGraph:
    rest = [node.rename_inputs(renamed) for node in graph.nodes[position + 1 :]]
    return replace(graph, nodes=[*graph.nodes[:position], *nodes, *rest])


@dataclass(frozen=True)
class _Quantized:
    """A tensor of integers, with the scale and zero point of the floats that they stand for."""

    name: str
    scale: float
    zero_point: int


@dataclass
class _Chain:
    """The nodes after a product that are fused into its integer kernel, and the kernel's attributes."""

    last: OpNode
    taken: list[OpNode]
    attrs: dict[str, Any]
    residual: str | None = None


class _Fuser:
    """One pass from the last node to the first, so that the last of several branches fuses with their sum."""

    def __init__(self, graph: IRGraph) -> None:
        self.graph = graph
        self.producers, self.consumers = graph.producers(), graph.consumers()
        self.tensors, self.constants = dict(graph.tensors), dict(graph.constants)
        self.storable = storable_in_bytes(graph)
        self.taken: set[str] = set()
        self.replacements: dict[str, OpNode] = {}

    def run(self) -> IRGraph:
        for node in reversed(self.graph.nodes):
            if node.name in self.taken:
                continue
            with well_formed(node):
                if node.base in ("aten.conv2d", "aten.convolution", "aten.linear"):
                    self._product(node)
                elif node.base in ("aten.mean", "aten.adaptive_avg_pool2d", "aten._adaptive_avg_pool2d"):
                    self._mean(node)
                elif node.base == "aten.add":
                    self._sum(node)
        nodes = [
            self.replacements.get(node.name, node)
            for node in self.graph.nodes
            if node.name in self.replacements or node.name not in self.taken
        ]
        return replace(self.graph, nodes=nodes, tensors=self.tensors, constants=self.constants)

    def _quantized(self, name: str) -> _Quantized | None:
        """The quantized tensor that a dequantize op turns into the float tensor `name`; None if there is none."""
        node = self.producers.get(name)
        if node is None or node.op_type != _DEQUANTIZE or node.inputs[0] not in self.storable:
            return None
        return _Quantized(node.inputs[0], node.attrs["x_scale"], node.attrs["zero_point"])

    def _product(self, node: OpNode) -> None:
        x = self._quantized(node.inputs[0])
        is_linear = node.base == "aten.linear"
        rank = len(self.tensors[node.inputs[1]].shape)
        if x is None or rank != (2 if is_linear else 4) or node.attrs.get("transposed"):
            return
        if len(self.tensors[x.name].shape) < rank:
            return
        weight = self._weight(node.inputs[1])
        if weight is None:
            return
        chain = self._follow(node, node.outputs[0], may_add=True)
        bias = node.inputs[2:3]
        attrs = {
            **({} if is_linear else node.attrs),
            "x_scale": x.scale,
            "zero_point": x.zero_point,
            "has_weight_zeros": len(weight) > 2,
            "has_bias": bool(bias),
            **chain.attrs,
        }
        residual = () if chain.residual is None else (chain.residual,)
        op = "npu.integer_linear" if is_linear else "npu.integer_conv2d"
        self._make(op, chain, (x.name, *weight, *bias, *residual), attrs)

    def _weight(self, name: str) -> tuple[str, ...] | None:
        """The names of a dequantized weight's int8 tensor, its scales [o] and, if it has any, its zero points [o].

        None if the weight is not a known int8 tensor with one scale for all or one for each output channel.
        """
        node = self.producers.get(name)
        if node is None or node.op_type not in _WEIGHT_OPS:
            return None
        integers = node.inputs[0]
        spec = self.tensors[integers]
        if spec.dtype != "int8" or not self._is_known(integers) or integers not in self.storable:
            return None
        if math.prod(spec.shape[1:]) > MOST_TERMS:
            return None
        channels, args = spec.shape[0], Args(node)
        if "scale" in node.attrs:
            scales = self._constant(f"{name}.scales", np.full(channels, node.attrs["scale"], np.float32))
            zero = int(node.attrs["zero_point"])
            zeros = self._constant(f"{name}.zeros", np.full(channels, zero, np.int32)) if zero else None
        elif node.attrs.get("axis") in (0, -len(spec.shape)):
            tensor_scales = args.tensor("scales")
            assert tensor_scales is not None
            scales, zeros = tensor_scales, args.tensor("zero_points")
        else:
            return None
        if any(x is not None and self.tensors[x].shape != (channels,) for x in (scales, zeros)):
            return None
        return (integers, scales) if zeros is None else (integers, scales, zeros)

    def _is_known(self, name: str) -> bool:
        return name in self.graph.weights or name in self.graph.constants

    def _constant(self, stem: str, value: np.ndarray) -> str:
        name = unique_name(stem, self.tensors)
        self.tensors[name] = TensorSpec(name, value.shape, value.dtype.name)
        self.constants[name] = value
        return name

    def _follow(self, node: OpNode, tensor: str, may_add: bool) -> _Chain:
        """The chain of a sum, an activation and a quantization after `node`, each the only reader of the one before.

        Args:
            tensor: The output of `node` from which the chain goes on.
            may_add: Whether the chain may have a sum.
        """
        chain = _Chain(node, [node], {**_NO_RESIDUAL, **_NO_RESULT, "activation": "none"})
        shape = self.tensors[tensor].shape
        reader = self._only_reader(tensor)
        if may_add and reader is not None and reader.base == "aten.add" and self._add_residual(chain, reader, tensor):
            tensor, reader = reader.outputs[0], self._only_reader(reader.outputs[0])
        if reader is not None and activation(reader) is not None and len(reader.inputs) == 1:
            chain.attrs["activation"] = activation(reader)
            chain.taken.append(reader)
            tensor, reader = reader.outputs[0], self._only_reader(reader.outputs[0])
        if reader is not None and reader.op_type == _QUANTIZE and self.tensors[reader.outputs[0]].shape == shape:
            chain.attrs.update(reader.attrs)
            chain.taken.append(reader)
        chain.last = chain.taken[-1]
        return chain

    def _only_reader(self, name: str) -> OpNode | None:
        readers = self.consumers.get(name, [])
        if len(readers) != 1 or name in self.graph.outputs or readers[0].name in self.taken:
            return None
        return readers[0]

    def _add_residual(self, chain: _Chain, node: OpNode, tensor: str) -> bool:
        others = [name for name in node.inputs if name != tensor]
        if len(others) != 1 or node.attrs.get("alpha", 1) != 1:
            return False
        spec = self.tensors[others[0]]
        if (
            spec.shape != self.tensors[tensor].shape
            or spec.dtype not in FLOAT_DTYPES
            or others[0] in self.graph.weights
        ):
            return False
        quantized = self._quantized(others[0])
        chain.residual = others[0] if quantized is None else quantized.name
        chain.attrs["has_residual"] = True
        if quantized is not None:
            chain.attrs.update(residual_scale=quantized.scale, residual_zero_point=quantized.zero_point)
        chain.taken.append(node)
        return True

    def _mean(self, node: OpNode) -> None:
        x = self._quantized(node.inputs[0])
        shape = self.tensors[node.inputs[0]].shape
        out_shape = self.tensors[node.outputs[0]].shape
        dims = {dim % 4 for dim in node.attrs.get("dim") or ()} if node.base == "aten.mean" else {2, 3}
        if x is None or len(shape) != 4 or dims != {2, 3} or math.prod(out_shape) != shape[0] * shape[1]:
            return
        if node.attrs.get("dtype") not in (None, self.tensors[node.outputs[0]].dtype):
            return
        reader = self._only_reader(node.outputs[0])
        chain = _Chain(node, [node], dict(_NO_RESULT))
        if reader is not None and reader.op_type == _QUANTIZE:
            chain = _Chain(reader, [node, reader], {**_NO_RESULT, **reader.attrs})
        attrs = {"x_scale": x.scale, "zero_point": x.zero_point, **chain.attrs}
        self._make("npu.integer_mean", chain, (x.name,), attrs)

    def _sum(self, node: OpNode) -> None:
        """Replace a sum of two quantized tensors by one integer op, unless it is fused into a product."""
        operands = [self._quantized(name) for name in node.inputs]
        if len(operands) != 2 or node.attrs.get("alpha", 1) != 1:
            return
        x, other = operands
        if x is None or other is None or self.tensors[x.name].shape != self.tensors[other.name].shape:
            return
        chain = self._follow(node, node.outputs[0], may_add=False)
        attrs = {**chain.attrs, "x_scale": x.scale, "zero_point": x.zero_point, "has_residual": True}
        attrs |= {"residual_scale": other.scale, "residual_zero_point": other.zero_point}
        self._make("npu.integer_add", chain, (x.name, other.name), attrs)

    def _make(self, op: str, chain: _Chain, inputs: tuple[str, ...], attrs: dict[str, Any]) -> None:
        self.replacements[chain.last.name] = OpNode(chain.last.name, op, inputs, chain.last.outputs, attrs)
        self.taken.update(node.name for node in chain.taken)
