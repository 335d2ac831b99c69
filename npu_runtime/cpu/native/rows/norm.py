"""Normalizations along the last dimension, and of groups of channels."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import numpy as np

from npu_runtime.cpu.native.bindings import NativeLaunch, available, launch, operand
from npu_runtime.cpu.native.extents import ArgumentBlock, Extent, View
from npu_runtime.cpu.native.numbers import DTYPES
from npu_runtime.cpu.native.shapes import as_rows


class _NormArgs(ArgumentBlock):
    _fields_ = [
        ("x", View),
        ("weight", View),
        ("bias", View),
        ("out", View),
        ("subtracts_mean", ctypes.c_int64),
        ("eps", ctypes.c_float),
        ("weight_offset", ctypes.c_float),
    ]

    def extents(self, kernel: str) -> Iterator[Extent]:
        yield self.x.extent("x")
        yield self.out.extent("out", self.x.size)
        for name in ("weight", "bias"):
            yield getattr(self, name).extent(name, (1, 1, 1, self.x.size[3]))


class _GroupNormArgs(ArgumentBlock):
    _fields_ = [
        ("x", View),
        ("weight", View),
        ("bias", View),
        ("statistics", View),
        ("out", View),
        ("planes_of_group", ctypes.c_int64),
        ("planes_of_image", ctypes.c_int64),
        ("eps", ctypes.c_float),
    ]

    def extents(self, kernel: str) -> Iterator[Extent]:
        yield self.x.extent("x")
        yield self.out.extent("out", self.x.size)
        yield self.statistics.extent("statistics", (1, 1, self.x.size[2], 2))
        for name in ("weight", "bias"):
            yield getattr(self, name).extent(name, (1, 1, 1, self.planes_of_image))


class _SoftmaxArgs(ArgumentBlock):
    _fields_ = [("x", View), ("out", View), ("scale", ctypes.c_float)]

    def extents(self, kernel: str) -> Iterator[Extent]:
        yield self.x.extent("x")
        yield self.out.extent("out", self.x.size)


def rms_norm(
    x: np.ndarray, weight: np.ndarray | None, eps: float, weight_offset: float, out: np.ndarray
) -> NativeLaunch | None:
    """Prepare out = x / sqrt(mean(x²) + eps) * (weight + weight_offset) over rows; None without a kernel for it."""
    return _norm(x, weight, None, False, eps, weight_offset, out)


def layer_norm(
    x: np.ndarray, weight: np.ndarray | None, bias: np.ndarray | None, eps: float, out: np.ndarray
) -> NativeLaunch | None:
    """Prepare out = (x - mean) / sqrt(variance + eps) * weight + bias over rows; None without a kernel for it."""
    return _norm(x, weight, bias, True, eps, 0.0, out)


def group_norm(
    x: np.ndarray, weight: np.ndarray | None, bias: np.ndarray | None, groups: int, eps: float, out: np.ndarray
) -> NativeLaunch | None:
    """Prepare the group norm of images [N, C, …], which must be contiguous; None without a kernel for the operands."""
    vectors = [t for t in (weight, bias) if t is not None]
    if not available() or x.size == 0 or any(t.dtype not in DTYPES for t in (x, out, *vectors)):
        return None
    images, channels = x.shape[:2]
    if out.shape != x.shape or channels % groups or any(t.shape != (channels,) for t in vectors):
        return None
    if not all(t.flags.c_contiguous for t in (x, out, *vectors)):
        return None
    statistics = np.empty((images * channels, 2), np.float32)
    planes, out_planes = (t.reshape(images * channels, -1) for t in (x, out))
    operands = (operand(t) for t in (planes, weight, bias, statistics, out_planes))
    args = _GroupNormArgs(*operands, channels // groups, channels, eps)
    return launch("group_norm", args, x, out, *vectors, statistics)


def softmax(x: np.ndarray, scale: float, out: np.ndarray) -> NativeLaunch | None:
    """Prepare the softmax of scale * x over rows; None if there is no native kernel for the operands."""
    if not available() or x.shape != out.shape or x.size == 0 or not {x.dtype, out.dtype} <= DTYPES.keys():
        return None
    x_rows, out_rows = as_rows(x), as_rows(out)
    if x_rows is None or out_rows is None:
        return None
    return launch("softmax", _SoftmaxArgs(operand(x_rows), operand(out_rows), scale), x, out)


def _norm(
    x: np.ndarray,
    weight: np.ndarray | None,
    bias: np.ndarray | None,
    subtracts_mean: bool,
    eps: float,
    weight_offset: float,
    out: np.ndarray,
) -> NativeLaunch | None:
    matrices, vectors = (x, out), (weight, bias)
    if not available() or x.size == 0 or any(t is not None and t.dtype not in DTYPES for t in matrices + vectors):
        return None
    if out.shape != x.shape:
        return None
    if any(t is not None and (t.shape != x.shape[-1:] or not t.flags.c_contiguous) for t in vectors):
        return None
    x_rows, out_rows = as_rows(x), as_rows(out)
    if x_rows is None or out_rows is None:
        return None
    operands = (operand(t) for t in (x_rows, weight, bias, out_rows))
    args = _NormArgs(*operands, subtracts_mean, eps, weight_offset)
    # Without a weight there is nothing to offset: the factor is 1.
    if weight is None:
        args.weight_offset = 0.0
    return launch("norm", args, *matrices, *vectors)
