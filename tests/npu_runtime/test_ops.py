"""Every op of the op table against PyTorch, as PyTorch itself exports it: one line of the table is one case."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torch_ir
from cuda_gpu import DEVICES
from drawn import drawn
from metal_harness import open_metal
from torch import nn
from torch.ao.quantization.fx import _decomposed  # noqa: F401 (registers its ops)
from traces import traced
from transformers.integrations import moe  # noqa: F401 (registers its ops)

from npu_compiler import (
    CompileOptions,
    ConstraintError,
    DeviceError,
    compile,
    get_supported_ops,
    is_op_supported,
    partition,
    read_ir,
)
from npu_compiler.constraint_checker import find_violations
from npu_compiler.ops import find_op
from npu_runtime import Backend, CPUBackend, DAGExecutor, Device, Executor, execute_cpu_partition, load_weights
from npu_runtime.cpu.kernels import CPU_KERNELS
from npu_runtime.cpu.torch_kernels import TORCH_KERNELS
from npu_runtime.torch_arrays import tensor_to_numpy

A = torch.ops.aten
CPUS = (CPUBackend(native=False), CPUBackend(native=True), CPUBackend(native=False, pytorch=False))


@pytest.fixture(scope="module", params=DEVICES)
def backends(request: pytest.FixtureRequest) -> tuple[Backend, ...]:
    """Backends that run the op-level program, or the GPU."""
    return (*CPUS, open_metal(mps=True)[0]) if request.param == "cpu" else (Device(request.param).backend,)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small operations on a busy machine wait longer for a second thread than they save by it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@dataclass(frozen=True)
class Arg:
    """One argument of a case: how its values are drawn, and whether it is a weight rather than an input."""

    shape: tuple[int, ...]
    draw: Callable[..., torch.Tensor]
    weight: bool = False


def f(*shape: int) -> Arg:
    """Normal floats."""
    return Arg(shape, torch.randn)


def u(*shape: int) -> Arg:
    """Floats in (-0.95, 0.95)."""
    return Arg(shape, lambda s: torch.rand(s) * 1.9 - 0.95)


def inner(*shape: int) -> Arg:
    """Floats in (0.05, 0.95)."""
    return Arg(shape, lambda s: torch.rand(s) * 0.9 + 0.05)


def p(*shape: int) -> Arg:
    """Floats in [0.3, 2)."""
    return Arg(shape, lambda s: torch.rand(s) * 1.7 + 0.3)


def whole(*shape: int) -> Arg:
    """Floats that are small whole numbers, so that comparisons meet equal ones."""
    return Arg(shape, lambda s: torch.randint(-2, 3, s).float())


def halves(*shape: int) -> Arg:
    """Numbers with a fraction that 16 bits hold; rounding each is another thing than rounding their sum."""
    return Arg(shape, lambda s: torch.randint(-7, 8, s) / 2)


def distinct(*shape: int) -> Arg:
    """Floats of which no two are equal, in 16 bits either."""
    return Arg(shape, lambda s: torch.randperm(math.prod(s)).reshape(s) - 60.0)


def i(*shape: int, low: int = 0, high: int = 4, dtype: torch.dtype = torch.int64) -> Arg:
    return Arg(shape, lambda s: torch.randint(low, high, s, dtype=dtype))


def large(*shape: int, dtype: torch.dtype = torch.int64) -> Arg:
    """Integers of which float32 holds no exact product, and int32 tens of products."""
    return i(*shape, low=4097, high=6000, dtype=dtype)


def b(*shape: int) -> Arg:
    return Arg(shape, lambda s: torch.rand(s) < 0.6)


def w(*shape: int) -> Arg:
    """A weight of normal floats."""
    return Arg(shape, torch.randn, weight=True)


def wp(*shape: int) -> Arg:
    """A weight of positive floats."""
    return replace(p(*shape), weight=True)


@dataclass(frozen=True)
class Case:
    """A function of its arguments, and how exact 16-bit results must be.

    Attributes:
        ulps: Allowed error of a 16-bit result, relative to each element.
        spread: Further allowance in ulps of the largest element, for cases of several ops.
    """

    name: str
    function: Callable[..., Any]
    args: tuple[Arg, ...]
    ulps: float = 1.0
    spread: float = 0.0


CASES: list[Case] = []
REFUSED: list[Case] = []


def case(name: str, function: Callable[..., Any], *args: Arg, ulps: float = 1.0, spread: float = 0.0) -> None:
    CASES.append(Case(name, function, args, ulps, spread))


def refused(name: str, function: Callable[..., Any], *args: Arg, spread: float = 0.0) -> None:
    """A case that the device declines: it must go to the CPU, and be right there."""
    REFUSED.append(Case(name, function, args, spread=spread))


# Element-wise, one operand.
for _name in (
    "abs angle asinh atan ceil cos cosh deg2rad erf exp expm1 exp2 floor frac isfinite isinf isnan isneginf isposinf "
    "logical_not neg rad2deg sgn signbit relu round sigmoid sign sin sinh "
    "square tanh trunc clone positive detach ravel logical_not"
).split():
    case(_name, getattr(torch, _name), f(3, 5))
for _name in "log log10 log1p log2 sqrt rsqrt reciprocal".split():
    case(_name, getattr(torch, _name), p(3, 5))
for _name in "acos asin atanh tan".split():
    case(_name, getattr(torch, _name), u(3, 5))
case("acosh", lambda x: torch.acosh(x + 1), p(3, 5), spread=1)
case(
    "tests-of-oddities",
    lambda x: (torch.isfinite(1 / x), torch.isposinf(1 / x), torch.isneginf(-1 / x), torch.signbit(x), torch.sgn(x)),
    whole(40),
)
case("tests-of-ints", lambda x: (torch.isfinite(x), torch.isposinf(x), torch.signbit(x), torch.sgn(x)), i(40, low=-4))
case(
    "nan_to_num",
    lambda x: (torch.nan_to_num(torch.sqrt(x)), torch.nan_to_num(1 / x, 2.0, 5.0, -7.0)),
    whole(40),
)
case("nan_to_num-int", torch.nan_to_num, i(4, 5, low=-4))

# Special functions.
for _name in "erfc ndtr log_ndtr i0 i0e i1 i1e bessel_j0 bessel_j1 modified_bessel_i0 modified_bessel_i1".split():
    case(f"special_{_name}", getattr(torch.special, _name), f(3, 5))
for _name in (
    "entr erfcx digamma gammaln bessel_y0 bessel_y1 modified_bessel_k0 modified_bessel_k1 scaled_modified_bessel_k0 "
    "scaled_modified_bessel_k1"
).split():
    case(f"special_{_name}", getattr(torch.special, _name), p(3, 5))
case("special_airy_ai", torch.special.airy_ai, p(3, 5))
case("spherical_bessel_j0", torch.special.spherical_bessel_j0, f(3, 5))
case(
    "erfinv", lambda x: (torch.erfinv(x), torch.special.erfinv(x), torch.special.ndtri((x + 1) / 2)), u(3, 5), spread=1
)
case("erfc/i0", lambda x: (torch.erfc(x), torch.i0(x), torch.special.psi(x), torch.special.digamma(x)), p(3, 5))
case("special-far", lambda x: [fn(4 * x) for fn in (torch.erfc, torch.special.i0e, torch.lgamma)], f(3, 40), spread=1)
case("lgamma/digamma", lambda x: (torch.lgamma(x), torch.digamma(x)), p(3, 5))
for _order in range(4):
    case(f"polygamma-{_order}", lambda x, n=_order: (torch.polygamma(n, x), torch.special.polygamma(n, x)), p(3, 5))
case("mvlgamma", lambda x: (torch.mvlgamma(x + 1, 3), torch.special.multigammaln(x, 1)), p(3, 5), spread=1)
case("zeta", torch.special.zeta, Arg((4, 1), lambda s: torch.rand(s) * 3 + 1.3), p(5))
for _name in [
    f"{shift}chebyshev_polynomial_{kind}" for shift in ("", "shifted_") for kind in "tuvw"
] + "hermite_polynomial_h hermite_polynomial_he laguerre_polynomial_l legendre_polynomial_p".split():
    case(
        _name,
        lambda x, n, fn=getattr(torch.special, _name): (fn(x, n), fn(x, 3)),
        inner(4, 5),
        Arg((5,), lambda s: torch.tensor([0.0, 1.0, -1.0, 4.0, 9.0])),
        spread=1,
    )
for _name in (
    "silu relu6 hardswish hardsigmoid mish selu logsigmoid softplus leaky_relu elu celu hardtanh softsign gelu"
).split():
    case(_name, getattr(F, _name), f(2, 3, 5), spread=2 if _name == "softsign" else 0)
case("gelu-tanh", lambda x: F.gelu(x, approximate="tanh"), f(4, 33))
case("softplus-beta", lambda x: F.softplus(x, 2.0, 1.0), f(4, 5))
case("leaky_relu-slope", lambda x: F.leaky_relu(x, 0.3), f(4, 5))
case("elu-alpha", lambda x: F.elu(x, 0.7), f(4, 5))
case("elu-scales", lambda x: A.elu(x, 0.7, 1.5, 0.5), f(4, 5))
case("celu-alpha", lambda x: F.celu(x, 0.7), f(4, 5))
case("hardtanh-bounds", lambda x: F.hardtanh(x, -0.5, 0.25), f(4, 5))
case("clamp", lambda x: (x.clamp(-0.5, 0.5), x.clamp(min=0.1), x.clamp(max=0.1), x.clip(-1, 1)), f(4, 5))
case("clamp-int-bounds", lambda x: x.clamp(0, 1), f(4, 5))
case("clamp-ints", lambda x: x.clamp(1, 2), i(4, 5))
case("clamp-tensors", lambda x, lo, hi: torch.clamp(x, lo, hi), f(4, 5), f(5), p(4, 1))
case("clamp-ints-float-bounds", lambda x: (x.clamp(0.5, 1.5), x.clamp(-1.5, 0)), i(4, 5))
case("clamp-wide-bounds", lambda x, lo, hi: torch.clamp(x, lo, hi), f(4, 1), f(5), p(4, 5))
case("hardshrink/softshrink", lambda x: (F.hardshrink(x, 0.3), F.softshrink(x, 0.3)), f(4, 5))
case("threshold", lambda x: F.threshold(x, 0.25, -2.0), f(4, 5))
case("threshold-int", lambda x: F.threshold(x, 1, 7), i(4, 5))
case("logit", lambda x: (torch.logit(x / 2), torch.special.logit(x / 2, eps=0.25)), p(4, 5), spread=1)
case("clamp-crossed", lambda x: x.clamp(0.5, -0.5), f(4, 5))
case("clamp_min/max", lambda x: A.clamp_max(A.clamp_min(x, -0.5), 0.5), f(4, 5))
case("clamp_min/max-tensor", lambda x, y: (A.clamp_min(x, y), A.clamp_max(x, y)), f(4, 5), f(5))
case("prelu", F.prelu, f(2, 3, 4, 5), w(3))
case("prelu-shared", F.prelu, f(2, 3), w(1))
case("prelu-kernel", A._prelu_kernel, f(2, 3), w(1))
case("glu", lambda x: F.glu(x, 1), f(2, 6, 3))
case("round-half-even", lambda x: torch.round(x / 2), whole(40))
case(
    "round-decimals",
    lambda x, y: (torch.round(x, decimals=1), torch.round(y, decimals=-1)),
    f(3, 5),
    Arg((3, 5), lambda s: torch.randn(s) * 200),
    spread=1,
)
case("isnan/isinf-some", lambda x: (torch.isnan(torch.log(x)), torch.isinf(1 / x)), whole(40))
case("unary-strided", lambda x: torch.tanh(x.transpose(0, 1)[1:, ::2]), f(4, 6, 3))
case("unary-scalar", lambda x: torch.exp(torch.sin(x)), f(), spread=1)
case("unary-empty", torch.exp, f(0, 3))
case("unary-rank6", torch.tanh, f(2, 1, 3, 2, 1, 2))
case("log-of-negative-and-zero", lambda x: (torch.log(x), torch.sqrt(x), torch.rsqrt(x)), whole(20))
for _name in "abs neg sign square relu bitwise_not logical_not clone".split():
    case(f"{_name}-int", getattr(torch, _name), i(3, 4, low=-4))
for _name in "exp sqrt sigmoid reciprocal tanh".split():
    case(f"{_name}-int", getattr(torch, _name), i(3, 4, low=1))
case("bitwise_not-bool", torch.bitwise_not, b(3, 4))

# Element-wise, two operands and more.
for _name in "add sub mul true_divide maximum minimum atan2 multiply subtract divide".split():
    case(_name, getattr(torch, _name), f(4, 1, 5), p(3, 1))
    case(f"{_name}-same", getattr(torch, _name), f(4, 5), p(4, 5))
    case(f"{_name}-scalar-tensor", getattr(torch, _name), f(4, 5), p())
for (
    _name
) in "eq ne lt le gt ge not_equal less less_equal greater greater_equal logical_and logical_or logical_xor".split():
    case(_name, getattr(torch, _name), whole(4, 1), whole(5))
    case(f"{_name}-int", getattr(torch, _name), i(4, 1), i(5))
    case(f"{_name}-bool", getattr(torch, _name), b(4, 1), b(5))
for _name in "eq ne lt le gt ge not_equal less less_equal greater greater_equal".split():
    case(f"{_name}-scalar", lambda x, fn=getattr(torch, _name): fn(x, 1), whole(4, 5))
for _name in "bitwise_and bitwise_or bitwise_xor".split():
    case(_name, getattr(torch, _name), i(4, 1), i(5))
    case(f"{_name}-bool", getattr(torch, _name), b(4, 1), b(5))
    case(f"{_name}-scalar", lambda x, fn=getattr(torch, _name): (fn(x, 3), fn(3, x)), i(4, 5))
for _name in "__and__ __or__ __xor__".split():
    case(_name, lambda x, y, op=getattr(A, _name): (op.Tensor(x, y), op.Scalar(x, 2)), i(4, 5), i(5))
for _name in "add sub mul floor_divide remainder fmod maximum minimum true_divide".split():
    case(f"{_name}-int", getattr(torch, _name), i(4, 5, low=-9, high=9), i(4, 5, low=1, high=5))
case("add-alpha", lambda x, y: torch.add(x, y, alpha=2.5), f(4, 5), f(5))
case("add-scalar", lambda x: (x + 1.5, 2 + x, A.add.Scalar(x, 3)), f(4, 5))
case("add-int-float", lambda x, y: x + y, i(4, 5), f(4, 5))
case("add-bool-float", lambda x, y: x + y, b(4, 5), f(4, 5))
case("add-bool-bool", lambda x, y: (x + y, x * y), b(4, 5), b(4, 5))
case("add-bool-int", lambda x, y: x + y, b(4, 5), i(4, 5))
case("sub-alpha", lambda x, y: torch.sub(x, y, alpha=3), f(4, 5), f(5))
case(
    "rsub",
    lambda x, y: (A.rsub.Tensor(x, y, alpha=2), A.rsub.Scalar(x, 1.5), 1 - x, A.rsub.Scalar(x, 2, 3)),
    f(4, 5),
    f(5),
)
case("rsub-int", lambda x: 3 - x, i(4, 5))
case("add-alpha-int", lambda x, y: torch.add(x, y, alpha=2), i(4, 5), i(5))
case("mul-int-scalar-float", lambda x: x * 0.5, i(4, 5))
case("mul-scalar", lambda x: (x * 3, 0.3 * x, A.mul.Scalar(x, 2)), f(4, 5))
case("div-scalar", lambda x: (x / 3, 1 / (x * x + 1)), f(4, 5), ulps=2)
case(
    "div-modes",
    lambda x, y: (torch.div(x, y, rounding_mode="floor"), torch.div(x, y, rounding_mode="trunc")),
    f(4, 5),
    p(5),
)
case(
    "div-modes-int",
    lambda x, y: (
        torch.div(x, y, rounding_mode="floor"),
        torch.div(x, y, rounding_mode="trunc"),
        x // 2,
        x % 3,
        torch.div(x, 2, rounding_mode="trunc"),
    ),
    i(4, 5, low=-9, high=9),
    i(5, low=1),
)
case("floor_divide", lambda x, y: (torch.floor_divide(x, y), x // 0.5), whole(4, 5), p(5))
case("remainder", lambda x, y: (torch.remainder(x, y), x % 0.75, torch.remainder(2.0, y)), f(4, 5), p(5))
case("fmod", lambda x, y: (torch.fmod(x, y), torch.fmod(x, 0.75)), f(4, 5), p(5))
case("pow", lambda x, y: (torch.pow(x, y), x**2, x**0.5, 2.0**y, x**-1, x**3), p(4, 5), u(5))
case("pow-int", lambda x: (x**2, x**3, 2 ** x.clamp(max=20)), i(4, 5))
case("pow-negative-base", lambda x: (x**2, x**3), f(4, 5))
case("max.other", lambda x, y: (torch.max(x, y), torch.min(x, y)), f(4, 5), f(5))
case("addcmul", lambda x, y, z: torch.addcmul(x, y, z, value=0.5), f(4, 5), f(5), f(4, 1))
case("addcdiv", lambda x, y, z: torch.addcdiv(x, y, z, value=0.5), f(4, 5), f(5), p(4, 1))
case("lerp", lambda x, y, z: (torch.lerp(x, y, z), torch.lerp(x, y, 0.3)), f(4, 5), f(4, 5), u(4, 5))
case("where", torch.where, b(4, 1), f(4, 5), f(5))
case(
    "where-scalars",
    lambda c, x: (torch.where(c, x, 1.5), torch.where(c, -1.0, x), A.where.Scalar(c, 1.0, 0.0)),
    b(4, 5),
    f(4, 5),
)
case("where-inf", lambda c, x: torch.where(c, x, -math.inf), b(4, 5), f(4, 5))
case("where-int", lambda c, x: (torch.where(c, x, 7), torch.where(c, x, x + 1)), b(4, 5), i(4, 5))
case("where-float-min", lambda c, x: torch.where(c, x, torch.finfo(torch.float16).min), b(4, 5), f(4, 5))
case(
    "masked_fill",
    lambda x, m: (x.masked_fill(m, -1.0), x.masked_fill(m, -math.inf), x.masked_fill(m, x[0, 0])),
    f(4, 5),
    b(5),
)
case("masked_fill-int", lambda x, m: x.masked_fill(m, 9), i(4, 5), b(4, 1))
case("masked_fill-broadcast-self", lambda x, m: A.masked_fill(x.expand(4, 5), m, 2.0), f(1, 5), b(4, 5))
case("binary-strided", lambda x, y: x.t() * y[:, ::2] + x.t(), f(5, 4), f(4, 10), spread=1)
case("binary-empty", lambda x, y: x + y, f(0, 5), f(1, 5))
case("binary-0d", lambda x, y: x * y + 1, f(), f(), spread=1)
case("binary-rank6", lambda x, y: x * y, f(2, 1, 3, 1, 2, 2), f(1, 2, 1, 4, 1, 2))
case("copy", lambda x, y: A.copy(x, y), f(4, 5), f(5))
case("silu-mul", lambda x, y: F.silu(x) * y, f(4, 32), f(4, 32), ulps=2)
case("gelu-mul", lambda x, y: (F.gelu(x) * y, F.gelu(x, approximate="tanh") * y), f(4, 32), f(4, 32), ulps=3)
case("add-relu", lambda x, y: F.relu(x + y), f(4, 32), f(32))

for _name in "fmax fmin copysign xlogy logaddexp logaddexp2".split():
    case(_name, getattr(torch, _name), f(4, 1, 5), p(3, 1))
case("fmax/fmin-nan", lambda x, y: (torch.fmax(torch.log(x), y), torch.fmin(y, torch.log(x))), f(4, 5), f(4, 5))
case("fmax/fmin-int", lambda x, y: (torch.fmax(x, y), torch.fmin(x, y)), i(4, 5), i(5))
case("copysign-scalar", lambda x: torch.copysign(x, -1.0), f(4, 5))
case("copysign-int", torch.copysign, i(4, 5), i(5, low=-4))
case("heaviside", torch.heaviside, whole(4, 5), f(5))
case("heaviside-int", torch.heaviside, i(4, 5, low=-2), i(5))
case("xlogy-zero", lambda x, y: (torch.xlogy(x, y), torch.xlogy(x, 2.0), torch.xlogy(2.0, y)), whole(4, 5), p(5))
case("special_xlogy", lambda x, y: (torch.special.xlogy(x, y), torch.special.xlog1py(x, y)), whole(4, 5), p(5))

# Conversions.
for _dtype in (torch.float16, torch.bfloat16, torch.float32, torch.int64, torch.int32, torch.bool):
    case(f"to-{_dtype}", lambda x, d=_dtype: x.clamp(-999, 999).to(d), whole(4, 5))  # bounded: int64 has 32 bits there
    case(f"int-to-{_dtype}", lambda x, d=_dtype: x.to(d), i(4, 5))
    case(f"bool-to-{_dtype}", lambda x, d=_dtype: x.to(d), b(4, 5))
case("to-truncates", lambda x: x.clamp(-999, 999).to(torch.int64), Arg((4, 5), lambda s: torch.randn(s) * 4))
case(
    "to-float-int-methods",
    lambda x: (x.clamp(-999, 999).long(), x.int(), x.bool(), x.half().float(), x.bfloat16().float()),
    whole(4, 5),
)
case("to-other", lambda x, y: (x.to(y), x.type_as(y)), i(4, 5), f(2))
case("to_copy", lambda x: A._to_copy(x, dtype=torch.float32), i(4, 5))
case("float32-island", lambda x: (x.float() * 1.5).to(x.dtype), f(4, 5))
case("lift_fresh", lambda x: (A.lift_fresh(x) + 1, A.lift_fresh_copy(x)), f(4, 5))
case("tensor-constant", lambda x: x + torch.tensor([1.0, 2.0]).to(x.device), f(3, 2))

# Matrix products.
case("linear", F.linear, f(4, 7), w(5, 7), w(5))
case("linear-no-bias-3d", F.linear, f(2, 3, 7), w(5, 7))
case("linear-vector", F.linear, f(7), w(5, 7), w(5))
case("linear-1d-weight", lambda x, v: F.linear(x, v), f(4, 7), w(7))
case("linear-one-row", F.linear, f(1, 64), w(33, 64), w(33))
case("linear-activations-weights", F.linear, f(4, 7), f(5, 7), f(5))
case("linear-relu", lambda x, v, c: F.relu(F.linear(x, v, c)), f(4, 64), w(48, 64), w(48), spread=1)
case(
    "linear-gelu-silu",
    lambda x, v, c: (F.gelu(F.linear(x, v, c)), F.silu(F.linear(x, v))),
    f(4, 64),
    w(48, 64),
    w(48),
    spread=1,
)
case("linear-residual", lambda x, v, c: x + F.linear(x, v, c), f(4, 64), w(64, 64), w(64), spread=1)
case("linear-empty", F.linear, f(0, 7), w(5, 7), w(5))
case("linear-empty-inner", F.linear, f(4, 0), w(5, 0), w(5))
case("matmul-2d", torch.matmul, f(4, 7), f(7, 5))
case("matmul-weight", torch.matmul, f(4, 7), w(7, 5))
case("matmul-1d", lambda x, y: (torch.matmul(x, x), torch.matmul(x, y), torch.matmul(y.t(), x)), f(7), f(7, 5))
case("matmul-batched", torch.matmul, f(2, 1, 4, 7), f(3, 7, 5))
case("matmul-batched-vector", lambda x, y: (torch.matmul(x, y), torch.matmul(y, x.transpose(1, 2))), f(2, 4, 7), f(7))
case("matmul-4d-transposed", lambda x, y: torch.matmul(x, y.transpose(-1, -2)), f(2, 3, 4, 7), f(2, 3, 5, 7))
case("matmul-empty", torch.matmul, f(2, 4, 0), f(2, 0, 5))
case(
    "mm/mv/dot",
    lambda x, y, v: (torch.mm(x, y), torch.mv(x, v), torch.dot(v, v), torch.vdot(v, v)),
    f(4, 7),
    f(7, 5),
    f(7),
)
case("mm-int", torch.mm, i(4, 7), i(7, 5))
# Integers whose products and sums float32 does not hold.
case(
    "matmul-large-ints",
    lambda x, y, v: (
        torch.mm(x, y),
        torch.matmul(x.unsqueeze(0), y),
        torch.mv(x, v),
        torch.matmul(v, y),
        torch.dot(v, v),
    ),
    large(4, 7),
    large(7, 5),
    large(7),
)
case("matmul-large-int32", torch.matmul, large(1, 7, dtype=torch.int32), large(7, 3, dtype=torch.int32))
case(
    "bmm-large-ints",
    lambda c, x, y: (torch.bmm(x, y), torch.baddbmm(c, x, y), torch.baddbmm(c, x, y, beta=-3, alpha=2)),
    large(2, 4, 5),
    large(2, 4, 7),
    large(2, 7, 5),
)
case(
    "addmm-large-ints",
    lambda c, x, y, v: (
        torch.addmm(v, x, y),
        torch.addmm(c, x, y, alpha=3),
        torch.addmm(c, x, y, beta=0),
        torch.addmv(v, y.t(), x[0]),
    ),
    large(4, 5),
    large(4, 7),
    large(7, 5),
    large(5),
)
case(
    "addmm-large-int-alpha",
    lambda c, x, y: torch.addmm(c.clamp(0, 3), x.clamp(0, 3), y.clamp(0, 3), alpha=16777217, beta=33554433),
    i(4, 5),
    i(4, 7),
    i(7, 5),
)
refused(
    "linear-bias-by-row", lambda x, y, c, d: (F.linear(x, y, c), F.linear(x, y, d)), f(4, 7), f(5, 7), f(4, 5), f(1, 5)
)
case(
    "linear-large-ints",
    lambda x, y, v: (F.linear(x, y), F.linear(x, y, v), F.linear(x[0], y), F.linear(x, y[0])),
    large(4, 7),
    large(5, 7),
    large(5),
)
case(
    "linear-large-ints-fused",
    lambda x, y, v, c: (
        F.relu(F.linear(x, y, v)),
        F.linear(-x, y, v) + c,
        F.linear(x, y).double(),
        F.linear(x, y) + c.float(),
    ),
    large(4, 7),
    large(5, 7),
    large(5),
    large(4, 5),
)
case(
    "linear-large-ints-shared",
    lambda x, y, v, c: F.linear(x, y, v) - F.linear(x, c),
    large(4, 7),
    replace(large(5, 7), weight=True),
    replace(large(5), weight=True),
    replace(large(5, 7), weight=True),
)
case(
    "einsum-large-ints",
    lambda x, y, z: (
        torch.einsum("ij,jk->ik", x, y),
        torch.einsum("ij,ij->", x, x),
        torch.einsum("ij->i", z),
        torch.einsum("ij->", z),
        torch.einsum("ij,k->ik", z, torch.ones_like(y[0])),
    ),
    large(4, 7),
    large(7, 5),
    i(3, 7, low=2**24, high=2**24 + 99),
)
case("bmm", torch.bmm, f(3, 4, 7), f(3, 7, 5))
case("bmm-strided", lambda x, y: torch.bmm(x.transpose(1, 2), y[:, :, ::2]), f(3, 7, 4), f(3, 7, 10))
case("baddbmm", torch.baddbmm, f(3, 4, 5), f(3, 4, 7), f(3, 7, 5))
case(
    "baddbmm-alpha-beta",
    lambda c, x, y: (torch.baddbmm(c, x, y, alpha=0.5, beta=2.0), torch.baddbmm(c, x, y, beta=0)),
    f(4, 5),
    f(3, 4, 7),
    f(3, 7, 5),
)
case("addmm", torch.addmm, f(5), f(4, 7), w(7, 5))
case(
    "addmm-alpha-beta",
    lambda c, x, y: (
        torch.addmm(c, x, y, alpha=0.5, beta=2),
        torch.addmm(c, x, y, alpha=3),
        torch.addmm(c, x, y, beta=0),
    ),
    f(4, 5),
    f(4, 7),
    f(7, 5),
)
case("addmv", lambda c, x, v: (torch.addmv(c, x, v), torch.addmv(c, x, v, alpha=2, beta=0.5)), f(4), f(4, 7), f(7))
case("outer", lambda x, y: (torch.outer(x, y), torch.ger(x, y)), f(4), f(5))
for _equation, _shapes in {
    "ij,jk->ik": [(4, 7), (7, 5)],
    "ij,jk": [(4, 7), (7, 5)],
    "bij,bjk->bik": [(2, 4, 7), (2, 7, 5)],
    "bhqd,bhkd->bhqk": [(2, 3, 4, 7), (2, 3, 5, 7)],
    "bhqk,bkhd->bqhd": [(2, 3, 4, 5), (2, 5, 3, 7)],
    "i,j->ij": [(4,), (5,)],
    "i,i->": [(4,), (4,)],
    "ij->ji": [(4, 5)],
    "ij->": [(4, 5)],
    "ij->j": [(4, 5)],
    "ijk->ki": [(2, 3, 4)],
    "...ij,...jk->...ik": [(2, 3, 4, 7), (3, 7, 5)],
    "...i->...": [(2, 3, 4)],
    "ij,ij->ij": [(4, 5), (4, 5)],
    "ij,k->ik": [(4, 5), (3,)],
    "bi,oi->bo": [(4, 7), (5, 7)],
    "bnd,de->bne": [(2, 3, 7), (7, 5)],
    "i,ij->j": [(4,), (4, 5)],
    "ij,j": [(4, 5), (5,)],
}.items():
    case(f"einsum {_equation}", lambda *xs, e=_equation: torch.einsum(e, *xs), *(f(*s) for s in _shapes))
refused("einsum-diagonal", lambda x: torch.einsum("ii->i", x), f(4, 4))
refused("einsum-three", lambda x, y, z: torch.einsum("ij,jk,kl->il", x, y, z), f(2, 3), f(3, 4), f(4, 5), spread=2)

# Convolutions.
case("conv2d", F.conv2d, f(2, 3, 8, 9), w(4, 3, 3, 3), w(4))
case("conv2d-activation-weight", F.conv2d, f(2, 3, 8, 9), f(4, 3, 3, 3), f(4))
case("conv2d-stride-padding", lambda x, v: F.conv2d(x, v, None, (2, 1), (1, 2)), f(2, 3, 8, 9), w(4, 3, 3, 5))
case("conv2d-groups", lambda x, v, c: F.conv2d(x, v, c, 1, 1, 1, 2), f(1, 4, 8, 8), w(6, 2, 3, 3), w(6))
case("conv2d-depthwise", lambda x, v, c: F.conv2d(x, v, c, 2, 1, 1, 8), f(1, 8, 9, 9), w(8, 1, 3, 3), w(8))
case("conv2d-depthwise-multiplier", lambda x, v: F.conv2d(x, v, None, 1, 2, 1, 4), f(1, 4, 9, 9), w(8, 1, 5, 5))
case("conv2d-dilation", lambda x, v: F.conv2d(x, v, None, 1, 2, (2, 1)), f(1, 3, 9, 9), w(4, 3, 3, 3))
case("conv2d-1x1", F.conv2d, f(2, 33, 7, 5), w(40, 33, 1, 1), w(40))
case(
    "conv2d-winograd-size", lambda x, v, c: F.conv2d(x, v, c, 1, 1), f(1, 32, 16, 16), w(32, 32, 3, 3), w(32), spread=1
)
case("conv2d-same", lambda x, v: F.conv2d(x, v, None, 1, "same"), f(1, 3, 8, 8), w(4, 3, 4, 3))
case("conv2d-same-dilated", lambda x, v: F.conv2d(x, v, None, 1, "same", (3, 2)), f(1, 3, 12, 12), w(4, 3, 2, 3))
case("conv2d-valid", lambda x, v: F.conv2d(x, v, None, 2, "valid"), f(1, 3, 8, 8), w(4, 3, 3, 3))
case(
    "conv2d-asymmetric-pad",
    lambda x, v, c: F.conv2d(F.pad(x, (0, 1, 2, 1)), v, c, 2),
    f(1, 3, 8, 8),
    w(4, 3, 3, 3),
    w(4),
)
case("conv2d-pad-value", lambda x, v: F.conv2d(F.pad(x, (1, 1, 1, 1), value=1.0), v), f(1, 3, 8, 8), w(4, 3, 3, 3))
case(
    "conv2d-pad-and-padding", lambda x, v: F.conv2d(F.pad(x, (0, 1, 0, 1)), v, None, 2, 1), f(1, 3, 8, 8), w(4, 3, 3, 3)
)
case("conv2d-unbatched", F.conv2d, f(3, 8, 9), w(4, 3, 3, 3), w(4))
case(
    "conv2d-relu-residual", lambda x, v: F.relu(F.conv2d(x, v, None, 1, 1) + x), f(1, 4, 8, 8), w(4, 4, 3, 3), spread=1
)
case("conv2d-silu", lambda x, v: F.silu(F.conv2d(x, v)), f(1, 4, 8, 8), w(4, 4, 3, 3), spread=1)
case("conv2d-chain", lambda x, v: F.conv2d(F.relu6(F.conv2d(x, v)), v), f(1, 4, 8, 8), w(4, 4, 1, 1), spread=2)
case("conv2d-strided-input", lambda x, v: F.conv2d(x.permute(0, 3, 1, 2), v), f(1, 8, 8, 3), w(4, 3, 3, 3))
case("conv2d-empty-batch", F.conv2d, f(0, 3, 8, 8), w(4, 3, 3, 3))
case("conv2d-channel-slice", lambda x, v: F.conv2d(x, v)[:, :2], f(1, 3, 8, 8), w(4, 3, 3, 3))
case(
    "conv2d-transposed-twice", lambda x, v: F.conv2d(x, v).transpose(2, 3).transpose(2, 3), f(1, 3, 8, 8), w(4, 3, 3, 3)
)
case("conv1d", lambda x, v, c: F.conv1d(x, v, c, 2, 1), f(2, 3, 11), w(4, 3, 3), w(4))
case("conv1d-groups-dilation", lambda x, v: F.conv1d(x, v, None, 1, 2, 2, 3), f(2, 3, 11), w(6, 1, 3))
case("conv1d-same", lambda x, v: F.conv1d(x, v, None, 1, "same"), f(2, 3, 11), w(4, 3, 4))
case("conv1d-valid-unbatched", lambda x, v, c: F.conv1d(x, v, c, 1, "valid"), f(3, 11), w(4, 3, 3), w(4))
case(
    "convolution",
    lambda x, v, c: A.convolution(x, v, c, [1, 1], [1, 1], [1, 1], False, [0, 0], 1),
    f(1, 3, 8, 8),
    w(4, 3, 3, 3),
    w(4),
)
case("convolution-1d", lambda x, v: A.convolution(x, v, None, [2], [1], [1], False, [0], 1), f(1, 3, 8), w(4, 3, 3))
case(
    "convolution-transposed",
    lambda x, v: A.convolution(x, v, None, [2, 2], [1, 1], [1, 1], True, [1, 0], 1),
    f(1, 4, 5, 5),
    w(4, 3, 3, 3),
)
case(
    "_convolution",
    lambda x, v: A._convolution(x, v, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, False, False, False, False),
    f(1, 3, 8, 8),
    w(4, 3, 3, 3),
)
case("conv_transpose2d", lambda x, v, c: F.conv_transpose2d(x, v, c, 2, 1, 1), f(2, 4, 5, 6), w(4, 3, 3, 3), w(3))
case(
    "conv_transpose2d-groups",
    lambda x, v: F.conv_transpose2d(x, v, None, (2, 1), 0, 0, 2, (1, 2)),
    f(2, 4, 5, 6),
    w(4, 3, 3, 3),
)
case("conv_transpose2d-unbatched", F.conv_transpose2d, f(4, 5, 6), w(4, 3, 2, 2), w(3))
case("conv_transpose1d", lambda x, v, c: F.conv_transpose1d(x, v, c, 3, 1, 1), f(2, 4, 7), w(4, 3, 4), w(3))
case("conv3d", F.conv3d, f(1, 2, 4, 4, 4), w(3, 2, 3, 3, 3), spread=1)

# Normalization.
case(
    "batch_norm",
    lambda x, m, v, g, c: F.batch_norm(x, m, v, g, c),
    f(2, 3, 4, 4),
    w(3),
    wp(3),
    w(3),
    w(3),
    ulps=2,
    spread=1,
)
case("batch_norm-plain", lambda x, m, v: F.batch_norm(x, m, v, eps=1e-3), f(2, 3, 4), w(3), wp(3), ulps=2, spread=1)
case(
    "batch_norm-rank2",
    lambda x, m, v, g, c: F.batch_norm(x, m, v, g, c),
    f(5, 3),
    w(3),
    wp(3),
    w(3),
    w(3),
    ulps=2,
    spread=1,
)
case(
    "batch_norm-inputs",
    lambda x, m, v, g, c: F.batch_norm(x, m, v, g, c),
    f(2, 3, 4, 4),
    f(3),
    p(3),
    f(3),
    f(3),
    ulps=2,
    spread=1,
)
case(
    "conv-bn-relu",
    lambda x, k, m, v, g, c: F.relu(F.batch_norm(F.conv2d(x, k), m, v, g, c)),
    f(1, 3, 8, 8),
    w(4, 3, 3, 3),
    w(4),
    wp(4),
    w(4),
    w(4),
    spread=2,
)
case(
    "linear-bn",
    lambda x, k, m, v, g, c: F.batch_norm(F.linear(x, k), m, v, g, c),
    f(5, 7),
    w(4, 7),
    w(4),
    wp(4),
    w(4),
    w(4),
    spread=2,
)
case(
    "legit-bn",
    lambda x, g, c, m, v: A._native_batch_norm_legit_no_training(x, g, c, m, v, 0.1, 1e-5)[0],
    f(2, 3, 4, 4),
    w(3),
    w(3),
    w(3),
    wp(3),
    ulps=2,
    spread=1,
)
case(
    "native-bn",
    lambda x, g, c, m, v: A.native_batch_norm(x, g, c, m, v, False, 0.1, 1e-5)[0],
    f(2, 3, 4, 4),
    w(3),
    w(3),
    w(3),
    wp(3),
    ulps=2,
    spread=1,
)
case(
    "bn-no-update",
    lambda x, g, c, m, v: A._batch_norm_no_update(x, g, c, m, v, 0.1, 1e-5)[0],
    f(2, 3, 4, 4),
    w(3),
    w(3),
    w(3),
    wp(3),
    ulps=2,
    spread=1,
)
refused("bn-training", lambda x: F.batch_norm(x, None, None, training=True), f(4, 3, 4, 4), spread=2)
case("layer_norm", lambda x, g, c: F.layer_norm(x, (33,), g, c), f(2, 3, 33), w(33), w(33), ulps=2, spread=1)
case("layer_norm-plain", lambda x: F.layer_norm(x, (3, 7), eps=1e-3), f(2, 3, 7), ulps=2, spread=1)
case("layer_norm-weight-only", lambda x, g: F.layer_norm(x, (7,), g), f(2, 3, 7), w(7), ulps=2, spread=1)
case("layer_norm-2dims", lambda x, g, c: F.layer_norm(x, (3, 7), g, c), f(2, 3, 7), w(3, 7), w(3, 7), ulps=2, spread=1)
case("layer_norm-strided", lambda x: F.layer_norm(x.transpose(1, 2), (3,)), f(2, 3, 7), ulps=2, spread=1)
case("layer_norm-empty", lambda x: F.layer_norm(x, (7,)), f(0, 7))
case("group_norm", lambda x, g, c: F.group_norm(x, 2, g, c), f(2, 6, 4, 5), w(6), w(6), ulps=2, spread=1)
case("group_norm-plain", lambda x: F.group_norm(x, 3, eps=1e-3), f(2, 6, 5), ulps=2, spread=1)
case("group_norm-rank2", lambda x, g, c: F.group_norm(x, 2, g, c), f(4, 6), w(6), w(6), ulps=2, spread=1)
case("rms_norm", lambda x, g: F.rms_norm(x, (33,), g, 1e-5), f(2, 3, 33), w(33), ulps=2, spread=1)
case("rms_norm-boolean-weight", lambda x, g: F.rms_norm(x, (33,), g > 0, 1e-5), f(2, 3, 33), w(33), ulps=2, spread=1)
case("rms_norm-default-eps", lambda x: F.rms_norm(x * 1e-2, (7,)), f(2, 3, 7), ulps=2, spread=2)
case(
    "rms_norm-explicit",
    lambda x, g: g * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)),
    f(2, 64),
    w(64),
    spread=2,
)
case("instance_norm", lambda x, g, c: F.instance_norm(x, None, None, g, c), f(2, 3, 4, 5), w(3), w(3), ulps=2, spread=1)
case("instance_norm-plain", lambda x: F.instance_norm(x), f(2, 3, 11), ulps=2, spread=1)
case(
    "weight_norm",
    lambda v, g: (torch._weight_norm(v, g, 0), torch._weight_norm(v.reshape(-1, 4), g.reshape(1, 4), 1)),
    w(4, 3, 2),
    wp(4, 1, 1),
    spread=1,
)

# Pooling and resampling.
case("max_pool2d", lambda x: F.max_pool2d(x, 3, 2, 1), f(2, 3, 9, 9))
case("max_pool2d-options", lambda x: F.max_pool2d(x, (2, 3), (2, 1), (0, 1), (1, 2)), f(2, 3, 9, 9))
case("max_pool2d-ceil", lambda x: F.max_pool2d(x, 3, 2, ceil_mode=True), f(2, 3, 8, 8))
case("max_pool2d-ceil-padding", lambda x: F.max_pool2d(x, 2, 2, 1, ceil_mode=True), f(1, 2, 5, 6))
case("max_pool2d-default-stride", lambda x: F.max_pool2d(x, 2), f(3, 8, 8))
case("max_pool1d", lambda x: (F.max_pool1d(x, 3, 2, 1), F.max_pool1d(x, 2, ceil_mode=True)), f(2, 3, 9))
case("max_pool1d-indices", lambda x: A.max_pool1d_with_indices(x, 3, 2, 1), distinct(2, 3, 9))
case(
    "max_pool2d-indices",
    lambda x: (*F.max_pool2d(x, 3, 2, 1, return_indices=True), *F.max_pool2d(x[0], 2, return_indices=True)),
    whole(2, 3, 9, 8),
)
case(
    "max_pool3d",
    lambda x: (F.max_pool3d(x, 3, 2, 1), F.max_pool3d(x[0], (2, 3, 2), (1, 2, 2), (1, 1, 0), (2, 1, 3), True)),
    f(2, 3, 5, 9, 8),
)
case(
    "max_pool3d-indices",
    lambda x: (
        *F.max_pool3d(x, 3, 2, 1, return_indices=True),
        *F.max_pool3d(x, (2, 3, 2), (1, 2, 2), (1, 1, 0), (2, 1, 3), True, return_indices=True),
    ),
    whole(2, 3, 5, 9, 8),
)
case(
    "avg_pool3d",
    lambda x: (
        F.avg_pool3d(x, 2),
        F.avg_pool3d(x, (2, 3, 4), (2, 2, 3), (1, 1, 2)),
        F.avg_pool3d(x, 3, 2, 1, ceil_mode=True, count_include_pad=False),
        F.avg_pool3d(x[0], (2, 3, 4), 2, (0, 1, 2), divisor_override=7),
    ),
    f(2, 3, 5, 9, 8),
    spread=0.5,
)
case(
    "adaptive_avg_pool3d",
    lambda x: (
        F.adaptive_avg_pool3d(x, (3, 4, 5)),
        F.adaptive_avg_pool3d(x[0], 1),
        A._adaptive_avg_pool3d(x, (7, 1, 8)),
    ),
    f(2, 3, 5, 9, 8),
    spread=0.5,
)
case(
    "interpolate-volumes",
    lambda x: (
        *(F.interpolate(x, (7, 5, 11), mode=mode) for mode in ("nearest", "nearest-exact", "trilinear")),
        F.interpolate(x, scale_factor=(1.7, 0.6, 2.0), mode="trilinear"),
        F.interpolate(x, scale_factor=(1.7, 0.6, 2.0), mode="nearest"),
        F.interpolate(x, (7, 5, 1), mode="trilinear", align_corners=True),
    ),
    f(2, 3, 5, 9, 8),
    spread=0.5,
)
case("avg_pool2d", lambda x: F.avg_pool2d(x, 3, 2, 1), f(2, 3, 9, 9))
case(
    "avg_pool2d-exclude-pad", lambda x: F.avg_pool2d(x, (3, 2), (2, 1), (1, 0), count_include_pad=False), f(2, 3, 9, 9)
)
case("avg_pool2d-ceil", lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True), f(2, 3, 8, 8))
case(
    "avg_pool2d-ceil-exclude",
    lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True, count_include_pad=False),
    f(2, 3, 8, 8),
)
case("avg_pool2d-wider-than-image", lambda x: F.avg_pool2d(x, 1280, ceil_mode=True), f(2, 3, 7, 5))
case("avg_pool2d-wider-than-image-padded", lambda x: F.avg_pool2d(x, 8, 8, 4, ceil_mode=True), f(2, 3, 7, 5))
case(
    "avg_pool2d-wider-than-image-divisor",
    lambda x: F.avg_pool2d(x, 9, ceil_mode=True, divisor_override=5),
    f(2, 3, 7, 5),
)
case("avg_pool2d-divisor", lambda x: F.avg_pool2d(x, 3, 2, 1, divisor_override=5), f(2, 3, 8, 8))
case("avg_pool2d-unbatched", lambda x: F.avg_pool2d(x, 2), f(3, 8, 8))
case("avg_pool1d", lambda x: (F.avg_pool1d(x, 3, 2, 1), F.avg_pool1d(x, 3, 2, 1, count_include_pad=False)), f(2, 3, 9))
case(
    "adaptive_avg_pool2d",
    lambda x: (F.adaptive_avg_pool2d(x, 1), F.adaptive_avg_pool2d(x, (3, 5)), F.adaptive_avg_pool2d(x, (None, 2))),
    f(2, 3, 7, 8),
)
case("adaptive_avg_pool2d-unbatched", lambda x: F.adaptive_avg_pool2d(x, (3, 2)), f(3, 7, 8))
case("adaptive_avg_pool-aten", lambda x: A._adaptive_avg_pool2d(x, [2, 2]), f(2, 3, 7, 8))
case("adaptive_avg_pool1d", lambda x: F.adaptive_avg_pool1d(x, 3), f(2, 3, 8))
case("global-mean", lambda x: x.mean((2, 3)), f(2, 3, 7, 8))
for _mode in ("nearest", "nearest-exact", "bilinear"):
    for _options in (
        {"size": (7, 5)},
        {"scale_factor": 2},
        {"scale_factor": (1.5, 2.5)},
        {"size": (2, 11)},
        {"scale_factor": 1.7, "recompute_scale_factor": True},
        {"scale_factor": 0.6},
    ):
        case(
            f"upsample-{_mode}-{_options}", lambda x, m=_mode, o=_options: F.interpolate(x, mode=m, **o), f(2, 3, 4, 6)
        )
for _options in ({"size": (7, 5)}, {"scale_factor": 2}, {"scale_factor": 1.5}):
    case(
        f"upsample-align-{_options}",
        lambda x, o=_options: F.interpolate(x, mode="bilinear", align_corners=True, **o),
        f(2, 3, 4, 6),
    )
case(
    "upsample-1d",
    lambda x: (
        F.interpolate(x, size=9),
        F.interpolate(x, scale_factor=2.0, mode="linear"),
        F.interpolate(x, size=9, mode="nearest-exact"),
        F.interpolate(x, size=9, mode="linear", align_corners=True),
    ),
    f(2, 3, 5),
)
case("pixel_shuffle", lambda x: F.pixel_shuffle(x, 2), f(2, 8, 3, 4))
case("pixel_unshuffle", lambda x: F.pixel_unshuffle(x, 2), f(8, 6, 4))
case("channel_shuffle", lambda x: F.channel_shuffle(x, 2), f(2, 6, 3, 4))

# Attention and softmax.
for _dim in (-1, 0, 1, -2):
    case(f"softmax-{_dim}", lambda x, d=_dim: (F.softmax(x, d), F.log_softmax(x, d)), f(3, 4, 5))
case(
    "softmax-aten",
    lambda x: (A._softmax(x, 1, False), A._log_softmax(x, 1, False), torch.special.softmax(x, 0)),
    f(3, 5),
)
case("softmax-float32", lambda x: F.softmax(x, -1, dtype=torch.float32).to(x.dtype), f(3, 5))
case(
    "softmax-masked",
    lambda x, m: F.softmax(x + torch.where(m, 0.0, -math.inf), -1),
    f(3, 4, 5),
    Arg((4, 5), lambda s: torch.ones(s).tril().bool()),
)
case("softmax-0d", lambda x: F.softmax(x, 0), f())
case("softmax-empty", lambda x: F.softmax(x, -1), f(0, 5))
case("softmax-wide", lambda x: F.softmax(x * 8, -1), f(2, 1000), ulps=2, spread=4)
SDPA = F.scaled_dot_product_attention
Q, K, V = f(2, 4, 5, 8), f(2, 4, 7, 8), f(2, 4, 7, 8)
case("sdpa", SDPA, Q, K, V, spread=1)
case("sdpa-causal", lambda q, k, v: SDPA(q, k, v, is_causal=True), Q, f(2, 4, 5, 8), f(2, 4, 5, 8), spread=1)
case("sdpa-causal-longer-keys", lambda q, k, v: SDPA(q, k, v, is_causal=True), Q, K, V, spread=1)
case("sdpa-scale", lambda q, k, v: SDPA(q, k, v, scale=0.7), Q, K, V, spread=1)
case(
    "sdpa-bool-mask",
    lambda q, k, v, m: SDPA(q, k, v, m),
    Q,
    K,
    V,
    Arg((5, 7), lambda s: torch.ones(s).tril().bool()),
    spread=1,
)
case("sdpa-float-mask", lambda q, k, v, m: SDPA(q, k, v, m), Q, K, V, f(2, 1, 5, 7), spread=1)
case(
    "sdpa-permuted-mask",
    lambda q, k, v, m: SDPA(q, k, v, m.permute(2, 0, 1).unsqueeze(0).expand(2, -1, -1, -1)),
    f(2, 3, 7, 8),
    f(2, 3, 7, 8),
    f(2, 3, 7, 8),
    f(7, 7, 3),
    spread=1,
)
case("sdpa-float-mask-kw", lambda q, k, v, m: SDPA(q, k, v, attn_mask=m, scale=0.5), Q, K, V, f(1, 7), spread=1)
case("sdpa-windows", SDPA, f(2, 3, 4, 5, 8), f(2, 3, 4, 7, 8), f(2, 3, 4, 7, 8), spread=1)
case(
    "sdpa-joint-windows",
    lambda x: SDPA(*x.reshape(2, 3, 5, 3, 4, 8).permute(3, 0, 4, 1, 2, 5)),
    f(2, 3, 5, 96),
    spread=1,
)
case(
    "sdpa-windows-mask",
    lambda q, k, v, m: SDPA(q, k, v, m),
    f(2, 3, 4, 5, 8),
    f(2, 3, 4, 7, 8),
    f(2, 3, 4, 7, 8),
    f(4, 5, 7),
    spread=1,
)
case("sdpa-gqa", lambda q, k, v: SDPA(q, k, v, enable_gqa=True), Q, f(2, 2, 7, 8), f(2, 2, 7, 8), spread=1)
case(
    "sdpa-mqa-causal",
    lambda q, k, v: SDPA(q, k, v, is_causal=True, enable_gqa=True),
    Q,
    f(2, 1, 5, 8),
    f(2, 1, 5, 8),
    spread=1,
)
case("sdpa-3d", SDPA, f(4, 5, 8), f(4, 7, 8), f(4, 7, 8), spread=1)
case("sdpa-3d-mask", lambda q, k, v, m: SDPA(q, k, v, m), f(4, 5, 8), f(4, 7, 8), f(4, 7, 8), f(4, 1, 7), spread=1)
case("sdpa-2d", SDPA, f(5, 8), f(7, 8), f(7, 8), spread=1)
case("sdpa-value-width", SDPA, Q, K, f(2, 4, 7, 6), spread=1)
case("sdpa-one-query", SDPA, f(1, 4, 1, 64), f(1, 4, 40, 64), f(1, 4, 40, 64), spread=1)
case(
    "sdpa-transposed",
    lambda x: SDPA(x.transpose(1, 2), x.transpose(1, 2), x.transpose(1, 2)).transpose(1, 2).reshape(2, 5, 32),
    f(2, 5, 4, 8),
    spread=1,
)
case(
    "sdpa-masked-row",
    lambda q, k, v, m: SDPA(q, k, v, m),
    Q,
    K,
    V,
    Arg((5, 7), lambda s: torch.arange(5)[:, None].expand(s) > 0),
    spread=1,
)
case("attention-explicit", lambda q, k, v: (F.softmax(q @ k.transpose(-1, -2) / 8**0.5, -1)) @ v, Q, K, V, spread=2)
refused("sdpa-broadcast-batch", SDPA, Q, f(1, 4, 7, 8), f(1, 4, 7, 8), spread=2)

# Reductions.
for _name in "sum mean amax amin prod".split():
    for _dims in ((-1,), (0, 2), (1,), ()) if _name != "prod" else (-1, 0):
        for _keep in (False, True):
            case(
                f"{_name}-{_dims}-{_keep}",
                lambda x, fn=getattr(torch, _name), d=_dims, k=_keep: fn(x, d, keepdim=k),
                p(3, 4, 5),
                spread=1,
            )
for _name in "sum mean max min prod any all".split():
    case(f"{_name}-all", getattr(torch, _name), p(3, 4, 5))
for _name in "any all".split():
    case(f"{_name}-dims", lambda x, fn=getattr(torch, _name): (fn(x, 1), fn(x, -1, True), fn(x, (0, 2))), b(3, 4, 5))
    case(f"{_name}-float", lambda x, fn=getattr(torch, _name): fn(x, 1), whole(3, 4))
for _name in "max min".split():
    case(f"{_name}-dim", lambda x, fn=getattr(torch, _name): (*fn(x, 1), *fn(x, 0, keepdim=True)), f(3, 4, 5))
    case(f"{_name}-dim-values-only", lambda x, fn=getattr(torch, _name): fn(x, -1).values, f(3, 4, 5))
    case(f"{_name}-dim-int", lambda x, fn=getattr(torch, _name): (*fn(x, 1), fn(x)), i(3, 4, high=1000))
for _name in "argmax argmin".split():
    case(
        _name,
        lambda x, fn=getattr(torch, _name): (fn(x), fn(x, -1), fn(x, 0, keepdim=True), fn(x, keepdim=True)),
        f(3, 4, 5),
    )
for _name in "var std".split():
    case(
        _name,
        lambda x, fn=getattr(torch, _name): (
            fn(x),
            fn(x, 1),
            fn(x, (0, 2), keepdim=True),
            fn(x, -1, correction=0),
            fn(x, 1, False),
        ),
        f(3, 4, 5),
        spread=1,
    )
case(
    "var_mean",
    lambda x: (*torch.var_mean(x, 1), *torch.var_mean(x, (0, 2), keepdim=True, correction=0), *torch.var_mean(x)),
    f(3, 4, 5),
    spread=1,
)
case("logsumexp", lambda x: (torch.logsumexp(x, 1), torch.logsumexp(x, (0, 2), True)), f(3, 4, 5), spread=1)
case(
    "norm",
    lambda x: (
        x.norm(),
        x.norm(1, 1),
        x.norm(2, (0, 2), keepdim=True),
        torch.linalg.vector_norm(x, 3, 1),
        torch.linalg.vector_norm(x),
        torch.linalg.vector_norm(x, math.inf, -1),
        F.normalize(x, dim=-1),
    ),
    f(3, 4, 5),
    spread=2,
)
case(
    "norm-aten",
    lambda x: (A.norm.Scalar(x), A.norm.Scalar(x, 1), A.norm.ScalarOpt_dim(x, 2, [1], True)),
    f(3, 4, 5),
    spread=2,
)
case("sum-int", lambda x: (x.sum(), x.sum(1), x.clamp(1, 5).prod(), x.cumsum(0)), i(3, 4, low=1))
case("sum-bool", lambda x: (x.sum(), x.sum(1), x.cumsum(1)), b(3, 4))
case("sum-dtype", lambda x: (x.sum(1, dtype=torch.float32), x.mean(dtype=torch.float32)), i(3, 4))
case("sum-float-to-int", lambda x: x.clamp(-9, 9).sum(1, dtype=torch.int64), halves(3, 4))
case("prod-float-to-int", lambda x: x.prod(1, dtype=torch.int32), halves(3, 4))
case("cumsum-float-to-int", lambda x: x.clamp(-9, 9).cumsum(1, dtype=torch.int64), halves(3, 4))
case(
    "sum-large-int-to-float",
    lambda x: (x.sum(1, dtype=torch.float32), x.cumsum(1, dtype=torch.float32)),
    i(3, 4, low=2**29, high=2**30),
)
case("mean-strided", lambda x: x.transpose(0, 2)[1:].mean((0, 1)), f(3, 4, 5), spread=1)
case("reduce-0d", lambda x: (x.sum(), x.mean(), x.max(), x.sum(0), x.argmax(), x.softmax(0)), f(), spread=1)
case("reduce-size-1", lambda x: (x.sum(1), x.var(1, correction=0), x.amax(1)), f(3, 1, 4), spread=1)
case("reduce-rank6", lambda x: x.sum((1, 3, 5)), f(2, 3, 2, 3, 2, 2), spread=1)
case(
    "reductions-empty",
    lambda x: (
        x.sum(),
        x.sum(0),
        x.mean(0),
        x.prod(0),
        x.amax(1),
        x.logsumexp(0),
        x.var(),
        *torch.var_mean(x, 0),
        torch.linalg.vector_norm(x, 2, 0),
        (x > 0).any(0),
        (x > 0).all(),
    ),
    f(0, 3),
)
case("reductions-empty-integers", lambda x: (x.sum(), x.prod(0)), i(0, 3))
case(
    "lstm",
    lambda x, h, c, *weights: torch.lstm(x, (h, c), weights, True, 1, 0.0, False, True, True),
    f(3, 4, 5),
    u(2, 3, 6),
    u(2, 3, 6),
    *(w(24, 5), w(24, 6), w(24), w(24)) * 2,
    spread=2,
)
case(
    "lstm-layers",
    lambda x, h, c, *weights: torch.lstm(x, (h, c), weights, False, 2, 0.5, False, False, False),
    f(4, 2, 5),
    u(2, 2, 3),
    u(2, 2, 3),
    *(w(12, 5), w(12, 3), w(12, 3), w(12, 3)),
    spread=2,
)
case(
    "gru",
    lambda x, h, *weights: torch.gru(x, h, weights, True, 2, 0.0, False, True, False),
    f(4, 2, 5),
    u(4, 2, 3),
    *(w(9, 5), w(9, 3), w(9), w(9)) * 2,
    *(w(9, 6), w(9, 3), w(9), w(9)) * 2,
    spread=2,
)
case(
    "rnn",
    lambda x, h, *weights: (
        *torch.rnn_tanh(x, h, weights, True, 1, 0.0, False, False, True),
        *torch.rnn_relu(x, h, weights, True, 1, 0.0, False, False, True),
    ),
    f(2, 4, 5),
    u(1, 2, 7),
    *(w(7, 5), w(7, 7), w(7), w(7)),
    spread=2,
)
refused(
    "lstm-projected",
    lambda x, h, c, *weights: torch.lstm(x, (h, c), weights, False, 1, 0.0, False, False, False),
    f(4, 2, 5),
    u(1, 2, 3),
    u(1, 2, 6),
    *(w(24, 5), w(24, 3), w(3, 6)),
    spread=2,
)
case("cumsum", lambda x: (x.cumsum(0), x.cumsum(-1)), f(3, 4, 5), spread=1)
case("cumsum-0d", lambda x: x.cumsum(0), f())
case("cumsum-long", lambda x: x.cumsum(-1), f(2, 5000), spread=2)
case(
    "sort",
    lambda x: (*torch.sort(x), *torch.sort(x, 0, True), *torch.sort(x, dim=1, stable=True), x.msort()),
    distinct(3, 4, 5),
)
case(
    "sort-equal",
    lambda x: (*torch.sort(x, stable=True), *torch.sort(x, dim=0, descending=True, stable=True)),
    whole(40, 7),
)
case("sort-values-only", lambda x: torch.sort(x, descending=True).values * 2, f(3, 50))
case(
    "sort-int",
    lambda x, y: (*torch.sort(x, stable=True), *torch.sort(y, stable=True, descending=True)),
    i(3, 40, low=-9),
    b(3, 20),
)
case(
    "narrow-integers",
    lambda x, y: (
        *(x.to(dtype) for dtype in (torch.int8, torch.uint8, torch.int16)),
        y.to(torch.int8),
        y.to(torch.uint8),
    ),
    i(3, 40, low=-70000, high=70000),
    i(3, 40, low=-300, high=300, dtype=torch.int16),
)
case("narrow-integers-of-floats", lambda x: ((x * 16).to(torch.int8), (x * 16).abs().to(torch.uint8)), halves(3, 4))
case("sort-narrow-int", lambda x: torch.sort(x, stable=True), i(3, 40, dtype=torch.int8))
case("sort-empty", lambda x: torch.sort(x, 0), f(3, 0))
case("argsort", lambda x: (x.argsort(), x.argsort(0, True), torch.argsort(x, dim=1, stable=True)), distinct(3, 4, 5))
case("topk", lambda x: (*x.topk(2), *x.topk(3, 0, largest=False), *x.topk(1, dim=1, sorted=False)), distinct(4, 5, 6))
case("sort-0d", lambda x: (*torch.sort(x), *torch.topk(x, 1), x.argsort()), f())

# Views.
case("view", lambda x: (x.view(12, 5) + 1, x.view(-1) + 1, x.view(3, 2, 2, 5) * 2), f(3, 4, 5))
case("reshape", lambda x: (x.reshape(4, 15), x.transpose(0, 1).reshape(12, 5), x.flatten(1), x.flatten()), f(3, 4, 5))
case(
    "reshape-like",
    lambda x, y: (x.view_as(y) + 1, x.t().reshape_as(y) + 1, A._unsafe_view(x, [2, 6])),
    f(3, 4),
    f(4, 3),
)
case("unflatten", lambda x: x.unflatten(1, (2, -1)) + 1, f(3, 4))
case("permute", lambda x: (x.permute(2, 0, 1), x.permute(-1, 1, 0) + 1, x.permute(0, 2, 1).contiguous()), f(3, 4, 5))
case(
    "transpose",
    lambda x: (x.transpose(0, -1), x.swapaxes(0, 1) + 1, x.swapdims(1, 2), x.mT, x.mH, x.adjoint()),
    f(3, 4, 5),
)
case("t", lambda x, v: (x.t(), v.t() + 1, x.T, x.H, A.numpy_T(x), A.matrix_H(x)), f(3, 4), f(3))
case(
    "movedim",
    lambda x: (x.movedim(0, 2), x.moveaxis((0, 1), (2, 0)), x.movedim(-1, 0) + 1, torch.moveaxis(x, 0, 1)),
    f(3, 4, 5),
)
case(
    "squeeze",
    lambda x: (x.squeeze(), x.squeeze(1), x.squeeze(0), x.squeeze((1, -1)), x.unsqueeze(0), x.unsqueeze(-1) + 1),
    f(3, 1, 4, 1),
)
case(
    "expand",
    lambda x, y: (x.expand(2, 3, 4) + 1, x.expand(-1, 4), x.expand_as(y), x.broadcast_to(3, 4) * 2),
    f(3, 1),
    f(3, 4),
)
case("broadcast_tensors", lambda x, y: torch.broadcast_tensors(x, y), f(3, 1), f(4))
case("slice", lambda x: (x[1:], x[:, :-1], x[:, ::2] + 1, x[..., 1:3], x[5:], x[-2:, 1:2], x[:, 10:]), f(3, 4, 5))
case("narrow", lambda x: (x.narrow(1, 1, 2), x.narrow(0, -2, 1) + 1), f(3, 4))
case("select", lambda x: (x[0], x[:, -1], x.select(2, 1) + 1, x[1, 2, 3]), f(3, 4, 5))
case("split", lambda x: (*x.split(2, 1), *x.split([1, 3], 1), *(y + 1 for y in x.chunk(2, 0))), f(3, 4))
case("split-part", lambda x: x.chunk(3, -1)[1] * x.split(2, -1)[0], f(3, 6))
case("tensor_split", lambda x: (*x.tensor_split(3), *x.tensor_split((1, 3), 1)), f(5, 4))
case("split_with_sizes", lambda x: A.split_with_sizes(x, [1, 2], 0), f(3, 4))
case("unbind", lambda x: (*x.unbind(), *(y + 1 for y in x.unbind(1))), f(3, 2))
case("unfold", lambda x: (x.unfold(1, 3, 2), x.unfold(0, 2, 1).sum(-1)), f(3, 7), spread=1)
case(
    "diagonal",
    lambda x: (x.diagonal(), x.diagonal(1, 1, 2), x.diagonal(-1, 0, -1) + 1, torch.diagonal(x, 9, 1, 2)),
    f(3, 4, 5),
)
case("alias", lambda x: (A.alias(x) + 1, x.detach() * 2, x.contiguous()), f(3, 4))
case(
    "dropout",
    lambda x: (
        F.dropout(x, 0.5, False) + 1,
        F.dropout2d(x, 0.5, False),
        F.alpha_dropout(x, 0.5, False),
        A.feature_dropout(x, 0.5, False),
    ),
    f(2, 3, 4, 4),
)
case(
    "view-chain",
    lambda x: x.permute(2, 0, 1)[1:].reshape(-1, 3, 2, 2)[:, 1:].transpose(-1, -2).flatten(1) + 1,
    f(3, 4, 5),
)
case("view-empty", lambda x: (x.reshape(3, 0), x.permute(1, 0), x.flatten() + 1, x.unsqueeze(1)), f(0, 3))
case("view-to-0d", lambda x: (x.reshape(()), x.squeeze() + 1, x.reshape(1, 1).expand(2, 3)), f(1))
case("view-rank6", lambda x: x.permute(5, 3, 1, 0, 2, 4).reshape(4, -1), f(2, 1, 3, 2, 1, 2))
case("input-is-output", lambda x, y: (x, y + 1, x), f(3), f(2))
case("output-twice", lambda x: (lambda y: (y, y.view(-1), y))(x + 1), f(3, 2))
case("weight-is-output", lambda x, v: (x + 1, v), f(3), w(3))

# Making and rearranging tensors.
case(
    "cat",
    lambda x, y: (
        torch.cat([x, y]),
        torch.cat([x, x], 1),
        torch.cat([x[:, 1:], y[:2, :2]], -1) if False else torch.cat([x.t(), y.t()], -1),
    ),
    f(3, 4),
    f(2, 4),
)
case("cat-many", lambda *xs: torch.cat(xs, 1), *(f(2, n, 3) for n in (1, 2, 3, 1, 4, 2)))
case("cat-empty", lambda x, y, z: (torch.cat([x, y], 0), torch.cat([z, x]), torch.cat([y, y])), f(3, 4), f(0, 4), f(0))
case("cat-only-empty", lambda x: A.cat([x], 3), f(0))
case("cat-dtypes", lambda x, y, z: torch.cat([x, y, z]), f(3), i(2), b(2))
case("cat-aliases", lambda x, y: (torch.concat([x, y]), torch.concatenate([y, x], 0)), f(3, 4), f(2, 4))
case("cat-int", lambda x, y: torch.cat([x, y], -1), i(3, 4), i(3, 2))
case("stack", lambda x, y: (torch.stack([x, y]), torch.stack([x, y], -1), torch.stack([x, y, x], 1)), f(3, 4), f(3, 4))
case("stack-0d", lambda x, y: torch.stack([x, y]), f(), f())
case(
    "repeat", lambda x: (x.repeat(2, 3), x.repeat(2, 1, 1), x.tile(2), x.tile(1, 2, 2), torch.tile(x, (2, 2))), f(3, 4)
)
case("repeat-zero", lambda x: x.repeat(0, 2), f(3, 4))
case(
    "repeat-rank8",
    lambda x: (
        x.permute(7, 6, 5, 4, 3, 2, 1, 0).repeat(2, 1, 1, 2, 1, 1, 3, 1),
        x.transpose(0, 7).repeat_interleave(2, 2),
    ),
    f(2, 3, 1, 2, 1, 2, 2, 3),
)
case(
    "repeat_interleave",
    lambda x: (x.repeat_interleave(2, 1), x.repeat_interleave(3), x.repeat_interleave(2, -2)),
    f(3, 4),
)
refused(
    "repeat_interleave-tensor",
    lambda x, n: torch.repeat_interleave(x, n, 0, output_size=6),
    f(3, 4),
    Arg((3,), lambda s: torch.tensor([1, 2, 3])),
)
case("roll", lambda x: (x.roll(1, 0), x.roll((1, -2), (0, 1)), x.roll(5), x.roll(-1, -1), x.roll(7, 1)), f(3, 4))
case("flip", lambda x: (x.flip(0), x.flip((0, -1)), x.flip(1) + 1), f(3, 4, 5))
case("pad", lambda x: (F.pad(x, (1, 2)), F.pad(x, (0, 1, 2, 0), value=1.5), F.pad(x, (1, 1, 1, 1, 1, 0))), f(2, 3, 4))
case("pad-negative", lambda x: (F.pad(x, (-1, 2)), F.pad(x, (-1, -1, 1, -1)), F.pad(x, (-1, 0)) + 1), f(2, 3, 4))
case(
    "pad-modes-1d", lambda x: tuple(F.pad(x, (2, 1), mode=m) for m in ("reflect", "replicate", "circular")), f(2, 3, 5)
)
case(
    "pad-modes-2d",
    lambda x: tuple(F.pad(x, (2, 1, 0, 3), mode=m) for m in ("reflect", "replicate", "circular")),
    f(2, 3, 5, 6),
)
case(
    "pad-modes-unbatched", lambda x: tuple(F.pad(x, (1, 1, 1, 0), mode=m) for m in ("reflect", "replicate")), f(3, 5, 6)
)
case(
    "pad-aten",
    lambda x: (
        A.constant_pad_nd(x, [1, 0], 2.0),
        A.reflection_pad1d(x, [1, 2]),
        A.replication_pad1d(x, [2, 1]),
        A.reflection_pad2d(x, [1, 2, 0, 1]),
        A.replication_pad2d(x, [1, 2, 0, 1]),
    ),
    f(2, 3, 5),
)
case("pad-int", lambda x: F.pad(x, (1, 2), value=7), i(2, 3))
case("pad-bool", lambda x: F.pad(x, (1, 2), value=True), b(2, 3))
refused("pad-negative-replicate", lambda x: F.pad(x, (-1, 2), mode="replicate"), f(2, 3, 5))
case("tril/triu", lambda x: (x.tril(), x.triu(1), x.tril(-1), x.triu(-2), x.transpose(1, 2).triu()), f(2, 4, 5))
case("tril-bool", lambda x: (x.tril(), x.triu(1)), b(4, 4))
case("tril-int", lambda x: x.tril(1), i(4, 4))


def _like(x: torch.Tensor) -> dict[str, Any]:
    return {"device": x.device, "dtype": x.dtype}


case(
    "fill",
    lambda x: (
        torch.zeros(2, 3, **_like(x)),
        torch.ones(2, **_like(x)),
        torch.full((2, 2), 1.5, **_like(x)),
        torch.zeros_like(x),
        torch.ones_like(x),
        torch.full_like(x, 0.25),
        x.new_zeros(2),
        x.new_ones(2),
        x.new_full((2,), 3.0),
    ),
    f(3, 4),
)
case(
    "fill-int-bool",
    lambda x: (
        torch.full((2,), 7, device=x.device),
        torch.ones(2, dtype=torch.bool, device=x.device),
        torch.full((2,), True, device=x.device),
        torch.zeros((), dtype=torch.int32, device=x.device),
        torch.full_like(x, 2),
    ),
    i(3),
)
case(
    "fill-aten",
    lambda x: (A.fill.Scalar(x, 2.0), A.fill.Tensor(x, x[0, 0]), A.zero(x), A.scalar_tensor(2.5, **_like(x))),
    f(3, 4),
)
case(
    "empty",
    lambda x: (
        torch.empty(2, 3, **_like(x)).fill_(1.0),
        torch.empty_like(x).copy_(x),
        x.new_empty(2).zero_(),
        A.empty_permuted([2, 3], [1, 0], **_like(x)).zero_(),
    ),
    f(3, 4),
)
case(
    "arange",
    lambda x: (
        torch.arange(5, device=x.device),
        torch.arange(2, 9, 3, device=x.device),
        torch.arange(5, 0, -2, device=x.device),
        torch.arange(0.0, 1.0, 0.25, device=x.device),
        torch.arange(1, 4, dtype=torch.float32, device=x.device),
    ),
    f(1),
)
case(
    "linspace",
    lambda x: (
        torch.linspace(0, 1, 5, device=x.device),
        torch.linspace(2.0, -1.0, 4, device=x.device),
        torch.linspace(3, 4, 1, device=x.device),
    ),
    f(1),
    spread=1,
)
case("positions", lambda x: x + torch.arange(5, device=x.device)[None, :, None] * 0.5, f(2, 5, 3))
case(
    "causal-mask",
    lambda x: x.masked_fill(torch.ones(5, 5, dtype=torch.bool, device=x.device).triu(1), -1.0),
    f(2, 5, 5),
)
refused("linspace-tensor", lambda x: torch.linspace(x, 2.0, 5, device=x.device), f())
case("diff", lambda x, y: (x.diff(), x.diff(dim=0), x.diff(prepend=y)), f(3, 4), f(3, 1))
case("diff-both-ends", lambda x, y, z: x.diff(prepend=y, append=z), f(3, 4), f(3, 1), f(3, 2))
case("diff-int-bool", lambda x, y: (x.diff(), y.diff()), i(3, 4), b(3, 4))
case("meshgrid", lambda x, y: (*torch.meshgrid(x, y, indexing="ij"), *torch.meshgrid(x, y, indexing="xy")), f(3), f(4))
case("meshgrid-default", lambda x, y: A.meshgrid([x, y]), f(3), f(4))
case("slice_scatter", lambda x, y: (x.slice_scatter(y, 1, 1, 3), x.slice_scatter(y, 1, 0, 4, 2)), f(3, 4), f(3, 2))
case("select_scatter", lambda x, y: (x.select_scatter(y, 1, 2), x.select_scatter(y, 1, -1)), f(3, 4), f(3))
case("diagonal_scatter", lambda x, y: x.diagonal_scatter(y), f(3, 4), f(3))

# Indexing.
case("embedding", F.embedding, i(2, 5, high=7), w(7, 6))
case("embedding-0d", F.embedding, i(high=7), w(7, 6))
case("embedding-padding", lambda n, v: F.embedding(n, v, padding_idx=0), i(2, 5, high=7), w(7, 6))
case("embedding-int32", F.embedding, i(2, 5, high=7, dtype=torch.int32), w(7, 6))
case("embedding-computed-ids", lambda n, v: F.embedding(n // 2 + 1, v), i(2, 5, high=7), w(7, 6))
case(
    "index_select",
    lambda x, n: (x.index_select(0, n), x.index_select(-1, n), x.transpose(0, 1).index_select(1, n)),
    f(4, 5, 6),
    i(3),
)
case("index_select-0d", lambda x, n: x.index_select(0, n), f(4), i())
case("index_select-int", lambda x, n: x.index_select(1, n), i(4, 5), i(3))
case("index-unsafe", lambda x, n: A._unsafe_index(x, [None, n]), f(3, 4), i(3))
case(
    "gather-scalar",
    lambda x, n, y, m: (x.gather(0, n), y.gather(0, m), x.gather(0, m)),
    f(),
    i(high=1),
    f(3),
    i(2, high=1),
)
case("gather", lambda x, n: (x.gather(1, n), x.gather(0, n[:, :2]), x.gather(-1, n[:2])), f(4, 5), i(4, 3))
case("index", lambda x, n, m: (x[n], x[:, n], x[n, m], x[:, n, m], x[n[:, None], m]), f(4, 5, 6), i(3), i(3))
case("index-negative", lambda x, n: (x[n], x[:, n]), f(4, 5), i(3, low=-4))
case("index-2d", lambda x, n: (x[n], x[..., n]), f(4, 5), i(2, 3))
case("index-int", lambda x, n: x[n], i(4, 5), i(3))
case("index-bool-data", lambda x, n: x[n], b(4, 5), i(3))
refused("index-mixed", lambda x, n, m: x[n, :, m], f(4, 5, 6), i(3), i(3))
case(
    "index_copy",
    lambda x, n, y: (x.index_copy(0, n, y), x.index_copy(1, n, y.t()[:4])),
    f(4, 6),
    Arg((2,), lambda s: torch.tensor([3, 1])),
    f(2, 6),
)


def rows(*picked: int) -> Arg:
    return Arg((len(picked),), lambda s: torch.tensor(picked))


def permutation(*shape: int) -> Arg:
    """Argument of distinct random integers along the last dimension, below twice its size."""
    return Arg(shape, lambda s: torch.rand(*s[:-1], 2 * s[-1]).argsort(-1)[..., : s[-1]])


case("scatter-value", lambda x, n: (x.scatter(1, n, 2.5), x.scatter(-1, n[:2], -1)), f(4, 6), permutation(4, 3))
case("scatter-value-rows", lambda x, n: x.scatter(0, n.t(), 0.5), f(6, 4), permutation(2, 3))
case("scatter-value-repeated", lambda x, n: x.scatter(1, n, 2.0), f(2, 4), i(2, 5))
case("scatter-value-int", lambda x, n: x.scatter(0, n, 7), i(6), permutation(3))
case("scatter-value-bool", lambda x, n: x.scatter(1, n, True), b(2, 6), permutation(2, 3))
case("scatter-value-infinite", lambda x, n: x.scatter(1, n, -math.inf), f(2, 6), permutation(2, 3))
case("scatter-value-in-place", lambda x, n: (x + 1).scatter_(1, n, 2.0) * 2, f(2, 6), permutation(2, 3))
case("scatter-value-none", lambda x, n: x.scatter(1, n, 2.0), f(2, 6), i(2, 0))
case("scatter-src", lambda x, n, y: x.scatter(1, n, y), f(4, 6), permutation(4, 3), f(4, 3))
case("scatter-src-larger", lambda x, n, y: x.scatter(2, n, y), f(3, 4, 6), permutation(2, 4, 3), f(3, 5, 4))
case("scatter-src-int", lambda x, n, y: x.scatter(0, n, y), i(6, 2), i(3, 2, high=1), i(3, 2, high=1))
case("scatter-src-none", lambda x, n, y: x.scatter(1, n, y), f(2, 6), i(2, 0), f(2, 3))
case("scatter-large", lambda x, n: x.scatter(1, n, 2.0), f(64, 1024), i(64, 513, high=1024))
case("scatter-scalar", lambda x, n, y: (x.scatter(0, n, y), x.scatter_add(0, n, y)), f(), i(high=1), f())
case(
    "scatter-src-repeated",
    lambda x, n, y: x.scatter(1, n, y),
    f(2, 4),
    Arg((2, 3), lambda s: torch.ones(s, dtype=torch.int64)),
    f(2, 3),
)
case(
    "scatter_add", lambda x, n, y: (x.scatter_add(1, n, y), x.scatter_add(0, n, y)), f(4, 6), i(4, 5), f(4, 5), spread=1
)
case(
    "scatter_add-window",
    lambda x, n, y: x.scatter_add(1, n[:2], y),
    f(4, 3, 6),
    i(3, 4, 5, high=3),
    f(3, 4, 6),
    spread=1,
)
case("scatter_add-int", lambda x, n, y: x.scatter_add(-1, n, y), large(3, 4), i(3, 7), large(3, 7))
case("scatter_add-none", lambda x, n, y: x.scatter_add(1, n, y), f(2, 6), i(2, 0), f(2, 3))
case("scatter-multiply", lambda x, n, y: x.scatter(1, n, y, reduce="multiply"), f(3, 4), i(3, 5), f(3, 5), spread=1)
case("scatter-add-value", lambda x, n: x.scatter(1, n, 1.5, reduce="add"), f(3, 4), i(3, 5), spread=1)
for _reduction in "sum prod mean amax amin".split():
    case(
        f"scatter_reduce-{_reduction}",
        lambda x, n, y, r=_reduction: (
            x.scatter_reduce(1, n, y, r),
            x.scatter_reduce(0, n, y, r, include_self=False),
        ),
        f(4, 6),
        i(4, 5),
        f(4, 5),
        spread=1,
    )
case(
    "scatter_reduce-nan",
    lambda x, n, y: (x.scatter_reduce(1, n, torch.log(y), "amax"), x.scatter_reduce(1, n, torch.log(y), "amin")),
    f(3, 4),
    i(3, 4),
    f(3, 4),
)
case(
    "scatter_reduce-int",
    lambda x, n, y: [x.scatter_reduce(1, n, y, r) for r in ("sum", "prod", "amax", "amin")],
    i(3, 4, low=-5, dtype=torch.int32),
    i(3, 4),
    i(3, 4, low=-5, dtype=torch.int32),
)
refused("scatter_reduce-mean-int", lambda x, n, y: x.scatter_reduce(1, n, y, "mean"), i(3, 4), i(3, 4), i(3, 4))
case(
    "index_add",
    lambda x, n, y: (x.index_add(0, n, y), x.index_add(0, n, y, alpha=-2), x.t().index_add(-1, n, y.t())),
    f(4, 3),
    i(5),
    f(5, 3),
    spread=1,
)
case("index_add-scalar", lambda x, n, y: x.index_add(0, n, y), f(), i(high=1), f())
case("index_add-int", lambda x, n, y: x.index_add(1, n, y, alpha=3), i(2, 4, 3), i(5), i(2, 5, 3))
for _reduction in "prod mean amax amin".split():
    case(
        f"index_reduce-{_reduction}",
        lambda x, n, y, r=_reduction: (
            x.index_reduce(0, n, y, r),
            x.index_reduce(0, n, y, r, include_self=False),
        ),
        f(4, 3),
        i(5),
        f(5, 3),
        spread=1,
    )
case("index_put-rows", lambda x, n, y: A.index_put(x, [n], y), f(6, 3, 2), rows(4, -1, 0), f(3, 3, 2))
case(
    "index_put-inverse",
    lambda n: A.index_put(torch.zeros_like(n), [n], torch.arange(4, device=n.device)),
    rows(2, 0, 3, 1),
)
case("index_put-accumulate", lambda x, n, y: A.index_put(x, [n], y, True), f(4, 3), i(5), f(5, 3), spread=1)
case("index_put-broadcast", lambda x, n, y: A.index_put(x, [n], y), f(4, 3), rows(2, 0), f(3))
case("index_put-second", lambda x, n, y: A.index_put(x, [None, n], y), f(3, 4), rows(2, 0), f(3, 2))
case("index_put-two", lambda x, n, m, y: A.index_put(x, [n, m], y), f(3, 4), rows(2, 0), rows(1, -1), f(2))
case(
    "index_put-two-apart",
    lambda x, n, m, y: A.index_put(x, [n, None, m], y),
    f(3, 2, 4),
    rows(2, 0),
    rows(1, -1),
    f(2, 2),
)
case(
    "index_put-middle",
    lambda x, n, m, y: A.index_put(x, [None, n, m], y),
    f(5, 3, 4, 2),
    rows(2, 0),
    rows(1, -1),
    f(5, 2, 2),
)
case(
    "index_put-table",
    lambda x, n, m, y: A.index_put(x, [n, m], y, True),
    f(3, 4, 2),
    i(5, 1, high=3),
    i(2),
    f(5, 2, 2),
    spread=1,
)
case("index_put-unsafe", lambda x, n, y: A._unsafe_index_put(x, [n], y), f(6, 3), rows(4, -1, 0), f(3, 3))
case("index_put-mask", lambda x, m, y: (A.index_put(x, [m], y), A.index_put(x, [m], y, True)), f(3), b(3), f(1))
case("index_put-mask-scalar", lambda x, m, y: A.index_put(x, [None, m], y), f(2, 3, 4), b(3), f())
case("index_put-mask-row", lambda x, m, y: A.index_put(x, [m], y), f(2, 3, 4), b(2, 3), f(4))
refused(
    "index_put-mask-values",
    lambda x, m, y: A.index_put(x, [m], y),
    f(3),
    Arg((3,), lambda s: torch.ones(s, dtype=torch.bool)),
    f(3),
)
case("isin", lambda n, m: (torch.isin(n, m), torch.isin(n, m, invert=True)), i(3, 5, high=9), i(2, 2, high=9))
case("isin-float", lambda x, y: torch.isin(x, y), whole(7), whole(1))
refused("isin-scalar", lambda n: torch.isin(n, 2), i(3))
refused("isin-mixed", lambda n, x: torch.isin(n, x), i(3), whole(2))
refused("isin-large", lambda n, m: torch.isin(n, m), i(4097, high=9), i(4096, high=9))
LIMITS = Arg((4,), lambda s: torch.tensor([-1.0, 0.0, 0.5, 2.0]))
case("bucketize", lambda x, y: (torch.bucketize(x, y), torch.bucketize(x, y, right=True)), halves(3, 9), LIMITS)
case("bucketize-nan", lambda x, y: torch.bucketize(x / 0.0, y), whole(9), LIMITS)
case("bucketize-int32", lambda n, m: torch.bucketize(n, m, out_int32=True), i(7, high=9), rows(2, 4, 4))
case("eye", lambda x: (torch.eye(4, device=x.device) + x, torch.eye(2, 4, device=x.device) * x[:2]), f(4, 4))
case("eye-int", lambda n: torch.eye(3, dtype=torch.int64, device=n.device) + n, i(3))
case("linalg_norm", lambda x: (torch.linalg.norm(x), torch.linalg.norm(x, dim=-1, keepdim=True)), f(3, 4))
case("linalg_norm-order", lambda x: (torch.linalg.norm(x, 1, 1), torch.linalg.norm(x, 3.0, dim=(0,))), p(3, 4))
refused("linalg_norm-matrix", lambda x: torch.linalg.norm(x, "fro"), f(3, 4))
case("conv3d-patches", lambda x, v, c: F.conv3d(x, v, c, (2, 3, 4)), f(2, 3, 4, 7, 9), w(5, 3, 2, 3, 4), w(5), spread=1)
case(
    "conv3d-overlap",
    lambda x, v: F.conv3d(x, v, None, (1, 2, 1), 1, (2, 1, 1)),
    f(1, 2, 5, 5, 4),
    w(3, 2, 2, 3, 2),
    spread=1,
)
case("conv3d-input", lambda x, v: F.conv3d(x.transpose(2, 4), v) * 2, f(1, 2, 3, 4, 3), w(2, 2, 1, 2, 2), spread=1)
case(
    "conv3d-planes",
    lambda x, v, c: (F.conv3d(x, v, c, (2, 1, 2), (0, 1, 1)), F.conv3d(x, v, c, 1, (1, 0, 2))),
    f(2, 3, 5, 6, 5),
    w(4, 3, 1, 3, 2),
    w(4),
    spread=1,
)
case(
    "conv3d-depth",
    lambda x, v, c: (F.conv3d(x, v, c, (2, 1, 1), (2, 0, 0), (2, 1, 1), 2), F.conv3d(x, v, c, (1, 2, 1), groups=2)),
    f(2, 4, 7, 3, 5),
    w(6, 2, 3, 1, 1),
    w(6),
    spread=1,
)
case(
    "conv3d-groups",
    lambda x, v, c: F.conv3d(x, v, c, (1, 2, 1), (1, 0, 2), (2, 1, 1), groups=2),
    f(2, 4, 6, 7, 5),
    w(6, 2, 2, 3, 2),
    w(6),
    spread=1,
)
case(
    "conv3d-unbatched",
    lambda x, v: (F.conv3d(x, v, padding="same", dilation=(1, 2, 1)), F.conv3d(x, v, padding="valid")),
    f(4, 3, 5, 4),
    w(3, 4, 2, 3, 2),
    spread=1,
)
case(
    "conv3d-depthwise",
    lambda x, v: A.convolution(x, v, None, [1, 1, 1], [1, 1, 0], [1, 1, 1], False, [0, 0, 0], 4),
    f(1, 4, 3, 4, 3),
    w(8, 1, 2, 3, 2),
    spread=1,
)
case(
    "conv_transpose3d",
    lambda x, v, c: (F.conv_transpose3d(x, v, c, 2, 1, 1), F.conv_transpose3d(x[0], v, None, dilation=(1, 2, 1))),
    f(2, 4, 3, 4, 3),
    w(4, 3, 2, 3, 2),
    w(3),
    spread=1,
)
case(
    "conv_transpose3d-planes",
    lambda x, v, c: (
        F.conv_transpose3d(x, v, c, 2),
        F.conv_transpose3d(x[0], v, None, (2, 1, 3), (0, 1, 0), (0, 0, 1), 1, (1, 2, 1)),
    ),
    f(2, 4, 3, 4, 3),
    w(4, 3, 2, 3, 2),
    w(3),
    spread=1,
)
case(
    "conv_transpose3d-groups",
    lambda x, v: A.convolution(x, v, None, [1, 2, 3], [2, 1, 3], [1, 2, 1], True, [0, 1, 2], 2),
    f(1, 4, 6, 4, 3),
    w(4, 3, 2, 3, 2),
    spread=1,
)
case(
    "col2im",
    lambda x: (F.fold(x, (5, 6), 3, padding=1), F.fold(x[0], (5, 18), (1, 9), 1, (0, 1), (1, 2))),
    f(2, 27, 30),
    spread=1,
)
case("im2col", lambda x: (F.unfold(x, 3), F.unfold(x[0], (2, 3), (1, 2), (1, 0), (2, 1))), f(2, 3, 9, 8))


def ends(*values: int) -> Arg:
    return Arg((len(values),), lambda s: torch.tensor(values, dtype=torch.int32))


GROUPED = torch.ops.transformers.grouped_mm_fallback
case("grouped_mm", GROUPED, f(7, 5), w(4, 5, 3), rows(2, 2, 6, 7), spread=1.0)
case("grouped_mm-rows-left", GROUPED, f(7, 5), f(3, 5, 4), rows(0, 3, 5), spread=1.0)
case("grouped_mm-transposed", lambda x, y, n: GROUPED(x, y.mT, n), f(6, 5), w(2, 3, 5), rows(4, 6), spread=1.0)
case(
    "grouped_mm-bfloat16",  # the only dtype of which PyTorch exports it
    lambda x, y, n: torch._grouped_mm(x.bfloat16(), y.bfloat16(), n).float(),
    whole(8, 8),
    whole(2, 8, 16),
    ends(3, 8),
)
case("grouped_mm-large", GROUPED, f(1025, 256), f(2, 256, 257), rows(1000, 1025), spread=1.0)
case("histc-integers", lambda n: torch.histc(n.float(), 5, 0, 4), i(40, low=-2, high=7))
case("histc-one-bin", lambda n: torch.histc(n.float(), 1, 0, 1), i(3, 4, low=-1, high=3))
case("histc-halves", lambda x: torch.histc(x.float(), 8, -2, 2), halves(50))
refused("histc-of-16-bits", lambda x: torch.histc(x.half(), 8, -2, 2), halves(50))
refused("histc-limits-of-data", lambda x: torch.histc(x, 8), f(20))
refused("histc-large", lambda x: torch.histc(x, 4097, -2, 2), f(4096))
case(
    "index_copy-cache",
    lambda x, n, y: x.index_copy(2, n, y) * 1.0,
    f(1, 2, 8, 4),
    Arg((3,), lambda s: torch.tensor([5, 0, 2])),
    f(1, 2, 3, 4),
)


# In-place variants: on whole tensors, and on views of which others remain.
def _inplace(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(x: torch.Tensor, *rest: torch.Tensor) -> Any:
        y = x.clone()
        extra = function(y, *rest)
        return (y, *extra) if isinstance(extra, tuple) else (y, extra) if isinstance(extra, torch.Tensor) else y

    return run


def _set(view: Callable[[torch.Tensor], torch.Tensor], write: Callable[[torch.Tensor], Any]) -> Callable[..., Any]:
    def run(y: torch.Tensor) -> torch.Tensor:
        write(view(y))
        return y + 1

    return _inplace(run)


def _assign(y: torch.Tensor, key: Any, value: Any) -> None:
    y[key] = value


INPLACE: dict[str, Callable[[torch.Tensor], Any]] = {
    "relu_": lambda y: y.relu_(),
    "add_": lambda y: y.add_(1.5),
    "mul_": lambda y: y.mul_(y),
    "sub_": lambda y: y.sub_(y * 2, alpha=0.5),
    "div_": lambda y: y.div_(3),
    "clamp_": lambda y: y.clamp_(-0.5, 0.5),
    "zero_": lambda y: y.zero_(),
    "fill_": lambda y: y.fill_(2.0),
    "copy_": lambda y: y.copy_(y.abs()),
    "sigmoid_": lambda y: y.sigmoid_(),
    "neg_": lambda y: y.neg_(),
    "tanh_": lambda y: y.tanh_(),
    "masked_fill_": lambda y: y.masked_fill_(y > 0, -1.0),
    "pow_": lambda y: y.pow_(2),
    "hardswish_": lambda y: F.hardswish(y, inplace=True),
    "leaky_relu_": lambda y: F.leaky_relu(y, 0.1, inplace=True),
    "iadd": lambda y: y.__iadd__(1),
    "floor_": lambda y: y.floor_(),
    "unsqueeze_": lambda y: y.unsqueeze(0).unsqueeze_(1).add_(1),
    "t_": lambda y: y.view(3, 8).t_().add_(1),
    "squeeze_": lambda y: y.unsqueeze(0).squeeze_(0).mul_(2),
    "index_copy_": lambda y: y.index_copy_(0, 2 - 2 * torch.arange(2, device=y.device), y[:2] * 2),
}
for _name, _write in INPLACE.items():
    case(_name, _inplace(_write), f(3, 4, 2), spread=1)
VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "slice": lambda y: y[:, 1:3],
    "step": lambda y: y[:, ::2],
    "select": lambda y: y[:, 0],
    "negative-select": lambda y: y[..., -1],
    "transpose": lambda y: y.transpose(0, 1),
    "permute": lambda y: y.permute(2, 0, 1),
    "nested": lambda y: y[1:, 1:][:, :2].transpose(0, 1),
    "view": lambda y: y.view(12, 2)[3:5],
    "reshape": lambda y: y.reshape(2, 12)[0],
    "narrow": lambda y: y.narrow(1, 1, 2),
    "negative-narrow": lambda y: y.narrow(-1, -1, 1),
    "chunk": lambda y: y.chunk(2, 1)[1],
    "split": lambda y: y.split([1, 3], -2)[1],
    "unbind": lambda y: y.unbind(1)[2],
    "diagonal": lambda y: y.diagonal(),
    "unsqueeze": lambda y: y.unsqueeze(1)[:, 0, 1:],
    "flatten": lambda y: y.flatten()[2:7],
    "squeeze": lambda y: y[:, :1].squeeze(1),
    "negative-transpose": lambda y: y.transpose(-1, 0)[1],
    "expand-same": lambda y: y.expand(3, 4, 2)[0],
    "movedim": lambda y: y.movedim(0, 2)[0],
    "mT": lambda y: y.mT[:, 0],
    "alias": lambda y: y.detach()[0],
    "unflatten": lambda y: y.unflatten(1, (2, 2))[:, :, 0],
    "view_as": lambda y: y.view_as(y * 1)[0],
    "swapaxes": lambda y: y.swapaxes(0, 1)[0],
    "end-past": lambda y: y[:, 2:100],
    "whole": lambda y: y[:],
    "empty": lambda y: y[:, 4:],
    "contiguous": lambda y: y.contiguous()[0],
}
for _name, _view in VIEWS.items():
    case(f"write-{_name}", _set(_view, lambda v: v.mul_(3).add_(1)), f(3, 4, 2), spread=4)
case(
    "write-pixel-shuffle-copies",
    _inplace(lambda y: (lambda r: (r.add_(1), r))(F.pixel_shuffle(y, 2))),
    f(1, 4, 2, 2),
    spread=1,
)
case(
    "write-broadcast_tensors",
    _inplace(lambda y, z: (lambda v: (v[1].add_(1), z + 0))(torch.broadcast_tensors(y, z.clone()))),
    f(3, 4),
    f(3, 4),
)
case("write-twice", _inplace(lambda y: (y[:, 0].add_(1), y[1:].mul_(2), y[:, 0] + 1)), f(3, 4), spread=1)
case(
    "write-assign",
    _inplace(lambda y: (_assign(y, (slice(None), 0), 5.0), _assign(y, 1, y[2] * 2), y + 0)[2]),
    f(3, 4),
    spread=1,
)
case("write-then-read-old-view", _inplace(lambda y: (lambda v: (y.mul_(2), v + 1, v.t()))(y[1:])), f(3, 4), spread=1)
case(
    "write-view-then-read-sibling",
    _inplace(lambda y: (lambda a, c: (a.add_(10), c + 1, a + 1))(y[:2], y[1:])),
    f(3, 4),
    spread=1,
)
case(
    "write-through-two-names",
    _inplace(lambda y: (lambda a: (a.add_(1), a.mul_(2), y.sub_(1), a + 0))(y.view(-1))),
    f(3, 4),
    spread=1,
)
case("write-masked-view", _inplace(lambda y: (y[:, 1:].masked_fill_(y[:, 1:] > 0, 0.0), y.sum())), f(3, 4), spread=1)
case("write-int", _inplace(lambda y: (y[0].add_(1), y.mul_(2))), i(3, 4))
case("write-bool", _inplace(lambda y: (y[0].logical_not_(), y.logical_or_(y.flip(0)))), b(3, 4))
case("write-reshape-copy", _inplace(lambda y: (lambda r: (r.add_(1), r))(y.t().reshape(-1))), f(3, 4), spread=1)
case("write-contiguous-copy", _inplace(lambda y: (lambda r: (r.add_(1), r))(y.t().contiguous())), f(3, 4), spread=1)
case("write-strided-reshape", _inplace(lambda y: (lambda r: (r.add_(1), r))(y[:, ::2].reshape(-1))), f(3, 4), spread=1)
case(
    "write-column-reshape-view",
    _inplace(lambda y: (lambda r: (r.add_(1), r))(y[:, :, 0].reshape(12))),
    f(3, 4, 2),
    spread=1,
)
case("write-flatten-of-slice", _inplace(lambda y: (lambda r: (r.add_(1), r))(y[:, 1:].flatten())), f(3, 4, 2), spread=1)
case("write-add_-broadcast", _inplace(lambda y, z: y.add_(z)), f(3, 4), f(4))
case("write-type-promoting", _inplace(lambda y, z: y.mul_(z)), f(3, 4), i(4), spread=1)
case("write-input", lambda x: (x.add_(1), x * 2), f(3, 4), spread=1)
case("write-input-view", lambda x: (x[0].mul_(2), x.sum())[1], f(3, 4), spread=1)


class CaseModule(nn.Module):
    """A case's function as a module: weights as buffers, the rest as inputs."""

    def __init__(self, case: Case, weights: dict[int, torch.Tensor]) -> None:
        super().__init__()
        self.case = case
        for position, value in weights.items():
            self.register_buffer(f"w{position}", value)

    def forward(self, *inputs: torch.Tensor) -> Any:
        remaining = iter(inputs)
        args = [getattr(self, f"w{n}") if arg.weight else next(remaining) for n, arg in enumerate(self.case.args)]
        result = self.case.function(*args)
        return tuple(result) if isinstance(result, list) else result


