"""Fuses two updates of KV caches into one call."""

from __future__ import annotations

from dataclasses import replace

from npu_compiler.graph.model import IRGraph, OpNode
from npu_compiler.ops.registry import well_formed


def pair_cache_updates(graph: IRGraph) -> IRGraph:
    """Replace two row updates with the same index, of a layer's keys and values, by one op.

    Given:   k1 = index_copy(k0, dim, index, k);  v1 = index_copy(v0, dim, index, v)
    Result:  k1, v1 = index_copy_pair(k0, index, k, v0, v, dim)
    """
    waiting: dict[object, OpNode] = {}
    pairs: dict[str, OpNode] = {}
    for node in graph.nodes:
        for key, earlier in list(waiting.items()):
            if earlier.outputs[0] in node.inputs:
                del waiting[key]
        if node.base != "aten.index_copy" or node.inputs[0] not in graph.inputs:
            continue
        with well_formed(node):
            cache, index, source = node.inputs
            specs = graph.tensors[cache], graph.tensors[source]
            dim = node.attrs["dim"] % max(1, len(specs[0].shape))
        key = (index, dim, *((spec.shape, spec.dtype) for spec in specs))
        if key in waiting:
            pairs[node.name] = waiting.pop(key)
        else:
            waiting[key] = node
    dropped = {earlier.name for earlier in pairs.values()}
    nodes = [_pair(pairs[node.name], node) if node.name in pairs else node for node in graph.nodes]
    return replace(graph, nodes=[node for node in nodes if node.name not in dropped])


def _pair(first: OpNode, second: OpNode) -> OpNode:
    inputs = (*first.inputs, second.inputs[0], second.inputs[2])
    return OpNode(second.name, "npu.index_copy_pair", inputs, (*first.outputs, *second.outputs), first.attrs)
