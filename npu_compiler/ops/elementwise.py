"""Element-wise ops, as data: a name, a C expression over float operands, and the equivalent torch function.

The CPU device calls the torch function; the Metal and CUDA generators paste the expression. Operands are `a`, `b`,
`c`; attributes appear under their own names. Comparisons are written so that a NaN operand gives the same as in torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from npu_compiler.graph.dtypes import FLOAT_MAX, is_float, is_int, numpy_dtype
from npu_compiler.graph.model import IRGraph, OpNode, TensorSpec
from npu_compiler.ops import ranges
from npu_compiler.ops.aliases import write_whole
from npu_compiler.ops.lowering import Lowering
from npu_compiler.ops.promotion import as_dtype, common_dtype, holds
from npu_compiler.ops.ranges import by_operands, of_scalar
from npu_compiler.ops.registry import (
    NARROW_INTS,
    Args,
    Layout,
    Range,
    SupportFn,
    ViewRule,
    always,
    operand,
    register_op,
    supported,
)
from npu_compiler.ops.sharding import shard_elementwise
from npu_compiler.program.elementwise import ACTIVATIONS, Elementwise, activation_rule, add_elementwise
from npu_compiler.program.views import View

SAME = "same"


def elementwise(
    name: str,
    operands: str,
    expr: str,
    torch: str = "",
    aten: str = "",
    integer: str | None = None,
    *,
    identity: Callable[[OpNode, str], bool] | None = None,
    moves: bool = False,
    one_dtype: bool = False,
    masks: bool = False,
    bytes: bool = False,
    integer_range: Callable[..., Range] | None = None,
    unsupported: SupportFn = supported,
    **attrs: float | bool,
) -> Elementwise:
    """Add an element-wise op and its row in the op table.

    Args:
        operands: Space-separated schema names of the arguments that may be tensors.
        torch: Defaults to `torch.<name>`.
        aten: Space-separated ATen names that lower to it; defaults to `<name>`.
        integer: The result over ints; `SAME` if the expression serves for both.
        identity, moves, one_dtype, unsupported: As in `Op`.
        masks, bytes: As in `Elementwise`.
        integer_range: Range of integer results, given the ranges of the operands and of the attributes.
    """
    integer = expr if integer == SAME else integer
    op = Elementwise(name, tuple(operands.split()), expr, integer, torch or f"torch.{name}", attrs, masks, bytes)
    add_elementwise(op)

    def lower(ctx: Lowering, node: OpNode) -> None:
        args = Args(node)
        values = [operand(ctx, args, arg) for arg in op.operands]
        params = {key: args.attr(key) for key in op.attrs if args.attr(key) is not None}
        ctx.elementwise(op.name, values, ctx.output(), params)  # type: ignore[arg-type]

    names = (x if x.startswith("npu.") else f"aten.{x}" for x in (aten or name).split())
    register_op(
        " ".join(names),
        tensors=op.operands,
        unsupported=unsupported,
        layout=Layout.ELEMENTWISE,
        identity=identity,
        moves=moves,
        one_dtype=one_dtype,
        activation=activation_rule(name),
        integer_range=by_operands(integer_range, *attrs) if integer_range is not None else None,
        shard=shard_elementwise,
    )(lower)
    return op


def _by_one(node: OpNode, dtype: str) -> bool:
    """An `Op.identity` rule: whether the other operand is 1."""
    return len(node.inputs) == 1 and node.attrs.get("other") == 1


def _adds_nothing(sign: int) -> Callable[[OpNode, str], bool]:
    """An `Op.identity` rule for `self + sign · alpha · other`: whether that never changes `self`.

    Integers do not change by 0, floats do not change by -0.0.
    """

    def rule(node: OpNode, dtype: str) -> bool:
        other = node.attrs.get("other")
        if len(node.inputs) != 1 or not isinstance(other, (bool, int, float)) or other != 0:
            return False
        alpha = node.attrs.get("alpha", 1)
        return is_int(dtype) or (alpha > 0 and math.copysign(1, other) == -sign)

    return rule


F = "torch.nn.functional."

_UNARY = {
    "acos": "acos(a)",
    "acosh": "acosh(a)",
    "angle": "a < 0 ? 3.14159265f : a != a ? a : 0",
    "asin": "asin(a)",
    "asinh": "asinh(a)",
    "atan": "atan(a)",
    "atanh": "atanh(a)",
    "cos": "cos(a)",
    "cosh": "cosh(a)",
    "deg2rad": "a * 0.0174532925f",
    "erf": "erf(a)",
    "exp": "exp(a)",
    "expm1": "expm1(a)",
    "exp2": "exp2(a)",
    "isinf": "isinf(a)",
    "isnan": "isnan(a)",
    "log": "log(a)",
    "log10": "log10(a)",
    "log1p": "log1p(a)",
    "log2": "log2(a)",
    "rad2deg": "a * 57.2957795f",
    "rsqrt": "1 / sqrt(a)",
    "sigmoid": "1 / (1 + exp(-a))",
    "sin": "sin(a)",
    "sinh": "sinh(a)",
    "sqrt": "sqrt(a)",
    "tan": "tan(a)",
    "tanh": "tanh(a)",
    "reciprocal": "1 / a",
}
for _name, _expr in _UNARY.items():
    elementwise(_name, "self", _expr)

_INTEGER_UNARY = {
    "abs": ("fabs(a)", "a < 0 ? -a : a", ranges.absolute),
    "ceil": ("ceil(a)", "a", ranges.same),
    "floor": ("floor(a)", "a", ranges.same),
    "frac": ("a - trunc(a)", None, None),
    "isfinite": ("!isinf(a) && !isnan(a)", "a == a", None),
    "isneginf": ("isinf(a) && a < 0", "a != a", None),
    "isposinf": ("isinf(a) && a > 0", "a != a", None),
    "logical_not": ("a == 0", SAME, None),
    "neg": ("-a", SAME, ranges.neg),
    "relu": ("a < 0 ? 0 : a", SAME, ranges.relu),
    "round": ("rint(a)", "a", ranges.same),
    "sign": ("(a > 0) - (a < 0)", SAME, ranges.sign),
    "sgn": ("(a > 0) - (a < 0)", SAME, ranges.sign),
    "signbit": ("copysign(1.0f, a) < 0", "a < 0", None),
    "square": ("a * a", SAME, ranges.square),
    "trunc": ("trunc(a)", "a", ranges.same),
}
for _name, (_expr, _integer, _range) in _INTEGER_UNARY.items():
    elementwise(_name, "self", _expr, integer=_integer, integer_range=_range)

elementwise("bitwise_not", "self", "~int(a)", "torch.bitwise_not", "npu.bitwise_not", integer="~a")
elementwise("copy", "src", "a", "npu.copy", "clone", integer=SAME, identity=always, moves=True, masks=True, bytes=True)
elementwise("silu", "self", "a / (1 + exp(-a))", F + "silu")
elementwise("relu6", "self", "a < 0 ? 0 : a > 6 ? 6 : a", F + "relu6", integer=SAME, integer_range=ranges.relu6)
elementwise("gelu_erf", "self", "0.5f * a * (1 + erf(a * 0.70710678118654752f))", F + "gelu", "npu.gelu_erf")
elementwise(
    "gelu_tanh",
    "self",
    "0.5f * a * (1 + tanh(0.7978845608028654f * (a + 0.044715f * a * a * a)))",
    "npu.gelu_tanh",
    "npu.gelu_tanh",
)
elementwise("hardswish", "self", "a * (a < -3 ? 0 : a > 3 ? 6 : a + 3) / 6", F + "hardswish")
elementwise("hardsigmoid", "self", "(a < -3 ? 0 : a > 3 ? 6 : a + 3) / 6", F + "hardsigmoid")
elementwise("mish", "self", "a * tanh(log1p(exp(a)))", F + "mish")
elementwise("selu", "self", "1.0507009873554805f * (a > 0 ? a : 1.6732632423543772f * expm1(a))", "torch.selu")
elementwise("log_sigmoid", "self", "(a < 0 ? a : 0) - log1p(exp(-fabs(a)))", F + "logsigmoid")
elementwise(
    "softplus",
    "self",
    "a * beta > threshold ? a : log1p(exp(a * beta)) / beta",
    F + "softplus",
    beta=1.0,
    threshold=20.0,
)
elementwise("leaky_relu", "self", "a > 0 ? a : a * negative_slope", F + "leaky_relu", negative_slope=0.01)
elementwise(
    "elu",
    "self",
    "a > 0 ? scale * a : scale * alpha * expm1(a * input_scale)",
    "npu.elu",
    alpha=1.0,
    scale=1.0,
    input_scale=1.0,
)
elementwise("celu", "self", "a > 0 ? a : alpha * expm1(a / alpha)", "torch.celu", alpha=1.0)
elementwise(
    "hardtanh",
    "self",
    "a < min_val ? min_val : a > max_val ? max_val : a",
    F + "hardtanh",
    "npu.hardtanh",
    min_val=-1.0,
    max_val=1.0,
)
elementwise("hardshrink", "self", "a >= -lambd && a <= lambd ? 0 : a", F + "hardshrink", lambd=0.5)
elementwise("softshrink", "self", "a > lambd ? a - lambd : a < -lambd ? a + lambd : a * 0", F + "softshrink", lambd=0.5)
elementwise(
    "threshold",
    "self",
    "a <= threshold ? value : a",
    F + "threshold",
    integer="a <= int(threshold) ? int(value) : a",
    integer_range=lambda a, threshold, value: ranges.hull(a, value),
    threshold=0.0,
    value=0.0,
)
elementwise(
    "logit",
    "self",
    "a < eps ? log(eps / (1 - eps)) : eps >= 0 && a > 1 - eps ? log((1 - eps) / eps) : log(a / (1 - a))",
    "npu.logit",
    "logit special_logit",
    eps=-math.inf,
)
elementwise(
    "nan_to_num",
    "self",
    "a != a ? nan : isinf(a) ? (a > 0 ? posinf : neginf) : a",
    "npu.nan_to_num",
    "npu.nan_to_num",
    integer="a",
    integer_range=ranges.same,
    nan=0.0,
    posinf=0.0,
    neginf=0.0,
)
elementwise("prelu", "self weight", "a > 0 ? a : a * b", "npu.prelu", "npu.prelu")


def _scales_booleans(node: OpNode, graph: IRGraph) -> str | None:
    """The reason to refuse a sum of booleans with an `alpha`, which PyTorch makes a boolean; None for other nodes."""
    is_boolean = graph.tensors[node.outputs[0]].dtype == "bool"
    return "a sum of booleans with a factor" if is_boolean and node.attrs.get("alpha", 1) != 1 else None


elementwise(
    "add",
    "self other",
    "a + alpha * b",
    integer="a + int(alpha) * b",
    identity=_adds_nothing(1),
    unsupported=_scales_booleans,
    alpha=1,
    masks=True,
    integer_range=ranges.add,
)
elementwise(
    "sub",
    "self other",
    "a - alpha * b",
    aten="sub subtract",
    integer="a - int(alpha) * b",
    identity=_adds_nothing(-1),
    alpha=1,
    masks=True,
    integer_range=ranges.sub,
)
elementwise(
    "rsub",
    "self other",
    "b - alpha * a",
    "torch.rsub",
    integer="b - int(alpha) * a",
    alpha=1,
    masks=True,
    integer_range=ranges.rsub,
)
elementwise("mul", "self other", "a * b", aten="mul multiply", integer=SAME, identity=_by_one, integer_range=ranges.mul)
elementwise("true_divide", "self other", "a / b")
elementwise("floor_divide", "self other", "floor_div(a, b)", integer=SAME, integer_range=ranges.floor_divide)
elementwise(
    "trunc_divide", "self other", "trunc(a / b)", "npu.trunc_divide", "npu.trunc_divide", integer="trunc_div(a, b)"
)
elementwise("pow", "self exponent", "pow(a, b)", integer="int_pow(a, b)", integer_range=ranges.power)
elementwise("remainder", "self other", "floor_mod(a, b)", integer=SAME, integer_range=ranges.remainder)
elementwise("fmod", "self other", "fmod(a, b)", integer="trunc_mod(a, b)", integer_range=ranges.fmod)
elementwise("atan2", "self other", "atan2(a, b)")
elementwise(
    "maximum",
    "self other",
    "a > b || a != a ? a : b",
    aten="maximum max.other",
    integer=SAME,
    masks=True,
    integer_range=ranges.maximum,
)
elementwise(
    "minimum",
    "self other",
    "a < b || a != a ? a : b",
    aten="minimum min.other",
    integer=SAME,
    masks=True,
    integer_range=ranges.minimum,
)


def _comparison_unsupported(node: OpNode, graph: IRGraph) -> str | None:
    dtype = common_dtype(Args(node), graph, ("self", "other"))
    changed = [x for x in node.inputs if not holds(dtype, graph.tensors[x].dtype) and dtype in NARROW_INTS]
    return f"it compares {graph.tensors[changed[0]].dtype} as {dtype}" if changed else None


_COMPARISONS = {
    "eq": ("a == b", "eq"),
    "ne": ("a != b", "ne not_equal"),
    "lt": ("a < b", "lt less"),
    "le": ("a <= b", "le less_equal"),
    "gt": ("a > b", "gt greater"),
    "ge": ("a >= b", "ge greater_equal"),
}


def _lower_comparison(ctx: Lowering, node: OpNode) -> None:
    """Emit a comparison in the dtype that the operands have in common, as PyTorch does: 300 is 44 to a uint8."""
    args = Args(node)
    dtype = common_dtype(args, ctx.graph, ("self", "other"))
    values = (operand(ctx, args, name) for name in ("self", "other"))
    op = next(name for name, (_, names) in _COMPARISONS.items() if node.base.removeprefix("aten.") in names.split())
    ctx.elementwise(op, [x if isinstance(x, View) else as_dtype(x, dtype) for x in values], ctx.output())  # type: ignore[misc]


for _name, (_expr, _names) in _COMPARISONS.items():
    add_elementwise(Elementwise(_name, ("self", "other"), _expr, _expr, f"torch.{_name}"))
    register_op(
        " ".join(f"aten.{x}" for x in _names.split()),
        tensors=("self", "other"),
        unsupported=_comparison_unsupported,
        layout=Layout.ELEMENTWISE,
        shard=shard_elementwise,
    )(_lower_comparison)
elementwise("logical_and", "self other", "a != 0 && b != 0", integer=SAME)
elementwise("logical_or", "self other", "a != 0 || b != 0", integer=SAME)
elementwise("logical_xor", "self other", "(a != 0) != (b != 0)", integer=SAME)
elementwise(
    "bitwise_and",
    "self other",
    "int(a) & int(b)",
    aten="bitwise_and __and__",
    integer="a & b",
    integer_range=ranges.bitwise_and,
)
elementwise(
    "bitwise_or",
    "self other",
    "int(a) | int(b)",
    aten="bitwise_or __or__",
    integer="a | b",
    integer_range=ranges.bitwise,
)
elementwise(
    "bitwise_xor",
    "self other",
    "int(a) ^ int(b)",
    aten="bitwise_xor __xor__",
    integer="a ^ b",
    integer_range=ranges.bitwise,
)
elementwise("where", "condition self other", "a != 0 ? b : c", integer=SAME, masks=True, integer_range=ranges.where)
elementwise(
    "addcmul",
    "self tensor1 tensor2",
    "a + value * b * c",
    integer="a + int(value) * b * c",
    value=1,
    integer_range=ranges.addcmul,
)
elementwise("addcdiv", "self tensor1 tensor2", "a + value * b / c", value=1)
elementwise(
    "lerp",
    "self end weight",
    "fabs(c) < 0.5f ? a + c * (b - a) : b - (b - a) * (1 - c)",
    "npu.lerp",
    one_dtype=True,
    unsupported=lambda node, graph: (
        None if all(is_float(graph.tensors[x].dtype) for x in node.inputs) else "interpolation of integers"
    ),
)
elementwise(
    "clamp_min",
    "self min",
    "a < b || b != b ? b : a",
    "npu.clamp_min",
    "clamp_min",
    integer=SAME,
    masks=True,
    integer_range=ranges.maximum,
)
elementwise(
    "clamp_max",
    "self max",
    "a > b || b != b ? b : a",
    "npu.clamp_max",
    "clamp_max",
    integer=SAME,
    masks=True,
    integer_range=ranges.minimum,
)
elementwise("fmax", "self other", "a > b || b != b ? a : b", integer=SAME, masks=True, integer_range=ranges.maximum)
elementwise("fmin", "self other", "a < b || b != b ? a : b", integer=SAME, masks=True, integer_range=ranges.minimum)
elementwise("copysign", "self other", "copysign(a, b)")
elementwise(
    "heaviside",
    "self values",
    "a == 0 ? b : a > 0",
    "npu.heaviside",
    "heaviside",
    integer=SAME,
    one_dtype=True,
    integer_range=lambda a, b: ranges.hull((0, 1), b),
)
elementwise("xlogy", "self other", "b != b ? b : a == 0 ? 0 : a * log(b)", aten="xlogy special_xlogy")
elementwise(
    "xlog1py", "self other", "b != b ? b : a == 0 ? 0 : a * log1p(b)", "torch.special.xlog1py", "special_xlog1py"
)
elementwise("logaddexp", "self other", "isinf(a) && a == b ? a : (a > b ? a : b) + log1p(exp(-fabs(a - b)))")
elementwise(
    "logaddexp2",
    "self other",
    "isinf(a) && a == b ? a : (a > b ? a : b) + 1.44269504f * log1p(exp2(-fabs(a - b)))",
)
elementwise("glu", "self other", "a / (1 + exp(-b))", "npu.glu", "npu.glu")
elementwise("silu_mul", "self other", "a / (1 + exp(-a)) * b", "npu.silu_mul", "npu.silu_mul")
elementwise(
    "gelu_mul", "self other", "0.5f * a * (1 + erf(a * 0.70710678118654752f)) * b", "npu.gelu_mul", "npu.gelu_mul"
)
elementwise(
    "gelu_tanh_mul",
    "self other",
    "0.5f * a * (1 + tanh(0.7978845608028654f * (a + 0.044715f * a * a * a))) * b",
    "npu.gelu_tanh_mul",
    "npu.gelu_tanh_mul",
)
elementwise(
    "clamped_silu_mul",
    "self other",
    "(a > limit ? limit : a) / (1 + exp(-alpha * (a > limit ? limit : a)))"
    " * ((b < -limit ? -limit : b > limit ? limit : b) + 1)",
    "npu.clamped_silu_mul",
    "npu.clamped_silu_mul",
    alpha=1.702,
    limit=7.0,
)
elementwise("add_relu", "self other", "a + b < 0 ? 0 : a + b", "npu.add_relu", "npu.add_relu", integer=SAME)
elementwise("scale_shift", "self scale shift", "a * b + c", "npu.scale_shift", "npu.scale_shift")


def _gelu(attrs: Mapping[str, Any]) -> str:
    return "gelu_tanh" if attrs.get("approximate") == "tanh" else "gelu"


@register_op(
    "aten.hardtanh", layout=Layout.ELEMENTWISE, activation=activation_rule("hardtanh"), shard=shard_elementwise
)
def lower_hardtanh(ctx: Lowering, node: OpNode) -> None:
    """Lower a clamp to [min_val, max_val].

    If the minimum is above the maximum, it counts as the maximum, as in `clamp`.
    """
    low, high = float(node.attrs.get("min_val", -1)), float(node.attrs.get("max_val", 1))
    params = {"min_val": min(low, high), "max_val": high}
    ctx.elementwise("hardtanh", [ctx.view(node.inputs[0])], ctx.output(), params)


@register_op("aten.gelu", layout=Layout.ELEMENTWISE, activation=_gelu, shard=shard_elementwise)
def lower_gelu(ctx: Lowering, node: OpNode) -> None:
    ctx.elementwise(ACTIVATIONS[_gelu(node.attrs)], [ctx.view(node.inputs[0])], ctx.output())


@register_op("aten.bitwise_not", layout=Layout.ELEMENTWISE, integer_range=by_operands(ranges.bitwise_not))
def lower_bitwise_not(ctx: Lowering, node: OpNode) -> None:
    """Lower a bitwise complement, which for booleans is a logical negation, as in torch."""
    view = ctx.view(node.inputs[0])
    ctx.elementwise("logical_not" if view.dtype == "bool" else "bitwise_not", [view], ctx.output())


@register_op("aten.round.decimals", layout=Layout.ELEMENTWISE)
def lower_round_decimals(ctx: Lowering, node: OpNode) -> None:
    """Lower round(x · 10ᵈ) / 10ᵈ; for negative d, round(x / 10⁻ᵈ) · 10⁻ᵈ, since 10ᵈ is then inexact."""
    view, decimals = ctx.view(node.inputs[0]), node.attrs["decimals"]
    up, down = ("mul", "true_divide") if decimals >= 0 else ("true_divide", "mul")
    scaled, rounded = (ctx.temp(view.shape, "float32") for _ in range(2))
    ctx.elementwise(up, [view, 10.0 ** abs(decimals)], scaled)
    ctx.elementwise("round", [scaled], rounded)
    ctx.elementwise(down, [rounded, 10.0 ** abs(decimals)], ctx.output())


@register_op(
    "aten.nan_to_num", layout=Layout.ELEMENTWISE, integer_range=by_operands(ranges.same), shard=shard_elementwise
)
def lower_nan_to_num(ctx: Lowering, node: OpNode) -> None:
    """Replace NaN and infinities; infinities become, by default, the largest numbers of the result's stored dtype."""
    out = ctx.output()
    largest = FLOAT_MAX.get(out.dtype, 0.0)
    limits = {"nan": 0.0, "posinf": largest, "neginf": -largest}
    args = Args(node)
    params = {name: float(args.attr(name, limit)) for name, limit in limits.items()}
    ctx.elementwise("nan_to_num", [ctx.view(node.inputs[0])], out, params)


