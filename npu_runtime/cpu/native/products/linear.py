"""Matrix products with a weight that is packed once."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from npu_runtime.cpu.arrays import BFLOAT16, address
from npu_runtime.cpu.native.bindings import NativeLaunch, available, launch, layout, operand
from npu_runtime.cpu.native.extents import ArgumentBlock, Extent, View, item_size, packed
from npu_runtime.cpu.native.memory import weight_memory
from npu_runtime.cpu.native.numbers import ACTIVATIONS, DTYPES
from npu_runtime.cpu.native.shapes import has_contiguous_rows


class Packed(Protocol):
    """A weight [n, k] in any layout of the native kernels."""

    @property
    def data(self) -> np.ndarray: ...
    @property
    def n(self) -> int: ...
    @property
    def k(self) -> int: ...


@dataclass(frozen=True)
class PackedWeight:
    """A float weight [n, k] in the kernels' layout (described in gemm.h)."""

    data: np.ndarray
    n: int
    k: int
    dtype: np.dtype


class _PackArgs(ArgumentBlock):
    _fields_ = [("weight", View), ("packed", ctypes.c_void_p)]

    def extents(self, kernel: str) -> Iterator[Extent]:
        n, k = self.weight.size[2:]
        yield self.weight.extent("weight")
        yield packed("packed", self.packed, packed_size(n, k, self.weight.dtype))


