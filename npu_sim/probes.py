"""Small programs that show how fast a device computes a kind of call: blocks of a few calls, one after another.

A block is what networks are made of, so that a call is measured between calls of other kinds, with what the compiler
fuses into it. The time of a block is that of many of them less that of few, over the difference of their numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

Shape = Sequence[int]


class Graph:
    """An IR dict in the making, of one input, `x`."""

    def __init__(self, shape: Shape) -> None:
        self._metas: dict[str, dict[str, Any]] = {}
        self._nodes: list[dict[str, Any]] = []
        self._weights: list[str] = []
        self._made("x", shape, "x")

    def shape(self, name: str) -> Shape:
        found: Shape = self._metas[name]["shape"]
        return found

    def weight(self, *shape: int) -> str:
        name = f"p_{len(self._weights)}"
        self._metas[name] = {"name": name, "shape": list(shape), "dtype": "float32"}
        self._weights.append(name)
        return name

    def op(self, op_type: str, inputs: Sequence[str], result: Shape, /, **attrs: Any) -> str:
        """Add a node; the name of its output, which has the shape `result`."""
        name = f"y{len(self._nodes)}"
        metas = [self._metas[each] for each in inputs]
        self._made(name, result, name)
        node = {"name": name, "op_type": f"aten.{op_type}", "inputs": metas, "attrs": attrs}
        self._nodes.append({**node, "outputs": [self._bare(name)]})
        return name

    def ir(self, outputs: Sequence[str]) -> dict[str, Any]:
        return {
            "model_name": "probe",
            "graph_inputs": [self._bare("x")],
            "graph_outputs": [self._metas[name] for name in outputs],
            "weights": [self._bare(name) for name in self._weights],
            "weight_name_mapping": {name: name for name in self._weights},
            "constants": {},
            "nodes": self._nodes,
        }

    def _made(self, name: str, shape: Shape, producer: str) -> None:
        bare = {"name": name, "shape": list(shape), "dtype": "float32"}
        self._metas[name] = {**bare, "producer_node": producer, "producer_output_idx": 0}

    def _bare(self, name: str) -> dict[str, Any]:
        return {key: self._metas[name][key] for key in ("name", "shape", "dtype")}


@dataclass(frozen=True)
class Probe:
    """A block to be measured.

    Attributes:
        kind: Kind of the calls in it whose speed it shows, one of `npu_model.measured.KINDS`; the speed of calls of
            sizes that an earlier probe has shown is known.
        shape: Shape of the input of the first block.
        block: Adds a block to a graph after a tensor; returns its output.
        chained: Whether a block reads the one before; otherwise all read the same input.
    """

    kind: str
    shape: tuple[int, ...]
    block: Callable[[Graph, str], str]
    chained: bool = True

    def ir(self, count: int) -> dict[str, Any]:
        """A program of that many blocks."""
        graph, outputs = Graph(self.shape), ["x"]
        for _ in range(count):
            outputs.append(self.block(graph, outputs[-1] if self.chained else "x"))
        return graph.ir(outputs[-1:] if self.chained else outputs[1:])


def _linear(width: int, g: Graph, x: str) -> str:
    *rows, k = g.shape(x)
    return g.op("linear.default", [x, g.weight(width, k), g.weight(width)], [*rows, width])


def _norm(g: Graph, x: str) -> str:
    width = g.shape(x)[-1]
    return g.op("layer_norm.default", [x, g.weight(width), g.weight(width)], g.shape(x), normalized_shape=[width])


def _softmax(g: Graph, x: str) -> str:
    return g.op("softmax.int", [x], g.shape(x), dim=-1)


def _normed_sum(g: Graph, x: str) -> str:
    return _norm(g, g.op("add.Tensor", [x, "x"], g.shape(x)))


def _feed_forward(inner: int, g: Graph, x: str) -> str:
    """Two layers with a GELU between them, and the input added."""
    hidden = _linear(inner, g, x)
    hidden = g.op("gelu.default", [hidden], g.shape(hidden))
    return g.op("add.Tensor", [_linear(g.shape(x)[-1], g, hidden), x], g.shape(x))


def _two_layers(inner: int, g: Graph, x: str) -> str:
    return _linear(g.shape(x)[-1], g, _linear(inner, g, x))


def _layer_and_norm(g: Graph, x: str) -> str:
    return _norm(g, _linear(g.shape(x)[-1], g, x))


def _attention(heads: int, g: Graph, x: str) -> str:
    """Self-attention with the projections before and after it."""
    batch, length, width = g.shape(x)
    split, turned = [batch, length, heads, width // heads], [batch, heads, length, width // heads]
    parts = [g.op("view.default", [_linear(width, g, x)], split, size=split) for _ in "qkv"]
    parts = [g.op("transpose.int", [part], turned, dim0=1, dim1=2) for part in parts]
    joined = g.op("scaled_dot_product_attention.default", parts, turned)
    joined = g.op("transpose.int", [joined], split, dim0=1, dim1=2)
    return _linear(width, g, g.op("reshape.default", [joined], g.shape(x), shape=list(g.shape(x))))


def _relu(g: Graph, x: str) -> str:
    return g.op("relu.default", [x], g.shape(x))


def _convolution(outputs: int, taps: int, stride: int, groups: int, g: Graph, x: str) -> str:
    """A convolution with bias."""
    batch, channels, height, _ = g.shape(x)
    size, pad = -(-height // stride), taps // 2
    operands = [x, g.weight(outputs, channels // groups, taps, taps), g.weight(outputs)]
    window = {"stride": [stride, stride], "padding": [pad, pad], "dilation": [1, 1], "groups": groups}
    return g.op("conv2d.default", operands, [batch, outputs, size, size], **window)


def _two_convolutions(inner: int, taps: int, g: Graph, x: str) -> str:
    """A residual block."""
    y = _relu(g, _convolution(inner, taps, 1, 1, g, x))
    return _relu(g, g.op("add.Tensor", [_convolution(g.shape(x)[1], taps, 1, 1, g, y), x], g.shape(x)))


def _depthwise(taps: int, g: Graph, x: str) -> str:
    channels = g.shape(x)[1]
    return _relu(g, _convolution(channels, taps, 1, channels, g, x))


def _strided(outputs: int, taps: int, groups: int, g: Graph, x: str) -> str:
    return _relu(g, _convolution(outputs, taps, 2, groups, g, x))


def _max_pool(g: Graph, x: str) -> str:
    return g.op("max_pool2d.default", [x], g.shape(x), kernel_size=[3, 3], stride=[1, 1], padding=[1, 1])


def _less_mean(g: Graph, x: str) -> str:
    batch, channels = g.shape(x)[:2]
    mean = g.op("mean.dim", [x], [batch, channels, 1, 1], dim=[2, 3], keepdim=True)
    return g.op("sub.Tensor", [x, mean], g.shape(x))


LAUNCH = Probe("norm", (1, 8), _norm)
BETWEEN_PRODUCTS = Probe("norm", (32, 32), _layer_and_norm)
SMALL_PRODUCTS = Probe("product", (32, 32), partial(_two_layers, 32))


def probes(most: int) -> Iterator[Probe]:
    """All probes, a kind that is part of another one's blocks first.

    Args:
        most: Multiply-accumulates of a block: larger ones are left out. An element that is not of a product counts as
            64, a multiply-accumulate of a depthwise convolution as 16.
    """
    for probe, work in _sized():
        if work <= most:
            yield probe


def _sized() -> Iterator[tuple[Probe, int]]:
    """Probes and their work: rows and products, attention, images."""
    for rows, width in ((128, 256), (512, 768), (4096, 512), (16384, 768), (131072, 512)):
        for kind, block in (("norm", _norm), ("softmax", _softmax), ("elementwise", _normed_sum)):
            yield Probe(kind, (rows, width), block), 64 * rows * width
    for images, channels, size in ((1, 576, 14), (1, 64, 56), (32, 576, 14), (32, 64, 56)):
        shape = (images, channels, size, size)
        yield Probe("reduction", shape, _less_mean), 64 * math.prod(shape)
    for rows in (1, 8, 32, 128, 512, 2048):
        for width, inner in ((192, 192), (256, 1024), (512, 2048), (768, 768), (768, 3072), (2048, 2048), (2048, 8192)):
            if inner < 8192 or rows in (128, 2048):
                work = 2 * rows * width * inner
                yield Probe("product", (rows, width), partial(_two_layers, inner)), work
                if width < inner and rows in (32, 512):
                    yield Probe("product", (rows, width), partial(_feed_forward, inner)), work
    for images, length, heads, width in (
        (64, 49, 3, 96),
        (4, 49, 12, 384),
        (1, 64, 8, 256),
        (1, 128, 12, 768),
        (16, 128, 12, 768),
        (1, 200, 6, 384),
        (32, 200, 12, 768),
        (1, 512, 16, 1024),
        (8, 512, 12, 768),
        (1, 1500, 12, 768),
        (4, 1500, 12, 768),
    ):
        work = 4 * images * length * width**2 + 2 * images * length**2 * width
        yield Probe("attention", (images, length, width), partial(_attention, heads)), work
    yield from _sized_images()


def _sized_images() -> Iterator[tuple[Probe, int]]:
    for images in (1, 8, 32):
        for channels, size, factor, taps in (
            (64, 56, 1, 3),
            (128, 28, 1, 3),
            (256, 14, 1, 3),
            (512, 7, 1, 3),
            (16, 112, 4, 1),
            (24, 56, 6, 1),
            (128, 28, 4, 1),
            (96, 14, 6, 1),
            (512, 7, 4, 1),
        ):
            shape = (images, channels, size, size)
            work = 2 * images * size**2 * channels**2 * factor * taps**2
            yield Probe("convolution", shape, partial(_two_convolutions, channels * factor, taps)), work
        for channels, size, outputs, taps in (
            (3, 224, 32, 3),
            (3, 224, 64, 7),
            (64, 56, 128, 3),
            (128, 28, 256, 3),
            (256, 14, 512, 3),
            (64, 56, 128, 1),
            (256, 28, 512, 1),
            (512, 14, 1024, 1),
        ):
            shape, work = (images, channels, size, size), images * size**2 // 4 * channels * outputs * taps**2
            yield Probe("convolution", shape, partial(_strided, outputs, taps, 1), chained=False), work
        for channels, size, taps in (
            (32, 112, 3),
            (96, 56, 7),
            (144, 56, 3),
            (192, 28, 5),
            (384, 14, 3),
            (576, 14, 5),
            (384, 14, 7),
            (960, 7, 3),
            (960, 7, 5),
        ):
            shape, work = (images, channels, size, size), 16 * images * channels * size**2 * taps**2
            yield Probe("depthwise", shape, partial(_depthwise, taps)), work
        for channels, size, taps in ((96, 112, 3), (144, 56, 5), (240, 28, 3), (576, 14, 3), (672, 14, 5)):
            shape, work = (images, channels, size, size), 4 * images * channels * size**2 * taps**2
            yield Probe("depthwise", shape, partial(_strided, channels, taps, channels), chained=False), work
        yield Probe("pool", (images, 64, 56, 56), _max_pool), 64 * images * 64 * 56**2
