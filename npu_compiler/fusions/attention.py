"""Attention written as products and a softmax, attention with shared KV heads, and the softmax of masked scores."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from npu_compiler.fusions.engine import Fusion, Match, Maybe, Num, P, Pattern, Rewriter, Var, add, fused, mul
from npu_compiler.graph.model import IRGraph, OpNode
from npu_compiler.ops.registry import unsupported_reason
from npu_compiler.program.views import broadcast_shapes

x, q, k, v, gain, mask = (Var(name) for name in ("x", "q", "k", "v", "gain", "mask"))

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


_REARRANGEMENTS = frozenset(f"{_REGROUPINGS} aten.transpose aten.permute aten.contiguous".split())
ATTENTION_OPS = frozenset({"aten.scaled_dot_product_attention", "npu.attention"})
_PRODUCTS = "aten.matmul aten.bmm"
_MOST_TERMS = 3  # biases and masks
_SWAP = {"dim0": -2, "dim1": -1}


def _capped(scores: Pattern) -> P:
    """tanh(scores / cap) · bound, which is a soft cap if the two numbers are one."""
    return mul(P("aten.tanh", (P("aten.div", (scores, Num("cap"))),)), Num("bound"))


def _with_terms(scores: Pattern, first: int) -> Iterator[Pattern]:
    """Yield scores to which nothing or terms are added, with reshapes around each addition.

    The terms are numbered from `first` on, which is 1 if the product adds one itself.
    """
    yield scores
    for number in range(first, _MOST_TERMS):
        scores = replace(add(Maybe(scores, _REGROUPINGS), Var(f"term {number}")), bind=f"sum {number}")
        yield Maybe(scores, _REGROUPINGS)


def _attention_patterns() -> tuple[P, ...]:
    """softmax(q · kᵀ · scale + terms) · v, where k arrives transposed and any step may be cast or reshaped.

    The terms are biases and masks. Between them, windows may get a dimension of their own, as in Swin, or heads that
    were one dimension with the batch, as in BLOOM. The scale is a number, or a gain for each row of scores, as of each
    head. The scaled scores may have a soft cap. Or the transpose of that, vᵀ · softmax(…)ᵀ, where vᵀ arrives.
    """
    raw = P(_PRODUCTS, (q, k))
    scaled = (mul(raw, Num("scale")), P("aten.div", (raw, Num("divisor"))), mul(raw, gain), raw)
    prescaled = P(_PRODUCTS, (mul(q, Num("scale")), k))
    every = [prescaled, *(bounded for scores in map(Maybe, scaled) for bounded in (scores, _capped(scores)))]
    added = [P("aten.baddbmm", (Var("term 0"), left, k), bind="sum 0") for left in (mul(q, Num("scale")), q)]
    starts = (*((scores, 0) for scores in every), *((scores, 1) for scores in added))
    logits = (each for scores, first in starts for each in _with_terms(scores, first))
    weights = [Maybe(Maybe(_softmax(Maybe(each))), _REGROUPINGS) for each in logits]
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
    is_turned = match.root.inputs[0] == values
    out = specs[match.root.outputs[0]].shape
    if not len(specs[query].shape) == len(specs[keys].shape) == len(specs[values].shape) >= 3:
        return None
    if (_flipped(out) if is_turned else out)[:-1] != specs[query].shape[:-1] or not _keeps_rows(match, rewriter):
        return None
    attrs = _numbers(match)
    apart = None if attrs is None else _operands(match, rewriter, is_turned)
    if attrs is None or apart is None:
        return None
    heads = None if is_turned else _by_heads(apart, rewriter)
    operands = heads or apart
    if any(name.startswith("sum ") for name in match.bound):
        bias = _sum_of_terms(match, rewriter, (*specs[operands[0]].shape[:-1], specs[operands[1]].shape[-2]))
        if bias is None:
            return None
        operands = (*operands, bias)
    node = result = fused("npu.attention", match, operands, **attrs)
    if is_turned or heads:
        attended = (*specs[operands[0]].shape[:-1], specs[operands[2]].shape[-1])
        name = rewriter.node(
            f"{match.root.name}.attended", "npu.attention", operands, match.root.outputs[0], attended, **attrs
        )
        node = replace(node, outputs=(name,))
        rearranged = ("aten.transpose.int", _SWAP) if is_turned else ("aten.view.default", {"size": list(out)})
        result = fused(rearranged[0], match, (name,), **rearranged[1])
    return None if unsupported_reason(node, replace(rewriter.graph, tensors=specs)) else result


def _numbers(match: Match) -> dict[str, float] | None:
    """Return the attributes of the fused op; None if the numbers of a match are none of attention."""
    scale = match.scalars.get("scale", 1.0) / match.scalars.get("divisor", 1.0)
    soft_cap = match.scalars.get("cap", 0.0)
    first = match.bound.get("sum 0")
    if first is not None and first.base == "aten.baddbmm":
        scale *= first.attrs.get("alpha", 1)
        if first.attrs.get("beta", 1) != 1:
            return None
    if soft_cap != match.scalars.get("bound", 0.0):
        return None
    return {"scale": scale, **({"soft_cap": soft_cap} if soft_cap else {})}


def _operands(match: Match, rewriter: Rewriter, is_turned: bool) -> tuple[str, ...] | None:
    """Return queries, with their gain if there is one, keys and values, all with tokens before features.

    None if the gain is not one for each row of the scores.
    """
    specs = rewriter.tensors
    query, keys, values = (match.tensors[name] for name in ("q", "k", "v"))
    if (gains := match.tensors.get("gain")) is not None:
        shape, whole = specs[gains].shape, specs[query].shape
        if len(shape) > len(whole) or shape[-1:] != (1,) or specs[gains].dtype != specs[query].dtype:
            return None
        query = rewriter.node(f"{match.root.name}.query", "aten.mul.Tensor", (query, gains), query, whole)

    def turned(name: str, stem: str) -> str:
        shape = _flipped(specs[name].shape)
        return rewriter.node(f"{match.root.name}.{stem}", "aten.transpose.int", (name,), name, shape, **_SWAP)

    return query, turned(keys, "key"), turned(values, "value") if is_turned else values


def _keeps_rows(match: Match, rewriter: Rewriter) -> bool:
    """Whether every reshape of the scores keeps their last two dimensions, which are queries and keys."""
    shapes = rewriter.tensors
    return all(
        shapes[node.inputs[0]].shape[-2:] == shapes[node.outputs[0]].shape[-2:]
        for node in match.nodes.values()
        if node.base in _REGROUPINGS.split()
    )


def _by_heads(operands: tuple[str, ...], rewriter: Rewriter) -> tuple[str, ...] | None:
    """Return the [B, H, T, D] of which queries, keys and values [B · H, T, D] are reshapes; None if they are not.

    The reshape would often be a copy, and attention reads heads where they lie.
    """
    producers, specs = rewriter.producers, rewriter.tensors
    added = {out: node for node in rewriter.added for out in node.outputs}

    def apart(name: str) -> str | None:
        node = added.get(name) or producers.get(name)
        if node is None or not node.inputs:
            return None
        source, own = specs[node.inputs[0]].shape, specs[name].shape
        if node.base in _REGROUPINGS.split():
            return node.inputs[0] if len(source) == 4 and len(own) == 3 and source[2:] == own[1:] else None
        if node.base == "aten.transpose" and source == _flipped(own) and (inner := apart(node.inputs[0])):
            shape = _flipped(specs[inner].shape)
            return rewriter.node(f"{name}.heads", "aten.transpose.int", (inner,), inner, shape, **_SWAP)
        return None

    sources = tuple(filter(None, map(apart, operands)))
    alike = len({specs[name].shape[:2] for name in sources}) == 1
    return sources if len(sources) == len(operands) and alike else None


def _sum_of_terms(match: Match, rewriter: Rewriter, scores: tuple[int, ...]) -> str | None:
    """Return the terms that are added to the scores as one tensor, which broadcasts to their shape.

    None if they have several dtypes or are boolean, or more dimensions than the scores.
    """
    numbers = sorted(name.removeprefix("sum ") for name in match.bound if name.startswith("sum "))
    terms = [match.tensors[f"term {number}"] for number in numbers]
    kinds = {rewriter.tensors[term].dtype for term in terms}
    if len(kinds) > 1 or kinds == {"bool"}:
        return None
    total = ""
    for number, term in zip(numbers, terms, strict=True):
        whole, own = rewriter.tensors[match.bound[f"sum {number}"].outputs[0]].shape, rewriter.tensors[term].shape
        if len(own) > len(whole):
            return None
        term = _regrouped(term, whole, scores, rewriter, f"{match.root.name}.term{number}")
        if total:
            shape = broadcast_shapes(rewriter.tensors[total].shape, rewriter.tensors[term].shape)
            term = rewriter.node(f"{match.root.name}.terms", "aten.add.Tensor", (total, term), total, shape)
        total = term
    return total


def _regrouped(term: str, whole: tuple[int, ...], scores: tuple[int, ...], rewriter: Rewriter, stem: str) -> str:
    """Return a term that is added to scores of shape `whole` as one that broadcasts to the shape `scores`.

    The two shapes have the same elements and the same last two dimensions. The term is repeated only along dimensions
    that are regrouped between the two, and only where it has others of these.
    """
    own = rewriter.tensors[term].shape
    if whole == scores:
        return term
    full = (*[1] * (len(whole) - len(own)), *own)
    start = next((i for i, (x, y) in enumerate(zip(whole, scores, strict=False)) if x != y), 0)
    most = min(len(whole), len(scores)) - start
    end = next((i for i in range(most) if whole[-1 - i] != scores[-1 - i]), most)
    middle, group = full[start : len(full) - end], scores[start : len(scores) - end]
    if any(size > 1 for size in middle):
        full = (*full[:start], *whole[start : len(whole) - end], *full[len(full) - end :])
        shape = (*full[:start], *group, *full[len(full) - end :])
    else:
        shape = (*full[:start], *[1] * len(group), *full[len(full) - end :])
    if math.prod(full) != math.prod(own):
        term = rewriter.node(stem, "aten.expand.default", (term,), term, full, size=list(full))
        own = full
    if shape != own:
        term = rewriter.node(stem, "aten.view.default", (term,), term, shape, size=list(shape))
    return term


def _flipped(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:-2], shape[-1], shape[-2])


def absorb_scales(graph: IRGraph) -> IRGraph:
    """Scale attention by the numbers that queries and keys were multiplied by, if nobody else reads the products.

    Given:   s = mul(x, 0.125);  q = transpose(view(s));  y = attention(q, k, v) {scale=1.0}
    Result:  q = transpose(view(x));                      y = attention(q, k, v) {scale=0.125}
    """
    producers, consumers, outputs = graph.producers(), graph.consumers(), set(graph.outputs)

    def scaling(name: str) -> OpNode | None:
        while (node := producers.get(name)) is not None and len(consumers[name]) == 1 and name not in outputs:
            if node.base == "aten.mul" and len(node.inputs) == 1:
                return node if isinstance(node.attrs.get("other"), (int, float)) else None
            if node.base not in _REARRANGEMENTS:
                return None
            name = node.inputs[0]
        return None

    renamed: dict[str, str] = {}
    scaled: dict[str, OpNode] = {}
    for node in graph.nodes:
        if node.base not in ATTENTION_OPS or node.inputs[0] == node.inputs[1]:
            continue
        scale = node.attrs.get("scale")
        scale = 1 / math.sqrt(graph.tensors[node.inputs[0]].shape[-1]) if scale is None else scale
        for factor in filter(None, map(scaling, node.inputs[:2])):
            if graph.tensors[factor.inputs[0]].dtype == graph.tensors[factor.outputs[0]].dtype:
                scale *= factor.attrs["other"]
                renamed[factor.outputs[0]] = factor.inputs[0]
                scaled[node.name] = replace(node, attrs={**node.attrs, "scale": scale})
    if not renamed:
        return graph
    nodes = (scaled.get(node.name, node) for node in graph.nodes if renamed.keys().isdisjoint(node.outputs))
    return replace(graph, nodes=[node.rename_inputs(renamed) for node in nodes])


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
        if node.base in ATTENTION_OPS:
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