# Quantizing. Steps are powers of two, so that no rounding of the input moves a value over the middle between two codes.
Q = torch.ops.quantized_decomposed
_BYTES = (0, 255, torch.uint8)
case("quantize", lambda x: Q.quantize_per_tensor(x, 0.125, -3, -128, 127, torch.int8), f(2, 3, 5))
case("quantize-bytes", lambda x: Q.quantize_per_tensor(x, 2**-7, 120, *_BYTES), f(2, 3, 5))
case("quantize-saturates", lambda x: Q.quantize_per_tensor(x, 2**-10, 0, -127, 127, torch.int8), f(4, 9))
case("quantize-halves", lambda x: Q.quantize_per_tensor(x, 1.0, 1, -8, 7, torch.int8), halves(5, 7))
case("dequantize", lambda x: Q.dequantize_per_tensor(x, 0.1, 7, *_BYTES), i(2, 5, high=256, dtype=torch.uint8))
case(
    "quantize-by-tensors",
    lambda x, s, z: Q.quantize_per_tensor.tensor(x, s.exp2(), z, -128, 127, torch.int8),
    f(2, 5),
    i(1, low=-6, high=0),
    i(1, low=-9, high=9),
)
case(
    "dequantize-by-tensors",
    lambda x, s, z: Q.dequantize_per_tensor.tensor(x, s, z, *_BYTES),
    i(2, 5, high=256, dtype=torch.uint8),
    p(1),
    i(1, high=256),
)
case(
    "quantize-channels",
    lambda x, s, z: Q.quantize_per_channel(x, s.exp2(), z, 1, -128, 127, torch.int8),
    f(2, 3, 4),
    i(3, low=-6, high=0),
    i(3, low=-9, high=9),
)
case(
    "dequantize-channels",
    lambda x, s, z: Q.dequantize_per_channel(x, s, z, 0, -128, 127, torch.int8),
    i(4, 3, 2, 2, low=-128, high=128, dtype=torch.int8),
    p(4),
    i(4, low=-9, high=9),
)
case(
    "dequantize-last-channels",
    lambda x, s: Q.dequantize_per_channel(x, s, None, -1, -128, 127, torch.int8),
    i(3, 4, low=-128, high=128, dtype=torch.int8),
    p(4),
)


