"""Scaled dot-product attention on fixed arrays."""

from __future__ import annotations

import ctypes

import numpy as np

from npu_compiler.graph.dtypes import FLOAT_MAX
from npu_runtime.cpu.arrays import expand, strides_of
from npu_runtime.cpu.native.bindings import DTYPES, NativeLaunch, View, available, launch, operand
from npu_runtime.cpu.native.shapes import has_contiguous_rows

_NO_MASK, _BOOLEAN, _ADDITIVE = range(3)
_MAX_WIDTH = 512


class _AttentionArgs(ctypes.Structure):
    _fields_ = [
        ("q", View),
        ("k", View),
        ("v", View),
        ("mask", View),
        ("out", View),
        ("mask_kind", ctypes.c_int64),
        ("causal", ctypes.c_int64),
        ("scale", ctypes.c_float),
        ("mask_floor", ctypes.c_float),
    ]


def attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    mask: np.ndarray | None,
    causal: bool,
    scale: float,
    out: np.ndarray,
) -> NativeLaunch | None:
    """out[B, H, M, Dv] = softmax(scale * q[B, H, M, D] · k[B, KV, S, D]ᵀ + mask) · v[B, KV, S, Dv].

    H is a multiple of KV. The mask broadcasts to [B, H, M, S]; True in a boolean one means "attend". `causal` lets
    query i attend keys up to i. A row that attends nothing is zero.
    """
    arrays = (q, k, v, out)
    if not available() or any(t.ndim != 4 or t.dtype not in DTYPES or t.size == 0 for t in arrays):
        return None
    if any(not has_contiguous_rows(t) for t in arrays) or not q.dtype == k.dtype == v.dtype:
        return None
    batch, heads, queries, width = q.shape
    kv_heads, keys = k.shape[1], k.shape[2]
    if width > _MAX_WIDTH or heads % kv_heads != 0 or k.shape != (batch, kv_heads, keys, width):
        return None
    if v.shape[:3] != k.shape[:3] or out.shape != (batch, heads, queries, v.shape[3]):
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
        operand(q), operand(k), operand(v), operand(full_mask), operand(out), kind, causal, scale, floor
    )
    return launch("attention", args, q, k, v, mask, out)
