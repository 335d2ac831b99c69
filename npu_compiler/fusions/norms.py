"""Normalizations that are written as element-wise ops and means."""

from __future__ import annotations

from npu_compiler.fusions.engine import (
    CASTS,
    Either,
    Fusion,
    Match,
    Maybe,
    Num,
    P,
    Pattern,
    Rewriter,
    Var,
    add,
    fused,
    mul,
)
from npu_compiler.graph.dtypes import is_float
from npu_compiler.graph.model import IRGraph, OpNode

x, w, b = Var("x"), Var("w"), Var("b")


def _last_dim_mean(node: OpNode, graph: IRGraph) -> bool:
    rank = len(graph.tensors[node.inputs[0]].shape)
    dims = node.attrs.get("dim")
    return dims in ([-1], [rank - 1], -1, rank - 1) and bool(node.attrs.get("keepdim"))


def _mean(inner: Pattern) -> P:
    return P("aten.mean", (inner,), where=_last_dim_mean)


def _square(inner: Pattern) -> Either:
    return Either(P("aten.pow", (inner, Num(value=2))), mul(inner, inner))


def _rms_norm_patterns() -> tuple[P, ...]:
    """The pattern of RMSNorm as Hugging Face writes it: weight · cast(x · rsqrt(mean(x²) + eps)).

    Casts and weight are optional.
    """
    x32 = Maybe(x)
    rsqrt = P("aten.rsqrt", (add(_mean(_square(x32)), Num("eps")),))
    scale = Maybe(rsqrt, "aten.expand")
    divide = P("aten.div", (x32, P("aten.sqrt", (add(_mean(_square(x32)), Num("eps")),))))
    normal = (mul(x32, scale), divide)
    weighted = tuple(mul(Maybe(w), Maybe(n)) for n in normal)
    offset = tuple(mul(Maybe(n), add(Maybe(w), Num("offset", 1.0))) for n in normal)
    return (
        *(P(CASTS, (n,)) for n in (*offset, *weighted)),
        *offset,
        *weighted,
        *(P(CASTS, (n,)) for n in normal),
        *normal,
    )


def _rewrite_rms_norm(match: Match, rewriter: Rewriter) -> OpNode | None:
    specs = rewriter.tensors
    source = match.tensors["x"]
    weight = match.tensors.get("w")
    width = specs[source].shape[-1]
    if specs[match.root.outputs[0]].shape != specs[source].shape or not is_float(specs[source].dtype):
        return None
    if weight is not None and specs[weight].shape != (width,):
        return None
    inputs = (source,) if weight is None else (source, weight)
    offset = match.scalars.get("offset", 0.0)
    return fused("npu.rms_norm", match, inputs, eps=match.scalars["eps"], weight_offset=offset)


def _layer_norm_patterns() -> tuple[P, ...]:
    """The pattern of LayerNorm as single ops: (x − mean(x)) / sqrt(mean((x − mean(x))²) + eps) · w + b."""
    centered = P("aten.sub", (x, _mean(x)))
    variance = add(_mean(_square(centered)), Num("eps"))
    normal = (P("aten.div", (centered, P("aten.sqrt", (variance,)))), mul(centered, P("aten.rsqrt", (variance,))))
    return tuple(add(mul(w, n), b) for n in normal)


def _rewrite_layer_norm(match: Match, rewriter: Rewriter) -> OpNode | None:
    names = tuple(match.tensors[name] for name in ("x", "w", "b"))
    width = rewriter.tensors[names[0]].shape[-1]
    if any(rewriter.tensors[name].shape != (width,) for name in names[1:]):
        return None
    return fused("npu.layer_norm", match, names, normalized_shape=[width], eps=match.scalars["eps"])


LAYER_NORM = Fusion("layer_norm", _layer_norm_patterns(), _rewrite_layer_norm)
RMS_NORM = Fusion("rms_norm", _rms_norm_patterns(), _rewrite_rms_norm)