class LinearArgs(ArgumentBlock):
    """The operands of a product with a packed weight (`LinearArgs` in linear_args.h)."""

    _fields_ = [
        ("x", View),
        ("bias", View),
        ("residual", View),
        ("out", View),
        ("weight", ctypes.c_void_p),
        ("n", ctypes.c_int64),
        ("k", ctypes.c_int64),
        ("activation", ctypes.c_int64),
        ("row_scales", ctypes.c_void_p),  # the kernels' own
        ("residual_first", ctypes.c_int64),
    ]

    def extents(self, kernel: str) -> Iterator[Extent]:
        yield from self.row_extents(kernel)
        yield packed("weight", self.weight, packed_size(self.n, self.k, self.x.dtype))

    def row_extents(self, kernel: str) -> Iterator[Extent]:
        """The extents of all operands except the weight."""
        rows, is_gated = self.x.size[2], kernel.endswith("gated_linear")
        results = (1, 1, rows, self.n // 2 if is_gated else self.n)
        yield self.x.extent("x", (1, 1, rows, self.k))
        yield packed("bias", self.bias.data, 4 * self.n)
        yield self.residual.extent("residual", results)
        yield self.out.extent("out", results)


class Routing(ctypes.Structure):
    """The experts that a product's rows are routed to (`Routing` in experts.h)."""

    _fields_ = [("experts", ctypes.c_void_p), ("count", ctypes.c_int64), ("weight_bytes", ctypes.c_int64)]

    def extents(self, linear: LinearArgs, weight_bytes: int) -> Iterator[Extent]:
        """The extents of the operands of an expert product, in which each expert's weight has `weight_bytes` bytes."""
        rows = linear.out.size[2]
        yield linear.x.extent("x")
        yield packed("bias", linear.bias.data, 4 * self.count * linear.n)
        yield linear.out.extent("out", (1, 1, rows, linear.n))
        yield packed("weight", linear.weight, (self.count - 1) * self.weight_bytes + weight_bytes)
        yield packed("experts", self.experts, 4 * rows)


class _ExpertArgs(ArgumentBlock):
    _fields_ = [("linear", LinearArgs), ("routing", Routing)]

    def extents(self, kernel: str) -> Iterator[Extent]:
        linear = self.linear
        yield from self.routing.extents(linear, packed_size(linear.n, linear.k, linear.x.dtype))


def packed_size(n: int, k: int, dtype: int) -> int:
    """Bytes of a float weight [n, k] in the kernels' layout; `dtype` is the number of its dtype."""
    panel, step = layout().panel, 2 if dtype == DTYPES[BFLOAT16] and layout().has_pairs else 1
    return -(-n // panel) * panel * -(-k // step) * step * item_size(dtype)


def pack_linear_weight(weight: np.ndarray) -> PackedWeight | None:
    """Pack weight[N, K], of any strides, for `linear`; None if there are no native kernels for its dtype."""
    if not available() or weight.ndim != 2 or weight.dtype not in DTYPES or weight.size == 0:
        return None
    n, k = weight.shape
    data = weight_memory(packed_size(n, k, DTYPES[weight.dtype]))
    launch("pack_weight", _PackArgs(operand(weight), address(data)), weight, data)()
    return PackedWeight(data, n, k, weight.dtype)


@dataclass(frozen=True)
class PackedExperts:
    """The weights of several experts, packed one after the other; all have one shape.

    Attributes:
        first: The first expert's weight; its data are those of all experts.
        count: Number of experts.
        bytes_each: Bytes of an expert's weight.
    """

    first: Packed
    count: int
    bytes_each: int


def pack_expert_weights(weight: np.ndarray) -> PackedExperts | None:
    """Pack weight[E, N, K], of any strides, for `expert_linear`; None if there are no native kernels for its dtype."""
    if not available() or weight.ndim != 3 or weight.dtype not in DTYPES or weight.size == 0:
        return None
    count, n, k = weight.shape
    size = packed_size(n, k, DTYPES[weight.dtype])
    data = weight_memory(count * size).reshape(count, size)
    for matrix, memory in zip(weight, data, strict=True):
        launch("pack_weight", _PackArgs(operand(matrix), address(memory)), matrix, memory)()
    return PackedExperts(PackedWeight(data, n, k, weight.dtype), count, size)


def expert_linear(
    x: np.ndarray, weight: PackedExperts, experts: np.ndarray, bias: np.ndarray | None, out: np.ndarray
) -> NativeLaunch | None:
    """Prepare out[M, N] = x[m · R / M] · weight[experts[m]]ᵀ + bias[experts[m]], rounded once; 0 for no such expert.

    x [R, K] has the weight's dtype, out any; experts are int32 [M]. The bias [E, N] is read now, not when the launch
    runs. None if there is no native kernel for the operands.
    """
    if not isinstance(weight.first, PackedWeight) or x.dtype != weight.first.dtype:
        return None
    bias = float_vector(bias)
    block = expert_args(x, weight, experts, bias, out)
    return None if block is None else launch("expert_linear", _ExpertArgs(*block), x, weight, bias, experts, out)


def expert_args(
    x: np.ndarray, weight: PackedExperts, experts: np.ndarray, bias: np.ndarray | None, out: np.ndarray
) -> tuple[LinearArgs, Routing] | None:
    """The arguments of an expert product; None if there is no kernel for the operands.

    The bias is a result of `float_vector`.
    """
    first, rows = weight.first, x.shape[0]
    if any(t.ndim != 2 or t.dtype not in DTYPES or not has_contiguous_rows(t) for t in (x, out)) or rows == 0:
        return None
    if x.shape[1] != first.k or out.shape != (len(experts), first.n) or len(experts) == 0 or len(experts) % rows:
        return None
    if experts.dtype != np.int32 or not experts.flags.c_contiguous or weight.count >= 2**31:
        return None
    if bias is not None and bias.size != weight.count * first.n:
        return None
    views = operand(x), operand(bias), operand(None), operand(out)
    routing = Routing(address(experts), weight.count, weight.bytes_each)
    return LinearArgs(*views, address(first.data), first.n, first.k, ACTIVATIONS["none"]), routing


def linear(
    x: np.ndarray,
    weight: PackedWeight,
    bias: np.ndarray | None,
    residual: np.ndarray | None,
    activation: str,
    out: np.ndarray,
) -> NativeLaunch | None:
    """Prepare out[M, N] = activation(x[M, K] · weightᵀ + bias) + residual, rounded once.

    Rows of x, residual and out may be any distance apart; x has the weight's dtype, the others any. The bias is read
    now, not when the launch runs. None if there is no native kernel for the operands.
    """
    if x.dtype != weight.dtype:
        return None
    bias = float_vector(bias)
    args = linear_args(x, weight, bias, residual, activation, out)
    return None if args is None else launch("linear", args, x, weight, bias, residual, out)


def gated_linear(
    x: np.ndarray, weight: PackedWeight, bias: np.ndarray | None, activation: str, out: np.ndarray
) -> NativeLaunch | None:
    """Prepare out[1, N] = activation(gate) * up, rounded once, where [gate, up] = x[1, K] · weight[2N, K]ᵀ + bias.

    x has the weight's dtype, out any. The bias is read now, not when the launch runs. None if there is no native kernel
    for the operands.
    """
    if x.dtype != weight.dtype:
        return None
    bias = float_vector(bias)
    args = gated_linear_args(x, weight, bias, activation, out)
    return None if args is None else launch("gated_linear", args, x, weight, bias, out)


def float_vector(bias: np.ndarray | None) -> np.ndarray | None:
    """The bias in the form that products read: a contiguous float32 vector; None if there is no bias."""
    return None if bias is None else bias.reshape(-1).astype(np.float32)


def linear_args(
    x: np.ndarray,
    weight: Packed,
    bias: np.ndarray | None,
    residual: np.ndarray | None,
    activation: str,
    out: np.ndarray,
) -> LinearArgs | None:
    """The arguments of a product; None if there is no kernel for the operands.

    The bias is a result of `float_vector`.
    """
    return _product_args(x, weight, bias, residual, activation, out, weight.n)


def gated_linear_args(
    x: np.ndarray, weight: Packed, bias: np.ndarray | None, activation: str, out: np.ndarray
) -> LinearArgs | None:
    """The arguments of a gated product of one row; None if there is no kernel for the operands. See `linear_args`."""
    if x.shape[:1] != (1,) or weight.n % 2:
        return None
    return _product_args(x, weight, bias, None, activation, out, weight.n // 2)


def _product_args(
    x: np.ndarray,
    weight: Packed,
    bias: np.ndarray | None,
    residual: np.ndarray | None,
    activation: str,
    out: np.ndarray,
    columns: int,
) -> LinearArgs | None:
    """The arguments of a product with `columns` columns in its result; None if there is no kernel for the operands."""
    matrices = [t for t in (x, residual, out) if t is not None]
    if any(t.ndim != 2 or t.dtype not in DTYPES or not has_contiguous_rows(t) for t in matrices):
        return None
    rows = x.shape[0]
    if x.shape[1] != weight.k or rows == 0 or out.shape != (rows, columns):
        return None
    if activation not in ACTIVATIONS or (residual is not None and residual.shape != out.shape):
        return None
    if bias is not None and bias.size != weight.n:
        return None
    return LinearArgs(
        operand(x),
        operand(bias),
        operand(residual),
        operand(out),
        address(weight.data),
        weight.n,
        weight.k,
        ACTIVATIONS[activation],
    )
