"""Elementwise kernels: sums, products, activations, gated activations and casts."""

from __future__ import annotations

import ctypes

import torch

from npu_compiler.program.views import collapse
from npu_runtime.cpu.native.bindings import DTYPES, NativeLaunch, View, available, launch
from npu_runtime.cpu.native.linear import ACTIVATIONS

_ALONE, _ADD, _MULTIPLY = range(3)


class _PointwiseArgs(ctypes.Structure):
    _fields_ = [
        ("a", View),
        ("b", View),
        ("out", View),
        ("activation", ctypes.c_int64),
        ("combine", ctypes.c_int64),
    ]


def add(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> NativeLaunch | None:
    """out = a + b with broadcasting; out may be an operand."""
    return _pointwise(a, b, "none", _ADD, out)


def mul(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> NativeLaunch | None:
    """out = a * b with broadcasting; out may be an operand."""
    return _pointwise(a, b, "none", _MULTIPLY, out)


def activation_mul(activation: str, gate: torch.Tensor, up: torch.Tensor, out: torch.Tensor) -> NativeLaunch | None:
    """out = activation(gate) * up with broadcasting, for the activations of `linear`."""
    return _pointwise(gate, up, activation, _MULTIPLY, out)


def activation(kind: str, x: torch.Tensor, out: torch.Tensor) -> NativeLaunch | None:
    """out = kind(x), for the activations of `linear`."""
    return _pointwise(x, None, kind, _ALONE, out)


def cast(x: torch.Tensor, out: torch.Tensor) -> NativeLaunch | None:
    """out = x in out's dtype; both are floating point."""
    return _pointwise(x, None, "none", _ALONE, out)


def _pointwise(
    a: torch.Tensor, b: torch.Tensor | None, activation: str, combine: int, out: torch.Tensor
) -> NativeLaunch | None:
    operands = [a, out] if b is None else [a, b, out]
    if not available() or activation not in ACTIVATIONS or out.numel() == 0:
        return None
    if any(t.dtype not in DTYPES for t in operands):
        return None
    try:
        views = [t.expand(out.shape) for t in operands]
    except RuntimeError:
        return None
    # In the order of out's memory, which the kernel writes in vectors of neighbours.
    dims = sorted(range(out.dim()), key=out.stride, reverse=True)
    size, strides = collapse([out.shape[d] for d in dims], *([view.stride(d) for d in dims] for view in views))
    if len(size) > 4:
        return None
    if not size:
        size, strides = [1], [[1] for _ in strides]
    if strides[-1][-1] != 1:
        return None
    described = [_describe(t, size, stride) for t, stride in zip(operands, strides, strict=True)]
    if b is None:
        described.insert(1, View())
    return launch("pointwise", _PointwiseArgs(*described, ACTIVATIONS[activation], combine), *operands)


def _describe(tensor: torch.Tensor, size: list[int], stride: list[int]) -> View:
    missing = 4 - len(size)
    padded_size, padded_stride = (1,) * missing + tuple(size), (0,) * missing + tuple(stride)
    return View(tensor.data_ptr(), DTYPES[tensor.dtype], padded_size, padded_stride)
