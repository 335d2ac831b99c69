"""Dtype names and sizes, and the dtype in which a device stores a tensor."""

from __future__ import annotations

import math
from typing import Annotated, TypeAlias

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
BYTE_DTYPES = frozenset({"int8", "uint8"})
HALF_DTYPES = frozenset({"float16", "bfloat16"})
# What a device may store.
STORED_DTYPES = frozenset({"float32", "float16", "bfloat16", "int32", "bool", "uint8", "int8"})
COMPUTE_DTYPES = ("float16", "bfloat16", "float32")

FLOAT_MAX = {"float16": 65504.0, "bfloat16": 3.3895313892515355e38, "float32": 3.4028234663852886e38}
INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1

SignedInt: TypeAlias = Annotated[int, "signed 64 bits"]
"""An integer of up to 64 bits with sign; files hold no other negative integers than -1 elsewhere."""


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


# Finite values that stand for an infinity, as masks use them: the lowest float32 or bfloat16, or -1e9. Stored in 16
# bits they must stay finite, or a row that is masked throughout turns from a uniform softmax into NaN.
_HUGE, _MASKING = 1e38, -1e9


def saturate(value: float, dtype: str, *, masks: bool = True) -> float:
    """Clamp a value that stands for an infinity to the finite range of a float dtype; return other values unchanged.

    Args:
        masks: Whether values of at most `_MASKING`, as masks use them, stand for minus infinity too.
    """
    limit = FLOAT_MAX.get(dtype)
    if limit is None or not math.isfinite(value) or not (abs(value) >= _HUGE or (masks and value <= _MASKING)):
        return value
    return min(max(value, -limit), limit)


def stands_for_infinity(values: np.ndarray) -> np.ndarray:
    """A boolean mask of the finite values of a float array that are so large that they stand for an infinity."""
    result: np.ndarray = np.isfinite(values) & ((np.abs(values) >= _HUGE) | (values <= _MASKING))
    return result


def misfit(values: np.ndarray, dtype: str) -> float | None:
    """A finite value that a float dtype cannot hold; None if there is none.

    Values that stand for an infinity do not count.
    """
    limit, source = FLOAT_MAX.get(dtype), values.dtype.name
    wider = ("float32", "float64", "bfloat16") if dtype == "float16" else ("float64",)
    if limit is None or values.size == 0 or source not in wider:
        return None
    with np.errstate(over="ignore", invalid="ignore"):
        if -limit <= values.min() and values.max() <= limit:
            return None
        wide = values.astype(np.float64)
        lost = np.isinf(values.astype(numpy_dtype(dtype)).astype(np.float64)) & np.isfinite(wide)
    lost &= ~stands_for_infinity(wide)
    return float(wide[lost][0]) if lost.any() else None


def as_int32(value: float) -> int:
    """A scalar as an int32 parameter: truncated and clamped to the range; 0 for NaN."""
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
