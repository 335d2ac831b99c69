"""Attention on fixed arrays, also over a paged KV cache, and updates of KV caches whose rows are quantized."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from npu_compiler.graph.dtypes import FLOAT_MAX
from npu_runtime.cpu.arrays import address, expand, strides_of
from npu_runtime.cpu.native.bindings import NativeLaunch, available, launch, operand
from npu_runtime.cpu.native.extents import ArgumentBlock, Extent, View, packed, strided
from npu_runtime.cpu.native.numbers import DTYPES, ROUNDING
from npu_runtime.cpu.native.shapes import has_contiguous_rows

_NO_MASK, _BOOLEAN, _ADDITIVE = range(3)
_MAX_WIDTH = 512


class _AttentionArgs(ArgumentBlock):
    _fields_ = [
        ("q", View),
        ("k", View),
        ("v", View),
        ("mask", View),
        ("out", View),
        ("mask_kind", ctypes.c_int64),
        ("causal", ctypes.c_int64),
        ("scale", ctypes.c_float),
        ("soft_cap", ctypes.c_float),
        ("mask_floor", ctypes.c_float),
        ("format", ctypes.c_int64),
        ("k_scales", View),
        ("v_scales", View),
        ("sinks", View),
    ]

    def extents(self, kernel: str) -> Iterator[Extent]:
        (batch, heads, queries, width), (_, kv_heads, keys, _) = self.q.size, self.k.size
        value_width = self.v.size[3]
        yield self.q.extent("q")
        yield self.k.extent("k", (batch, kv_heads, keys, width))
        yield self.v.extent("v", (batch, kv_heads, keys, value_width))
        yield self.mask.extent("mask", (batch, heads, queries, keys))
        yield self.out.extent("out", (batch, heads, queries, value_width))
        yield self.k_scales.extent("k_scales", (1, batch, kv_heads, keys))
        yield self.v_scales.extent("v_scales", (1, batch, kv_heads, keys))
        yield self.sinks.extent("sinks", (1, 1, 1, heads))


@dataclass(frozen=True)
class QuantizedCache:
    """The format and scales of keys and values that `quantize_rows` has quantized to codes.

    Attributes:
        format: One of `ROW_FORMATS`.
        k_scales, v_scales: float32 [B, KV, S].
    """

    format: str
    k_scales: np.ndarray
    v_scales: np.ndarray

    def fits(self, k: np.ndarray, v: np.ndarray) -> bool:
        """Whether `k` and `v` are uint8 codes [B, KV, S, …] that the kernel can read with these scales.

        The scales must be float32 [B, KV, S] with contiguous values along S.
        """
        return all(
            codes.dtype == np.uint8 and scales.dtype == np.float32 and scales.shape == codes.shape[:3]
            for codes, scales in ((k, self.k_scales), (v, self.v_scales))
        ) and all(scales.shape[-1] == 1 or strides_of(scales)[-1] == 1 for scales in (self.k_scales, self.v_scales))


def attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    mask: np.ndarray | None,
    causal: bool,
    scale: float,
    out: np.ndarray,
    quantized: QuantizedCache | None = None,
    soft_cap: float = 0.0,
    sinks: np.ndarray | None = None,
) -> NativeLaunch | None:
    """Prepare out[B, H, M, Dv] = softmax(scale * q[B, H, M, D] · k[B, KV, S, D]ᵀ + mask) · v[B, KV, S, Dv].

    H is a multiple of KV. The mask broadcasts to [B, H, M, S]; True in a boolean one means "attend". `causal` lets
    query i attend keys up to i. A row that attends to nothing is zero. None if there is no native kernel for the
    operands.

    Args:
        quantized: Format and scales of k and v if they are codes; None if they are floats.
        soft_cap: Bound c of the scaled scores s, which become c · tanh(s / c) before the mask. 0: none.
        sinks: One more score [H] of each head's softmax, which belongs to no key. None: there are none.
    """
    if not available() or any(t.ndim != 4 or t.size == 0 or not has_contiguous_rows(t) for t in (q, k, v, out)):
        return None
    if q.dtype not in DTYPES or out.dtype not in DTYPES:
        return None
    if not (q.dtype == k.dtype == v.dtype if quantized is None else quantized.fits(k, v)):
        return None
    batch, heads, queries, width = q.shape
    kv_heads, keys = k.shape[1], k.shape[2]
    if width > _MAX_WIDTH or heads % kv_heads != 0 or k.shape != (batch, kv_heads, keys, width):
        return None
    if v.shape[:3] != k.shape[:3] or out.shape != (batch, heads, queries, v.shape[3]):
        return None
    if sinks is not None and (sinks.shape != (heads,) or sinks.dtype not in DTYPES):
        return None
    kind, floor = _NO_MASK, 0.0
    full_mask = mask
    if mask is not None:
        if mask.dtype != bool and mask.dtype not in DTYPES:
            return None
        full_mask = expand(mask, (batch, heads, queries, keys))
        if full_mask is None or (keys > 1 and strides_of(full_mask)[-1] not in (0, 1)):
            return None
        kind = _BOOLEAN if mask.dtype == bool else _ADDITIVE
        # A float32 mask often holds the lowest bfloat16; adding a score to either changes neither.
        floor = -FLOAT_MAX["float16" if mask.dtype == np.float16 else "bfloat16"]
    args = _AttentionArgs(
        operand(q),
        operand(k),
        operand(v),
        operand(full_mask),
        operand(out),
        kind,
        causal,
        scale,
        soft_cap,
        floor,
        ROUNDING["none" if quantized is None else quantized.format],
        operand(None if quantized is None else quantized.k_scales),
        operand(None if quantized is None else quantized.v_scales),
        operand(sinks),
    )
    return launch("attention", args, q, k, v, mask, out, quantized, sinks)


class _PagedArgs(ArgumentBlock):
    _fields_ = [
        ("q", View),
        ("k", View),
        ("v", View),
        ("out", View),
        ("tables", ctypes.c_void_p),
        ("sequences", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("sequence_count", ctypes.c_int64),
        ("table_size", ctypes.c_int64),
        ("table_stride", ctypes.c_int64),
        ("block_size", ctypes.c_int64),
        ("window", ctypes.c_int64),
        ("scale", ctypes.c_float),
        ("soft_cap", ctypes.c_float),
        ("sinks", View),
    ]

    def extents(self, kernel: str) -> Iterator[Extent]:
        (_, tokens, heads, width), (_, rows, kv_heads, _), value_width = self.q.size, self.k.size, self.v.size[3]
        # A number of a block that there is not counts as the nearest one that there is: there must be one.
        rows = max(rows // self.block_size, 1) * self.block_size
        yield self.q.extent("q")
        yield self.k.extent("k", (1, rows, kv_heads, width))
        yield self.v.extent("v", (1, rows, kv_heads, value_width))
        yield self.out.extent("out", (1, tokens, heads, value_width))
        yield self.sinks.extent("sinks", (1, 1, 1, heads))
        yield strided("tables", self.tables, 4, (self.sequence_count, self.table_size), (self.table_stride, 1))
        yield packed("sequences", self.sequences, 4 * tokens)
        yield packed("positions", self.positions, 4 * tokens)


def paged_attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    tables: np.ndarray,
    sequences: np.ndarray,
    positions: np.ndarray,
    block_size: int,
    scale: float,
    out: np.ndarray,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: np.ndarray | None = None,
) -> NativeLaunch | None:
    """Prepare attention of q [N, H, D] over pools k [rows, KV, D] and v [rows, KV, Dv] into out [N, H, Dv].

    Tables [S, T], sequences and positions [N] are int32, sinks [H]; see
    `npu_compiler.ops.transformer.lower_paged_attention`, also for the numbers. None if there is no native kernel for
    the operands; the pools must be contiguous.
    """
    floats, integers = (q, k, v, out), (tables, sequences, positions)
    if not available() or any(t.ndim != 3 or t.size == 0 or not has_contiguous_rows(t) for t in floats):
        return None
    if not q.dtype == k.dtype == v.dtype or q.dtype not in DTYPES or out.dtype not in DTYPES:
        return None
    if not (k.flags.c_contiguous and v.flags.c_contiguous) or q.shape[2] > _MAX_WIDTH:
        return None
    if any(t.dtype != np.int32 or t.size == 0 or strides_of(t)[-1] != 1 for t in integers):
        return None
    (tokens, heads, width), (rows, kv_heads, value_width) = q.shape, v.shape
    if k.shape != (rows, kv_heads, width) or out.shape != (tokens, heads, value_width) or heads % kv_heads:
        return None
    if tables.ndim != 2 or not sequences.shape == positions.shape == (tokens,) or not 0 < block_size <= rows:
        return None
    if sinks is not None and (sinks.shape != (heads,) or sinks.dtype not in DTYPES):
        return None
    places = map(address, integers)
    sizes = (*tables.shape, strides_of(tables)[0], block_size, window)
    args = _PagedArgs(*map(operand, floats), *places, *sizes, scale, soft_cap, operand(sinks))
    return launch("paged_attention", args, *floats, *integers, sinks)


class _IndexCopyArgs(ArgumentBlock):
    _fields_ = [
        ("source", View),
        ("codes", View),
        ("scales", View),
        ("index", ctypes.c_void_p),
        ("index_size", ctypes.c_int64),
        ("format", ctypes.c_int64),
    ]

    def extents(self, kernel: str) -> Iterator[Extent]:
        (batch, heads, count, width), rows = self.source.size, self.codes.size[2]
        yield self.source.extent("source")
        yield self.codes.extent("codes", (batch, heads, rows, width))
        yield self.scales.extent("scales", (1, batch, heads, rows))
        yield packed("index", self.index, count * self.index_size)


def quantized_index_copy(
    codes: np.ndarray, scales: np.ndarray, index: np.ndarray, source: np.ndarray, format: str
) -> NativeLaunch | None:
    """Prepare codes[:, :, index], scales[:, :, index] = quantize_rows(source, format), without indices out of range.

    Codes are uint8 [B, H, S, D], scales float32 [B, H, S], the source [B, H, N, D]. None if there is no native kernel
    for the operands; rows and the last dimension of the scales must be contiguous.
    """
    if not available() or source.ndim != 4 or source.dtype not in DTYPES or source.size == 0:
        return None
    if codes.dtype != np.uint8 or scales.dtype != np.float32 or codes.ndim != 4 or scales.shape != codes.shape[:3]:
        return None
    if (*codes.shape[:2], codes.shape[3]) != (*source.shape[:2], source.shape[3]) or index.shape != source.shape[2:3]:
        return None
    if index.dtype not in (np.int32, np.int64) or not index.flags.c_contiguous or strides_of(scales)[-1] != 1:
        return None
    if not (has_contiguous_rows(codes) and has_contiguous_rows(source)):
        return None
    args = _IndexCopyArgs(
        operand(source), operand(codes), operand(scales), address(index), index.itemsize, ROUNDING[format]
    )
    return launch("quantized_index_copy", args, source, codes, scales, index)
