"""Chooses each tensor's memory layout: dense, or NCHW with channels padded for convolution activations.

A padded tensor is an ordinary view whose batch stride is larger, so only a consumer that needs the elements packed (a
reshape that merges batch and channels) makes code generation insert a copy without padding.
"""

from __future__ import annotations

from dataclasses import replace

from npu_compiler.graph.dtypes import FLOAT_DTYPES, itemsize
from npu_compiler.graph.model import IRGraph, OpNode
from npu_compiler.ops.registry import Layout, find_op
from npu_compiler.target_config import TargetConfig


def assign_layout(graph: IRGraph, config: TargetConfig) -> IRGraph:
    """Give 4-D convolution activations a channel-padded `alloc_shape`.

    Given:   y = conv2d(x: [2, 3, 8, 8], w)  with 16-bit storage and 64-byte alignment
    Result:  x is allocated as [2, 32, 8, 8], and y with its channels rounded up likewise
    """
    padded: set[str] = set()
    for node in graph.nodes:
        op = find_op(node.op_type)
        layout = op.layout if op is not None else Layout.DENSE
        if layout is Layout.CONVOLUTION and node.inputs[0] in graph.inputs:
            padded.add(node.inputs[0])
        keeps_padding = layout is Layout.ELEMENTWISE and _reads_padded(node, graph, padded)
        if keeps_padding or layout in (Layout.CONVOLUTION, Layout.IMAGE):
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


def _reads_padded(node: OpNode, graph: IRGraph, padded: set[str]) -> bool:
    """Whether one of the node's inputs is padded and has the shape of the node's output."""
    shape = graph.tensors[node.outputs[0]].shape
    return any(name in padded and graph.tensors[name].shape == shape for name in node.inputs)
