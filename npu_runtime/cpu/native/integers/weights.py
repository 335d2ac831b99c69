"""8-bit weights in the layouts that the kernels read."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from npu_runtime.cpu.arrays import host_memory
from npu_runtime.cpu.native.bindings import layout


@dataclass(frozen=True)
class PackedIntegers:
    """A weight in a kernel's layout, one row per group; and the sum of each output channel's weights.

    Attributes:
        order: The output channel of each element in the arrays of scales, biases and offsets.
    """

    data: np.ndarray
    sums: np.ndarray
    order: np.ndarray


def _centred(weight: np.ndarray, zeros: np.ndarray | None) -> np.ndarray:
    """A weight [o, ...] minus its zero points, as int16."""
    wide = weight.astype(np.int16)
    if zeros is not None:
        wide -= zeros.astype(np.int16).reshape(-1, *[1] * (weight.ndim - 1))
    return wide


def _stored(rows: np.ndarray, wide: np.ndarray) -> PackedIntegers:
    memory = host_memory(rows.size, rows.dtype).reshape(rows.shape)
    memory[...] = rows
    return PackedIntegers(memory, wide.reshape(len(wide), -1).sum(axis=1, dtype=np.int32), np.arange(len(wide)))


def pack_panels(weight: np.ndarray, zeros: np.ndarray | None, groups: int) -> PackedIntegers:
    """A weight [o, i, kh, kw] or [o, i] in int16 panels (integer_gemm.h), with the channels of a window innermost."""
    wide = _centred(weight, zeros)
    return _stored(_panels(wide, groups, 2), wide)


def pack_byte_panels(weight: np.ndarray, groups: int, multiple: int = 1) -> PackedIntegers:
    """A weight without zero points in int8 panels.

    Args:
        multiple: The number of steps of a panel is a multiple of this.
    """
    return _stored(_panels(weight, groups, 4, multiple), weight)


def _panels(weight: np.ndarray, groups: int, step: int, multiple: int = 1) -> np.ndarray:
    panel = layout().panel
    order = (0, 2, 3, 1) if weight.ndim == 4 else (0, 1)
    flat = weight.transpose(order).reshape(groups, len(weight) // groups, -1)
    flat = np.pad(flat, ((0, 0), (0, -flat.shape[1] % panel), (0, -flat.shape[2] % (step * multiple))))
    steps = flat.reshape(groups, -1, panel, flat.shape[2] // step, step).transpose(0, 1, 3, 2, 4)
    return steps.reshape(groups, -1)


def pack_windows(weight: np.ndarray) -> PackedIntegers:
    """A weight [o, i, 3, 3] without zero points in panels of taps of input pairs (conv_integer_winograd.cpp)."""
    panel, (out, channels) = layout().panel, weight.shape[:2]
    padded = np.pad(weight, ((0, -out % panel), (0, 0), (0, 0), (0, 0)))
    pairs = padded.reshape(-1, panel, channels // 2, 2, 9).transpose(0, 2, 4, 1, 3)
    return _stored(pairs.reshape(1, -1), weight)


def signed_sums(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sums of the positive and of the negative elements of each output channel of a weight [o, ...]: int64 [o] each."""
    rows = weight.reshape(len(weight), -1)
    return np.maximum(rows, 0).sum(axis=1, dtype=np.int64), np.minimum(rows, 0).sum(axis=1, dtype=np.int64)


def pack_taps(weight: np.ndarray, zeros: np.ndarray | None) -> PackedIntegers:
    """A weight [o, 1, kh, kw] as pairs of taps for each channel (conv_integer_depthwise.cpp)."""
    wide = _centred(weight, zeros)
    flat = wide.reshape(len(wide), -1)
    flat = np.pad(flat, ((0, 0), (0, flat.shape[1] % 2)))
    return _stored(flat.reshape(len(wide), -1, 2).transpose(1, 0, 2).reshape(1, -1), wide)


def pack_columns(weight: np.ndarray, zeros: np.ndarray | None) -> PackedIntegers:
    """A weight [o, 1, k, k] as groups of two or four taps for each column and channel (conv_integer_columns.cpp)."""
    quads, lanes, taps = layout().has_byte_quads, layout().lanes, weight.shape[-1]
    block, step = (4 * lanes, 4) if quads else (lanes, 2)
    within = np.arange(block)
    if quads:
        within = within.reshape(-1, 4, 4).transpose(1, 0, 2).reshape(-1)  # interleave_quads
    starts = np.minimum(np.arange(0, len(weight), block), max(0, len(weight) - block))
    order = (starts[:, None] + within) % len(weight)  # of which there may be less than a block
    wide = _centred(weight, zeros)
    columns = wide.astype(np.int8 if quads else np.int16).reshape(-1, taps, taps).transpose(0, 2, 1)
    parts = np.pad(columns, ((0, 0), (0, 0), (0, -taps % step))).reshape(len(weight), taps, -1, step)[order]
    packed = _stored(parts.transpose(0, 2, 3, 1, 4).reshape(1, -1), wide)
    return replace(packed, order=order.reshape(-1))