@dataclass(frozen=True)
class Variant:
    """Dtypes in which a case is compiled: the model's and the compute dtype."""

    model: torch.dtype
    compute: str

    @property
    def eps(self) -> float:
        return torch.finfo(getattr(torch, self.compute)).eps


VARIANTS = {
    "float32": Variant(torch.float32, "float32"),
    "float16": Variant(torch.float32, "float16"),
    "bfloat16": Variant(torch.bfloat16, "bfloat16"),
}


def arguments(case: Case, variant: Variant) -> list[torch.Tensor]:
    """Random arguments whose floats are exact in the compute dtype."""
    drawn = [arg.draw(arg.shape) for arg in case.args]
    return [x.to(getattr(torch, variant.compute)).float() if x.is_floating_point() else x for x in drawn]


@functools.cache
def extract(case: Case, model_dtype: torch.dtype) -> dict[str, Any]:
    """The case's IR, from torch.export on the meta device."""
    return traced(f"op {case.name} {model_dtype}", lambda: export(case, model_dtype))


def export(case: Case, model_dtype: torch.dtype) -> dict[str, Any]:
    drawn = [arg.draw(arg.shape) for arg in case.args]
    meta = [(x.to(model_dtype) if x.is_floating_point() else x).to("meta") for x in drawn]
    weights = {n: x for n, (x, arg) in enumerate(zip(meta, case.args, strict=True)) if arg.weight}
    inputs = tuple(x for x, arg in zip(meta, case.args, strict=True) if not arg.weight)
    try:
        return torch_ir.extract_ir(CaseModule(case, weights), inputs).to_dict()
    except torch_ir.ExportError as error:
        if "convolution_overrideable" in str(error) and torch.__version__ < "2.13":
            pytest.skip("PyTorch before 2.13 exports no _convolution from the meta device")
        raise


