"""Rewrites that make the graph smaller and keep its meaning. Each is a plain function `IRGraph → IRGraph`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from npu_compiler.functionalize import functionalize
from npu_compiler.ir_reader import IRGraph, OpNode, TensorSpec, unique_name
from npu_compiler.ops.conv import BATCH_NORM_OPS
from npu_compiler.weight_recipe import WeightTransformRecipe

__all__ = [
    "WeightTransformRecipe",
    "eliminate_common_subexpressions",
    "eliminate_dead_code",
    "eliminate_noops",
    "fold_batch_norm",
    "fold_padding",
    "functionalize",
    "lower_batch_norm",
]

ALWAYS_NOOP = frozenset({
    "aten.alias", "aten.detach", "aten.contiguous", "aten.clone", "aten.lift_fresh_copy", "aten.lift_fresh",
    "aten.positive",
})  # fmt: skip
CAST_OPS = frozenset({"aten.to", "aten._to_copy", "aten.type_as", "aten.float"})
SAME_SHAPE_NOOP = frozenset({
    "aten.expand", "aten.view", "aten.reshape", "aten._unsafe_view", "aten.expand_as", "aten.flatten",
    "aten.broadcast_to", "aten.view_as", "aten.reshape_as", "aten.slice", "aten.squeeze",
})  # fmt: skip


def is_noop(node: OpNode, graph: IRGraph) -> bool:
    """Whether the node's output always equals its first input (the graph is functional: sharing does not matter)."""
    if len(node.outputs) != 1 or not node.inputs:
        return False
    source, result = graph.tensors[node.inputs[0]], graph.tensors[node.outputs[0]]
    same = source.shape == result.shape and source.dtype == result.dtype
    if node.base in ALWAYS_NOOP or node.base in CAST_OPS:
        return same
    if "dropout" in node.base:
        return same and not node.attrs.get("train")
    if node.base in SAME_SHAPE_NOOP:
        return same and node.attrs.get("step", 1) == 1
    if node.base in ("aten.mul", "aten.div"):
        return same and len(node.inputs) == 1 and node.attrs.get("other") == 1 and not node.attrs.get("rounding_mode")
    return node.base in ("aten.add", "aten.sub") and same and len(node.inputs) == 1 and node.attrs.get("other") == 0


def eliminate_noops(graph: IRGraph) -> IRGraph:
    """Remove nodes that return their input, and assertions.

    Given:   y = dropout(x);  _assert_tensor_metadata(y);  z = relu(y)
    Result:  z = relu(x)
    """
    renamed: dict[str, str] = {}
    nodes = []
    for node in graph.nodes:
        node = node.rename_inputs(renamed)
        if not node.outputs or node.base.startswith("aten._assert"):
            continue
        if is_noop(node, graph):
            renamed[node.outputs[0]] = node.inputs[0]
        else:
            nodes.append(node)
    return replace(graph, nodes=nodes, outputs=[renamed.get(name, name) for name in graph.outputs])


def eliminate_dead_code(graph: IRGraph) -> IRGraph:
    """Remove nodes whose outputs nobody reads, then tensors and weights that no node mentions."""
    live = set(graph.outputs)
    kept: list[OpNode] = []
    for node in reversed(graph.nodes):
        if any(out in live for out in node.outputs):
            kept.append(node)
            live.update(node.inputs)
    kept.reverse()
    mentioned = live | set(graph.inputs) | {out for node in kept for out in node.outputs}
    return replace(
        graph,
        nodes=kept,
        tensors={name: spec for name, spec in graph.tensors.items() if name in mentioned},
        weights={name: recipe for name, recipe in graph.weights.items() if name in mentioned},
        constants={name: value for name, value in graph.constants.items() if name in mentioned},
    )


_IMPURE = ("rand", "bernoulli", "multinomial", "normal", "dropout")


def eliminate_common_subexpressions(graph: IRGraph) -> IRGraph:
    """Compute equal nodes once: exported masks and position chains repeat in every layer."""
    seen: dict[Any, OpNode] = {}
    renamed: dict[str, str] = {}
    nodes = []
    for node in graph.nodes:
        node = node.rename_inputs(renamed)
        dtypes = tuple(graph.tensors[out].dtype for out in node.outputs)
        key = (node.op_type, node.inputs, repr(sorted(node.attrs.items())), dtypes)
        twin = seen.get(key)
        if twin is None or any(word in node.op_type for word in _IMPURE):
            seen[key] = node
            nodes.append(node)
        else:
            renamed.update(zip(node.outputs, twin.outputs, strict=True))
    return replace(graph, nodes=nodes, outputs=[renamed.get(name, name) for name in graph.outputs])


