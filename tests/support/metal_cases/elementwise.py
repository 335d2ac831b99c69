"""Every op of the element-wise table in every form: dense, with scalars, strided, over integers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import cycle, islice
from typing import Any

import torch
from metal_harness import Case, T

from npu_compiler.program.elementwise import ELEMENTWISE, Elementwise

COMPARISONS = frozenset({"eq", "ne", "lt", "le", "gt", "ge"})
TESTS = COMPARISONS | frozenset(
    "isinf isnan isfinite isposinf isneginf signbit logical_not logical_and logical_or logical_xor".split()
)
INTEGERS_ONLY = frozenset({"bitwise_not", "bitwise_and", "bitwise_or", "bitwise_xor"})
DIVISIONS = frozenset({"floor_divide", "trunc_divide", "remainder", "fmod"})

# torch's vectorized gelu makes NaN of an infinity; its plain one, and the kernel, do not.
WITHOUT_INFINITY = frozenset({"gelu_erf", "gelu_tanh", "gelu_mul", "gelu_tanh_mul"})
FINITE_ODDITIES = (float("nan"), 0.0, -0.0, 1.0, -1.0, -3.0, 5.5, -8.0, 1e-7, 100.0)

# Where torch computes 1 + erf(x) and the like, cancellation leaves an error relative to 1.
CANCELLING = {"gelu_erf": 1e-6, "gelu_tanh": 1e-6, "gelu_mul": 1e-6, "gelu_tanh_mul": 1e-6, "lerp": 1e-6}

# Operands for which an op is defined and torch and the kernel have no pole or pole's sign to differ about.
_POLYNOMIALS = [op.name for op in ELEMENTWISE.values() if op.operands == ("x", "n")]
DOMAINS: dict[str, tuple[tuple[float, float] | Sequence[float], ...]] = {
    "polygamma": ((0.1, 9.0),),
    "zeta": ((1.5, 6.0), (0.1, 20.0)),
    "airy_ai": ((-6.0, 6.0),),
    **dict.fromkeys(_POLYNOMIALS, ((-1.2, 1.2), (0, 1, 2, 3, 7, -1, 12))),
}
# Ops with roots, about which their error is relative to 1.
ROOTED = dict.fromkeys(
    "lgamma digamma ndtri bessel_j0 bessel_j1 bessel_y0 bessel_y1 spherical_bessel_j0 airy_ai logit logaddexp "
    "logaddexp2 ndtr log_ndtr".split(),
    1e-5,
) | dict.fromkeys(_POLYNOMIALS, 1e-4)

# The operands that a scalar may stand for, where torch does not take one for each.
SCALAR_PLACES: dict[str, tuple[int, ...]] = {
    "prelu": (1,),
    "addcmul": (),
    "addcdiv": (),
    "clamp_min": (1,),
    "clamp_max": (1,),
    "glu": (0,),
    "silu_mul": (1,),
    "clamped_silu_mul": (1,),
    "gelu_mul": (1,),
    "gelu_tanh_mul": (1,),
    "scale_shift": (1, 2),
    "rsub": (1,),
    "where": (1, 2),
    **dict.fromkeys(COMPARISONS, (1,)),
}

ATTRIBUTES: dict[str, dict[str, Any]] = {
    "add": {"alpha": -2},
    "sub": {"alpha": 3},
    "rsub": {"alpha": 2},
    "addcmul": {"value": -3},
    "addcdiv": {"value": 2},
    "softplus": {"beta": 2.0, "threshold": 1.5},
    "leaky_relu": {"negative_slope": 0.25},
    "celu": {"alpha": 0.75},
    "elu": {"alpha": 0.75, "scale": 1.25, "input_scale": 0.5},
    "hardtanh": {"min_val": -0.5, "max_val": 0.75},
    "hardshrink": {"lambd": 0.75},
    "softshrink": {"lambd": 0.75},
    "threshold": {"threshold": 1, "value": -3},
    "logit": {"eps": 0.125},
    "clamped_silu_mul": {"alpha": 1.25, "limit": 2.0},
    "nan_to_num": {"nan": 2.5, "posinf": 100.0, "neginf": -50.0},
    "polygamma": {"order": 2.0, "factor": -2.0},
}

# Four elements a thread, 256 threads a threadgroup: sizes about the edges of both.
SIZES = (1, 2, 3, 4, 5, 7, 13, 31, 66, 127, 257, 1027)
OFFSETS = (0, 4, 3)

# (shape, strides of a, b, c and out, offset): strides of the operands that cannot be walked as one dimension.
GEOMETRIES: tuple[tuple[tuple[int, ...], tuple[tuple[int, ...], ...], int], ...] = (
    ((5, 7), ((1, 5), (0, 1), (1, 0), (7, 1)), 0),
    ((2, 3, 33), ((210, 70, 2), (0, 33, 1), (33, 0, 1), (120, 40, 1)), 3),
    ((9, 40), ((1, 9), (0, 0), (41, 1), (80, 2)), 1),
    ((3, 300), ((300, 1), (1, 3), (0, 1), (301, 1)), 4),
    ((70, 3), ((1, 70), (3, 1), (1, 0), (4, 1)), 2),
    (
        (2, 3, 2, 2, 3, 2, 2, 3),
        (
            (1, 2, 6, 12, 24, 72, 144, 288),
            (0, 3, 0, 2, 0, 1, 0, 6),
            (432, 144, 72, 36, 12, 6, 3, 1),
            (432, 144, 72, 36, 12, 6, 3, 1),
        ),
        0,
    ),
    ((1, 2, 1, 3, 1), ((9, 1, 9, 2, 9), (1, 0, 1, 1, 1), (3, 3, 3, 1, 1), (8, 4, 1, 1, 1)), 5),
)
EVERYWHERE = frozenset({"add", "copy", "where"})  # ops that are tried with every geometry


def _tolerance(op: Elementwise) -> float:
    return CANCELLING.get(op.name, ROOTED.get(op.name, 0.0))


def _cycled(values: Sequence[float], count: int) -> list[float]:
    return list(islice(cycle(values), count))


def _result(op: str, integer: bool = False) -> str:
    return "bool" if op in TESTS else "int32" if integer else "compute"


def _floats(op: Elementwise, index: int, shape: tuple[int, ...], **geometry: Any) -> T:
    """A float operand with the values that tell most about an op."""
    if op.name == "where" and index == 0:
        return T(shape, "bool", **geometry)
    if op.name in WITHOUT_INFINITY and len(shape) == 1:
        return T(shape, values=_cycled(FINITE_ODDITIES[index:], shape[0]), **geometry)
    if op.name in DOMAINS:
        domain = DOMAINS[op.name][index]
        values = domain if len(domain) == 2 else lambda dtype: _cycled(domain, shape[-1])
        return T(shape, values=values, **geometry)
    if op.name == "lerp":
        return T(shape, **geometry)
    return T(shape, values="normal" if op.name in WITHOUT_INFINITY else "special", **geometry)


def _integers(op: str, index: int, shape: tuple[int, ...], **geometry: Any) -> T:
    """An int operand: large ones where floats would round them, small ones where the result would overflow."""
    if op == "where" and index == 0:
        return T(shape, "bool", **geometry)
    if op in ("copysign", "nan_to_num"):
        return T(shape, "int32", values=(-99, 99), **geometry)
    if op == "pow":
        return T(shape, "int32", values=((-3, 4), (-3, 8))[index], **geometry)
    if op in DIVISIONS and index == 1:
        return T(shape, "int32", values=(1, 9), **geometry)
    if op in ("mul", "square", "addcmul"):
        return T(shape, "int32", values=(-20_000, 20_000) if op == "square" else (-900, 900), **geometry)
    if op in COMPARISONS or op.startswith("logical"):
        return T(shape, "int32", values=(-1, 2), **geometry)
    return T(shape, "int32", values=(-(2**26), 2**26), **geometry)


def _params(op: Elementwise, scalars: Sequence[float | int | None], attributes: bool) -> dict[str, Any]:
    return {"scalars": list(scalars), **(ATTRIBUTES.get(op.name, {}) if attributes else {})}


def _dense(op: Elementwise, number: int) -> list[Case]:
    count = len(op.operands)
    cases = []
    for turn in range(0 if op.name in INTEGERS_ONLY else 2):
        shape = (SIZES[(number + 6 * turn) % len(SIZES)],)
        offset = OFFSETS[(number + turn) % len(OFFSETS)]
        inputs = [_floats(op, index, shape, offset=offset) for index in range(count)]
        params = _params(op, [None] * count, attributes=turn == 0)
        out = T(shape, _result(op.name), offset=offset)
        cases.append(Case(f"{op.name}_kernel", f"dense{turn}", inputs, [out], params, _tolerance(op)))
    if op.integer is not None:
        shape = (SIZES[(number + 3) % len(SIZES)],)
        inputs = [_integers(op.name, index, shape) for index in range(count)]
        params = _params(op, [None] * count, attributes=True)
        out = T(shape, _result(op.name, integer=True))
        cases.append(Case(f"{op.name}_kernel", "dense-int", inputs, [out], params))
    return cases


def _strided(op: Elementwise, number: int) -> list[Case]:
    count = len(GEOMETRIES)
    places = range(count) if op.name in EVERYWHERE else (number % count, (number + 3) % count)
    return [case for place in places for case in _strided_as(op, place, *GEOMETRIES[place])]


def _strided_as(
    op: Elementwise, place: int, shape: tuple[int, ...], strides: tuple[tuple[int, ...], ...], offset: int
) -> list[Case]:
    count = len(op.operands)
    params = _params(op, [None] * count, attributes=True)
    name = f"{op.name}_broadcast_kernel"
    cases = []
    if op.name not in INTEGERS_ONLY:
        inputs = [_floats(op, i, shape, strides=strides[i], offset=offset) for i in range(count)]
        out = T(shape, _result(op.name), strides=strides[3], offset=offset)
        cases.append(Case(name, f"strided{place}", inputs, [out], params, _tolerance(op)))
    if op.integer is not None:
        inputs = [_integers(op.name, i, shape, strides=strides[i], offset=offset) for i in range(count)]
        out = T(shape, _result(op.name, integer=True), strides=strides[3], offset=offset)
        cases.append(Case(name, f"strided{place}-int", inputs, [out], params))
    return cases


def _scalars(op: Elementwise, number: int) -> list[Case]:
    """A scalar in the place of each operand in turn."""
    shape = (SIZES[(number + 5) % len(SIZES)],)
    wide, strides, _ = GEOMETRIES[0]
    count = len(op.operands)
    cases = []
    for place in SCALAR_PLACES.get(op.name, range(count) if count > 1 else ()):
        others = [index for index in range(count) if index != place]
        if op.name not in INTEGERS_ONLY:
            scalars: list[float | int | None] = [None] * count
            scalars[place] = -2.5
            params = _params(op, scalars, attributes=True)
            atol = _tolerance(op)
            inputs = [_floats(op, index, shape) for index in others]
            out = T(shape, _result(op.name))
            cases.append(Case(f"{op.name}_scalar_kernel", f"scalar{place}", inputs, [out], params, atol))
            inputs = [_floats(op, index, wide, strides=strides[index], offset=2) for index in others]
            out = T(wide, _result(op.name))
            cases.append(Case(f"{op.name}_scalar_broadcast_kernel", f"scalar{place}", inputs, [out], params, atol))
        if op.integer is not None:
            scalars = [None] * count
            scalars[place] = 3
            params = _params(op, scalars, attributes=True)
            inputs = [_integers(op.name, index, shape) for index in others]
            out = T(shape, _result(op.name, integer=True))
            cases.append(Case(f"{op.name}_scalar_kernel", f"scalar{place}-int", inputs, [out], params))
    return cases


def _case(op: str, form: str, name: str, inputs: list[T], out: T, scalars: list[Any] | None = None) -> Case:
    chosen = scalars if scalars is not None else [None] * len(inputs)
    return Case(f"{op}{form}_kernel", name, inputs, [out], _params(ELEMENTWISE[op], chosen, False), atol=0.0)


def _quotients(inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], params: Mapping[str, Any]) -> None:
    """0 for a divisor of 0."""
    outputs[0].zero_()


def _remainders(inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], params: Mapping[str, Any]) -> None:
    """The dividend for a divisor of 0."""
    outputs[0].copy_(inputs[0])


def _by_zero(op: str, reference: Callable[..., None]) -> Case:
    """torch raises here; a kernel must not fault."""
    inputs = [T((11,), "int32", values=(-9, 9)), T((11,), "int32", values=0)]
    return replace(_case(op, "", "by-zero", inputs, T((11,), "int32")), reference=reference)


_MIXED = [
    _by_zero("trunc_divide", _quotients),
    _by_zero("floor_divide", _quotients),
    _by_zero("fmod", _remainders),
    _by_zero("remainder", _remainders),
    _case("add", "", "float32-plus-compute", [T((37,), "float32"), T((37,))], T((37,), "float32")),
    _case("mul", "", "float32-to-compute", [T((64,), "float32"), T((64,))], T((64,))),
    _case("mul", "", "unaligned-float32", [T((41,), "float32", offset=2), T((41,), offset=2)], T((41,), offset=2)),
    _case(
        "add",
        "_broadcast",
        "int-plus-float32",
        [T((4, 5), "int32", strides=(1, 4)), T((4, 5), "float32")],
        T((4, 5), "float32"),
    ),
    _case("true_divide", "", "ints", [T((19,), "int32"), T((19,), "int32", values=(1, 9))], T((19,))),
    _case("sqrt", "", "int", [T((21,), "int32", values=(0, 1000))], T((21,), "float32")),
    _case("lt", "_scalar", "int-under-float", [T((30,), "int32")], T((30,), "bool"), [None, 0.5]),
    _case("add", "_scalar", "int-and-float", [T((30,), "int32")], T((30,), "float32"), [None, 0.5]),
    _case("mul", "_scalar", "bool-times-float", [T((30,), "bool")], T((30,)), [None, 2.5]),
    _case("add", "", "bools", [T((30,), "bool"), T((30,), "bool")], T((30,), "bool")),
    _case("eq", "_scalar", "float-beyond-float32", [T((30,), values="special")], T((30,), "bool"), [None, 1e300]),
    _case("copy", "", "int-to-compute", [T((45,), "int32", values=(-3000, 3000))], T((45,))),
    _case("copy", "", "compute-to-int", [T((45,), values=(-300, 300))], T((45,), "int32")),
    _case("copy", "", "compute-to-bool", [T((45,), values="special")], T((45,), "bool")),
    _case("copy", "", "int-to-bool", [T((45,), "int32", values=(-2, 3))], T((45,), "bool")),
    _case("copy", "", "bool-to-float32", [T((45,), "bool")], T((45,), "float32")),
    _case("copy", "", "float32", [T((45,), "float32", values="special")], T((45,), "float32")),
    _case("copy", "_scalar", "float", [], T((9,)), [-1.5]),
    _case("copy", "_scalar", "int", [], T((9,), "int32"), [2**30 + 1]),
    _case(
        "copy", "_broadcast", "large-ints", [T((6, 7), "int32", (1, 6), values=(-(2**31), 2**31))], T((6, 7), "int32")
    ),
    _case("where", "_scalar", "infinity", [T((33,), "bool"), T((33,))], T((33,)), [None, float("-inf"), None]),
    _case(
        "pow",
        "",
        "whole-exponents",
        [T((50,), values="special"), T((50,), values=_cycled((2, 3, 0, -1, -2), 50))],
        T((50,), "float32"),
    ),
    _case(
        "floor_divide",
        "",
        "by-infinity",
        [
            T((32,), values=_cycled((1.5, -1.5, 0.0, -0.0), 32)),
            T((32,), values=_cycled((float("inf"), float("-inf"), 0.0), 32)),
        ],
        T((32,), "float32"),
    ),
    _case(
        "remainder",
        "",
        "of-large",
        [T((32,), "float32", values=(-1e6, 1e6)), T((32,), "float32", values=(0.1, 3))],
        T((32,), "float32"),
    ),
]

CASES = [
    *(
        case
        for number, op in enumerate(ELEMENTWISE.values())
        for make in (_dense, _strided, _scalars)
        for case in make(op, number)
    ),
    *_MIXED,
]