def expected(case: Case, args: list[torch.Tensor]) -> list[np.ndarray]:
    with torch.no_grad():
        result = case.function(*(x.clone() for x in args))
    outputs = list(result) if isinstance(result, (tuple, list)) else [result]
    return [tensor_to_numpy(x) for x in outputs if isinstance(x, torch.Tensor)]


def feeds(
    case: Case, args: list[torch.Tensor], names: list[str]
) -> tuple[dict[str, np.ndarray], dict[str, torch.Tensor]]:
    inputs = [x.numpy() for x, arg in zip(args, case.args, strict=True) if not arg.weight]
    weights = {f"w{n}": x for n, (x, arg) in enumerate(zip(args, case.args, strict=True)) if arg.weight}
    return dict(zip(names, inputs, strict=True)), weights


def assert_near(ours: np.ndarray, reference: np.ndarray, case: Case, variant: Variant, where: str = "") -> None:
    assert ours.shape == reference.shape, where
    if reference.dtype.kind in "biu":
        np.testing.assert_array_equal(ours.astype(reference.dtype), reference)
        return
    got, want = ours.astype(np.float64), reference.astype(np.float64)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    np.testing.assert_array_equal(got[np.isinf(want)], want[np.isinf(want)])
    finite = np.isfinite(want)
    got, want = got[finite], want[finite]
    largest = float(np.abs(want).max(initial=0.0))
    if variant.compute == "float32":
        # Elements are about 1, so a mean that cancels by the luck of the draw is not more exact than they are.
        allowed = 1e-5 * np.maximum(np.abs(want), (0.1 + case.spread) * max(largest, 0.1))
    else:
        step = float(np.finfo(np.float32).tiny) if variant.compute == "bfloat16" else 2.0**-24
        allowed = variant.eps * (case.ulps * np.abs(want) + case.spread * max(largest, 1.0)) + 2e-6 * largest + step
    worst = int(np.argmax(np.abs(got - want) - allowed)) if want.size else 0
    right = bool((np.abs(got - want) <= allowed).all())
    assert right, f"got {got[worst]:.9g}, want {want[worst]:.9g} ± {allowed[worst]:.3g} {where}"


