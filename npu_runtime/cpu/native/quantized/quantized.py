"""Products and lookups with quantized weights. A weight is packed once for products; lookups read it unpacked."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from npu_compiler.graph.code_formats import CODE_FORMATS
from npu_compiler.graph.quantization import QuantizedArray, QuantizedFormat
from npu_compiler.target_config import KERNEL_CODES
from npu_runtime.cpu.arrays import address
from npu_runtime.cpu.native.bindings import NativeLaunch, available, launch, layout
from npu_runtime.cpu.native.extents import ArgumentBlock, Extent, floats, item_size, packed, prefixed
from npu_runtime.cpu.native.memory import weight_memory
from npu_runtime.cpu.native.numbers import CODES, DTYPES, OFFSET_KINDS, ROUNDING
from npu_runtime.cpu.native.products.linear import (
    LinearArgs,
    PackedExperts,
    Routing,
    expert_args,
    float_vector,
    gated_linear_args,
    linear_args,
)

# Elements that share a scale of x, where groups have more: a multiple of 8 (kMaxBlock in quantized.h).
_MAX_BLOCK = 64
_INDEX_DTYPES = (np.int32, np.int64)


class _Format(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("codes", "scales", "offsets", "group", "groups", "block")]

    @property
    def bits(self) -> int:
        return CODE_FORMATS[KERNEL_CODES[self.codes]].bits

    @property
    def offset_size(self) -> int:
        """Bytes of the offset of a quantization group."""
        sizes = {"none": 0, "minimum": item_size(self.scales)}
        return sizes.get(next(name for name, number in OFFSET_KINDS.items() if number == self.offsets), 1)

    @property
    def packed_row(self) -> int:
        """Bytes of a row in the kernels' layout, its scales and offsets included."""
        codes = -(-self.group // self.block) * self.block * self.bits // 8
        size: int = self.groups * (item_size(self.scales) + self.offset_size + codes)
        return size


class _Rows(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("codes", "scales", "offsets")]

    def extents(self, format: _Format, n: int) -> Iterator[Extent]:
        """The extents of codes, scales and offsets of `n` rows."""
        yield packed("codes", self.codes, n * format.group * format.groups * format.bits // 8)
        yield packed("scales", self.scales, n * format.groups * item_size(format.scales))
        yield packed("offsets", self.offsets, n * format.groups * format.offset_size)


class _PackArgs(ArgumentBlock):
    _fields_ = [("rows", _Rows), ("format", _Format), ("n", ctypes.c_int64), ("packed", ctypes.c_void_p)]

    def extents(self, kernel: str) -> Iterator[Extent]:
        yield from prefixed("rows", self.rows.extents(self.format, self.n))
        yield packed("packed", self.packed, _packed_size(self.format, self.n))


class _LinearArgs(ArgumentBlock):
    _fields_ = [("linear", LinearArgs), ("format", _Format), ("activations", ctypes.c_int64)]

    def extents(self, kernel: str) -> Iterator[Extent]:
        yield from self.linear.row_extents(kernel)
        yield packed("weight", self.linear.weight, _packed_size(self.format, self.linear.n))


class _ExpertArgs(ArgumentBlock):
    _fields_ = [("product", _LinearArgs), ("routing", Routing)]

    def extents(self, kernel: str) -> Iterator[Extent]:
        linear = self.product.linear
        yield from self.routing.extents(linear, _packed_size(self.product.format, linear.n))


class _EmbeddingArgs(ArgumentBlock):
    _fields_ = [
        ("rows", _Rows),
        ("format", _Format),
        ("numbers", ctypes.c_void_p),
        ("ids", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("out_type", ctypes.c_int64),
        ("id_size", ctypes.c_int64),
        ("count", ctypes.c_int64),
        ("limit", ctypes.c_int64),
        ("checked", ctypes.c_int64),
    ]

    def extents(self, kernel: str) -> Iterator[Extent]:
        yield from prefixed("rows", self.rows.extents(self.format, self.limit))
        yield floats("numbers", self.numbers, 256)
        yield packed("ids", self.ids, self.count * self.id_size)
        width = self.format.group * self.format.groups
        yield packed("out", self.out, self.count * width * item_size(self.out_type))


def _packed_size(format: _Format, n: int) -> int:
    """Bytes of a weight of `n` rows in the kernels' layout."""
    return -(-n // layout().panel) * layout().panel * format.packed_row


@dataclass(frozen=True)
class PackedQuantized:
    """A quantized weight [n, k] in the kernels' layout (described in quantized.h).

    Attributes:
        format: The format as a C struct.
    """

    data: np.ndarray
    n: int
    k: int
    format: _Format


def pack_quantized(weight: QuantizedArray) -> PackedQuantized | None:
    """Pack a quantized weight for products; None if there are no native kernels."""
    if not available():
        return None
    n, k = weight.shape
    format = _native_format(weight)
    data = weight_memory(_packed_size(format, n))
    parts = _contiguous(weight)
    launch("pack_quantized", _PackArgs(_rows(parts), format, n, address(data)), parts, data)()
    return PackedQuantized(data, n, k, format)


def quantized_linear(
    x: np.ndarray,
    weight: PackedQuantized,
    bias: np.ndarray | None,
    residual: np.ndarray | None,
    activation: str,
    out: np.ndarray,
    activations: str = "none",
) -> NativeLaunch | None:
    """Prepare out[M, N] = activation(x[M, K] · weightᵀ + bias) + residual with a quantized weight, rounded once.

    Rows of x, residual and out may be any distance apart, and have any float dtype. The bias is read now, not when the
    launch runs. None if there is no native kernel for the operands.

    Args:
        activations: Format to which rows of x are quantized first (`QuantizedFormat.activations`).
    """
    bias = float_vector(bias)
    args = linear_args(x, weight, bias, residual, activation, out)
    if args is None:
        return None
    block = _LinearArgs(args, weight.format, ROUNDING[activations])
    return launch("quantized_linear", block, x, weight, bias, residual, out)


def pack_quantized_experts(weight: QuantizedArray, count: int) -> PackedExperts | None:
    """Pack the quantized weights of `count` experts, stacked in one matrix; None if that is impossible.

    It is without native kernels, or if the rows do not divide among the experts.
    """
    if not available() or weight.shape[0] % count or 0 in weight.shape:
        return None
    n, k = weight.shape[0] // count, weight.shape[1]
    format = _native_format(weight)
    size = _packed_size(format, n)
    data = weight_memory(count * size).reshape(count, size)
    for expert, memory in enumerate(data):
        parts = _contiguous(weight.rows((expert * n, (expert + 1) * n)))
        launch("pack_quantized", _PackArgs(_rows(parts), format, n, address(memory)), parts, memory)()
    return PackedExperts(PackedQuantized(data, n, k, format), count, size)


def quantized_expert_linear(
    x: np.ndarray,
    weight: PackedExperts,
    experts: np.ndarray,
    bias: np.ndarray | None,
    out: np.ndarray,
    activations: str = "none",
) -> NativeLaunch | None:
    """Prepare `expert_linear` with quantized weights; None if there is no native kernel for the operands.

    Dtypes, bias and `activations` are as for `quantized_linear`.
    """
    if not isinstance(weight.first, PackedQuantized):
        return None
    bias = float_vector(bias)
    block = expert_args(x, weight, experts, bias, out)
    if block is None:
        return None
    linear, routing = block
    args = _ExpertArgs(_LinearArgs(linear, weight.first.format, ROUNDING[activations]), routing)
    return launch("quantized_expert_linear", args, x, weight, bias, experts, out)


def quantized_gated_linear(
    x: np.ndarray,
    weight: PackedQuantized,
    bias: np.ndarray | None,
    activation: str,
    out: np.ndarray,
    activations: str = "none",
) -> NativeLaunch | None:
    """Prepare out[1, N] = activation(gate) * up, rounded once, where [gate, up] = x[1, K] · weight[2N, K]ᵀ + bias.

    The bias is read now, not when the launch runs; `activations` is as for `quantized_linear`. None if there is no
    native kernel for the operands.
    """
    bias = float_vector(bias)
    args = gated_linear_args(x, weight, bias, activation, out)
    if args is None:
        return None
    block = _LinearArgs(args, weight.format, ROUNDING[activations])
    return launch("quantized_gated_linear", block, x, weight, bias, out)


def quantized_embedding(
    ids: np.ndarray, weight: QuantizedArray, out: np.ndarray, checked: bool = True
) -> NativeLaunch | None:
    """Prepare out[..., :] = weight[ids[...], :] for int32 or int64 ids; None without a native kernel for them.

    Args:
        checked: Whether the ids have been checked, so that one out of range gives zeros; if not, it is a `DeviceError`.
    """
    n, k = weight.shape
    if not available() or ids.dtype not in _INDEX_DTYPES or out.dtype not in DTYPES or out.size == 0:
        return None
    if out.shape != (*ids.shape, k) or not (ids.flags.c_contiguous and out.flags.c_contiguous):
        return None
    parts, numbers = _contiguous(weight), _numbers(weight.format)
    args = _EmbeddingArgs(
        _rows(parts),
        _native_format(weight),
        address(numbers),
        address(ids),
        address(out),
        DTYPES[out.dtype],
        ids.itemsize,
        ids.size,
        n,
        checked,
    )
    return launch("quantized_embedding", args, parts, numbers, ids, out)


def _contiguous(weight: QuantizedArray) -> QuantizedArray:
    """The weight with contiguous rows in each of its parts."""
    parts = {name: np.ascontiguousarray(weight.part(name)) for name in weight.format.parts(weight.shape)}
    return QuantizedArray(weight.format, weight.shape, **parts)


def _rows(weight: QuantizedArray) -> _Rows:
    offsets = weight.offsets
    return _Rows(address(weight.codes), address(weight.scales), None if offsets is None else address(offsets))


def _native_format(weight: QuantizedArray) -> _Format:
    format, k = weight.format, weight.shape[1]
    group = format.group or k
    # Of the lengths that cost little for their scales, the one that fills up a group with the fewest zeros.
    longest = min(_MAX_BLOCK, -(-group // 8) * 8)
    block = min(range(longest, longest // 2, -8), key=lambda length: -(-group // length) * length)
    scales = DTYPES[weight.scales.dtype]
    return _Format(CODES[format.codes], scales, OFFSET_KINDS[format.offsets], group, k // group, block)


def _numbers(format: QuantizedFormat) -> np.ndarray:
    """The number that each of the 256 codes stands for, without its scale: float32 [256]."""
    kind = format.code_format
    codes = np.arange(len(kind.table) or 256, dtype=np.uint8).view(kind.dtype)
    numbers = np.zeros(256, np.float32)
    numbers[: len(codes)] = kind.numbers(codes)
    if format.offsets == "none":
        numbers -= np.float32(kind.zero)
    return numbers
