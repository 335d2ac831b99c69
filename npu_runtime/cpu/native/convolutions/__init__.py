"""Convolutions and pooling over NCHW."""

from npu_runtime.cpu.native.convolutions.conv import alternatives, conv2d
from npu_runtime.cpu.native.convolutions.pooling import avg_pool2d, global_avg_pool2d, max_pool2d
from npu_runtime.cpu.native.convolutions.weights import PackedConv, pack_conv_weight

__all__ = [
    "PackedConv",
    "alternatives",
    "avg_pool2d",
    "conv2d",
    "global_avg_pool2d",
    "max_pool2d",
    "pack_conv_weight",
]