@register_op("aten.glu")
def lower_glu(ctx: Lowering, node: OpNode) -> None:
    view = ctx.view(node.inputs[0])
    dim = view.dim(node.attrs.get("dim", -1))
    half = view.shape[dim] // 2
    ctx.elementwise("glu", [view.slice(dim, 0, half), view.slice(dim, half, 2 * half)], ctx.output())


def _quotient_range(node: OpNode, graph: IRGraph, operands: Mapping[str, Range]) -> Range:
    divide = ranges.floor_divide if node.attrs["rounding_mode"] == "floor" else ranges.trunc_divide
    return divide(*Args(node).ranges(operands, of_scalar))  # type: ignore[arg-type]


@register_op(
    "aten.div aten.divide",
    tensors=("self", "other"),
    layout=Layout.ELEMENTWISE,
    identity=lambda node, dtype: _by_one(node, dtype) and not node.attrs.get("rounding_mode"),
    integer_range=_quotient_range,
    shard=shard_elementwise,
)
def lower_div(ctx: Lowering, node: OpNode) -> None:
    args = Args(node)
    op = {None: "true_divide", "floor": "floor_divide", "trunc": "trunc_divide"}[args.attr("rounding_mode")]
    ctx.elementwise(op, [operand(ctx, args, "self"), operand(ctx, args, "other")], ctx.output())  # type: ignore[list-item]


