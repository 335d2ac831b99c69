"""Element-wise kernels on floats: sums, products, activations, gated activations and casts."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence

import numpy as np

from npu_compiler.program.views import collapse
from npu_runtime.cpu.arrays import address, expand, host_memory, strides_of
from npu_runtime.cpu.native.bindings import NativeLaunch, available, launch
from npu_runtime.cpu.native.extents import ArgumentBlock, Extent, View
from npu_runtime.cpu.native.numbers import ACTIVATIONS, DTYPES, NUMBER_DTYPES

# `Combine` in pointwise.cpp
COMBINATIONS = ("none", "add", "multiply", "divide", "scale_shift", "add_relu", "scale_below_zero", "at_least")


class _PointwiseArgs(ArgumentBlock):
    _fields_ = [
        ("a", View),
        ("b", View),
        ("c", View),
        ("out", View),
        ("activation", ctypes.c_int64),
        ("combine", ctypes.c_int64),
    ]

    def extents(self, kernel: str) -> Iterator[Extent]:
        for name in ("a", "b", "c", "out"):
            yield getattr(self, name).extent(name, self.out.size)


class _ClampedGateArgs(ArgumentBlock):
    _fields_ = [("a", View), ("b", View), ("out", View), ("alpha", ctypes.c_float), ("limit", ctypes.c_float)]

    def extents(self, kernel: str) -> Iterator[Extent]:
        for name in ("a", "b", "out"):
            yield getattr(self, name).extent(name, self.out.size)


def combine(how: str, operands: Sequence[np.ndarray], out: np.ndarray) -> NativeLaunch | None:
    """Prepare a combination of one to three operands with broadcasting; None without a kernel for the operands.

    Args:
        how: One of `COMBINATIONS`: the sum, product or quotient of two operands, `scale_shift` a · b + c, `add_relu`
            relu(a + b), `scale_below_zero` a where that is above 0, else a · b, and `at_least` the greater one.
        operands: Arrays of floats; out may be one of them.
    """
    return _pointwise(operands, "none", how, out)


def activation_mul(activation: str, gate: np.ndarray, up: np.ndarray, out: np.ndarray) -> NativeLaunch | None:
    """Prepare out = activation(gate) * up with broadcasting, for the activations of `linear`; None without a kernel."""
    return _pointwise([gate, up], activation, "multiply", out)


def clamped_silu_mul(
    gate: np.ndarray, up: np.ndarray, alpha: float, limit: float, out: np.ndarray
) -> NativeLaunch | None:
    """Prepare out = g · sigmoid(alpha · g) · (u + 1) with broadcasting; None without a kernel for the operands.

    Here g is the gate, but at most `limit`, and u is `up`, but between -limit and limit.
    """
    described = _described([gate, up, out])
    if described is None:
        return None
    return launch("clamped_silu_mul", _ClampedGateArgs(*described, alpha, limit), gate, up, out)


def activation(kind: str, x: np.ndarray, out: np.ndarray) -> NativeLaunch | None:
    """Prepare out = kind(x), for the activations of `linear`; None without a kernel for the operands."""
    return _pointwise([x], kind, "none", out)


def cast(x: np.ndarray, out: np.ndarray) -> NativeLaunch | None:
    """Prepare out = x in out's dtype, both of floats; None without a kernel for the operands."""
    return _pointwise([x], "none", "none", out)


def widened(x: np.ndarray) -> np.ndarray:
    """A floating-point array as float32, converted by all threads; the array itself if it is float32 already."""
    if x.dtype == np.float32 or x.size == 0:
        return x.astype(np.float32, copy=False)
    source, result = x.reshape(-1), host_memory(x.size, np.dtype(np.float32))
    converted = cast(source, result)
    if converted is None:
        return x.astype(np.float32)
    converted()
    return result.reshape(x.shape)


def _pointwise(operands: Sequence[np.ndarray], activation: str, how: str, out: np.ndarray) -> NativeLaunch | None:
    described = _described([*operands, out]) if activation in ACTIVATIONS else None
    if described is None:
        return None
    absent = [View() for _ in range(3 - len(operands))]
    args = _PointwiseArgs(*described[:-1], *absent, described[-1], ACTIVATIONS[activation], COMBINATIONS.index(how))
    return launch("pointwise", args, *operands, out)


def _described(operands: Sequence[np.ndarray]) -> list[View] | None:
    """Floats, of which the last are the result, as views whose result is packed along its last dimension.

    None if there are no native kernels, or they do not handle these operands.
    """
    out = operands[-1]
    if not available() or out.size == 0 or any(t.dtype not in DTYPES for t in operands):
        return None
    described = in_order_of(out, operands)
    return None if described is None or described[-1].stride[3] != 1 else described


def in_order_of(out: np.ndarray, operands: Sequence[np.ndarray]) -> list[View] | None:
    """Operands, broadcast to out's shape, as views in the order of out's memory.

    None if one does not broadcast to that shape, or if the views need more than four dimensions.
    """
    views = [strides_of(view) for t in operands if (view := expand(t, out.shape)) is not None]
    if len(views) < len(operands):
        return None
    dims = sorted(range(out.ndim), key=strides_of(out).__getitem__, reverse=True)
    size, strides = collapse([out.shape[d] for d in dims], *([view[d] for d in dims] for view in views))
    if len(size) > 4:
        return None
    if not size:
        size, strides = [1], [[1] for _ in strides]
    lead = 4 - len(size)
    return [
        View(address(t), NUMBER_DTYPES[t.dtype], (*[1] * lead, *size), (*[0] * lead, *stride))
        for t, stride in zip(operands, strides, strict=True)
    ]
