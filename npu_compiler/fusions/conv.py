"""Convolutions with what follows: a sum with a residual, an activation."""

from __future__ import annotations

from npu_compiler.fusions.activations import is_tanh
from npu_compiler.fusions.engine import Fusion, Match, P, Rewriter, Var, add, fused
from npu_compiler.graph.model import IRGraph, OpNode

_CONV_ACTIVATIONS = {
    "aten.relu": "relu",
    "aten.relu6": "relu6",
    "aten.silu": "silu",
    "aten.hardswish": "hardswish",
    "aten.hardsigmoid": "hardsigmoid",
    "aten.sigmoid": "sigmoid",
    "aten.gelu": "gelu",
}


def _is_conv_activation(node: OpNode, graph: IRGraph) -> bool:
    if node.base == "aten.hardtanh":
        return (node.attrs.get("min_val", -1.0), node.attrs.get("max_val", 1.0)) == (0, 6)
    return not is_tanh(node)


def _conv_patterns() -> tuple[P, ...]:
    conv = P("aten.conv2d npu.conv2d", bind="conv")
    activations = " ".join((*_CONV_ACTIVATIONS, "aten.hardtanh"))
    summed = add(conv, Var("residual"))

    def activated(inner: P) -> P:
        return P(activations, (inner,), where=_is_conv_activation, bind="activation")

    return (activated(summed), activated(conv), summed)


def _rewrite_conv(match: Match, rewriter: Rewriter) -> OpNode | None:
    conv = match.bound["conv"]
    out, shape = match.root.outputs[0], rewriter.tensors[conv.outputs[0]].shape
    residual = match.tensors.get("residual")
    if conv.base == "npu.conv2d" or rewriter.tensors[out].shape != shape:
        return None
    if residual is not None and rewriter.tensors[residual].shape != shape:
        return None
    activation = match.bound.get("activation")
    kind = "none" if activation is None else _CONV_ACTIVATIONS.get(activation.base, "relu6")
    inputs = conv.inputs if residual is None else (*conv.inputs, residual)
    attrs = {
        **conv.attrs,
        "has_bias": len(conv.inputs) > 2,
        "has_residual": residual is not None,
        "activation": kind,
    }
    return fused("npu.conv2d", match, inputs, **attrs)


CONV_EPILOGUE = Fusion("conv_epilogue", _conv_patterns(), _rewrite_conv)