# Ops that the CPU lacks, that export rewrites, whose every node the op table refuses for its many outputs, or that are
# tried where their package is installed (test_affine.py).
WITHOUT_CASE = {
    "aten.lift_fresh",
    "aten.native_layer_norm",
    "torchao.quantize_affine.default",
    "torchao.dequantize_affine.default",
}


def ids(cases: list[Case]) -> Any:
    return pytest.mark.parametrize("case", cases, ids=[case.name for case in cases])


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS.keys())
@pytest.mark.parametrize("case", drawn(CASES, 1 / 6, lambda case: case.name))
def test_op_runs_on_the_device_and_equals_pytorch(
    case: Case, variant: Variant, backends: tuple[Backend, ...], seed: int
) -> None:
    ir = extract(case, variant.model)
    args = arguments(case, variant)
    reference = expected(case, args)
    program = compile(ir, backends[0].target, CompileOptions(compute_dtype=variant.compute))
    inputs, weights = feeds(case, args, read_ir(ir).inputs)
    for backend in backends:
        buffers = load_weights(weights, program, backend)
        results = Executor(program, backend).run(
            {spec.name: inputs[spec.name] for spec in program.input_specs}, buffers
        )
        for spec, want in zip(program.output_specs, reference, strict=True):
            assert_near(results[spec.name].to_numpy(spec), want, case, variant, backend.device)


