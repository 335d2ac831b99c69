"""Convolution weights in the layouts that the kernels read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import numpy as np

from npu_runtime.cpu.arrays import BFLOAT16, host_memory
from npu_runtime.cpu.native.bindings import layout
from npu_runtime.cpu.native.convolutions.arguments import TILE_PAIRS, TILE_ROWS
from npu_runtime.cpu.native.numbers import DTYPES
from npu_runtime.cpu.native.products.linear import PackedWeight, pack_linear_weight
from npu_runtime.cpu.native.rows.pointwise import widened

_WINOGRAD_WEIGHTS = {  # the transform of a 3-tap filter, by output tile size
    2: [[1, 0, 0], [1 / 2, 1 / 2, 1 / 2], [1 / 2, -1 / 2, 1 / 2], [0, 0, 1]],
    4: [
        [1 / 4, 0, 0],
        [-1 / 6, -1 / 6, -1 / 6],
        [-1 / 6, 1 / 6, -1 / 6],
        [1 / 24, 1 / 12, 1 / 6],
        [1 / 24, -1 / 12, 1 / 6],
        [0, 0, 1],
    ],
}


@dataclass
class PackedConv:
    """A constant convolution weight, and its layouts that kernels have asked for so far."""

    weight: np.ndarray
    groups: int = 1
    _layouts: dict[tuple[str, bool], np.ndarray] = field(default_factory=dict, repr=False)

    def layout(self, algorithm: str, pairs: bool = False) -> np.ndarray:
        """The weight in the layout of `algorithm`, one row per group: float32, or pairs of bfloat16 as int32."""
        if (algorithm, pairs) not in self._layouts:
            elements = _pair_depth(self.weight) if pairs else widened(self.weight)
            groups = elements.reshape(self.groups, -1, *elements.shape[1:])
            rows = [_PACKERS[algorithm](group) for group in groups]
            memory = host_memory(len(rows) * rows[0].size, rows[0].dtype)
            self._layouts[algorithm, pairs] = np.stack(rows, out=memory.reshape(len(rows), -1))
        return self._layouts[algorithm, pairs]

    @cached_property
    def matrix(self) -> PackedWeight:
        """The weight for images with channels innermost: that of a linear layer whose inputs are windows.

        Windows are kernel rows, kernel columns, channels, and a zero where the kernel multiplies pairs and one lacks
        its second number. The rows of each of several groups are followed by zeros that fill its last panel.
        """
        rows = self.weight.transpose(0, 2, 3, 1).reshape(len(self.weight), -1)
        if self.groups > 1:
            of_groups = rows.reshape(self.groups, -1, rows.shape[1])
            whole = np.pad(of_groups, ((0, 0), (0, -of_groups.shape[1] % layout().panel), (0, 0)))
            rows = whole.reshape(-1, rows.shape[1])
        return _packed_matrix(rows, 2 if self.weight.dtype == BFLOAT16 and layout().has_pairs else 1)

    @cached_property
    def planar_matrix(self) -> PackedWeight:
        """The weight of one group for planar images of few channels, of `planar_dtype`.

        Windows are channels, kernel rows, kernel columns, and zeros up to what the matrix unit takes at once. Without
        that unit, pairs are of neighbouring kernel rows, whose number is made even by zeros.
        """
        if planar_dtype(DTYPES[self.weight.dtype]) != DTYPES[BFLOAT16]:
            return _packed_matrix(_rows(widened(self.weight)), 1)
        if layout().has_tiles:
            return _packed_matrix(_rows(self.weight), 2 * TILE_PAIRS)
        lines = self.weight.reshape(len(self.weight), -1, self.weight.shape[-1])
        lines = np.pad(lines, ((0, 0), (0, lines.shape[1] % 2), (0, 0)))
        pairs = lines.reshape(len(lines), -1, 2, lines.shape[-1]).swapaxes(2, 3)
        return _packed_matrix(_rows(pairs), 1)

    @cached_property
    def taps(self) -> np.ndarray:
        """The weight of a depthwise convolution for images with channels innermost: float32 [taps + 1, channels].

        The last tap is zero.
        """
        rows = widened(self.weight).reshape(len(self.weight), -1).T
        memory: np.ndarray = host_memory((len(rows) + 1) * rows.shape[1], np.dtype(np.float32))
        taps = memory.reshape(-1, rows.shape[1])
        taps[:-1], taps[-1] = rows, 0
        return taps


def planar_dtype(dtype: int) -> int:
    """The number of the dtype of weights for planar images, whose dtype has the number `dtype`."""
    return dtype if dtype == DTYPES[BFLOAT16] and layout().has_pairs else DTYPES[np.dtype(np.float32)]


def pack_conv_weight(weight: np.ndarray, groups: int = 1) -> PackedConv:
    """Prepare weight[Co, Ci / groups, Kh, Kw], which must not change afterwards, for any number of convolutions."""
    if weight.ndim != 4 or weight.shape[0] % groups:
        raise ValueError(f"no convolution weight of {groups} groups: {weight.shape}")
    return PackedConv(weight, groups)


def _pair_depth(weight: np.ndarray) -> np.ndarray:
    """A bfloat16 weight[Co, ...] as int32 pairs of successive values, [Co, pairs].

    An odd last value is paired with 0.
    """
    flat = _rows(weight)
    return np.pad(flat.view(np.int16), ((0, 0), (0, flat.shape[1] % 2))).view(np.int32)


def _packed_matrix(rows: np.ndarray, multiple: int) -> PackedWeight:
    """The weight of a linear layer, with zeros appended to its rows up to a multiple of that many elements."""
    packed = pack_linear_weight(np.pad(rows, ((0, 0), (0, -rows.shape[1] % multiple))))
    assert packed is not None
    return packed


def _rows(weight: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(weight.reshape(len(weight), -1))


def _row_blocks(rows: int) -> list[slice]:
    """The division of rows into blocks of about equal size, as RowBlocks in gemm.h does it."""
    count = -(-rows // layout().max_rows)
    least, larger = divmod(rows, count)
    begins = [block * least + min(block, larger) for block in range(count + 1)]
    return [slice(begin, end) for begin, end in pairwise(begins)]


def _pack_pixel_lanes(weight: np.ndarray) -> np.ndarray:
    """The weight in blocks of output channels, each with the channels innermost."""
    flat = _rows(weight)
    return np.concatenate([flat[block].T.reshape(-1) for block in _row_blocks(len(flat))])


def _pack_channel_lanes(weight: np.ndarray) -> np.ndarray:
    """The weight in panels of output channels, each with the channels innermost; zeros fill the last panel."""
    flat, panel = _rows(weight), layout().panel
    flat = np.pad(flat, ((0, -len(flat) % panel), (0, 0)))
    return flat.reshape(-1, panel, flat.shape[1]).transpose(0, 2, 1).reshape(-1)


def _pack_tiles(weight: np.ndarray) -> np.ndarray:
    """The weight as a row of pairs per output channel, with zeros appended to rows and pairs up to whole tiles."""
    flat = _rows(weight)
    return np.pad(flat, ((0, -len(flat) % TILE_ROWS), (0, -flat.shape[1] % TILE_PAIRS))).reshape(-1)


def _pack_winograd(weight: np.ndarray, tile: int) -> np.ndarray:
    """The Winograd-transformed weight in blocks of output channels: point after point, with the channels innermost."""
    transform = np.array(_WINOGRAD_WEIGHTS[tile])
    taps = weight.reshape(*weight.shape[:2], -1).transpose(2, 1, 0).reshape(weight[0, 0].size, -1)
    points = (np.kron(transform, transform) @ taps).astype(np.float32).reshape(-1, *weight.shape[1::-1])
    return np.concatenate([points[..., block].reshape(-1) for block in _row_blocks(points.shape[-1])])


_PACKERS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "pixels": _pack_pixel_lanes,
    "channels": _pack_channel_lanes,
    "tiles": _pack_tiles,
    "winograd2": lambda weight: _pack_winograd(weight, 2),
    "winograd4": lambda weight: _pack_winograd(weight, 4),
    "depthwise": np.ravel,
}
