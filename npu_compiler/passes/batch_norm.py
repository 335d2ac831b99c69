"""Folds batch norms into the weights before them, or turns them into a multiply-add per channel."""

from __future__ import annotations

from dataclasses import replace

from npu_compiler.graph.model import IRGraph, OpNode, TensorSpec, unique_name
from npu_compiler.graph.weight_recipe import WeightTransformRecipe
from npu_compiler.ops.conv import BATCH_NORM_OPS
from npu_compiler.ops.registry import Layout, find_op


def _bn_parts(node: OpNode, graph: IRGraph) -> tuple[WeightTransformRecipe, WeightTransformRecipe] | None:
    """Recipes of a batch norm's per-channel scale and shift; None unless all its parameters are weights."""
    if node.base not in BATCH_NORM_OPS or node.attrs.get("training") or node.attrs.get("train"):
        return None
    names = node.inputs[1:]
    if len(names) not in (2, 4) or any(name not in graph.weights for name in names):
        return None
    channels = list(graph.tensors[names[-1]].shape)
    mean, var = graph.weights[names[-2]], graph.weights[names[-1]]
    if len(names) == 4:
        gamma, beta = graph.weights[names[0]], graph.weights[names[1]]
    else:
        gamma = WeightTransformRecipe("fill", params={"shape": channels, "value": 1.0})
        beta = WeightTransformRecipe("fill", params={"shape": channels, "value": 0.0})
    eps = float(node.attrs.get("eps", 1e-5))
    scale = WeightTransformRecipe("bn_scale", (gamma, var), {"eps": eps})
    shift = WeightTransformRecipe("bn_shift", (gamma, beta, mean, var), {"eps": eps})
    return scale, shift


def fold_batch_norm(graph: IRGraph) -> IRGraph:
    """Fold a batch norm into the weights of the convolution or linear before it.

    Given:   c = conv2d(x, w, b);  y = batch_norm(c, gamma, beta, mean, var)
    Result:  y = conv2d(x, w · s, b · s + t)    with s = gamma / sqrt(var + eps), t = beta − mean · s

    A convolution of a 16-bit model stores w · s and b · s + t as float32: its own w is exact, and rounding w · s would
    shift whole channels, which no later average evens out.
    """
    producers, consumers = graph.producers(), graph.consumers()
    tensors, weights = dict(graph.tensors), dict(graph.weights)
    replaced: dict[str, OpNode] = {}
    dropped: set[str] = set()
    for node in graph.nodes:
        parts = _bn_parts(node, graph)
        source = producers.get(node.inputs[0]) if parts else None
        axis = _foldable_axis(source, node, graph, consumers) if source is not None else None
        if parts is None or source is None or axis is None:
            continue
        scale, shift = parts
        weight_name = source.inputs[1]
        folded = WeightTransformRecipe("scale_axis", (graph.weights[weight_name], scale), {"axis": axis})
        if len(source.inputs) > 2:
            shift = WeightTransformRecipe("multiply_add", (graph.weights[source.inputs[2]], scale, shift))
        spec = tensors[weight_name]
        names = []
        for suffix, recipe, shape in (("folded", folded, spec.shape), ("shift", shift, (spec.shape[axis],))):
            name = unique_name(f"{weight_name}.{suffix}", tensors)
            tensors[name] = TensorSpec(name, shape, "float32" if _is_convolution(source) else spec.dtype)
            weights[name] = recipe
            names.append(name)
        replaced[node.name] = replace(
            source, name=node.name, inputs=(source.inputs[0], *names), outputs=node.outputs[:1]
        )
        dropped.add(source.name)
    nodes = [replaced.get(node.name, node) for node in graph.nodes if node.name not in dropped]
    return replace(graph, nodes=nodes, tensors=tensors, weights=weights)


def _is_convolution(node: OpNode) -> bool:
    op = find_op(node.op_type)
    return op is not None and op.layout is Layout.CONVOLUTION


def _foldable_axis(source: OpNode, norm: OpNode, graph: IRGraph, consumers: dict[str, list[OpNode]]) -> int | None:
    """The axis of a node's weight along which a batch norm's factors can be multiplied; None if that is impossible."""
    op = find_op(source.op_type)
    if op is None or op.channel_axis is None:
        return None
    if consumers[source.outputs[0]] != [norm] or source.outputs[0] in graph.outputs:
        return None
    if any(name not in graph.weights for name in source.inputs[1:]):
        return None
    # Batch norm normalizes dimension 1, which holds the weight's rows only where there is a batch dimension.
    if len(graph.tensors[source.outputs[0]].shape) != len(graph.tensors[source.inputs[1]].shape):
        return None
    return op.channel_axis(source)


def lower_batch_norm(graph: IRGraph) -> IRGraph:
    """Turn each batch norm that was not folded into one multiply-add per channel, with constants computed at load time.

    Given:   y = batch_norm(x, gamma, beta, mean, var)
    Result:  y = x · s + t
    """
    tensors, weights = dict(graph.tensors), dict(graph.weights)
    nodes = []
    for node in graph.nodes:
        parts = _bn_parts(node, graph)
        if parts is not None:
            names = []
            for suffix, recipe in zip(("scale", "shift"), parts, strict=True):
                name = unique_name(f"{node.name}.{suffix}", tensors)
                tensors[name] = TensorSpec(name, graph.tensors[node.inputs[-1]].shape, "float32")
                weights[name] = recipe
                names.append(name)
            node = OpNode(node.name, "npu.scale_shift_channels", (node.inputs[0], *names), node.outputs[:1], {})
        nodes.append(node)
    return replace(graph, nodes=nodes, tensors=tensors, weights=weights)
