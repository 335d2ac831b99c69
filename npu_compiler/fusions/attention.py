"""Attention written as products and a softmax, attention with shared KV heads, and the softmax of masked scores."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from npu_compiler.fusions.engine import Fusion, Match, Maybe, Num, P, Pattern, Rewriter, Var, add, fused, mul
from npu_compiler.graph.model import IRGraph, OpNode
from npu_compiler.ops.registry import unsupported_reason
from npu_compiler.program.views import broadcast_shapes

x, q, k, v, gain, bias, mask = (Var(name) for name in ("x", "q", "k", "v", "gain", "bias", "mask"))

RESHAPES = "aten.view aten.reshape aten._unsafe_view aten.expand"
_REGROUPINGS = "aten.view aten.reshape aten._unsafe_view aten.flatten aten.unflatten aten.squeeze aten.unsqueeze"


def _last_dim_softmax(node: OpNode, graph: IRGraph) -> bool:
    return node.attrs.get("dim") in (-1, len(graph.tensors[node.inputs[0]].shape) - 1)


def _softmax(inner: Pattern) -> P:
    return P("aten.softmax aten._softmax", (inner,), where=_last_dim_softmax)


def _rewrite_masked_softmax(match: Match, rewriter: Rewriter) -> OpNode | None:
    scores, bias = match.tensors["x"], match.tensors["mask"]
    if rewriter.tensors[scores].shape != rewriter.tensors[match.root.outputs[0]].shape:
        return None
    return fused("npu.masked_softmax", match, (scores, bias))


_PRODUCTS = "aten.matmul aten.bmm"


def _capped(scores: Pattern) -> P:
    """tanh(scores / cap) · bound, which is a soft cap if the two numbers are one."""
    return mul(P("aten.tanh", (P("aten.div", (scores, Num("cap"))),)), Num("bound"))


def _biased_and_masked(scores: Pattern) -> Pattern:
    """Scores to which a bias and then a mask is added, with reshapes around the second addition."""
    biased = replace(add(scores, bias), bind="biased")
    return Maybe(replace(add(Maybe(biased, _REGROUPINGS), mask), bind="masked"), _REGROUPINGS)


def _attention_patterns() -> tuple[P, ...]:
    """softmax(q · kᵀ · scale + bias + mask) · v, where k arrives transposed and any step may be cast or reshaped.

    Between the bias and the mask, windows may get a dimension of their own, as in Swin. The scale is a number, or a
    gain for each row of scores, as of each head. The scaled scores may have a soft cap. Or the transpose of that,
    vᵀ · softmax(…)ᵀ, where vᵀ arrives.
    """
    raw = P(_PRODUCTS, (q, k))
    scaled = (mul(raw, Num("scale")), P("aten.div", (raw, Num("divisor"))), mul(raw, gain), raw)
    prescaled = P(_PRODUCTS, (mul(q, Num("scale")), k))
    every = [prescaled, *(bounded for scores in map(Maybe, scaled) for bounded in (scores, _capped(scores)))]
    logits = [*map(_biased_and_masked, every), *(each for scores in every for each in (add(scores, mask), scores))]
    weights = [Maybe(_softmax(Maybe(each))) for each in logits]
    turned = (P("aten.transpose aten.permute", (each,), where=_swaps_last_dims) for each in weights)
    return (*(P(_PRODUCTS, (each, v)) for each in weights), *(P(_PRODUCTS, (v, each)) for each in turned))


def _swaps_last_dims(node: OpNode, graph: IRGraph) -> bool:
    rank = len(graph.tensors[node.inputs[0]].shape)
    if "dims" in node.attrs:
        return [dim % rank for dim in node.attrs["dims"]] == [*range(rank - 2), rank - 1, rank - 2]
    return {node.attrs["dim0"] % rank, node.attrs["dim1"] % rank} == {rank - 2, rank - 1}


def _rewrite_attention(match: Match, rewriter: Rewriter) -> OpNode | None:
    specs = rewriter.tensors
    query, keys, values = (match.tensors[name] for name in ("q", "k", "v"))
    key_shape = specs[keys].shape
    if not len(specs[query].shape) == len(key_shape) == len(specs[values].shape) or len(key_shape) not in (3, 4):
        return None
    is_turned = match.root.inputs[0] == values
    out = specs[match.root.outputs[0]].shape
    if (_flipped(out) if is_turned else out)[:-1] != specs[query].shape[:-1]:
        return None
    scale = match.scalars.get("scale", 1.0) / match.scalars.get("divisor", 1.0)
    soft_cap = match.scalars.get("cap", 0.0)
    if soft_cap != match.scalars.get("bound", 0.0):
        return None
    bias = match.tensors.get("mask")
    if "bias" in match.tensors:
        kinds = {specs[match.tensors[name]].dtype for name in ("bias", "mask")}
        if len(kinds) > 1 or kinds == {"bool"}:
            return None
        bias = _sum_of_biases(match, rewriter, (*specs[query].shape[:-1], key_shape[-1]))
    if bias is not None and (specs[bias].dtype == "bool" or len(specs[bias].shape) > len(key_shape)):
        return None
    if (gains := match.tensors.get("gain")) is not None:
        shape = specs[gains].shape
        if len(shape) > len(key_shape) or shape[-1:] != (1,) or specs[gains].dtype != specs[query].dtype:
            return None
        query = rewriter.node(f"{match.root.name}.query", "aten.mul.Tensor", (query, gains), query, specs[query].shape)
    swap = {"dim0": -2, "dim1": -1}

    def turned(name: str, what: str) -> str:
        stem, shape = f"{match.root.name}.{what}", _flipped(specs[name].shape)
        return rewriter.node(stem, "aten.transpose.int", (name,), name, shape, **swap)

    key, value = turned(keys, "key"), turned(values, "value") if is_turned else values
    inputs = (query, key, value) if bias is None else (query, key, value, bias)
    attrs = {"scale": scale, **({"soft_cap": soft_cap} if soft_cap else {})}
    node = result = fused("npu.attention", match, inputs, **attrs)
    if is_turned:
        stem, like = f"{match.root.name}.attended", match.root.outputs[0]
        attended = rewriter.node(stem, "npu.attention", inputs, like, _flipped(out), **attrs)
        node = replace(node, outputs=(attended,))
        result = fused("aten.transpose.int", match, (attended,), **swap)
    return None if unsupported_reason(node, replace(rewriter.graph, tensors=specs)) else result


def _sum_of_biases(match: Match, rewriter: Rewriter, scores: tuple[int, ...]) -> str:
    """The bias and the mask as one tensor, which broadcasts to the shape of the scores."""
    terms = []
    for name, added in (("bias", match.bound["biased"]), ("mask", match.bound["masked"])):
        term, stem = match.tensors[name], f"{match.root.name}.{name}"
        whole, own = rewriter.tensors[added.outputs[0]].shape, rewriter.tensors[term].shape
        own = (*[1] * (len(whole) - len(own)), *own)
        lead = len(whole) - len(scores) + 1
        if lead > 1 and whole[lead:] == scores[1:]:  # windows of several images come to lie in one dimension
            wide = (*whole[:lead], *own[lead:]) if any(size > 1 for size in own[:lead]) else own
            shape = (math.prod(wide[:lead]), *own[lead:])
        else:
            wide, shape = (own, own) if whole == scores else (whole, scores)
        if wide != rewriter.tensors[term].shape:
            term = rewriter.node(stem, "aten.expand.default", (term,), term, wide, size=list(wide))
        if shape != wide:
            term = rewriter.node(stem, "aten.view.default", (term,), term, shape, size=list(shape))
        terms.append(term)
    first, second = terms
    shape = broadcast_shapes(rewriter.tensors[first].shape, rewriter.tensors[second].shape)
    return rewriter.node(f"{match.root.name}.biases", "aten.add.Tensor", (first, second), first, shape)


def _flipped(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:-2], shape[-1], shape[-2])


def share_kv_heads(graph: IRGraph) -> IRGraph:
    """Let attention read each KV head once, however many query heads use it.

    Given:   e = reshape(expand(unsqueeze(k, 2)));  y = attention(q, e, …)
    Result:  y = attention(q, k, …)
    """
    producers = graph.producers()

    def original(name: str) -> str:
        chain = []
        for ops in (RESHAPES, "aten.expand", "aten.unsqueeze"):
            node = producers.get(name)
            if node is None or node.base not in ops.split():
                return ""
            chain.append(node)
            name = node.inputs[0]
        reshaped, expanded, unsqueezed = chain
        before, after = graph.tensors[name].shape, graph.tensors[reshaped.outputs[0]].shape
        wide = graph.tensors[expanded.outputs[0]].shape
        if len(before) != 4 or unsqueezed.attrs.get("dim") != 2 or len(wide) != 5:
            return ""
        same = (before[0], before[2], before[3]) == (after[0], after[2], after[3]) and wide[:2] == before[:2]
        return name if same and after[1] == before[1] * wide[2] else ""

    nodes = []
    for node in graph.nodes:
        if node.base in ("aten.scaled_dot_product_attention", "npu.attention"):
            key, value = (_through_transpose(name, producers, original) for name in node.inputs[1:3])
            if key and value and graph.tensors[key].shape[:2] == graph.tensors[value].shape[:2]:
                node = replace(node, inputs=(node.inputs[0], key, value, *node.inputs[3:]))
        nodes.append(node)
    return replace(graph, nodes=nodes)


def _through_transpose(name: str, producers: dict[str, OpNode], original: Callable[[str], str]) -> str:
    """The result of `original` for a tensor, or else for the tensor before the two transposes between it and attention.

    The attention fusion leaves these transposes at the keys. Empty if neither has a result.
    """
    direct = original(name)
    if direct:
        return direct
    outer = producers.get(name)
    inner = producers.get(outer.inputs[0]) if outer is not None and outer.base == "aten.transpose" else None
    if inner is None or inner.base != "aten.transpose":
        return ""
    return original(inner.inputs[0])


ATTENTION = Fusion("attention", _attention_patterns(), _rewrite_attention)
MASKED_SOFTMAX = Fusion("masked_softmax", (_softmax(add(x, mask)),), _rewrite_masked_softmax)