def unclear_bound(node: OpNode) -> str | None:
    """The reason why a clamp with one tensor bound is ambiguous; None if it is not.

    The IR does not record which bound was omitted.
    """
    is_clamp = node.base.removesuffix("_") in ("aten.clamp", "aten.clip")
    is_unclear = node.tensor_names is None and len(node.inputs) == 2
    if is_clamp and node.op_type.endswith(".Tensor") and is_unclear:
        return "clamp with one tensor bound: the IR does not record whether it is the lower or the upper"
    return None


@register_op(
    "aten.clamp aten.clip",
    tensors=("self", "min", "max"),
    unsupported=lambda node, graph: unclear_bound(node),
    layout=Layout.ELEMENTWISE,
    by_name=True,
    integer_range=by_operands(ranges.clamp),
    shard=shard_elementwise,
)
def lower_clamp(ctx: Lowering, node: OpNode) -> None:
    args = Args(node)
    value: View = ctx.view(node.inputs[0])
    bounds = {
        name: operand(ctx, args, name)
        for name in ("min", "max")
        if args.tensor(name) is not None or args.attr(name) is not None
    }
    steps = [(f"clamp_{name}", bound) for name, bound in bounds.items()]
    if not steps:
        ctx.finish(value)
    spec = ctx.spec(node.outputs[0])
    for index, (op, bound) in enumerate(steps):
        out = ctx.output() if index == len(steps) - 1 else ctx.temp(spec.shape, spec.storage)
        ctx.elementwise(op, [value, bound], out)  # type: ignore[list-item]
        value = out


