"""PyTorch's type promotion: the common dtype of operands of several dtypes, and the conversion of numbers to it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import reduce

import numpy as np

from npu_compiler.graph.dtypes import HALF_DTYPES, is_float, is_int, numpy_dtype
from npu_compiler.graph.model import IRGraph
from npu_compiler.ops.registry import Args, Scalar

_WIDER_FLOATS = ("float16", "bfloat16", "float32", "float64")
_WIDER_INTS = ("int8", "int16", "int32", "int64")


def common_dtype(args: Args, graph: IRGraph, names: Iterable[str]) -> str:
    """The dtype to which PyTorch converts these arguments of a node, tensors or numbers, before it computes.

    Tensors without dimensions change the dtype of other tensors, and numbers that of tensors, only if they are of a
    higher kind; the kinds are booleans, integers and floats.
    """
    groups: dict[int, list[str]] = {}
    for name in names:
        tensor, value = args.tensor(name), args.attr(name)
        if tensor is not None:
            spec = graph.tensors[tensor]
            groups.setdefault(0 if spec.shape else 1, []).append(spec.dtype)
        elif value is not None:
            groups.setdefault(2, []).append(_dtype_of_number(value))
    return reduce(_under, (reduce(_promoted, groups[rank]) for rank in sorted(groups)))


def _dtype_of_number(value: Scalar) -> str:
    return "bool" if isinstance(value, bool) else "int64" if isinstance(value, int) else "float32"


def _promoted(a: str, b: str) -> str:
    """The dtype to which PyTorch promotes two tensors with dimensions."""
    if a == b or b == "bool":
        return a
    if a == "bool":
        return b
    if is_float(a) or is_float(b):
        if not (is_float(a) and is_float(b)):
            return a if is_float(a) else b
        return "float32" if {a, b} == HALF_DTYPES else max(a, b, key=_WIDER_FLOATS.index)
    if "uint8" in (a, b):
        other = b if a == "uint8" else a
        return "int16" if other == "int8" else other
    return max(a, b, key=_WIDER_INTS.index)


def _under(dtype: str, less_important: str) -> str:
    """The dtype of an operand after promotion with a less important one, which can only raise its kind."""
    if is_float(dtype) or not (dtype == "bool" or is_float(less_important)):
        return dtype
    return _promoted(dtype, less_important)


def holds(dtype: str, other: str) -> bool:
    """Whether an integer or boolean dtype contains all values of another; True if one of the two is a float dtype."""
    if not (is_int(dtype) and is_int(other)):
        return True
    own, theirs = np.iinfo(numpy_dtype(dtype)), np.iinfo(numpy_dtype(other))
    return bool(own.min <= theirs.min and theirs.max <= own.max)


def as_dtype(value: Scalar, dtype: str) -> Scalar:
    """A number as PyTorch converts it to the dtype of an operation: integers wrap around.

    For an operation in 16-bit floats, a number is rounded to those, unless it would become infinite.
    """
    if isinstance(value, str):
        return value
    if is_int(dtype) and math.isfinite(value):
        info = np.iinfo(numpy_dtype(dtype))
        return int((int(value) - int(info.min)) % 2 ** int(info.bits) + int(info.min))
    if dtype in HALF_DTYPES and math.isfinite(value):
        with np.errstate(over="ignore"):
            rounded = float(np.float64(value).astype(numpy_dtype(dtype)))
        return rounded if math.isfinite(rounded) else value
    return value
