"""Let a convolution do the padding before it."""

from __future__ import annotations

from dataclasses import replace

from npu_compiler.graph.model import IRGraph, OpNode


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