@register_op(
    "aten.masked_fill",
    tensors=("self", "mask", "value"),
    layout=Layout.ELEMENTWISE,
    integer_range=by_operands(ranges.masked_fill),
    shard=shard_elementwise,
)
def lower_masked_fill(ctx: Lowering, node: OpNode) -> None:
    args = Args(node)
    value, mask, fill = (operand(ctx, args, name) for name in ("self", "mask", "value"))
    ctx.elementwise("where", [mask, fill, value], ctx.output())  # type: ignore[list-item]


@register_op("aten.copy", tensors=("self", "src"), layout=Layout.ELEMENTWISE, integer_range=by_operands(ranges.second))
def lower_copy(ctx: Lowering, node: OpNode) -> None:
    ctx.copy(ctx.view(node.inputs[1]), ctx.output())


def _prelu_unsupported(node: OpNode, graph: IRGraph) -> str | None:
    weight = graph.tensors[node.inputs[1]].shape
    return None if len(weight) <= 1 else f"prelu weight of shape {list(weight)}"


@register_op("aten._prelu_kernel", tensors=("self", "weight"), layout=Layout.ELEMENTWISE, one_dtype=True)
def lower_prelu_kernel(ctx: Lowering, node: OpNode) -> None:
    """Lower prelu, whose weight broadcasts against the input as in any element-wise op."""
    ctx.elementwise("prelu", [ctx.view(name) for name in node.inputs], ctx.output())


