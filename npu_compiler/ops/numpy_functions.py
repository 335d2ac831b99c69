"""NumPy versions of the functions that expressions of element-wise ops call: name → function, for floats and ints."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

import npu_compiler.ops  # noqa: F401  (fills the table of functions)
from npu_compiler.program.expression import Value, called
from npu_compiler.program.functions import FUNCTIONS


def _erf(x: Value) -> Value:
    """The error function by a rational approximation from Eigen's library, as exact as float32 allows."""
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
    """Integer division that truncates as in C; 0 if the divisor is 0."""
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
    """Integer power that wraps around; a negative exponent gives 0 for all bases but 1 and -1."""
    of_negative = np.where(a == 1, 1, np.where(a == -1, np.where(b & 1, -1, 1), 0))
    return np.where(b < 0, of_negative, a ** np.maximum(b, 0)).astype(np.int32)


FLOAT_FUNCTIONS: dict[str, Any] = {
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
FLOAT_FUNCTIONS |= {name: partial(called, function, FLOAT_FUNCTIONS) for name, function in FUNCTIONS.items()}
INTEGER_FUNCTIONS: dict[str, Any] = {
    "number": np.int32,
    "floor_div": _floor_div,
    "floor_mod": _floor_mod,
    "int": lambda x: np.asarray(x).astype(np.int32),
    "int_pow": _int_pow,
    "trunc_div": _trunc_div,
    "trunc_mod": _trunc_mod,
}
