"""Layers drawn at random, run on a device and compared with PyTorch. Each batch has a process of its own.

    python tests/support/random_layers.py --device cuda --layers 3000 --seed 5

A layer is one op of a kind below, sometimes between two others, in sizes from 1 up, with strides, dilations and
paddings that reach beyond its map. Layer `n` of a seed is the same whatever else is drawn: `--first n --layers 1`
repeats it.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ir_builder import IRBuilder, Tensor
from quantized_networks import DEQUANTIZE, DEQUANTIZE_CHANNELS, LIMITS, QUANTIZE

from npu_compiler import CompileOptions, compile, read_ir
from npu_compiler.errors import NPUError
from npu_compiler.graph.dtypes import saturating_cast
from npu_compiler.ops.registry import unsupported_reason
from npu_compiler.program.kernels import KernelCall
from npu_runtime import Backend, CPUBackend, Device, Executor, load_weights
from npu_runtime.backend import Launch, Operand
from npu_runtime.cpu.backend import bind, candidates
from npu_runtime.cpu.bound_call import BoundCall

FORMATS = ("float32", "float16", "bfloat16")
# Of the largest element of a result, or of 1. The reference rounds its inputs and weights only.
TOLERANCE = {"float32": 3e-5, "float16": 6e-3, "bfloat16": 5e-2}
SIZES = (1, 1, 1, 2, 2, 3, 3, 4, 5, 6, 7, 8, 9, 12, 15, 16, 17, 20, 33)
CHANNELS = (1, 1, 2, 3, 4, 5, 8, 15, 16, 17, 24, 32, 33, 48, 64)
STEPS = (1, 1, 1, 2, 2, 3, 4, 5, 9, 40)
KERNELS = (1, 1, 1, 2, 3, 3, 3, 4, 5, 7)
PADDINGS = (0, 0, 0, 1, 1, 2, 3, 6)
MOST_ELEMENTS = 20_000
MOST_PRODUCTS = 1_000_000
BATCH = 500  # layers that share a process
ACTIVATIONS = ("relu", "silu", "gelu", "hardswish", "sigmoid", "tanh", "relu6", "hardsigmoid")
SCRIPT = __file__
_PROGRESS = "layer "


class Undrawable(Exception):
    """The sizes drawn so far do not go together: the layer is drawn again."""


def need(condition: object) -> None:
    """Draw again unless the condition holds."""
    if not condition:
        raise Undrawable


class Layer:
    """A graph in the making, each of whose nodes PyTorch computes at once, in float64.

    Attributes:
        format: The dtype that the device computes in.
        steps: Largest distance of a result from PyTorch's that is rounding, where results are rounded to codes.
        nodes: The calls so far, as text.
    """

    def __init__(self, kind: str, rng: random.Random, seed: int) -> None:
        self.kind, self.rng, self.numbers = kind, rng, np.random.default_rng(seed)
        self.format = rng.choice(FORMATS)
        self.steps = 0.0
        self.g = IRBuilder("layer")
        self.inputs: dict[str, np.ndarray] = {}
        self.weights: dict[str, np.ndarray] = {}
        self.values: dict[str, torch.Tensor] = {}
        self.nodes: list[str] = []

    @property
    def dtype(self) -> str:
        """The dtype of floats in the graph; a float32 graph may be compiled to float16."""
        return "bfloat16" if self.format == "bfloat16" else "float32"

    def one(self, *choices: Any) -> Any:
        return self.rng.choice(choices)

    def size(self, choices: Sequence[int] = SIZES) -> int:
        return self.rng.choice(choices)

    def sizes(self, count: int, choices: Sequence[int] = SIZES) -> list[int]:
        """Draw `count` sizes, which are equal half of the time."""
        return [self.size(choices)] * count if self.chance(0.5) else [self.size(choices) for _ in range(count)]

    def batch(self) -> int:
        """The size of a batch, which may be empty."""
        return 0 if self.chance(0.02) else self.one(1, 1, 1, 2, 3)

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def input(self, *shape: int, positive: bool = False) -> Tensor:
        name = f"x{len(self.inputs)}"
        self.inputs[name] = self._floats(shape, positive)
        return self._keep(self.g.input(name, *shape, dtype=self.dtype), self.inputs[name])

    def integers(self, limit: int, *shape: int) -> Tensor:
        """An input of indices below a limit."""
        name = f"x{len(self.inputs)}"
        self.inputs[name] = self.numbers.integers(0, limit, shape)
        return self._keep(self.g.input(name, *shape, dtype="int64"), self.inputs[name])

    def weight(self, *shape: int, positive: bool = False) -> Tensor:
        key = f"w{len(self.weights)}"
        scale = 1.0 if positive or len(shape) < 2 else prod(shape[1:]) ** -0.5
        self.weights[key] = self._rounded(self._floats(shape, positive) * np.float32(scale))
        return self._keep(self.g.weight(key, *shape, dtype=self.dtype), self.weights[key])

    def optional(self, *shape: int, positive: bool = False) -> Tensor | None:
        return self.weight(*shape, positive=positive) if self.chance(0.5) else None

    def affine(self, *shape: int) -> tuple[Tensor | None, Tensor | None]:
        """A norm's weight and bias, or the weight, or none: a graph does not tell a bias alone from a weight."""
        weight = self.optional(*shape)
        return weight, None if weight is None else self.optional(*shape)

    def codes(self, *shape: int) -> Tensor:
        """A weight of int8 with a scale for each row, dequantized."""
        key = f"w{len(self.weights)}"
        scales = self.numbers.uniform(0.5, 1.5, shape[0]).astype(np.float32) / np.float32(127 * prod(shape[1:]) ** 0.5)
        self.weights[key] = self.numbers.integers(-128, 128, shape).astype(np.int8)
        self.weights[f"{key}.scales"] = scales
        parts = [self.g.weight(key, *shape, dtype="int8"), self.g.weight(f"{key}.scales", shape[0])]
        attrs = {"axis": 0, "quant_min": -128, "quant_max": 127, "dtype": "int8"}
        result: Tensor = self.g(DEQUANTIZE_CHANNELS, *parts, **attrs, out=(shape, "float32"))
        wide = scales.astype(np.float64).reshape(-1, *[1] * (len(shape) - 1))
        return self._keep(result, self.weights[key] * wide)

    def rounded(self, x: Tensor, scale: float, zero: int, dtype: str) -> Tensor:
        """x quantized and dequantized."""
        shape, (low, high) = self.g.shape(x), LIMITS[dtype]
        attrs = {"scale": scale, "zero_point": zero, "quant_min": low, "quant_max": high, "dtype": dtype}
        codes = self.g(QUANTIZE, x, **attrs, out=(shape, dtype))
        result: Tensor = self.g(DEQUANTIZE, codes, **attrs, out=(shape, "float32"))
        limited = torch.clamp(torch.round(self.values[x] / scale) + zero, low, high)
        self.nodes.append(f"{result} = rounded({x}, {scale}, {zero}, {dtype})")
        return self._keep(result, ((limited - zero) * scale).numpy())

    def __call__(self, op: str, *args: Any, **kwargs: Any) -> Tensor:
        """Add a node and compute it; `need` another draw where PyTorch refuses it."""
        namespace, name, overload = f"aten.{op}".split(".")
        function = getattr(getattr(getattr(torch.ops, namespace), name), overload)
        try:
            result = function(*self._real(args), **{key: self._real(value) for key, value in kwargs.items()})
        except (RuntimeError, IndexError, ValueError) as error:
            raise Undrawable from error
        need(result.numel() <= MOST_ELEMENTS)
        dtype = self.dtype if result.is_floating_point() else str(result.dtype).removeprefix("torch.")
        tensor: Tensor = self.g(f"aten.{op}", *args, **kwargs, out=(tuple(result.shape), dtype))
        self.values[tensor] = result
        shown = ", ".join([*map(self._shown, args), *(f"{key}={value}" for key, value in kwargs.items())])
        self.nodes.append(f"{tensor} = {op}({shown})")
        return tensor

    def _shown(self, value: Any) -> str:
        return f"{value}{list(self.g.shape(value))}" if isinstance(value, Tensor) else str(value)

    def _real(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self.values[value]
        return type(value)(map(self._real, value)) if isinstance(value, (list, tuple)) else value

    def _floats(self, shape: Sequence[int], positive: bool = False) -> np.ndarray:
        need(prod(shape) <= MOST_ELEMENTS)
        values = self.numbers.uniform(0.5, 1.5, shape) if positive else self.numbers.standard_normal(shape)
        return self._rounded(values)

    def _rounded(self, values: np.ndarray) -> np.ndarray:
        return saturating_cast(values.astype(np.float32), self.format).astype(np.float32)

    def _keep(self, name: Tensor, value: np.ndarray) -> Tensor:
        self.values[name] = torch.from_numpy(value.astype(np.float64 if value.dtype.kind == "f" else value.dtype))
        return name

    def describe(self) -> str:
        return f"{self.kind} in {self.format}: {'; '.join(self.nodes)}"


Kind = Callable[[Layer], Tensor]
KINDS: dict[str, Kind] = {}


def kind(function: Kind) -> Kind:
    """Decorator: register a function that draws a kind of layer."""
    KINDS[function.__name__] = function
    return function


def image(d: Layer, channels: int, sizes: Sequence[int], positive: bool = False) -> Tensor:
    """[N, C, *sizes], sometimes made by an op before, or without a batch."""
    batch = [] if d.chance(0.05) else [d.batch()]
    x = d.input(*batch, channels, *sizes, positive=positive)
    return d("relu.default", x) if d.chance(0.15) and not positive else x


def map_sizes(d: Layer, rank: int) -> list[int]:
    return d.sizes(rank, SIZES if rank < 3 else SIZES[:12])


@dataclass
class Window:
    """Geometry of a sliding window that fits into a map at least once."""

    sizes: list[int]
    kernel: list[int]
    stride: list[int]
    padding: list[int]
    dilation: list[int]


def window(d: Layer, rank: int, pools: bool = False) -> Window:
    while True:
        strides, dilations = (STEPS if d.chance(chance) else (1,) for chance in (0.6, 0.3))
        kernel, padding = d.sizes(rank, KERNELS), d.sizes(rank, PADDINGS if d.chance(0.6) else (0,))
        if pools:  # which pad by half a kernel at most
            padding = [min(size // 2, pad) for size, pad in zip(kernel, padding, strict=True)]
        found = Window(map_sizes(d, rank), kernel, d.sizes(rank, strides), padding, d.sizes(rank, dilations))
        axes = zip(found.sizes, kernel, padding, found.dilation, strict=True)
        if all(size + 2 * pad > (taps - 1) * apart for size, taps, pad, apart in axes):
            return found


def convolved(d: Layer, rank: int, groups: int, channels: int, features: int) -> Tensor:
    """A convolution of `channels` and `features` per group."""
    w = window(d, rank)
    need(prod(w.sizes) * groups * channels * features * prod(w.kernel) < MOST_PRODUCTS)
    x = image(d, groups * channels, w.sizes)
    weight, bias = d.weight(groups * features, channels, *w.kernel), d.optional(groups * features)
    if d.chance(0.1):
        return d(f"conv{rank}d.padding", x, weight, bias, w.stride, d.one("same", "valid"), w.dilation, groups)
    return d(f"conv{rank}d.default", x, weight, bias, w.stride, w.padding, w.dilation, groups)


@kind
def conv1d(d: Layer) -> Tensor:
    return convolved(d, 1, d.one(1, 1, 2, 3), d.size(CHANNELS), d.size(CHANNELS))


@kind
def conv2d(d: Layer) -> Tensor:
    return convolved(d, 2, d.one(1, 1, 1, 2, 3, 4), d.size(CHANNELS), d.size(CHANNELS))


@kind
def pointwise_conv2d(d: Layer) -> Tensor:
    groups, channels, features = d.one(1, 1, 2, 4), d.size(CHANNELS), d.size(CHANNELS)
    x = image(d, groups * channels, map_sizes(d, 2))
    weight, bias = d.weight(groups * features, channels, 1, 1), d.optional(groups * features)
    return d("conv2d.default", x, weight, bias, d.sizes(2, STEPS), [0, 0], [1, 1], groups)


@kind
def conv3d(d: Layer) -> Tensor:
    return convolved(d, 3, d.one(1, 1, 2), d.size(CHANNELS[:8]), d.size(CHANNELS[:8]))


@kind
def depthwise_conv(d: Layer) -> Tensor:
    return convolved(d, d.one(1, 2, 2, 2), d.size(CHANNELS), 1, d.one(1, 1, 2))


@kind
def transposed_conv(d: Layer) -> Tensor:
    rank, groups = d.one(1, 2, 2, 3), d.one(1, 1, 2)
    channels, features = d.size(CHANNELS[:10]), d.size(CHANNELS[:10])
    w = window(d, rank)
    x = image(d, groups * channels, w.sizes)
    weight, bias = d.weight(groups * channels, features, *w.kernel), d.optional(groups * features)
    extra = [d.rng.randrange(max(step, apart)) for step, apart in zip(w.stride, w.dilation, strict=True)]
    overload = "default" if rank == 1 else "input"
    return d(f"conv_transpose{rank}d.{overload}", x, weight, bias, w.stride, w.padding, extra, groups, w.dilation)


@kind
def max_pool(d: Layer) -> Tensor:
    rank = d.one(1, 2, 2, 2)
    w = window(d, rank, pools=True)
    x = image(d, d.size(CHANNELS), w.sizes)
    return d(f"max_pool{rank}d.default", x, w.kernel, w.stride, w.padding, w.dilation, d.chance(0.4))


@kind
def avg_pool(d: Layer) -> Tensor:
    rank = d.one(1, 2, 2, 2)
    w = window(d, rank, pools=True)
    x = image(d, d.size(CHANNELS), w.sizes)
    divisor = [d.one(None, None, 1, 3)] if rank == 2 else []
    return d(f"avg_pool{rank}d.default", x, w.kernel, w.stride, w.padding, d.chance(0.4), d.chance(0.5), *divisor)


@kind
def adaptive_pool(d: Layer) -> Tensor:
    rank = d.one(1, 2, 2)
    x = image(d, d.size(CHANNELS), map_sizes(d, rank))
    return d(f"adaptive_avg_pool{rank}d.default", x, d.sizes(rank, (1, 1, 2, 3, 5, 7)))


@kind
def lp_pool(d: Layer) -> Tensor:
    """The steps of `torch.nn.functional.lp_pool2d`."""
    x = image(d, d.size(CHANNELS), map_sizes(d, 2), positive=True)
    kernel, stride = d.sizes(2, KERNELS), d.sizes(2, STEPS)
    power = d("pow.Tensor_Scalar", x, 2.0)
    mean = d("avg_pool2d.default", power, kernel, stride, [0, 0], d.chance(0.4))
    signed = d("mul.Tensor", d("sign.default", mean), d("relu.default", d("abs.default", mean)))
    return d("pow.Tensor_Scalar", d("mul.Tensor", signed, prod(kernel)), 0.5)


@kind
def mean_of_maps(d: Layer) -> Tensor:
    x = image(d, d.size(CHANNELS), map_sizes(d, 2))
    return d("mean.dim", x, d.one([-1, -2], [-1], [-2], [1]), d.chance(0.5))


def leading(d: Layer, most: int = 3) -> list[int]:
    sizes = [d.size(SIZES[:14]) for _ in range(d.rng.randrange(most))]
    return [0 if d.chance(0.02) else size for size in sizes]


@kind
def linear(d: Layer) -> Tensor:
    width, features = d.size((*SIZES, *CHANNELS, 100)), d.size((*SIZES, *CHANNELS, 100))
    return d("linear.default", d.input(*leading(d), width), d.weight(features, width), d.optional(features))


@kind
def matmul(d: Layer) -> Tensor:
    rows, inner, columns = d.size(), d.size(), d.size()
    if d.chance(0.3):
        batch = 0 if d.chance(0.02) else d.size(SIZES[:10])
        return d("bmm.default", d.input(batch, rows, inner), d.input(batch, inner, columns))
    batch = leading(d)
    left = [1 if d.chance(0.2) else size for size in batch]
    right = [1 if d.chance(0.2) else size for size in batch][d.rng.randrange(len(batch) + 1) :]
    a, b = d.input(*left, rows, inner), d.input(*right, inner, columns)
    if d.chance(0.3):
        b = d("transpose.int", d.input(*right, columns, inner), -1, -2)
    return d("matmul.default", a, b)


@kind
def norm(d: Layer) -> Tensor:
    eps = d.one(1e-5, 0.1)
    if d.chance(0.5):
        shape = [*leading(d), d.size((*SIZES, 100))]
        tail = shape[-d.one(1, 1, min(2, len(shape))) :]
        if d.chance(0.5):
            return d("rms_norm.default", d.input(*shape), tail, d.optional(*tail), eps)
        return d("layer_norm.default", d.input(*shape), tail, *d.affine(*tail), eps)
    groups = d.one(1, 2, 3, 4)
    channels = groups * d.size(CHANNELS[:8])
    x = d.input(d.batch(), channels, *d.sizes(d.one(0, 1, 2, 2)))
    weight = d.optional(channels)
    bias = None if weight is None else d.weight(channels)
    which = d.one("group", "instance", "batch")
    if which == "group":
        return d("group_norm.default", x, groups, weight, bias, eps)
    if which == "instance":
        return d("instance_norm.default", x, weight, bias, None, None, True, 0.1, eps, False)
    mean, variance = d.weight(channels), d.weight(channels, positive=True)
    return d("batch_norm.default", x, weight, bias, mean, variance, False, 0.1, eps, False)


@kind
def embedding(d: Layer) -> Tensor:
    rows = d.size()
    return d("embedding.default", d.weight(rows, d.size()), d.integers(rows, *leading(d)))


@kind
def softmax(d: Layer) -> Tensor:
    shape = [*leading(d), d.size((*SIZES, 100))]
    return d(f"{d.one('softmax', 'log_softmax')}.int", d.input(*shape), d.rng.randrange(-len(shape), len(shape)))


@kind
def attention(d: Layer) -> Tensor:
    batch, heads, queries, keys = d.batch(), d.one(1, 2, 4), d.size(), d.size()
    width, value_width = d.size(), d.size()
    q, k = d.input(batch, heads, queries, width), d.input(batch, heads, keys, width)
    v = d.input(batch, heads, keys, value_width)
    mask = d.input(*d.one([batch, heads], [1, 1], []), d.one(1, queries), keys) if d.chance(0.4) else None
    causal = mask is None and d.chance(0.4)
    return d("scaled_dot_product_attention.default", q, k, v, mask, 0.0, causal)


@kind
def interpolate(d: Layer) -> Tensor:
    rank = d.one(1, 2, 2)
    x = d.input(d.one(1, 2), d.size(CHANNELS[:8]), *d.sizes(rank))
    size, corners = d.sizes(rank), [d.chance(0.5)]
    which = d.one("nearest", "_nearest_exact", "linear")
    if which == "linear":
        return d(f"upsample_{('linear1d', 'bilinear2d')[rank - 1]}.default", x, size, *corners)
    name = f"_upsample_nearest_exact{rank}d" if which == "_nearest_exact" else f"upsample_nearest{rank}d"
    return d(f"{name}.default", x, size)


@kind
def shuffle(d: Layer) -> Tensor:
    factor, channels = d.one(1, 2, 3), d.size(CHANNELS[:8])
    height, width = d.size(), d.size()
    which = d.one("pixel_shuffle", "pixel_unshuffle", "channel_shuffle")
    if which == "pixel_unshuffle":
        return d("pixel_unshuffle.default", d.input(1, channels, height * factor, width * factor), factor)
    x = d.input(d.one(1, 2), channels * (factor if which == "channel_shuffle" else factor**2), height, width)
    return d(f"{which}.default", x, factor)


@kind
def padding(d: Layer) -> Tensor:
    rank = d.one(1, 2, 2)
    x = image(d, d.size(CHANNELS[:8]), map_sizes(d, rank))
    mode = d.one("constant", "reflect", "replicate", "circular")
    least = -2 if mode == "constant" else 0
    amounts = [d.rng.randrange(least, 5) for _ in range(2 * rank)]
    return d("pad.default", x, amounts, mode, *([d.one(0.0, 1.5)] if mode == "constant" else []))


@kind
def quantized_conv(d: Layer) -> Tensor:
    """A convolution of int8, its input and result rounded to codes."""
    groups, channels = d.one((1, d.size(CHANNELS)), (1, d.size(CHANNELS)), (2, 3), (d.size(CHANNELS), 1))
    features = d.size(CHANNELS) if channels > 1 or groups == 1 else d.one(1, 1, 2)
    w = window(d, 2)
    if d.chance(0.3):  # what some kernels are made for
        w.kernel, w.stride, w.dilation = d.one([3, 3], [5, 5], [1, 1]), [1, 1], [1, 1]
    need(prod(w.sizes) * groups * channels * features * prod(w.kernel) < MOST_PRODUCTS)
    x = rounded_image(d, image(d, groups * channels, w.sizes))
    weight, bias = d.codes(groups * features, channels, *w.kernel), d.optional(groups * features)
    y = d("conv2d.default", x, weight, bias, w.stride, w.padding, w.dilation, groups)
    return rounded_result(d, d("relu.default", y) if d.chance(0.3) else y)


@kind
def quantized_linear(d: Layer) -> Tensor:
    width, features = d.size(CHANNELS), d.size(CHANNELS)
    x = rounded_image(d, d.input(d.size(), width))
    return rounded_result(d, d("linear.default", x, d.codes(features, width), d.optional(features)))


@kind
def quantized_pool(d: Layer) -> Tensor:
    """Pools, sums and means between codes."""
    w = window(d, 2, pools=True)
    x = rounded_image(d, image(d, d.size(CHANNELS), w.sizes))
    which = d.one("max", "mean", "add", "none")
    if which == "none":
        d.steps = ROUNDED_SCALE * 1.01
        return x
    if which == "max":
        return rounded_result(d, d("max_pool2d.default", x, w.kernel, w.stride, w.padding, w.dilation))
    if which == "mean":
        return rounded_result(d, d("mean.dim", x, [-1, -2], d.chance(0.5)))
    return rounded_result(d, d("add.Tensor", x, rounded_image(d, d.input(*d.g.shape(x)))))


ROUNDED_SCALE = 0.03


def rounded_image(d: Layer, x: Tensor) -> Tensor:
    stored = d.one("uint8", "int8")
    return d.rounded(x, 0.02, d.one(3, -5, 100) if stored == "int8" else d.one(3, 128), stored)


def rounded_result(d: Layer, y: Tensor) -> Tensor:
    """The layer's result as codes, of which a device may choose a neighbour: sums round in another order."""
    d.steps = ROUNDED_SCALE * 1.01
    return d.rounded(y, ROUNDED_SCALE, d.one(3, 60), d.one("uint8", "int8"))


def draw(seed: int, number: int) -> Layer:
    """Layer `number` of a seed."""
    rng = random.Random(f"{seed} {number}")
    name = rng.choice(list(KINDS))
    while True:
        d = Layer(name, rng, rng.randrange(2**32))
        if d.kind.startswith("quantized"):
            d.format = "float32"
        try:
            result = KINDS[d.kind](d)
            if not d.steps:
                result = _followed(d, result)
        except Undrawable:
            continue
        d.g.output(result)
        return d


def _followed(d: Layer, x: Tensor) -> Tensor:
    """Return x, or x with an addition, an activation or both behind it, as models have them."""
    if d.chance(0.2):
        other = d.input(*d.g.shape(x))
        x = d("add.Tensor", *((x, other) if d.chance(0.5) else (other, x)))
    return d(f"{d.rng.choice(ACTIVATIONS)}.default", x) if d.chance(0.3) else x


def lacks_an_op(layer: Layer) -> bool:
    """Whether the op table lacks one of the layer's ops, in the form that it has there."""
    graph = read_ir(layer.g.ir())
    return any(unsupported_reason(node, graph) for node in graph.nodes)


class AnyKernel(CPUBackend):
    """The CPU device, which takes any implementation of a call instead of the fastest."""

    def __init__(self) -> None:
        super().__init__(tune=False)
        self.rng = random.Random()

    def prepare(self, call: KernelCall, inputs: Sequence[Operand], outputs: Sequence[Operand]) -> Launch:
        bound = BoundCall(call, [bind(x) for x in inputs], [bind(x) for x in outputs], inputs)
        others = candidates(bound, self.native, self.rng.random() < 0.1)
        self.rng.shuffle(others)
        for candidate in others:
            launch = candidate.make(bound)
            if launch is not None:
                return launch
        return super().prepare(call, inputs, outputs)


@dataclass
class Bench:
    """Runs layers on a device."""

    device: str
    backends: list[Backend] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.device != "cpu":
            self.backends = [Device(self.device).backend]
            return
        numpy = CPUBackend(native=False, pytorch=False, tune=False)
        self.backends = [AnyKernel(), CPUBackend(tune=False), CPUBackend(native=False, tune=False), numpy]

    def check(self, layer: Layer, number: int) -> str:
        """Return the error of the device's result, or nothing; `off` where the device lacks one of the ops."""
        if lacks_an_op(layer):
            return "off"
        # By turns: the kernels of its own come first, then PyTorch's and NumPy's.
        backend = self.backends[(0, 1, 0, 1, 0, 1, 2, 3)[number % 8] % len(self.backends)]
        if isinstance(backend, AnyKernel):
            backend.rng.seed(number)
        try:
            dtype = None if layer.format == "bfloat16" else layer.format
            program = compile(layer.g.ir(), backend.target, CompileOptions(compute_dtype=dtype))
            used = {spec.name: layer.inputs[spec.name] for spec in program.input_specs}
            results = Executor(program, backend).run(used, load_weights(layer.weights, program, backend))
        except NPUError as error:
            return f"{type(error).__name__}: {error}"
        (spec,) = program.output_specs
        return difference(layer, results[spec.name].to_numpy(spec).astype(np.float64))


def difference(layer: Layer, ours: np.ndarray) -> str:
    """Describe a result's difference from PyTorch's beyond rounding; empty where there is none."""
    theirs = layer.values[layer.g.outputs[0]].double().numpy()
    if ours.shape != theirs.shape:
        return f"shape {ours.shape}, not {theirs.shape}"
    finite = np.isfinite(theirs)
    allowed = layer.steps or TOLERANCE[layer.format] * max(1.0, float(np.abs(theirs[finite]).max(initial=0.0)))
    with np.errstate(invalid="ignore"):
        wrong = ~((np.abs(ours - theirs) <= allowed) | (ours == theirs) | (np.isnan(ours) & np.isnan(theirs)))
    if not wrong.any():
        return ""
    where = tuple(int(axis[0]) for axis in wrong.nonzero())
    return f"{wrong.sum()} of {wrong.size} elements, the first at {where}: {ours[where]:.6g}, not {theirs[where]:.6g}"


def run_here(device: str, seed: int, numbers: Sequence[int]) -> Iterator[str]:
    """Run layers in this process; yields a line before and after each one, and one for each that fails."""
    torch.set_num_threads(1)  # for results as small as these
    bench = Bench(device)
    for number in numbers:
        yield f"{_PROGRESS}{number}"
        layer = draw(seed, number)
        problem = bench.check(layer, number)
        yield f"count {layer.kind} {'off' if problem == 'off' else 'on'}"
        if problem not in ("", "off"):
            yield f"wrong {repeat(device, seed, number)}: {layer.describe()}: {problem}"


def repeat(device: str, seed: int, number: int) -> str:
    level = os.environ.get("NPU_SIM_CPU_LEVEL")
    prefix = f"NPU_SIM_CPU_LEVEL={level} " if level and device == "cpu" else ""
    return f"[{prefix}--device {device} --seed {seed} --first {number} --layers 1]"


@dataclass
class Outcome:
    """Outcome of batches of layers.

    Attributes:
        failures: A line for each layer that was wrong or ended its process.
        on, off: Layers of each kind that the device ran, and that it lacks an op for.
    """

    failures: list[str] = field(default_factory=list)
    on: Counter[str] = field(default_factory=Counter)
    off: Counter[str] = field(default_factory=Counter)


def run(device: str, seed: int, first: int, layers: int, level: str = "", batch: int = BATCH) -> Outcome:
    """Run layers, each batch of them in a process of its own; one that dies goes on after the layer that ended it.

    Args:
        level: CPU level to force; by default the machine's own.
    """
    outcome, end = Outcome(), first + layers
    while first < end:
        last = min(first + batch, end)
        first = _run_batch(device, seed, first, last, level, outcome)
    return outcome


def _run_batch(device: str, seed: int, first: int, last: int, level: str, outcome: Outcome) -> int:
    """Run layers `first` to `last` in a process; returns the number of the next layer to run."""
    environment = os.environ | {"NPU_SIM_TUNE": "0"} | ({"NPU_SIM_CPU_LEVEL": level} if level else {})
    paths = [str(Path(__file__).parent), *sys.path]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    command = [sys.executable, SCRIPT, "--here", "--device", device, "--seed", str(seed)]
    command += ["--first", str(first), "--layers", str(last - first)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    reached = first
    for line in done.stdout.splitlines():
        word, _, rest = line.partition(" ")
        if line.startswith(_PROGRESS):
            reached = int(rest)
        elif word == "wrong":
            outcome.failures.append(f"{level} {rest}".strip())
        elif word == "count":
            name, state = rest.split()
            (outcome.on if state == "on" else outcome.off)[name] += 1
    if done.returncode == 0:
        return last
    how = signal.Signals(-done.returncode).name if done.returncode < 0 else f"exit code {done.returncode}"
    layer = draw(seed, reached)
    tail = " ".join(done.stderr.strip().splitlines()[-1:])
    failure = f"{level} {repeat(device, seed, reached)}: {layer.describe()}: ended the process, {how} {tail}"
    outcome.failures.append(failure.strip())
    return reached + 1


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--layers", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=None, help="default: a fresh one")
    parser.add_argument("--first", type=int, default=0, help="number of the first layer")
    parser.add_argument("--here", action="store_true", help="run all layers in this process")
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(2**31) if options.seed is None else options.seed
    if options.here:
        for line in run_here(options.device, seed, range(options.first, options.first + options.layers)):
            print(line, flush=True)
        return 0
    outcome = run(options.device, seed, options.first, options.layers)
    for failure in outcome.failures:
        print(failure)
    print(f"seed {seed}: {outcome.on.total()} layers ran on {options.device}, {len(outcome.failures)} failed")
    print("not on the device:", ", ".join(f"{n} of {name}" for name, n in sorted(outcome.off.items())) or "none")
    return 1 if outcome.failures else 0


if __name__ == "__main__":
    sys.exit(main())
