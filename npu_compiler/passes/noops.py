"""Remove nodes that return their input."""

from __future__ import annotations

from dataclasses import replace

from npu_compiler.graph.model import IRGraph, OpNode

ALWAYS_NOOP = frozenset(
    {
        "aten.alias",
        "aten.detach",
        "aten.contiguous",
        "aten.clone",
        "aten.lift_fresh_copy",
        "aten.lift_fresh",
        "aten.positive",
    }
)

CAST_OPS = frozenset({"aten.to", "aten._to_copy", "aten.type_as", "aten.float"})

SAME_SHAPE_NOOP = frozenset(
    {
        "aten.expand",
        "aten.view",
        "aten.reshape",
        "aten._unsafe_view",
        "aten.expand_as",
        "aten.flatten",
        "aten.broadcast_to",
        "aten.view_as",
        "aten.reshape_as",
        "aten.slice",
        "aten.squeeze",
    }
)


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
