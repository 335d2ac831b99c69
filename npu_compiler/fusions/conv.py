"""Convolutions fused with the padding before them, and with the residual sum and activation after them."""

from __future__ import annotations

from dataclasses import replace

from npu_compiler.fusions.engine import ACTIVATION_OPS, Fusion, Match, P, Rewriter, Var, activation, add, fused
from npu_compiler.graph.model import IRGraph, OpNode


def _is_conv_activation(node: OpNode, graph: IRGraph) -> bool:
    return activation(node) is not None


def _conv_patterns() -> tuple[P, ...]:
    conv = P("aten.conv2d npu.conv2d", bind="conv")
    summed = add(conv, Var("residual"))

    def activated(inner: P) -> P:
        return P(ACTIVATION_OPS, (inner,), where=_is_conv_activation, bind="activation")

    return (activated(summed), activated(conv), summed)


def _rewrite_conv(match: Match, rewriter: Rewriter) -> OpNode | None:
    conv = match.bound["conv"]
    out, shape = match.root.outputs[0], rewriter.tensors[conv.outputs[0]].shape
    residual = match.tensors.get("residual")
    if conv.base == "npu.conv2d" or rewriter.tensors[out].shape != shape:
        return None
    if residual is not None and rewriter.tensors[residual].shape != shape:
        return None
    activated = match.bound.get("activation")
    inputs = conv.inputs if residual is None else (*conv.inputs, residual)
    attrs = {
        **conv.attrs,
        "has_bias": len(conv.inputs) > 2,
        "has_residual": residual is not None,
        "activation": "none" if activated is None else activation(activated),
    }
    return fused("npu.conv2d", match, inputs, **attrs)


CONV_EPILOGUE = Fusion("conv_epilogue", _conv_patterns(), _rewrite_conv)


def fold_padding(graph: IRGraph) -> IRGraph:
    """Let a convolution pad its own input.

    Given:   p = pad(x, [0, 1, 0, 1]);  y = conv2d(p, w, padding=0)
    Result:  y = conv2d(x, w, padding=[0, 1, 0, 1] as top, bottom, left, right)
    """
    producers, consumers = graph.producers(), graph.consumers()
    nodes, dropped = [], set()
    for node in graph.nodes:
        pad = producers.get(node.inputs[0]) if node.base == "aten.conv2d" and node.inputs else None
        if pad is not None and is_zero_padding(pad, graph) and node.attrs.get("padding") != "same":
            own = node.attrs.get("padding", 0)
            own = 0 if own == "valid" else own
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


def is_zero_padding(node: OpNode, graph: IRGraph) -> bool:
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
