"""Removes nodes that return their input."""

from __future__ import annotations

from dataclasses import replace

from npu_compiler.graph.model import IRGraph, OpNode
from npu_compiler.ops.registry import find_op, is_assertion


def is_noop(node: OpNode, graph: IRGraph) -> bool:
    """Whether the node's output always equals its first input.

    The graph has no in-place ops, so it does not matter whether the two share memory.
    """
    op = find_op(node.op_type)
    if op is None or op.identity is None or len(node.outputs) != 1 or not node.inputs:
        return False
    source, result = graph.tensors[node.inputs[0]], graph.tensors[node.outputs[0]]
    return source.shape == result.shape and source.dtype == result.dtype and op.identity(node, source.dtype)


def eliminate_noops(graph: IRGraph) -> IRGraph:
    """Remove nodes that return their input, and assertions.

    Given:   y = dropout(x);  _assert_tensor_metadata(y);  z = relu(y)
    Result:  z = relu(x)
    """
    renamed: dict[str, str] = {}
    nodes = []
    for node in graph.nodes:
        node = node.rename_inputs(renamed)
        if not node.outputs or is_assertion(node.op_type):
            continue
        if is_noop(node, graph):
            renamed[node.outputs[0]] = node.inputs[0]
        else:
            nodes.append(node)
    return replace(graph, nodes=nodes, outputs=[renamed.get(name, name) for name in graph.outputs])
