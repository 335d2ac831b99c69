"""Vector access to channels: how many contiguous channels a thread moves at a time."""

from __future__ import annotations

from dataclasses import replace

from cuda_compiler.specialization.sizes import vector_width
from npu_compiler.graph.dtypes import itemsize
from npu_compiler.program.views import View

PACK = 8  # channels per vector access of the convolution kernels
BYTE_PACKS = (16, 8, 4)  # the same of those over images in bytes


def least_pack(dtype: str) -> int:
    """The smallest pack of channels for a dtype: kernels read a multiple of this many channels."""
    return BYTE_PACKS[-1] if itemsize(dtype) == 1 else PACK


def channels_last(view: View) -> View:
    """[N, C, H, W] as [N, H, W, C]."""
    return view.permute((0, 2, 3, 1))


def is_packed(view: View, pack: int = PACK) -> bool:
    """Whether channels of an image [N, C, H, W] are contiguous and can be accessed as aligned vectors of `pack`."""
    side_by_side = view.shape[1] == 1 or view.strides[1] == 1
    return side_by_side and view.shape[1] % pack == 0 and vector_width(channels_last(view)) >= pack


def single_pixels(rows: View) -> View:
    """A matrix [M, C] as an image [1, C, M, 1]."""
    (count, channels), (step, side) = rows.shape, rows.strides
    return replace(rows, shape=(1, channels, count, 1), strides=(count * step, side, step, step))


def single_taps(weight: View) -> View:
    """A weight [N, C] as that of a 1 × 1 convolution, [N, C, 1, 1]."""
    return replace(weight, shape=(*weight.shape, 1, 1), strides=(*weight.strides, weight.strides[0], weight.strides[0]))
