"""Dtype names, sizes, and how a logical dtype is stored on a device."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from npu_compiler.errors import IRError

_NUMPY: dict[str, np.dtype] = {
    "float64": np.dtype(np.float64),
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "int64": np.dtype(np.int64),
    "int32": np.dtype(np.int32),
    "int16": np.dtype(np.int16),
    "int8": np.dtype(np.int8),
    "uint8": np.dtype(np.uint8),
    "bool": np.dtype(np.bool_),
    "complex64": np.dtype(np.complex64),
    "complex128": np.dtype(np.complex128),
}

KNOWN_DTYPES = frozenset(_NUMPY)
FLOAT_DTYPES = frozenset({"float64", "float32", "float16", "bfloat16"})
INT_DTYPES = frozenset({"int64", "int32", "int16", "int8", "uint8"})
HALF_DTYPES = frozenset({"float16", "bfloat16"})
STORED_DTYPES = frozenset({"float32", "float16", "bfloat16", "int32", "bool", "uint8"})  # what a device may store
COMPUTE_DTYPES = ("float16", "bfloat16", "float32")

FLOAT_MAX = {"float16": 65504.0, "bfloat16": 3.3895313892515355e38, "float32": 3.4028234663852886e38}
INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1


def is_float(dtype: str) -> bool:
    return dtype in FLOAT_DTYPES


def is_int(dtype: str) -> bool:
    return dtype in INT_DTYPES


def numpy_dtype(name: str) -> np.dtype:
    """The NumPy dtype (ml_dtypes for bfloat16) of a dtype name; `IRError` if there is none."""
    try:
        return _NUMPY[name]
    except KeyError:
        raise IRError(f"unknown dtype '{name}'; known are {', '.join(sorted(KNOWN_DTYPES))}") from None


def dtype_name(dtype: np.dtype) -> str:
    """The inverse of `numpy_dtype`."""
    name = np.dtype(dtype).name
    if name not in KNOWN_DTYPES:
        raise IRError(f"unknown dtype '{name}'; known are {', '.join(sorted(KNOWN_DTYPES))}")
    return name


def itemsize(name: str) -> int:
    """Bytes of one element."""
    return numpy_dtype(name).itemsize


def saturate(value: float, dtype: str) -> float:
    """Clamp a finite value to the finite range of a float dtype; infinities and NaN pass.

    Masks are often built from the float32 minimum; stored in 16 bits it must stay finite, or a row that is
    masked throughout turns from a uniform softmax into NaN.
    """
    limit = FLOAT_MAX.get(dtype)
    if limit is None or value != value or value in (float("inf"), float("-inf")):
        return value
    return min(max(value, -limit), limit)


def as_int32(value: float) -> int:
    """A scalar as an int32 parameter: truncated, clamped to the range; 0 where it is no number."""
    if value != value:
        return 0
    return int(min(max(value, INT32_MIN), INT32_MAX))


def saturating_cast(array: np.ndarray, dtype: str) -> np.ndarray:
    """Cast an array to a named dtype; finite floats beyond the target's range become its largest finite value."""
    target = numpy_dtype(dtype)
    if array.dtype == target:
        return array
    if dtype in FLOAT_MAX and np.dtype(array.dtype).name in ("float32", "float64"):
        limit = FLOAT_MAX[dtype]
        with np.errstate(over="ignore", invalid="ignore"):
            cast = array.astype(target)
            overflow = np.isinf(cast.astype(np.float32)) & np.isfinite(array)
        if overflow.any():
            cast = np.where(overflow, np.sign(array) * limit, array).astype(target)
        return cast
    return array.astype(target)