@pytest.mark.parametrize("case", drawn(CASES, 1 / 6, lambda case: case.name))
def test_op_is_one_device_partition(case: Case, backend: Backend, seed: int) -> None:
    variant = VARIANTS["float16"]
    plan = partition(extract(case, variant.model), is_op_supported, compute_dtype=variant.compute)
    assert not plan.reasons
    assert [part.device for part in plan.partitions] in (["npu"], [])
    args = arguments(case, variant)
    executor = DAGExecutor(plan, backend)
    inputs, weights = feeds(case, args, plan.graph.inputs)
    executor.load_weights(weights)
    for got, want in zip(executor.execute(inputs).values(), expected(case, args), strict=True):
        assert_near(got, want, case, variant)


@ids(REFUSED)
def test_op_that_the_device_refuses_runs_on_the_cpu(case: Case, backend: Backend, seed: int) -> None:
    variant = VARIANTS["float32"]
    plan = partition(extract(case, variant.model), compute_dtype="float32")
    assert plan.reasons
    args = arguments(case, variant)
    executor = DAGExecutor(plan, backend)
    inputs, weights = feeds(case, args, plan.graph.inputs)
    executor.load_weights(weights)
    for got, want in zip(executor.execute(inputs).values(), expected(case, args), strict=True):
        assert_near(got, want, case, variant)


