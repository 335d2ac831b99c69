"""Element-wise kernels: the C expressions of the compiler's table, evaluated by NumPy piece by piece."""

from __future__ import annotations

from functools import partial

import numpy as np

import npu_compiler.ops  # noqa: F401  (fills the table of functions)
from npu_compiler.graph.dtypes import as_int32
from npu_compiler.ops.numpy_functions import FLOAT_FUNCTIONS, INTEGER_FUNCTIONS
from npu_compiler.program.elementwise import Elementwise
from npu_compiler.program.elementwise import as_float32 as float32_scalar
from npu_compiler.program.expression import Value, parse
from npu_compiler.program.views import collapse
from npu_runtime.cpu.arrays import strides_of, with_strides
from npu_runtime.cpu.bound_call import Params
from npu_runtime.cpu.kernels.registry import Arrays, as_float32, is_float
from npu_runtime.hardware import Launch
from npu_runtime.pieces import in_pieces

_PIECE = 2**16  # elements: the intermediate results of a piece stay in the cache


def bound_elementwise(op: Elementwise, inputs: Arrays, out: np.ndarray, params: Params) -> Launch:
    """A launch of out = op(operands…) on fixed arrays.

    It computes in float32, rounded once, or in int32 if no operand is a float.
    """
    scalars = params["scalars"]
    if op.name == "copy":
        return partial(_copy, out, inputs[0] if inputs else scalars[0])
    floats = any(is_float(x.dtype) for x in inputs) or any(isinstance(x, float) for x in scalars)
    if op.integer is None or floats:
        evaluate, functions, scalar, array = parse(op.expr), FLOAT_FUNCTIONS, _float32, as_float32
    else:
        evaluate, functions, scalar, array = parse(op.integer), INTEGER_FUNCTIONS, _int32, _as_int32
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
    """Arrays of one shape as vectors over the same memory; None if an array cannot be walked with one stride."""
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