@register_op(
    "aten.prelu",
    tensors=("self", "weight"),
    unsupported=_prelu_unsupported,
    layout=Layout.ELEMENTWISE,
    one_dtype=True,
)
def lower_prelu(ctx: Lowering, node: OpNode) -> None:
    value, weight = (ctx.view(name) for name in node.inputs)
    ctx.elementwise("prelu", [value, per_channel(weight, value.rank)], ctx.output())


def per_channel(vector: View, rank: int) -> View:
    """A [C] vector shaped to broadcast along dimension 1 of an [N, C, …] tensor."""
    if vector.rank != 1 or rank < 2:
        return vector
    shaped = vector.reshape((vector.shape[0], *([1] * (rank - 2))))
    assert shaped is not None
    return shaped


def _same_dtype(node: OpNode, source: View, out: TensorSpec) -> View | None:
    return source if source.dtype == out.dtype and not node.attrs.get("copy") else None


_CAST: dict[str, Any] = {
    "tensors": ("self", "other"),
    "moves": True,
    "identity": always,
    "saturates": True,
    "shard": shard_elementwise,
}


def lower_cast(ctx: Lowering, node: OpNode) -> None:
    """Lower a cast; numbers that a narrow integer dtype does not hold lose their upper bits."""
    view, (source, result) = ctx.view(node.inputs[0]), (ctx.spec(x).dtype for x in (node.inputs[0], node.outputs[0]))
    if result not in NARROW_INTS or source == "bool" or (is_int(source) and holds(result, source)):
        ctx.finish(view)
        return
    info = np.iinfo(numpy_dtype(result))
    low, high = int(info.min), int(info.max)
    bits = ctx.temp(view.shape, "int32")
    ctx.elementwise("bitwise_and", [ctx.cast(view, "int32"), high - low], bits)
    if low < 0:  # the uppermost bit is the sign
        flipped = ctx.temp(view.shape, "int32")
        ctx.elementwise("bitwise_xor", [bits, -low], flipped)
        bits = ctx.temp(view.shape, "int32")
        ctx.elementwise("add", [flipped, low], bits)
    ctx.finish(bits)


register_op(
    "aten.to aten.type_as",
    **_CAST,
    is_cast=True,
    view=ViewRule(_same_dtype, may_copy=True, write_back=write_whole),
)(lower_cast)
register_op("aten._to_copy npu.cast", **_CAST, is_cast=True)(lower_cast)
register_op("aten.lift_fresh_copy aten.lift_fresh", **_CAST)(lower_cast)


def cast_node(source: str, result: str, dtype: str) -> OpNode:
    """The node, named `result` like its output, that casts `source` to another dtype."""
    return OpNode(result, "aten.to.dtype", (source,), (result,), {"dtype": dtype})
