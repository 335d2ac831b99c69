"""Activations that are written as several ops, and activations followed by a product or a sum."""

from __future__ import annotations

import math
from collections.abc import Callable

from npu_compiler.fusions.engine import (
    Either,
    Fusion,
    Match,
    Num,
    P,
    Pattern,
    Rewriter,
    Var,
    activation,
    add,
    fused,
    mul,
)
from npu_compiler.graph.dtypes import is_float
from npu_compiler.graph.model import IRGraph, OpNode

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


_CLAMPS = "aten.clamp aten.clip aten.clamp_min aten.clamp_max aten.hardtanh"


def _bounds(node: OpNode) -> tuple[float | None, float | None]:
    """The lower and the upper bound of a clamp by numbers, None where it has none."""
    if node.base == "aten.hardtanh":
        return node.attrs.get("min_val", -1.0), node.attrs.get("max_val", 1.0)
    return node.attrs.get("min"), node.attrs.get("max")


def _clamp(operand: Pattern, *, low: bool, high: bool) -> P:
    """The pattern of a clamp by numbers that has these bounds and no other."""

    def where(node: OpNode, graph: IRGraph) -> bool:
        return len(node.inputs) == 1 and [bound is not None for bound in _bounds(node)] == [low, high]

    return P(_CLAMPS, (operand,), where=where)


def _clamped_gate_pattern() -> P:
    """The pattern of (up + 1) · gate · sigmoid(alpha · gate), with a gate below a limit and `up` within two."""
    gate = _clamp(x, low=False, high=True)
    from_below = _clamp(_clamp(y, low=True, high=False), low=False, high=True)
    from_above = _clamp(_clamp(y, low=False, high=True), low=True, high=False)
    up = Either(_clamp(y, low=True, high=True), Either(from_below, from_above))
    scaled = mul(gate, P("aten.sigmoid", (mul(gate, Num("alpha")),)))
    return mul(add(up, Num(value=1.0)), Either(scaled, P("aten.silu", (gate,))))


def _rewrite_clamped_gate(match: Match, rewriter: Rewriter) -> OpNode | None:
    gate, up = (rewriter.tensors[match.tensors[name]] for name in ("x", "y"))
    if gate.shape != up.shape or not (is_float(gate.dtype) and is_float(up.dtype)):
        return None
    bounds = [_bounds(node) for node in match.nodes.values() if node.base in _CLAMPS.split()]
    limits = {-low for low, _ in bounds if low is not None} | {high for _, high in bounds if high is not None}
    if len(limits) > 1 or not min(limits) >= 0:
        return None
    attrs = {"alpha": match.scalars.get("alpha", 1.0), "limit": float(*limits)}
    return fused("npu.clamped_silu_mul", match, (gate.name, up.name), **attrs)


def _rewrite_add_relu(match: Match, rewriter: Rewriter) -> OpNode | None:
    return fused("npu.add_relu", match, (match.tensors["x"], match.tensors["y"]))


def _rewrite_quick_gelu(match: Match, rewriter: Rewriter) -> OpNode | None:
    gate, alpha = match.tensors["x"], match.scalars["alpha"]
    if not 0.1 <= abs(alpha) <= 10 or not is_float(rewriter.tensors[gate].dtype):
        return None
    shape, stem = rewriter.tensors[gate].shape, match.root.name
    scaled = rewriter.node(f"{stem}.scaled", "aten.mul.Tensor", (gate,), gate, shape, other=alpha)
    gated = rewriter.node(f"{stem}.gated", "aten.silu.default", (scaled,), gate, shape)
    return fused("aten.mul.Tensor", match, (gated,), other=1 / alpha)


SILU = Fusion("silu", (mul(x, P("aten.sigmoid", (x,))),), rewrite_unary("aten.silu.default"))
GELU = Fusion("gelu", _gelu_patterns(), rewrite_unary("aten.gelu.default"))
GELU_TANH = Fusion("gelu_tanh", _gelu_tanh_patterns(), rewrite_unary("aten.gelu.default", approximate="tanh"))
CLAMPED_GATE = Fusion("clamped_gate", (_clamped_gate_pattern(),), _rewrite_clamped_gate)
GATED_ACTIVATION = Fusion("gated_activation", (mul(_gate, y),), _rewrite_gated)
ADD_RELU = Fusion("add_relu", (P("aten.relu", (add(x, y),)),), _rewrite_add_relu)
# x · sigmoid(alpha · x), which reads x twice, becomes a chain, which can be the epilogue of a product.
QUICK_GELU = Fusion("quick_gelu", (mul(x, P("aten.sigmoid", (mul(x, Num("alpha")),))),), _rewrite_quick_gelu)