UNTOLD: list[tuple[str, Callable[..., torch.Tensor], tuple[Arg, ...], str]] = [
    (
        "group_norm-weight",
        lambda x, g: F.group_norm(x, 3, g),
        (f(2, 6, 4), w(6)),
        "does not record whether it is the weight or the bias",
    ),
    (
        "group_norm-bias",
        lambda x, c: F.group_norm(x, 3, None, c),
        (f(2, 6, 4), w(6)),
        "does not record whether it is the weight or the bias",
    ),
    (
        "instance_norm-bias",
        lambda x, c: F.instance_norm(x, bias=c),
        (f(2, 3, 4), w(3)),
        "does not record whether it is the weight or the bias",
    ),
    ("clamp-min", lambda x, lo: x.clamp(min=lo), (f(3, 4), f(4)), "does not record"),
    ("clip-max", lambda x, hi: x.clip(max=hi), (f(3, 4), f(4)), "does not record"),
]


@pytest.mark.parametrize("name, function, args, reason", UNTOLD, ids=[name for name, *_ in UNTOLD])
def test_an_omitted_tensor_never_shifts_the_next_one_into_its_place(
    name: str, function: Callable[..., torch.Tensor], args: tuple[Arg, ...], reason: str, seed: int
) -> None:
    """The IR drops omitted tensors without a trace, so that neither the device nor the CPU can tell which is left."""
    untold = Case(name, function, args)
    ir = extract(untold, torch.float32)
    with pytest.raises(ConstraintError, match=reason):
        compile(ir)
    inputs, weights = feeds(untold, arguments(untold, VARIANTS["float32"]), read_ir(ir).inputs)
    with pytest.raises(DeviceError, match=f"cannot run on the CPU either: .*{reason}"):
        execute_cpu_partition(read_ir(ir), inputs, weights)


