"""Choose each tensor's memory layout: dense, or NCHW with channels padded for convolution activations.

A padded tensor is an ordinary view whose batch stride is larger, so only a consumer that needs the elements packed (a
reshape that merges batch and channels) makes codegen insert a depadding copy.
"""

from __future__ import annotations

from dataclasses import replace

from npu_compiler.graph.dtypes import FLOAT_DTYPES, itemsize
from npu_compiler.graph.model import IRGraph, OpNode
from npu_compiler.program.elementwise import ELEMENTWISE
from npu_compiler.target_config import TargetConfig

CONV_OPS = frozenset({"aten.conv2d", "npu.conv2d", "aten.convolution", "aten.conv_transpose2d"})
CONV_WORLD_OPS = CONV_OPS | {
    "aten.max_pool2d",
    "aten.avg_pool2d",
    "aten.adaptive_avg_pool2d",
    "npu.scale_shift_channels",
    "aten.upsample_nearest2d",
    "aten.upsample_bilinear2d",
    "aten.group_norm",
}
_ELEMENTWISE_OPS = frozenset(f"aten.{name}" for name in ELEMENTWISE) | {"aten.gelu", "aten.div", "npu.add_relu"}


def assign_layout(graph: IRGraph, config: TargetConfig) -> IRGraph:
    """Give 4-D convolution activations a channel-padded `alloc_shape`.

    Given:   y = conv2d(x: [2, 3, 8, 8], w)  with 16-bit storage and 64-byte alignment
    Result:  x is allocated as [2, 32, 8, 8]; so is y, whatever its channel count rounds up to
    """
    padded: set[str] = set()
    for node in graph.nodes:
        if node.base in CONV_OPS and node.inputs[0] in graph.inputs:
            padded.add(node.inputs[0])
        if node.base in CONV_WORLD_OPS or _stays_in_conv_world(node, graph, padded):
            padded.update(node.outputs)
    tensors = dict(graph.tensors)
    for name in padded:
        spec = tensors[name]
        if len(spec.shape) == 4 and spec.dtype in FLOAT_DTYPES and 0 not in spec.shape:
            channels = pad_channels(spec.shape[1], itemsize(spec.storage), config.channel_alignment_bytes)
            if channels != spec.shape[1]:
                tensors[name] = replace(spec, alloc_shape=(spec.shape[0], channels, *spec.shape[2:]))
    return replace(graph, tensors=tensors)


def pad_channels(channels: int, element_bytes: int, alignment_bytes: int) -> int:
    """The channel count rounded up so that channels · element_bytes is a multiple of the alignment."""
    step = max(1, alignment_bytes // element_bytes)
    return -(-channels // step) * step


def _stays_in_conv_world(node: OpNode, graph: IRGraph, padded: set[str]) -> bool:
    if node.base not in _ELEMENTWISE_OPS:
        return False
    shape = graph.tensors[node.outputs[0]].shape
    return any(name in padded and graph.tensors[name].shape == shape for name in node.inputs)
