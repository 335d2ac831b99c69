"""Products and lookups with weights in few bits. A weight is packed once for products; lookups read it as it is."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from npu_compiler.graph.quantization import CODES, OFFSETS, SYMMETRIC_ZERO, QuantizedFormat
from npu_runtime.cpu.arrays import address
from npu_runtime.cpu.native.bindings import DTYPES, NativeLaunch, available, launch, layout
from npu_runtime.cpu.native.linear import LinearArgs, float_vector, gated_linear_args, linear_args
from npu_runtime.cpu.native.memory import weight_memory

_CODES = {name: number for number, name in enumerate(CODES)}
_OFFSETS = {name: number for number, name in enumerate(OFFSETS)}
# Elements that share a scale of x, where groups have more: a multiple of 8 (kMaxBlock in quantized.h).
_MAX_BLOCK = 64
_INDEX_DTYPES = (np.int32, np.int64)


class _Format(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("codes", "scales", "offsets", "group", "groups", "block")]


class _Rows(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("codes", "scales", "offsets")]


class _PackArgs(ctypes.Structure):
    _fields_ = [("rows", _Rows), ("format", _Format), ("n", ctypes.c_int64), ("packed", ctypes.c_void_p)]


class _LinearArgs(ctypes.Structure):
    _fields_ = [("linear", LinearArgs), ("format", _Format)]


class _EmbeddingArgs(ctypes.Structure):
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
    ]


@dataclass(frozen=True)
class PackedQuantized:
    """A weight [n, k] in few bits, in the kernels' layout (described in quantized.h).

    Attributes:
        format: The format as the kernels see it.
    """

    data: np.ndarray
    n: int
    k: int
    format: _Format


def pack_quantized(
    codes: np.ndarray, scales: np.ndarray, offsets: np.ndarray | None, format: QuantizedFormat
) -> PackedQuantized | None:
    """Packs the parts of a weight for products; None where they are not those of the format."""
    if not available() or not _are_parts(codes, scales, offsets, format):
        return None
    n, k = _shape(codes, format)
    packed = _native_format(k, format)
    group_blocks = -(-packed.group // packed.block)
    offset_size = 0 if offsets is None else offsets.itemsize
    group_bytes = scales.itemsize + offset_size + group_blocks * packed.block * format.bits // 8
    panel = layout().panel
    data = weight_memory(-(-n // panel) * panel * packed.groups * group_bytes)
    codes, scales, offsets = (None if part is None else np.ascontiguousarray(part) for part in (codes, scales, offsets))
    launch("pack_quantized", _PackArgs(_rows(codes, scales, offsets), packed, n, address(data)), codes, data)()
    return PackedQuantized(data, n, k, packed)


def quantized_linear(
    x: np.ndarray,
    weight: PackedQuantized,
    bias: np.ndarray | None,
    residual: np.ndarray | None,
    activation: str,
    out: np.ndarray,
) -> NativeLaunch | None:
    """out[M, N] = activation(x[M, K] · weightᵀ + bias) + residual, rounded once.

    Rows of x, residual and out may be any distance apart, and their dtypes any of ours. The bias is read now, not when
    the launch runs.
    """
    bias = float_vector(bias)
    args = linear_args(x, weight, bias, residual, activation, out)
    if args is None:
        return None
    return launch("quantized_linear", _LinearArgs(args, weight.format), x, weight, bias, residual, out)


def quantized_gated_linear(
    x: np.ndarray, weight: PackedQuantized, bias: np.ndarray | None, activation: str, out: np.ndarray
) -> NativeLaunch | None:
    """out[1, N] = activation(gate) * up, rounded once, where [gate, up] = x[1, K] · weight[2N, K]ᵀ + bias.

    The bias is read now, not when the launch runs.
    """
    bias = float_vector(bias)
    args = gated_linear_args(x, weight, bias, activation, out)
    if args is None:
        return None
    return launch("quantized_gated_linear", _LinearArgs(args, weight.format), x, weight, bias, out)


def quantized_embedding(
    ids: np.ndarray,
    codes: np.ndarray,
    scales: np.ndarray,
    offsets: np.ndarray | None,
    format: QuantizedFormat,
    out: np.ndarray,
) -> NativeLaunch | None:
    """out[..., :] = weight[ids[...], :] for int32 or int64 ids and the parts of a weight.

    An id out of range gives zeros.
    """
    parts = [part for part in (codes, scales, offsets) if part is not None]
    arrays = (ids, out, *parts)
    if not available() or not _are_parts(codes, scales, offsets, format):
        return None
    n, k = _shape(codes, format)
    if ids.dtype not in _INDEX_DTYPES or out.dtype not in DTYPES or out.size == 0 or out.shape != (*ids.shape, k):
        return None
    if not all(array.flags.c_contiguous for array in arrays):
        return None
    numbers = _numbers(format)
    args = _EmbeddingArgs(
        _rows(codes, scales, offsets),
        _native_format(k, format),
        address(numbers),
        address(ids),
        address(out),
        DTYPES[out.dtype],
        ids.itemsize,
        ids.size,
        n,
    )
    return launch("quantized_embedding", args, numbers, *arrays)


def _shape(codes: np.ndarray, format: QuantizedFormat) -> tuple[int, int]:
    return codes.shape[0], codes.shape[1] * 8 // format.bits


def _are_parts(codes: np.ndarray, scales: np.ndarray, offsets: np.ndarray | None, format: QuantizedFormat) -> bool:
    """Whether these are the parts of a matrix in that format."""
    if codes.ndim != 2 or format.problem(_shape(codes, format)):
        return False
    given = {"codes": codes, "scales": scales, "offsets": offsets}
    found = {name: (part.shape, part.dtype.name) for name, part in given.items() if part is not None}
    return found == format.parts(_shape(codes, format))


def _native_format(k: int, format: QuantizedFormat) -> _Format:
    group = format.group or k
    # Of the lengths that cost little for their scales, the one that fills up a group with the fewest zeros.
    longest = min(_MAX_BLOCK, -(-group // 8) * 8)
    block = min(range(longest, longest // 2, -8), key=lambda length: -(-group // length) * length)
    scales = DTYPES[np.dtype(format.scales)]
    return _Format(_CODES[format.codes], scales, _OFFSETS[format.offsets], group, k // group, block)


def _rows(codes: np.ndarray, scales: np.ndarray, offsets: np.ndarray | None) -> _Rows:
    return _Rows(address(codes), address(scales), None if offsets is None else address(offsets))


def _numbers(format: QuantizedFormat) -> np.ndarray:
    """What each code stands for, without its scale: float32 [256]."""
    codes = np.arange(256, dtype=np.uint8)
    if format.codes == "float8_e4m3":
        return codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    numbers = (codes.view(np.int8) if format.codes == "int8" else codes).astype(np.float32)
    if format.offsets == "none":
        numbers -= np.float32(SYMMETRIC_ZERO[format.codes])
    return numbers
