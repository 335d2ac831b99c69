"""Replaces ops that were decomposed into several nodes by the original op (a "composite").

Given:   y = slice(x, …);  z = slice(x, …);  …;  v = where(…)    # the parts of the composite v, w = cummax(x)
Result:  v, w = cummax(x)
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from npu_compiler.graph.model import Composite, IRGraph


def as_written(graph: IRGraph, names: Collection[str]) -> IRGraph:
    """The graph with the named composites as single ops, as the model's author wrote them.

    Args:
        names: Names of closed composites.
    """
    by_last = {c.parts.nodes[-1].name: c for c in graph.composites if c.node.name in names}
    gone = {part.name for composite in by_last.values() for part in composite.parts.nodes}
    nodes = []
    for node in graph.nodes:
        if node.name in by_last:
            nodes.append(by_last[node.name].node)
        elif node.name not in gone:
            nodes.append(node)
    return replace(graph, nodes=nodes)


def _is_closed(composite: Composite, graph: IRGraph) -> bool:
    """Whether a composite can replace its parts: all are in the graph, and no other node reads inner results."""
    parts = {node.name for node in composite.parts.nodes}
    if not parts <= {node.name for node in graph.nodes} or not graph.tensors.keys() >= set(composite.node.inputs):
        return False
    inner = {name for node in composite.parts.nodes for name in node.outputs} - set(composite.node.outputs)
    read = {name for node in graph.nodes if node.name not in parts for name in node.inputs}
    return not inner & (read | set(graph.outputs))


def closed_composites(graph: IRGraph) -> tuple[Composite, ...]:
    """The composites of a graph that can be put back in place of their parts."""
    return tuple(composite for composite in graph.composites if _is_closed(composite, graph))
