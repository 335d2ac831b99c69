"""Activations that are written as several ops, and activations followed by a product or a sum."""

from __future__ import annotations

import math
from collections.abc import Callable

from npu_compiler.fusions.engine import Fusion, Match, Num, P, Rewriter, Var, activation, add, fused, mul
from npu_compiler.graph.model import OpNode

x, y = Var("x"), Var("y")


def _gelu_patterns() -> tuple[P, ...]:
    erf_term = add(P("aten.erf", (P("aten.div", (x, Num(value=math.sqrt(2)))),)), Num(value=1.0))
    erf_scaled = add(P("aten.erf", (mul(x, Num(value=math.sqrt(0.5))),)), Num(value=1.0))
    forms: list[P] = []
    for term in (erf_term, erf_scaled):
        forms += [
            mul(mul(x, Num(value=0.5)), term),
            mul(mul(x, term), Num(value=0.5)),
            mul(x, mul(term, Num(value=0.5))),
        ]
    return tuple(forms)


def _gelu_tanh_patterns() -> tuple[P, ...]:
    cubed = mul(P("aten.pow", (x, Num(value=3))), Num(value=0.044715))
    nested = add(Num(value=1.0), mul(mul(x, x), Num(value=0.044715)))
    bodies = (
        mul(add(x, cubed), Num(value=math.sqrt(2 / math.pi))),
        mul(mul(x, Num(value=math.sqrt(2 / math.pi))), add(mul(mul(x, Num(value=0.044715)), x), Num(value=1.0))),
        mul(mul(x, nested), Num(value=math.sqrt(2 / math.pi))),
    )
    terms = [add(P("aten.tanh", (body,)), Num(value=1.0)) for body in bodies]
    return tuple(form for t in terms for form in (mul(mul(x, Num(value=0.5)), t), mul(mul(x, t), Num(value=0.5))))


def rewrite_unary(op_type: str, **attrs: object) -> Callable[[Match, Rewriter], OpNode | None]:
    """Return a rewrite that replaces a match by one op of the tensor bound to `x`, with these attributes."""

    def rewrite(match: Match, rewriter: Rewriter) -> OpNode | None:
        return fused(op_type, match, (match.tensors["x"],), **attrs)

    return rewrite


_gate = P("aten.silu aten.gelu", (x,), bind="activation")


def _rewrite_gated(match: Match, rewriter: Rewriter) -> OpNode | None:
    gate, up = match.tensors["x"], match.tensors["y"]
    if rewriter.tensors[gate].shape != rewriter.tensors[up].shape:
        return None
    return fused(f"npu.{activation(match.bound['activation'])}_mul", match, (gate, up))


def _rewrite_add_relu(match: Match, rewriter: Rewriter) -> OpNode | None:
    return fused("npu.add_relu", match, (match.tensors["x"], match.tensors["y"]))


SILU = Fusion("silu", (mul(x, P("aten.sigmoid", (x,))),), rewrite_unary("aten.silu.default"))
GELU = Fusion("gelu", _gelu_patterns(), rewrite_unary("aten.gelu.default"))
GELU_TANH = Fusion("gelu_tanh", _gelu_tanh_patterns(), rewrite_unary("aten.gelu.default", approximate="tanh"))
GATED_ACTIVATION = Fusion("gated_activation", (mul(_gate, y),), _rewrite_gated)
ADD_RELU = Fusion("add_relu", (P("aten.relu", (add(x, y),)),), _rewrite_add_relu)
