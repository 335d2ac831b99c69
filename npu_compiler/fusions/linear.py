"""Linears fused with what follows them, linears that share an input, and gated pairs of linears."""

from __future__ import annotations

from dataclasses import replace

from npu_compiler.fusions.engine import ACTIVATION_OPS, CASTS, Fusion, Match, P, Rewriter, Var, activation, add, fused
from npu_compiler.graph.model import IRGraph, OpNode, TensorSpec, unique_name
from npu_compiler.graph.weight_recipe import WeightTransformRecipe
from npu_compiler.ops.aliases import slice_bounds
from npu_compiler.ops.registry import well_formed
from npu_compiler.program.elementwise import GATES
from npu_compiler.program.views import numel


def fuse_shared_input_linears(graph: IRGraph) -> IRGraph:
    """Replace linears that read the same tensor (query, key and value; gate and up) by one product.

    Given:   q = linear(x, wq);  k = linear(x, wk);  v = linear(x, wv)
    Result:  t = linear(x, concat(wq, wk, wv));  q, k, v = slices of t   (free: they are views)
    """
    groups: dict[str, list[OpNode]] = {}
    for node in graph.nodes:
        if node.base == "aten.linear" and _can_join(node, graph):
            groups.setdefault(node.inputs[0], []).append(node)
    tensors, weights = dict(graph.tensors), dict(graph.weights)
    replaced: dict[str, list[OpNode]] = {}
    for source, members in groups.items():
        dtypes = {tensors[name].dtype for node in members for name in node.inputs[1:]}
        formats = {tensors[node.inputs[1]].quantized for node in members}
        if len(members) < 2 or len(dtypes) > 1 or len(formats) > 1:
            continue
        joined = _join_linears(source, members, tensors, weights)
        replaced[members[0].name] = joined
        replaced.update({node.name: [] for node in members[1:]})
    nodes = [new for node in graph.nodes for new in replaced.get(node.name, [node])]
    return replace(graph, nodes=nodes, tensors=tensors, weights=weights)


def _can_join(node: OpNode, graph: IRGraph) -> bool:
    with well_formed(node):
        return (
            all(name in graph.weights for name in node.inputs[1:])
            and len(graph.tensors[node.inputs[1]].shape) == 2
            and len(graph.tensors[node.inputs[0]].shape) >= 2
            and node.outputs[0] not in graph.outputs
        )


def _join_linears(
    source: str,
    members: list[OpNode],
    tensors: dict[str, TensorSpec],
    weights: dict[str, WeightTransformRecipe],
) -> list[OpNode]:
    name = unique_name("+".join(node.name for node in members[:3]), tensors)
    rows = [tensors[node.inputs[1]].shape[0] for node in members]
    first = tensors[members[0].inputs[1]]

    def concat(suffix: str, shape: tuple[int, ...], parts: list[WeightTransformRecipe]) -> str:
        weight = f"{name}.{suffix}"
        format = first.quantized if suffix == "weight" else None
        tensors[weight] = TensorSpec(weight, shape, first.dtype, quantized=format)
        weights[weight] = WeightTransformRecipe("concat", tuple(parts), {"axis": 0})
        return weight

    inputs = [source, concat("weight", (sum(rows), first.shape[1]), [weights[node.inputs[1]] for node in members])]
    if any(len(node.inputs) > 2 for node in members):
        zeros = [WeightTransformRecipe("fill", params={"shape": [n], "value": 0.0}) for n in rows]
        biases = [
            weights[node.inputs[2]] if len(node.inputs) > 2 else zero for node, zero in zip(members, zeros, strict=True)
        ]
        inputs.append(concat("bias", (sum(rows),), biases))
    out = tensors[members[0].outputs[0]]
    tensors[name] = replace(out, name=name, shape=(*out.shape[:-1], sum(rows)))
    nodes = [OpNode(name, "aten.linear.default", tuple(inputs), (name,), {})]
    start = 0
    for node, count in zip(members, rows, strict=True):
        attrs = {"dim": len(out.shape) - 1, "start": start, "end": start + count}
        nodes.append(OpNode(node.name, "aten.slice.Tensor", (name,), node.outputs, attrs))
        start += count
    return nodes


_ACTIVATIONS = frozenset({"relu", "gelu", "gelu_tanh", "silu"})


def _is_linear_activation(node: OpNode, graph: IRGraph) -> bool:
    return activation(node) in _ACTIVATIONS


def _linear_patterns() -> tuple[P, ...]:
    linear = P("aten.linear npu.linear", bind="linear")
    activated = P(ACTIVATION_OPS, (linear,), where=_is_linear_activation, bind="activation")
    return (add(linear, Var("residual")), activated)


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
    activated = match.bound.get("activation")
    if activated is not None:
        if attrs["activation"] != "none":
            return None
        attrs["activation"] = activation(activated)
    inputs = linear.inputs if residual is None else (*linear.inputs, residual)
    return fused("npu.linear", match, inputs, **attrs)


def _widens(node: OpNode, graph: IRGraph) -> bool:
    return graph.tensors[node.outputs[0]].dtype in ("float32", "float64")


def _rewrite_linear_cast(match: Match, rewriter: Rewriter) -> OpNode | None:
    """Fuse a linear with the cast of its result to float32: the product writes its float32 sums directly.

    None, so that the cast stays, unless the weight is a matrix and the result has at least two dimensions.
    """
    linear = match.bound["linear"]
    if len(rewriter.tensors[linear.inputs[1]].shape) != 2 or len(rewriter.tensors[linear.outputs[0]].shape) < 2:
        return None
    attrs = {"has_bias": len(linear.inputs) > 2, **linear.attrs}
    return fused("npu.linear", match, linear.inputs, **attrs)


def _gated_linear_pattern() -> P:
    """The pattern of act(t[…, :n]) · t[…, n:], where t is one linear whose weight holds the rows of gate and up."""
    gate, up = (P("aten.slice", (P("aten.linear", bind="linear"),), bind=half) for half in ("gate", "up"))
    return P(" ".join(_GATED), (gate, up))


_GATED = {f"npu.{op}": activation for op, activation in GATES.items()}


def _rewrite_gated_linear(match: Match, rewriter: Rewriter) -> OpNode | None:
    """Fuse act(gate) · up, where gate and up are the two halves of a linear's result, with that linear.

    None unless the result is one row and the halves match: for more rows, a library product and a separate gate are
    faster.
    """
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
    return fused("npu.gated_linear", match, linear.inputs, activation=_GATED[match.root.base])


LINEAR_ACTIVATION = Fusion("linear_activation", _linear_patterns()[1:], _rewrite_linear)
LINEAR_RESIDUAL = Fusion("linear_residual", _linear_patterns()[:1], _rewrite_linear)
LINEAR_CAST = Fusion(
    "linear_cast",
    (P(CASTS, (P("aten.linear npu.linear", bind="linear"),), where=_widens),),
    _rewrite_linear_cast,
)
GATED_LINEAR = Fusion("gated_linear", (_gated_linear_pattern(),), _rewrite_gated_linear)
