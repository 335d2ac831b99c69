"""Vector access to channels: how many contiguous channels a thread moves at a time."""

from __future__ import annotations

from cuda_compiler.specialization.sizes import vector_width
from npu_compiler.program.views import View

PACK = 8  # channels per vector access of the convolution kernels


def channels_last(view: View) -> View:
    """[N, C, H, W] as [N, H, W, C]."""
    return view.permute((0, 2, 3, 1))


def is_packed(view: View, pack: int = PACK) -> bool:
    """Whether channels of [N, C, H, W] are contiguous and can be accessed as aligned vectors of `pack`."""
    side_by_side = view.shape[1] == 1 or view.strides[1] == 1
    return side_by_side and view.shape[1] % pack == 0 and vector_width(channels_last(view)) >= pack
