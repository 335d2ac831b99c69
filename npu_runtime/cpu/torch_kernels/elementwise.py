"""Element-wise kernels: calls of the torch functions that the compiler's table of element-wise ops names."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from npu_compiler.program.elementwise import Elementwise
from npu_runtime.cpu.torch_kernels.registry import Kernel, Params, Tensors, to_float

HALVES = (torch.float16, torch.bfloat16)


def _remainder(function: Callable[..., torch.Tensor], a: Any, b: Any) -> torch.Tensor:
    """PyTorch's remainder, corrected where its vector code gives NaN because the quotient is too large."""
    result = function(a, b)
    if not result.is_floating_point() or not result.isnan().any():
        return result
    a, b = (torch.as_tensor(x, dtype=result.dtype).expand(result.shape) for x in (a, b))
    lost = result.isnan() & a.isfinite() & b.isfinite() & (b != 0)
    exact = torch.from_numpy(np.fmod(a[lost].double().numpy(), b[lost].double().numpy()))
    if function is torch.remainder:
        exact = torch.where((exact != 0) & ((exact < 0) != (b[lost] < 0)), exact + b[lost], exact)
    result[lost] = exact.to(result.dtype)
    return result


def _clamped_silu_mul(a: torch.Tensor, b: Any, alpha: float, limit: float) -> torch.Tensor:
    """The product of a clamped and gated operand and of another one that is clamped and incremented."""
    gate, up = torch.clamp(a, max=limit), torch.clamp(torch.as_tensor(b), -limit, limit)
    return (up + 1) * (gate * torch.sigmoid(gate * alpha))


_COMPOSED: dict[str, Callable[..., torch.Tensor]] = {
    "npu.copy": lambda x: x,
    "torch.remainder": functools.partial(_remainder, torch.remainder),
    "torch.fmod": functools.partial(_remainder, torch.fmod),
    "npu.gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "npu.elu": lambda x, alpha, scale, input_scale: torch.where(
        x > 0, scale * x, scale * alpha * torch.expm1(x * input_scale)
    ),
    "npu.prelu": lambda x, weight: torch.where(x > 0, x, x * weight),
    "npu.trunc_divide": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "npu.lerp": lambda a, b, weight: torch.lerp(a, b, weight),
    "npu.clamp_min": lambda a, low: torch.clamp(a, min=low),
    "npu.clamp_max": lambda a, high: torch.clamp(a, max=high),
    "npu.glu": lambda a, b: a * torch.sigmoid(b),
    "npu.silu_mul": lambda a, b: F.silu(a) * b,
    "npu.gelu_mul": lambda a, b: F.gelu(a) * b,
    "npu.gelu_tanh_mul": lambda a, b: F.gelu(a, approximate="tanh") * b,
    "npu.clamped_silu_mul": _clamped_silu_mul,
    "npu.add_relu": lambda a, b: torch.relu(a + b),
    "npu.scale_shift": lambda x, scale, shift: x * scale + shift,
    "npu.heaviside": lambda x, values: torch.where(torch.as_tensor(x) == 0, values, torch.as_tensor(x > 0)),
    "npu.logit": lambda x, eps: torch.logit(x, eps=eps if eps >= 0 else None),
    "npu.nan_to_num": lambda x, nan, posinf, neginf: torch.nan_to_num(x, nan=nan, posinf=posinf, neginf=neginf),
    "npu.polygamma": lambda x, order, factor: torch.polygamma(int(order), x),
    "npu.quantize": lambda x, scale, zero_point, low, high: torch.clamp(
        torch.round(x * torch.as_tensor(scale, dtype=torch.float32).reciprocal()) + zero_point, low, high
    ),
    "npu.dequantize": lambda x, scale, zero_point: (x - zero_point) * scale,
}
_TENSOR_ONLY = frozenset(
    "maximum minimum fmax fmin atan2 copysign logaddexp logaddexp2 logical_and logical_or logical_xor fmod lerp".split()
)


@functools.cache
def torch_function(dotted: str) -> Callable[..., torch.Tensor]:
    """The torch function for a dotted name in the table of element-wise ops."""
    if dotted in _COMPOSED:
        return _COMPOSED[dotted]
    value: object = torch
    for part in dotted.split(".")[1:]:
        value = getattr(value, part)
    return value  # type: ignore[return-value]


def elementwise_by_torch(op: Elementwise) -> Kernel:
    """A kernel for out = op(operands…), in float32 if an operand is a 16-bit float, rounded once."""
    return _copy if op.name == "copy" else functools.partial(_compute, op)


def _operands(inputs: Tensors, params: Params) -> list[Any]:
    remaining = iter(inputs)
    return [next(remaining) if scalar is None else scalar for scalar in params["scalars"]]


def _copy(inputs: Tensors, outputs: Tensors, params: Params) -> None:
    (value,) = _operands(inputs, params)
    outputs[0].copy_(value) if isinstance(value, torch.Tensor) else outputs[0].fill_(value)


def _compute(op: Elementwise, inputs: Tensors, outputs: Tensors, params: Params) -> None:
    out = outputs[0]
    tensors = [to_float(x) if isinstance(x, torch.Tensor) else x for x in _operands(inputs, params)]
    if op.name in _TENSOR_ONLY or not any(isinstance(x, torch.Tensor) for x in tensors):
        tensors = [x if isinstance(x, torch.Tensor) else torch.tensor(x) for x in tensors]
    attrs = {name: params[name] for name in op.attrs}
    result = torch_function(op.torch)(*tensors, **attrs)
    if out.dtype in HALVES and result.dtype == torch.float64:
        result = result.float()
    out.copy_(result)
