"""The fusions, as data: what each looks for and what takes its place. `FUSIONS` lists them in the order applied."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import replace

from npu_compiler.dtypes import is_float
from npu_compiler.errors import NPUError
from npu_compiler.fusion_engine import Fusion, Match, Maybe, Num, P, Pattern, Rewriter, Var, add, apply_fusion, mul
from npu_compiler.fusion_joins import fuse_shared_input_linears, pair_cache_updates, share_rope
from npu_compiler.ir_reader import IRGraph, OpNode
from npu_compiler.ops.aliases import slice_bounds
from npu_compiler.ops.registry import unsupported_reason
from npu_compiler.views import numel

x, y, w, b = Var("x"), Var("y"), Var("w"), Var("b")
q, k, v, mask = Var("q"), Var("k"), Var("v"), Var("mask")
RESHAPES = "aten.view aten.reshape aten._unsafe_view aten.expand"


def _fused(op_type: str, match: Match, inputs: tuple[str, ...], **attrs: object) -> OpNode:
    return OpNode(match.root.name, op_type, inputs, match.root.outputs, attrs)


def _last_dim_mean(node: OpNode, graph: IRGraph) -> bool:
    rank = len(graph.tensors[node.inputs[0]].shape)
    dims = node.attrs.get("dim")
    return dims in ([-1], [rank - 1], -1, rank - 1) and bool(node.attrs.get("keepdim"))


def _mean(inner: Pattern) -> P:
    return P("aten.mean", (inner,), where=_last_dim_mean)


def _square(inner: Pattern) -> P:
    return P("aten.pow", (inner, Num(value=2)))


def _rms_norm_patterns() -> tuple[P, ...]:
    """RMSNorm as Hugging Face writes it: weight · cast(x · rsqrt(mean(x²) + eps)), casts and weight optional."""
    x32 = Maybe(x)
    scale = P("aten.rsqrt", (add(_mean(_square(x32)), Num("eps")),))
    divide = P("aten.div", (x32, P("aten.sqrt", (add(_mean(_square(x32)), Num("eps")),))))
    normal = (mul(x32, scale), divide)
    weighted = tuple(mul(Maybe(w), Maybe(n)) for n in normal)
    offset = tuple(mul(Maybe(n), add(Maybe(w), Num("offset", 1.0))) for n in normal)
    cast = "aten.to aten._to_copy aten.type_as"
    return (
        *(P(cast, (n,)) for n in (*offset, *weighted)), *offset, *weighted, *(P(cast, (n,)) for n in normal), *normal,
    )  # fmt: skip


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
    return _fused("npu.rms_norm", match, inputs, eps=match.scalars["eps"], weight_offset=offset)


def _layer_norm_patterns() -> tuple[P, ...]:
    """LayerNorm written out: (x − mean(x)) / sqrt(mean((x − mean(x))²) + eps) · w + b."""
    centered = P("aten.sub", (x, _mean(x)))
    variance = add(_mean(_square(centered)), Num("eps"))
    normal = (P("aten.div", (centered, P("aten.sqrt", (variance,)))), mul(centered, P("aten.rsqrt", (variance,))))
    return tuple(add(mul(w, n), b) for n in normal)


def _rewrite_layer_norm(match: Match, rewriter: Rewriter) -> OpNode | None:
    names = tuple(match.tensors[name] for name in ("x", "w", "b"))
    width = rewriter.tensors[names[0]].shape[-1]
    if any(rewriter.tensors[name].shape != (width,) for name in names[1:]):
        return None
    return _fused("npu.layer_norm", match, names, normalized_shape=[width], eps=match.scalars["eps"])


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


def _rewrite_unary(op_type: str, **attrs: object) -> Callable[[Match, Rewriter], OpNode | None]:
    def rewrite(match: Match, rewriter: Rewriter) -> OpNode | None:
        return _fused(op_type, match, (match.tensors["x"],), **attrs)

    return rewrite


def _rewrite_gated(match: Match, rewriter: Rewriter) -> OpNode | None:
    gate, up = match.tensors["x"], match.tensors["y"]
    if rewriter.tensors[gate].shape != rewriter.tensors[up].shape:
        return None
    activation = match.bound["activation"]
    kind = "silu" if activation.base == "aten.silu" else "gelu_tanh" if _is_tanh(activation) else "gelu"
    return _fused(f"npu.{kind}_mul", match, (gate, up))


def _is_tanh(node: OpNode) -> bool:
    return node.attrs.get("approximate") == "tanh"


def _last_dim_softmax(node: OpNode, graph: IRGraph) -> bool:
    return node.attrs.get("dim") in (-1, len(graph.tensors[node.inputs[0]].shape) - 1)


def _softmax(inner: Pattern) -> P:
    return P("aten.softmax aten._softmax", (inner,), where=_last_dim_softmax)


def _rewrite_masked_softmax(match: Match, rewriter: Rewriter) -> OpNode | None:
    scores, bias = match.tensors["x"], match.tensors["mask"]
    if rewriter.tensors[scores].shape != rewriter.tensors[match.root.outputs[0]].shape:
        return None
    return _fused("npu.masked_softmax", match, (scores, bias))


def _attention_patterns() -> tuple[P, ...]:
    """softmax(q · kᵀ · scale + mask) · v, where k arrives transposed and any step may be cast or reshaped."""
    products = "aten.matmul aten.bmm"
    cast = "aten.to aten._to_copy aten.type_as aten.float"
    raw = P(products, (q, k))
    scaled = (mul(raw, Num("scale")), P("aten.div", (raw, Num("divisor"))), raw)
    result: list[P] = []
    for scores in scaled:
        scores = Maybe(scores)  # type: ignore[assignment]
        for logits in (add(scores, mask), scores):
            weights = Maybe(_softmax(Maybe(logits)), cast)
            result.append(P(products, (weights, v)))
    prescaled = P(products, (mul(q, Num("scale")), k))
    for logits in (add(prescaled, mask), prescaled):
        result.append(P(products, (Maybe(_softmax(Maybe(logits)), cast), v)))
    return tuple(result)


def _rewrite_attention(match: Match, rewriter: Rewriter) -> OpNode | None:
    specs = rewriter.tensors
    query, keys, values = (match.tensors[name] for name in ("q", "k", "v"))
    key_shape = specs[keys].shape
    if not len(specs[query].shape) == len(key_shape) == len(specs[values].shape) or len(key_shape) not in (3, 4):
        return None
    if specs[match.root.outputs[0]].shape[:-1] != specs[query].shape[:-1]:
        return None
    scale = match.scalars.get("scale", 1.0) / match.scalars.get("divisor", 1.0)
    flipped = (*key_shape[:-2], key_shape[-1], key_shape[-2])
    bias = match.tensors.get("mask")
    if bias is not None and (specs[bias].dtype == "bool" or len(specs[bias].shape) > len(key_shape)):
        return None
    key = rewriter.node(f"{match.root.name}.key", "aten.transpose.int", (keys,), keys, flipped, dim0=-2, dim1=-1)
    inputs = (query, key, values) if bias is None else (query, key, values, bias)
    node = _fused("npu.attention", match, inputs, scale=scale)
    checked = replace(rewriter.graph, tensors=specs)
    return None if unsupported_reason(node, checked) else node


def _is_rotate_half(node: OpNode, graph: IRGraph) -> bool:
    return node.attrs.get("dim", 0) in (-1, len(graph.tensors[node.outputs[0]].shape) - 1) and len(node.inputs) == 2


def _half_slice(second: bool) -> Callable[[OpNode, IRGraph], bool]:
    def where(node: OpNode, graph: IRGraph) -> bool:
        shape = graph.tensors[node.inputs[0]].shape
        half = shape[-1] // 2
        start, end = node.attrs.get("start") or 0, node.attrs.get("end")
        end = shape[-1] if end is None else min(end, shape[-1])
        wanted = (half, shape[-1]) if second else (0, half)
        dim = node.attrs.get("dim", 0)
        return dim in (-1, len(shape) - 1) and (start, end) == wanted and node.attrs.get("step", 1) == 1

    return where


def _rope_patterns() -> tuple[P, ...]:
    """x · cos + cat(−x[half:], x[:half]) · sin, the half-rotation form."""
    first = P("aten.slice", (x,), where=_half_slice(False))
    second = P("aten.slice", (x,), where=_half_slice(True))
    rotated = P("aten.cat", (P("aten.neg", (second,)), first), where=_is_rotate_half)
    return (add(mul(x, Var("cos")), mul(rotated, Var("sin"))),)


def _rewrite_rope(match: Match, rewriter: Rewriter) -> OpNode | None:
    names = tuple(match.tensors[name] for name in ("x", "cos", "sin"))
    shapes = [rewriter.tensors[name].shape for name in names]
    if len(shapes[0]) < 2 or shapes[0] != rewriter.tensors[match.root.outputs[0]].shape:
        return None
    if any(shape[-1:] != shapes[0][-1:] for shape in shapes) or shapes[0][-1] % 2:
        return None
    return _fused("npu.rope", match, names)


_CONV_ACTIVATIONS = {
    "aten.relu": "relu", "aten.relu6": "relu6", "aten.silu": "silu", "aten.hardswish": "hardswish",
    "aten.hardsigmoid": "hardsigmoid", "aten.sigmoid": "sigmoid", "aten.gelu": "gelu",
}  # fmt: skip


def _is_conv_activation(node: OpNode, graph: IRGraph) -> bool:
    if node.base == "aten.hardtanh":
        return (node.attrs.get("min_val", -1.0), node.attrs.get("max_val", 1.0)) == (0, 6)
    return not _is_tanh(node)


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
        **conv.attrs, "has_bias": len(conv.inputs) > 2, "has_residual": residual is not None, "activation": kind,
    }  # fmt: skip
    return _fused("npu.conv2d", match, inputs, **attrs)


def _linear_patterns() -> tuple[P, ...]:
    linear = P("aten.linear npu.linear", bind="linear")
    activated = P("aten.relu aten.gelu aten.silu npu.gelu_tanh npu.gelu_erf", (linear,), bind="activation")
    return (add(linear, Var("residual")), activated)


_LINEAR_ACTIVATIONS = {
    "aten.relu": "relu", "aten.silu": "silu", "npu.gelu_tanh": "gelu_tanh", "npu.gelu_erf": "gelu",
}  # fmt: skip


def _rewrite_linear(match: Match, rewriter: Rewriter) -> OpNode | None:
    linear = match.bound["linear"]
    specs = rewriter.tensors
    shape = specs[linear.outputs[0]].shape
    residual = match.tensors.get("residual")
    if len(specs[linear.inputs[1]].shape) != 2 or len(shape) < 2 or specs[match.root.outputs[0]].shape != shape:
        return None
    if linear.attrs.get("has_residual") or (residual is not None and specs[residual].shape != shape):
        return None
    attrs = {
        "has_bias": len(linear.inputs) > 2,
        "activation": "none",
        **linear.attrs,
    }
    attrs["has_residual"] = residual is not None
    activation = match.bound.get("activation")
    if activation is not None:
        if attrs["activation"] != "none":
            return None
        kind = "gelu_tanh" if _is_tanh(activation) else _LINEAR_ACTIVATIONS.get(activation.base, "gelu")
        attrs["activation"] = kind
    inputs = linear.inputs if residual is None else (*linear.inputs, residual)
    return _fused("npu.linear", match, inputs, **attrs)


def _widens(node: OpNode, graph: IRGraph) -> bool:
    return graph.tensors[node.outputs[0]].dtype in ("float32", "float64")


def _rewrite_linear_cast(match: Match, rewriter: Rewriter) -> OpNode | None:
    """A product that is widened at once is stored wide: it was float32 in registers anyway."""
    linear = match.bound["linear"]
    if len(rewriter.tensors[linear.inputs[1]].shape) != 2 or len(rewriter.tensors[linear.outputs[0]].shape) < 2:
        return None
    attrs = {"has_bias": len(linear.inputs) > 2, **linear.attrs}
    return _fused("npu.linear", match, linear.inputs, **attrs)


def _rewrite_add_relu(match: Match, rewriter: Rewriter) -> OpNode | None:
    return _fused("npu.add_relu", match, (match.tensors["x"], match.tensors["y"]))


def _gated_linear_pattern() -> P:
    """act(t[…, :n]) · t[…, n:], where t is one product with the rows of both in its weight."""
    gate, up = (P("aten.slice", (P("aten.linear", bind="linear"),), bind=half) for half in ("gate", "up"))
    return P(" ".join(_GATED), (gate, up))


_GATED = {"npu.silu_mul": "silu", "npu.gelu_mul": "gelu", "npu.gelu_tanh_mul": "gelu_tanh"}


def _rewrite_gated_linear(match: Match, rewriter: Rewriter) -> OpNode | None:
    """For one row only: products of more rows are better left to a library, with the gating after them."""
    specs = rewriter.tensors
    linear, gate, up = (match.bound[name] for name in ("linear", "gate", "up"))
    *rows, width = specs[match.root.outputs[0]].shape
    if gate.inputs != up.inputs or numel(rows) != 1 or specs[linear.inputs[1]].shape[:-1] != (2 * width,):
        return None
    if any(name not in rewriter.graph.weights for name in linear.inputs[1:]):
        return None
    for half, bounds in ((gate, (0, width)), (up, (width, 2 * width))):
        on_last = half.attrs.get("dim", 0) in (-1, len(rows)) and half.attrs.get("step", 1) == 1
        if not on_last or slice_bounds(2 * width, half.attrs.get("start"), half.attrs.get("end")) != bounds:
            return None
    return _fused("npu.gated_linear", match, linear.inputs, activation=_GATED[match.root.base])


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
    """`original` of a tensor, seen through the transpose pair that the attention fusion leaves around keys."""
    direct = original(name)
    if direct:
        return direct
    outer = producers.get(name)
    inner = producers.get(outer.inputs[0]) if outer is not None and outer.base == "aten.transpose" else None
    if inner is None or inner.base != "aten.transpose":
        return ""
    return original(inner.inputs[0])


_gate = P("aten.silu aten.gelu", (x,), bind="activation")

FUSIONS: dict[str, Fusion | Callable[[IRGraph], IRGraph]] = {
    "silu": Fusion("silu", (mul(x, P("aten.sigmoid", (x,))),), _rewrite_unary("aten.silu.default")),
    "gelu": Fusion("gelu", _gelu_patterns(), _rewrite_unary("aten.gelu.default")),
    "gelu_tanh": Fusion("gelu_tanh", _gelu_tanh_patterns(), _rewrite_unary("aten.gelu.default", approximate="tanh")),
    "layer_norm": Fusion("layer_norm", _layer_norm_patterns(), _rewrite_layer_norm),
    "rms_norm": Fusion("rms_norm", _rms_norm_patterns(), _rewrite_rms_norm),
    "attention": Fusion("attention", _attention_patterns(), _rewrite_attention),
    "share_kv_heads": share_kv_heads,
    "rope": Fusion("rope", _rope_patterns(), _rewrite_rope),
    "masked_softmax": Fusion("masked_softmax", (_softmax(add(x, mask)),), _rewrite_masked_softmax),
    "gated_activation": Fusion("gated_activation", (mul(_gate, y),), _rewrite_gated),
    "conv_epilogue": Fusion("conv_epilogue", _conv_patterns(), _rewrite_conv),
    "shared_input_linears": fuse_shared_input_linears,
    "linear_activation": Fusion("linear_activation", _linear_patterns()[1:], _rewrite_linear),
    "linear_residual": Fusion("linear_residual", _linear_patterns()[:1], _rewrite_linear),
    "linear_cast": Fusion(
        "linear_cast",
        (P("aten.to aten._to_copy", (P("aten.linear npu.linear", bind="linear"),), where=_widens),),
        _rewrite_linear_cast,
    ),
    "gated_linear": Fusion("gated_linear", (_gated_linear_pattern(),), _rewrite_gated_linear),
    "shared_rope": share_rope,
    "paired_cache_update": pair_cache_updates,
    "add_relu": Fusion("add_relu", (P("aten.relu", (add(x, y),)),), _rewrite_add_relu),
}


def fuse(graph: IRGraph, disabled: Collection[str] = ()) -> IRGraph:
    """Apply every fusion in `FUSIONS` order but those named in `disabled`.

    Raises:
        NPUError: `disabled` names no known fusion.
    """
    unknown = sorted(set(disabled) - FUSIONS.keys())
    if unknown:
        raise NPUError(f"unknown fusion {', '.join(unknown)}; known are {', '.join(FUSIONS)}")
    for name, fusion in FUSIONS.items():
        if name not in disabled:
            graph = apply_fusion(graph, fusion) if isinstance(fusion, Fusion) else fusion(graph)
    return graph
