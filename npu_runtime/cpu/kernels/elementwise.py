"""Element-wise kernels: the C expressions of the compiler's table, evaluated by NumPy, a piece of the arrays a time."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

import npu_compiler.ops  # noqa: F401  (fills the table of functions)
from npu_compiler.graph.dtypes import as_int32
from npu_compiler.program.elementwise import Elementwise
from npu_compiler.program.elementwise import as_float32 as float32_scalar
from npu_compiler.program.functions import FUNCTIONS
from npu_compiler.program.views import collapse
from npu_runtime.cpu.arrays import strides_of, with_strides
from npu_runtime.cpu.bound_call import Params
from npu_runtime.cpu.kernels.expression import Value, called, parse
from npu_runtime.cpu.kernels.registry import Arrays, as_float32, is_float
from npu_runtime.hardware import Launch
from npu_runtime.pieces import in_pieces

_PIECE = 2**16  # elements: the intermediate results of a piece stay in the cache


def _erf(x: Value) -> Value:
    """A rational approximation, as exact as float32 allows; that of Eigen's library."""
    x = np.clip(x, np.float32(-4), np.float32(4))
    square = x * x
    above, below = (_polynomial(coefficients, square) for coefficients in (_ERF_ABOVE, _ERF_BELOW))
    return x * above / below


_ERF_ABOVE = (
    -2.72614225801306e-10,
    2.77068142495902e-08,
    -2.10102402082508e-06,
    -5.69250639462346e-05,
    -7.34990630326855e-04,
    -2.95459980854025e-03,
    -1.60960333262415e-02,
)
_ERF_BELOW = (
    -1.45660718464996e-05,
    -2.13374055278905e-04,
    -1.68282697438203e-03,
    -7.37332916720468e-03,
    -1.42647390514189e-02,
)


def _polynomial(coefficients: tuple[float, ...], x: Value) -> Value:
    result = np.float32(coefficients[0])
    for coefficient in coefficients[1:]:
        result = result * x + np.float32(coefficient)
    return result


def _trunc_div(a: Value, b: Value) -> Value:
    """Integer division as in C, and 0 where the divisor is 0."""
    divisor = np.where(b == 0, 1, b)
    quotient = np.abs(a.astype(np.int64)) // np.abs(divisor.astype(np.int64))
    return np.where(b == 0, 0, np.where((a < 0) != (b < 0), -quotient, quotient)).astype(np.int32)


def _trunc_mod(a: Value, b: Value) -> Value:
    return a - _trunc_div(a, b) * b


def _floor_div(a: Value, b: Value) -> Value:
    rest = _trunc_mod(a, b)
    return _trunc_div(a, b) - ((b != 0) & (rest != 0) & ((rest < 0) != (b < 0))).astype(np.int32)


def _floor_mod(a: Value, b: Value) -> Value:
    rest = _trunc_mod(a, b)
    return np.where((rest != 0) & ((rest < 0) != (b < 0)), rest + b, rest)


def _floor_mod_of_floats(a: Value, b: Value) -> Value:
    rest = np.fmod(a, b)
    return np.where((rest != 0) & ((rest < 0) != (b < 0)), rest + b, rest)


def _int_pow(a: Value, b: Value) -> Value:
    """Wraps around; a negative power of anything but 1 and -1 is 0."""
    of_negative = np.where(a == 1, 1, np.where(a == -1, np.where(b & 1, -1, 1), 0))
    return np.where(b < 0, of_negative, a ** np.maximum(b, 0)).astype(np.int32)


_FLOAT_FUNCTIONS: dict[str, Any] = {
    name: getattr(np, name)
    for name in (
        "ceil copysign cos cosh exp exp2 expm1 fabs floor fmod isinf isnan log log10 log1p log2 rint sin sinh sqrt tan "
        "tanh trunc"
    ).split()
} | {
    "number": np.float32,
    "acos": np.arccos,
    "acosh": np.arccosh,
    "asin": np.arcsin,
    "asinh": np.arcsinh,
    "atan": np.arctan,
    "atanh": np.arctanh,
    "atan2": np.arctan2,
    "erf": _erf,
    "floor_div": np.floor_divide,
    "floor_mod": _floor_mod_of_floats,
    "int": lambda x: np.asarray(x).astype(np.int32),
    "pow": np.power,
}
_FLOAT_FUNCTIONS |= {name: partial(called, function, _FLOAT_FUNCTIONS) for name, function in FUNCTIONS.items()}
_INTEGER_FUNCTIONS: dict[str, Any] = {
    "number": np.int32,
    "floor_div": _floor_div,
    "floor_mod": _floor_mod,
    "int": lambda x: np.asarray(x).astype(np.int32),
    "int_pow": _int_pow,
    "trunc_div": _trunc_div,
    "trunc_mod": _trunc_mod,
}


def bound_elementwise(op: Elementwise, inputs: Arrays, out: np.ndarray, params: Params) -> Launch:
    """out = op(operands…) on fixed arrays: in float32, rounded once, or in int32 where no operand is a float."""
    scalars = params["scalars"]
    if op.name == "copy":
        return partial(_copy, out, inputs[0] if inputs else scalars[0])
    floats = any(is_float(x.dtype) for x in inputs) or any(isinstance(x, float) for x in scalars)
    if op.integer is None or floats:
        evaluate, functions, scalar, array = parse(op.expr), _FLOAT_FUNCTIONS, _float32, as_float32
    else:
        evaluate, functions, scalar, array = parse(op.integer), _INTEGER_FUNCTIONS, _int32, _as_int32
    names = functions | {name: np.float32(params[name]) for name in op.attrs}
    names |= {name: scalar(x) for name, x in zip("abc", scalars, strict=False) if x is not None}
    absent = [name for name, x in zip("abc", scalars, strict=False) if x is None]

    def compute(target: np.ndarray, *sources: np.ndarray) -> None:
        own = {name: array(x) for name, x in zip(absent, sources, strict=True)}
        with np.errstate(all="ignore"):
            target[...] = evaluate(names | own)

    flat = _one_dimensional([out, *inputs])
    if flat is None or out.size <= _PIECE:
        return partial(compute, out, *inputs)

    def compute_pieces() -> None:
        in_pieces(lambda piece: compute(*(x[piece] for x in flat)), out.size, _PIECE)

    return compute_pieces


def _copy(out: np.ndarray, value: Value) -> None:
    with np.errstate(invalid="ignore"):  # NaN as an integer
        out[...] = value


def _one_dimensional(arrays: Arrays) -> list[np.ndarray] | None:
    """The arrays, all of one shape, as vectors of the same memory; None where one stride does not walk each."""
    size, strides = collapse(arrays[0].shape, *map(strides_of, arrays))
    if len(size) != 1 or 0 in size:
        return None
    return [with_strides(x, size, stride) for x, stride in zip(arrays, strides, strict=True)]


def _float32(value: float) -> Value:
    return np.float32(float32_scalar(value))


def _int32(value: float) -> Value:
    return np.int32(as_int32(value))


def _as_int32(array: np.ndarray) -> np.ndarray:
    return array.astype(np.int32, copy=False)
