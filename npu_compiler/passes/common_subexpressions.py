"""Merges equal nodes (common subexpression elimination)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from npu_compiler.graph.model import IRGraph, OpNode
from npu_compiler.ops.registry import find_op


def eliminate_common_subexpressions(graph: IRGraph) -> IRGraph:
    """Keep one of several equal nodes, as masks and position computations that repeat in every layer."""
    seen: dict[Any, OpNode] = {}
    renamed: dict[str, str] = {}
    nodes = []
    for node in graph.nodes:
        node = node.rename_inputs(renamed)
        dtypes = tuple(graph.tensors[out].dtype for out in node.outputs)
        key = (node.op_type, node.inputs, repr(sorted(node.attrs.items())), dtypes)
        twin = seen.get(key)
        op = find_op(node.op_type)
        if twin is None or op is None or not op.is_pure:
            seen[key] = node
            nodes.append(node)
        else:
            renamed.update(zip(node.outputs, twin.outputs, strict=True))
    return replace(graph, nodes=nodes, outputs=[renamed.get(name, name) for name in graph.outputs])
