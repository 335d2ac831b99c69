"""Removes nodes, tensors and weights without readers."""

from __future__ import annotations

from dataclasses import replace

from npu_compiler.graph.model import IRGraph, OpNode


def eliminate_dead_code(graph: IRGraph) -> IRGraph:
    """Remove nodes whose outputs have no readers, then tensors and weights that no node mentions."""
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