class LoneTensor(nn.Module):
    """A norm whose checkpoint names its tensors."""

    def __init__(self, norm: nn.Module, forward: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.norm = norm
        self.function = forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.norm, x)


@pytest.mark.parametrize(
    "norm, function, reason",
    [
        (lambda: nn.LayerNorm(5), lambda norm, x: F.layer_norm(x, (5,), None, norm.bias), "not the weight"),
        (lambda: nn.InstanceNorm1d(3, track_running_stats=True), lambda norm, x: norm(x), "not the weight"),
        (lambda: nn.BatchNorm1d(3, track_running_stats=False), lambda norm, x: norm(x), "its weight and bias"),
    ],
    ids=["layer_norm-bias", "instance_norm-statistics", "batch_norm-affine-training"],
)
def test_a_norm_whose_tensors_names_say_otherwise_is_refused(
    norm: Callable[[], nn.Module], function: Callable[[Any, torch.Tensor], torch.Tensor], reason: str
) -> None:
    with torch.device("meta"):
        module, x = LoneTensor(norm(), function).train(), torch.zeros(2, 3, 5)
    graph = read_ir(torch_ir.extract_ir(module, (x,)))
    weights = {
        key: np.ones(graph.tensors[name].shape) for name, recipe in graph.weights.items() for key in recipe.keys()
    }
    assert find_violations(graph)
    with pytest.raises(DeviceError, match=reason):
        execute_cpu_partition(graph, {graph.inputs[0]: np.zeros((2, 3, 5), np.float32)}, weights)


def test_batch_statistics_need_no_affine_parameters() -> None:
    with torch.device("meta"):
        module, x = LoneTensor(nn.BatchNorm1d(3, affine=False), lambda norm, x: norm(x)).train(), torch.zeros(2, 3, 5)
    graph = read_ir(torch_ir.extract_ir(module, (x,)))
    weights = {
        key: np.ones(graph.tensors[name].shape) for name, recipe in graph.weights.items() for key in recipe.keys()
    }
    value = torch.randn(2, 3, 5)
    (got,) = execute_cpu_partition(graph, {graph.inputs[0]: value.numpy()}, weights).values()
    np.testing.assert_allclose(got, F.batch_norm(value, None, None, training=True), atol=1e-5)


def test_a_layer_norm_without_a_bias_runs_on_the_device() -> None:
    norm = LoneTensor(nn.LayerNorm(5, bias=False).to("meta"), lambda norm, x: norm(x))
    assert not find_violations(read_ir(torch_ir.extract_ir(norm, (torch.zeros(2, 5, device="meta"),))))


@pytest.mark.parametrize("kernels", [TORCH_KERNELS, CPU_KERNELS], ids=["torch", "numpy"])
def test_group_norm_of_channels_last_images_is_precise_far_from_zero(kernels: Any) -> None:
    x = 1000 + 10 * torch.rand(2, 16, 30, 20).contiguous(memory_format=torch.channels_last)
    out, params = torch.empty_like(x), {"groups": 2, "eps": 1e-5}
    arrays = [[x], [out]] if kernels is TORCH_KERNELS else [[x.numpy()], [out.numpy()]]
    kernels["groupnorm_kernel"](*arrays, params)
    expected = F.group_norm(x.double().contiguous(), 2)
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow  # exports every case
def test_the_table_covers_every_supported_op() -> None:
    covered = set()
    for case in CASES:
        for node in extract(case, torch.float32)["nodes"]:
            op = find_op(node["op_type"])
            covered.update([op.name] if op is not None else [])
    untried = set(get_supported_ops()) - covered
    if missing := ", ".join(sorted(untried - WITHOUT_CASE)):
        pytest.fail(f"no case tries {missing}: add case(…), or a line to WITHOUT_CASE with a reason", pytrace=False)
    if needless := ", ".join(sorted(WITHOUT_CASE - untried)):
        pytest.fail(f"WITHOUT_CASE lists ops that a case tries, or that are not supported: {needless}", pytrace=False)