def fold_padding(graph: IRGraph) -> IRGraph:
    """Let a convolution pad its own input.

    Given:   p = pad(x, [0, 1, 0, 1]);  y = conv2d(p, w, padding=0)
    Result:  y = conv2d(x, w, padding=[0, 1, 0, 1] as top, bottom, left, right)
    """
    producers, consumers = graph.producers(), graph.consumers()
    nodes, dropped = [], set()
    for node in graph.nodes:
        pad = producers.get(node.inputs[0]) if node.base == "aten.conv2d" and node.inputs else None
        if pad is not None and _is_zero_padding(pad, graph) and node.attrs.get("padding") not in ("same", "valid"):
            own = node.attrs.get("padding", 0)
            height, width = (own, own) if isinstance(own, int) else (own * 2)[:2]
            left, right, top, bottom = pad.attrs["pad"]
            sides = [top + height, bottom + height, left + width, right + width]
            node = replace(node, inputs=(pad.inputs[0], *node.inputs[1:]), attrs={**node.attrs, "padding": sides})
            if len(consumers[pad.outputs[0]]) == 1:
                dropped.add(pad.name)
        nodes.append(node)
    return replace(
        graph, nodes=[node for node in nodes if node.name not in dropped or node.outputs[0] in graph.outputs]
    )


def _is_zero_padding(node: OpNode, graph: IRGraph) -> bool:
    pads = node.attrs.get("pad")
    return (
        node.base in ("aten.pad", "aten.constant_pad_nd")
        and node.attrs.get("mode", "constant") == "constant"
        and not node.attrs.get("value")
        and isinstance(pads, list)
        and len(pads) == 4
        and min(pads) >= 0
        and len(graph.tensors[node.inputs[0]].shape) == 4
    )


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


_FOLD_AXIS = {"aten.conv2d": 0, "aten.conv1d": 0, "aten.linear": 0, "aten.conv_transpose2d": 1}


def fold_batch_norm(graph: IRGraph) -> IRGraph:
    """Fold a batch norm into the weights of the convolution or linear before it.

    Given:   c = conv2d(x, w, b);  y = batch_norm(c, gamma, beta, mean, var)
    Result:  y = conv2d(x, w · s, b · s + t)    with s = gamma / sqrt(var + eps), t = beta − mean · s

    A convolution of a 16-bit model gets them as float32: its own w is exact, and the rounding of w · s would move whole
    channels, which no later average evens out.
    """
    producers, consumers = graph.producers(), graph.consumers()
    tensors, weights = dict(graph.tensors), dict(graph.weights)
    replaced: dict[str, OpNode] = {}
    dropped: set[str] = set()
    for node in graph.nodes:
        parts = _bn_parts(node, graph)
        source = producers.get(node.inputs[0]) if parts else None
        if parts is None or source is None or not _is_foldable(source, node, graph, consumers):
            continue
        scale, shift = parts
        weight_name = source.inputs[1]
        axis = _FOLD_AXIS[source.base]
        folded = WeightTransformRecipe("scale_axis", (graph.weights[weight_name], scale), {"axis": axis})
        if len(source.inputs) > 2:
            shift = WeightTransformRecipe("multiply_add", (graph.weights[source.inputs[2]], scale, shift))
        spec = tensors[weight_name]
        names = []
        for suffix, recipe, shape in (("folded", folded, spec.shape), ("shift", shift, (spec.shape[axis],))):
            name = unique_name(f"{weight_name}.{suffix}", tensors)
            tensors[name] = TensorSpec(name, shape, spec.dtype if source.base == "aten.linear" else "float32")
            weights[name] = recipe
            names.append(name)
        replaced[node.name] = replace(
            source, name=node.name, inputs=(source.inputs[0], *names), outputs=node.outputs[:1]
        )
        dropped.add(source.name)
    nodes = [replaced.get(node.name, node) for node in graph.nodes if node.name not in dropped]
    return replace(graph, nodes=nodes, tensors=tensors, weights=weights)


def _is_foldable(source: OpNode, norm: OpNode, graph: IRGraph, consumers: dict[str, list[OpNode]]) -> bool:
    if source.base not in _FOLD_AXIS or consumers[source.outputs[0]] != [norm] or source.outputs[0] in graph.outputs:
        return False
    if any(name not in graph.weights for name in source.inputs[1:]):
        return False
    if source.base == "aten.conv_transpose2d" and source.attrs.get("groups", 1) != 1:
        return False
    # Batch norm normalizes dimension 1, which holds the weight's rows only where there is a batch dimension.
    return len(graph.tensors[source.outputs[0]].shape) == len(graph.tensors[source.inputs[1]].shape)


def lower_batch_norm(graph: IRGraph) -> IRGraph:
    """Turn each batch norm that was not folded into one multiply-add per channel, with constants made at load time.

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
