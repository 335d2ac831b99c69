"""Converters of element-wise operators: arithmetic, comparisons, activations, casts."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from npu_sim.onnx.dtypes import torch_dtype
from npu_sim.onnx.rows import Call, Refusal, converts, number

_UNARY: dict[str, Callable[[Any], Tensor]] = {
    "Abs": torch.abs,
    "Acos": torch.acos,
    "Acosh": torch.acosh,
    "Asin": torch.asin,
    "Asinh": torch.asinh,
    "Atan": torch.atan,
    "Atanh": torch.atanh,
    "BitwiseNot": torch.bitwise_not,
    "Ceil": torch.ceil,
    "Cos": torch.cos,
    "Cosh": torch.cosh,
    "Erf": torch.erf,
    "Exp": torch.exp,
    "Floor": torch.floor,
    "HardSwish": F.hardswish,
    "Identity": lambda x: x,
    "IsNaN": torch.isnan,
    "Log": torch.log,
    "Mish": F.mish,
    "Neg": torch.neg,
    "Not": torch.logical_not,
    "Reciprocal": torch.reciprocal,
    "Relu": torch.relu,
    "Round": torch.round,
    "Sigmoid": torch.sigmoid,
    "Sign": torch.sign,
    "Sin": torch.sin,
    "Sinh": torch.sinh,
    "Softplus": F.softplus,
    "Softsign": F.softsign,
    "Sqrt": torch.sqrt,
    "Tan": torch.tan,
    "Tanh": torch.tanh,
}
_BINARY: dict[str, Callable[[Any, Any], Tensor]] = {
    "Add": lambda a, b: a + b,
    "And": torch.logical_and,
    "BitwiseAnd": torch.bitwise_and,
    "BitwiseOr": torch.bitwise_or,
    "BitwiseXor": torch.bitwise_xor,
    "Equal": lambda a, b: a == b,
    "Greater": lambda a, b: a > b,
    "GreaterOrEqual": lambda a, b: a >= b,
    "Less": lambda a, b: a < b,
    "LessOrEqual": lambda a, b: a <= b,
    "Mul": lambda a, b: a * b,
    "Or": torch.logical_or,
    "Sub": lambda a, b: a - b,
    "Xor": torch.logical_xor,
}
_ARITHMETIC = {"Add", "Mul", "Sub", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"}


def _register() -> None:
    def unary(function: Callable[[Any], Tensor]) -> Callable[[Call, Tensor], Tensor]:
        return lambda call, x: function(x)

    def binary(function: Callable[[Any, Any], Tensor]) -> Callable[[Call, Any, Any], Tensor]:
        return lambda call, a, b: function(a, b)

    for op, function in _UNARY.items():
        converts(op)(unary(function))
    for op, two in _BINARY.items():
        converts(op, scalars=op in _ARITHMETIC)(binary(two))


_register()


@converts("Div", scalars=True)
def _div(call: Call, a: Any, b: Any) -> Tensor:
    of_floats = any(isinstance(x, float) or isinstance(x, Tensor) and x.is_floating_point() for x in (a, b))
    if isinstance(a, Tensor):
        return a / b if of_floats else torch.div(a, b, rounding_mode="trunc")
    return a / b if of_floats else torch.div(torch.full_like(b, a), b, rounding_mode="trunc")


@converts("Pow", scalars=True)
def _pow(call: Call, base: Any, exponent: Any) -> Tensor:
    if not isinstance(base, Tensor):
        return torch.pow(torch.full_like(exponent, base), exponent)
    if isinstance(exponent, Tensor) and exponent.dtype != base.dtype:
        wide = torch.promote_types(base.dtype, exponent.dtype)
        return torch.pow(base.to(wide), exponent.to(wide)).to(base.dtype)
    return torch.pow(base, exponent).to(base.dtype)


@converts("Mod")
def _mod(call: Call, a: Tensor, b: Tensor) -> Tensor:
    return torch.fmod(a, b) if call.attr("fmod", 0) else torch.remainder(a, b)


@converts("BitShift")
def _bit_shift(call: Call, x: Tensor, by: Tensor) -> Tensor:
    return torch.bitwise_left_shift(x, by) if call.attr("direction") == "LEFT" else torch.bitwise_right_shift(x, by)


@converts("BitCast")
def _bit_cast(call: Call, x: Tensor) -> Tensor:
    return x.view(torch_dtype(call.attr("to")))


@converts("Cast")
def _cast(call: Call, x: Tensor) -> Tensor:
    return x.to(torch_dtype(call.attr("to")))


@converts("CastLike")
def _cast_like(call: Call, x: Tensor, like: Tensor) -> Tensor:
    return x.to(like.dtype)


@converts("Max", "Min", "Sum", "Mean")
def _fold(call: Call, *terms: Tensor) -> Tensor:
    two: Callable[[Tensor, Tensor], Tensor] = {"Max": torch.maximum, "Min": torch.minimum}.get(call.op, torch.add)
    total = reduce(two, terms)
    return total / len(terms) if call.op == "Mean" else total


@converts("Where")
def _where(call: Call, condition: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return torch.where(condition, a, b)


@converts("IsInf")
def _is_inf(call: Call, x: Tensor) -> Tensor:
    positive, negative = call.attr("detect_positive", 1), call.attr("detect_negative", 1)
    if positive and negative:
        return torch.isinf(x)
    if not positive and not negative:
        return torch.zeros_like(x, dtype=torch.bool)
    return x == (math.inf if positive else -math.inf)


@converts("Clip", hints=(1, 2))
def _clip(call: Call, x: Tensor, low: Any = None, high: Any = None) -> Tensor:
    low, high = number(low), number(high)
    if isinstance(low, Tensor) or isinstance(high, Tensor):
        x = x if low is None else torch.maximum(x, torch.as_tensor(low, dtype=x.dtype))
        return x if high is None else torch.minimum(x, torch.as_tensor(high, dtype=x.dtype))
    return x.clone() if low is None and high is None else torch.clamp(x, low, high)


@converts("LeakyRelu")
def _leaky_relu(call: Call, x: Tensor) -> Tensor:
    return F.leaky_relu(x, call.attr("alpha", 0.01))


@converts("Elu")
def _elu(call: Call, x: Tensor) -> Tensor:
    return F.elu(x, call.attr("alpha", 1.0))


@converts("Celu")
def _celu(call: Call, x: Tensor) -> Tensor:
    return F.celu(x, call.attr("alpha", 1.0))


@converts("Selu")
def _selu(call: Call, x: Tensor) -> Tensor:
    alpha, gamma = call.attr("alpha", 1.67326319217681884765625), call.attr("gamma", 1.05070102214813232421875)
    result: Tensor = gamma * torch.where(x > 0, x, alpha * (torch.exp(x) - 1))
    return result


@converts("PRelu")
def _prelu(call: Call, x: Tensor, slope: Tensor) -> Tensor:
    return torch.where(x < 0, slope * x, x)


@converts("HardSigmoid")
def _hard_sigmoid(call: Call, x: Tensor) -> Tensor:
    return torch.clamp(call.attr("alpha", 0.2) * x + call.attr("beta", 0.5), 0, 1)


@converts("ThresholdedRelu")
def _thresholded_relu(call: Call, x: Tensor) -> Tensor:
    return F.threshold(x, call.attr("alpha", 1.0), 0.0)


@converts("Gelu")
def _gelu(call: Call, x: Tensor) -> Tensor:
    return F.gelu(x, approximate=call.attr("approximate", "none"))


@converts("Swish")
def _swish(call: Call, x: Tensor) -> Tensor:
    alpha = call.attr("alpha", 1.0)
    return F.silu(x) if alpha == 1.0 else x * torch.sigmoid(alpha * x)


@converts("Shrink")
def _shrink(call: Call, x: Tensor) -> Tensor:
    limit, bias = call.attr("lambd", 0.5), call.attr("bias", 0.0)
    zero = torch.zeros_like(x)
    return torch.where(x < -limit, (x + bias).to(x.dtype), torch.where(x > limit, (x - bias).to(x.dtype), zero))


@converts("Dropout", static=(1, 2))
def _dropout(call: Call, x: Tensor, ratio: float | None = None, training: bool | None = None) -> tuple[Tensor, Tensor]:
    if training and (0.5 if ratio is None else ratio):
        raise Refusal("drops elements at random (training_mode), which is for training")
    return x.clone(), torch.ones_like(x, dtype=torch.bool)
