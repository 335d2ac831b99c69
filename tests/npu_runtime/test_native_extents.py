"""Argument blocks tell all memory that their kernels touch, and a launch is refused where an operand has less."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quantized_products import KINDS, SCALES
from random_layers import AnyKernel, Layer, draw, lacks_an_op

from npu_compiler import CompileOptions, DeviceError, compile
from npu_compiler.graph.quantization import QuantizedArray, QuantizedFormat, quantize
from npu_compiler.program.kernels import KernelCall
from npu_runtime import Executor, load_weights
from npu_runtime.backend import Launch, Operand
from npu_runtime.cpu import native
from npu_runtime.cpu.arrays import BFLOAT16, address
from npu_runtime.cpu.native import convolutions as conv
from npu_runtime.cpu.native.bindings import NativeLaunch, pointers
from npu_runtime.cpu.native.extents import Extent, arrays_in
from npu_runtime.cpu.native.rows.pointwise import COMBINATIONS

pytestmark = pytest.mark.skipif(not native.available(), reason=f"no native kernels: {native.failure_reason()}")
FLOATS = (np.dtype(np.float32), np.dtype(np.float16), BFLOAT16)
SEEDS = st.integers(0, 2**32 - 1)


class Recording(AnyKernel):
    """A CPU device that keeps the native launches that it prepares."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[NativeLaunch] = []
        self.executor: Executor | None = None

    def prepare(self, call: KernelCall, inputs: Sequence[Operand], outputs: Sequence[Operand]) -> Launch:
        launch = super().prepare(call, inputs, outputs)
        if isinstance(launch, NativeLaunch):
            self.launches.append(launch)
        return launch


def launches_of(layer: Layer) -> list[NativeLaunch]:
    """Launches of a layer, after one run over its operands; none where it does not compile."""
    backend = Recording()
    if lacks_an_op(layer):
        return []
    program = compile(
        layer.g.ir(), options=CompileOptions(compute_dtype=None if layer.format == "bfloat16" else layer.format)
    )
    used = {spec.name: layer.inputs[spec.name] for spec in program.input_specs}
    backend.executor = Executor(program, backend)
    backend.executor.run(used, load_weights(layer.weights, program, backend))
    return backend.launches


class Operands:
    """Arrays of random sizes for kernels that random layers do not run."""

    def __init__(self, seed: int) -> None:
        self.rng, self.numbers = random.Random(seed), np.random.default_rng(seed)
        self.dtype = self.rng.choice(FLOATS)

    def size(self) -> int:
        return self.rng.choice((1, 1, 2, 3, 4, 7, 8, 16, 17, 33))

    def floats(self, *shape: int, dtype: np.dtype | None = None) -> np.ndarray:
        return self.numbers.standard_normal(shape).astype(dtype or self.dtype)

    def index(self, limit: int, *shape: int) -> np.ndarray:
        return self.numbers.integers(0, limit, shape).astype(np.int32)

    def places(self, limit: int, count: int) -> np.ndarray:
        """Indices that differ, of which some may be out of range."""
        return self.numbers.permutation(max(limit, count))[:count].astype(np.int32)


def gated_linear(o: Operands) -> NativeLaunch | None:
    n, k = o.size(), o.size()
    weight = native.pack_linear_weight(o.floats(2 * n, k))
    assert weight is not None
    bias = o.floats(2 * n) if o.rng.random() < 0.5 else None
    return native.gated_linear(o.floats(1, k), weight, bias, "silu", o.floats(1, n))


def quantized(o: Operands) -> QuantizedArray:
    """A weight of any format."""
    codes, offsets = o.rng.choice(KINDS)
    group = 2 * o.size()
    format = QuantizedFormat(codes, o.rng.choice((0, group)), o.rng.choice(SCALES), offsets)
    return quantize(o.floats(o.size(), group * o.rng.choice((1, 2)), dtype=FLOATS[0]), format)


def quantized_linear(o: Operands) -> NativeLaunch | None:
    weight, rows = native.pack_quantized(quantized(o)), o.size()
    assert weight is not None
    n, k = weight.n, weight.k
    bias = o.floats(n) if o.rng.random() < 0.5 else None
    residual = o.floats(rows, n) if o.rng.random() < 0.5 else None
    return native.quantized_linear(o.floats(rows, k), weight, bias, residual, "none", o.floats(rows, n))


def expert_linear(o: Operands) -> NativeLaunch | None:
    count, n, k, rows = o.size(), o.size(), o.size(), o.size()
    weight = native.pack_expert_weights(o.floats(count, n, k))
    assert weight is not None
    experts = o.index(count + 1, rows * o.rng.choice((1, 2, 3)))  # one of no expert among them
    bias = o.floats(count, n) if o.rng.random() < 0.5 else None
    return native.expert_linear(o.floats(rows, k), weight, experts, bias, o.floats(len(experts), n))


def quantized_expert_linear(o: Operands) -> NativeLaunch | None:
    count, rows, stored = o.size(), o.size(), quantized(o)
    n, k = stored.shape
    parts = [np.tile(stored.part(name), (count, 1)) for name in stored.format.parts(stored.shape)]
    weight = native.pack_quantized_experts(QuantizedArray(stored.format, (count * n, k), *parts), count)
    assert weight is not None
    experts = o.index(count + 1, rows * o.rng.choice((1, 2)))
    rounding = o.rng.choice(("none", "int8"))
    return native.quantized_expert_linear(o.floats(rows, k), weight, experts, None, o.floats(len(experts), n), rounding)


def quantized_embedding(o: Operands) -> NativeLaunch | None:
    weight, count = quantized(o), o.size()
    n, k = weight.shape
    return native.quantized_embedding(o.index(n, count), weight, o.floats(count, k))


def rope(o: Operands) -> NativeLaunch | None:
    shape = (o.size(), o.size(), o.size(), 2 * o.size())
    width = shape[3] // o.rng.choice((1, 2))
    cos, sin = o.floats(1, 1, shape[2], width), o.floats(1, 1, shape[2], width)
    return native.rope(o.floats(*shape), cos, sin, o.floats(*shape))


def index_copy_pair(o: Operands) -> NativeLaunch | None:
    batch, rows, width, count = o.size(), o.size(), o.size(), o.size()
    targets, sources = ([o.floats(batch, 2, size, width) for _ in range(2)] for size in (rows, count))
    return native.index_copy_pair(targets, 2, o.places(rows, count), sources)


def index_select(o: Operands) -> NativeLaunch | None:
    rows, width, count = o.size(), o.size(), o.size()
    return native.index_select(o.floats(2, rows, width), 1, o.index(rows, count), o.floats(2, count, width))


def elementwise(o: Operands) -> NativeLaunch | None:
    shape = (o.size(), o.size(), o.size())
    a, b = (o.floats(*(o.rng.choice((1, size)) for size in shape), dtype=FLOATS[0]) for _ in "ab")
    if o.rng.random() < 0.5:
        return native.elementwise("lt", [a, b], np.zeros(shape, np.bool_))
    return native.elementwise("where", [o.floats(*shape) > 0, a, b], o.floats(*shape, dtype=FLOATS[0]))


def place_of_extreme(o: Operands) -> NativeLaunch | None:
    rows = o.size()
    return native.place_of_extreme(o.floats(rows, o.size()), np.zeros(rows, np.int32), o.rng.random() < 0.5)


def reduce_last(o: Operands) -> NativeLaunch | None:
    x = o.floats(o.size(), o.size(), o.size()).transpose(o.rng.sample(range(3), 3))
    return native.reduce_last(o.rng.choice(("sum", "mean", "norm")), x, 1, o.floats(*x.shape[:2]))


def combine(o: Operands) -> NativeLaunch | None:
    shape, how = [o.size() for _ in range(3)], o.rng.choice(COMBINATIONS)
    others = [o.floats(*(o.rng.choice((1, size)) for size in shape)) for _ in range(2)]
    count = {"none": 0, "scale_shift": 2}.get(how, 1)
    return native.combine(how, [o.floats(*shape), *others[:count]], o.floats(*shape))


def group_norm(o: Operands) -> NativeLaunch | None:
    groups = o.rng.randint(1, 3)
    x = o.floats(o.size(), groups * o.rng.randint(1, 3), o.size(), o.size())
    weight, bias = (o.floats(x.shape[1]) if o.rng.random() < 0.7 else None for _ in range(2))
    return native.group_norm(x, weight, bias, groups, 1e-5, o.floats(*x.shape))


def argsort(o: Operands) -> NativeLaunch | None:
    rows, columns = o.size(), o.size()
    return native.argsort(o.floats(rows, columns), np.zeros((rows, columns), np.int32), o.rng.random() < 0.5)


def gather(o: Operands) -> NativeLaunch | None:
    rows, columns, picked = o.size(), o.size(), o.size()
    return native.gather(o.floats(rows, columns), 1, o.index(columns, rows, picked), o.floats(rows, picked))


def rounded_attention(o: Operands) -> NativeLaunch | None:
    batch, heads, queries, keys, width, values = (o.size() for _ in range(6))
    k, v = (o.numbers.integers(0, 100, (batch, heads, keys, size)).astype(np.uint8) for size in (width, values))
    scales = [np.abs(o.floats(batch, heads, keys, dtype=FLOATS[0])) for _ in range(2)]
    q, out = o.floats(batch, heads, queries, width), o.floats(batch, heads, queries, values)
    return native.attention(q, k, v, None, False, 1.0, out, native.QuantizedCache("int8", *scales))


def quantized_index_copy(o: Operands) -> NativeLaunch | None:
    batch, heads, rows, width, count = (o.size() for _ in range(5))
    codes, scales = np.zeros((batch, heads, rows, width), np.uint8), o.floats(batch, heads, rows, dtype=FLOATS[0])
    source = o.floats(batch, heads, count, width)
    return native.quantized_index_copy(codes, scales, o.places(rows, count), source, "int8")


def paged_attention(o: Operands) -> NativeLaunch | None:
    block, blocks, tokens, heads, width, values = (o.size() for _ in range(6))
    pools = [o.floats(block * blocks, heads, size) for size in (width, values)]
    sequences, length = o.size(), o.size()
    tables, positions = o.index(blocks, sequences, length), o.index(length * block, tokens)
    q, out = o.floats(tokens, heads, width), o.floats(tokens, heads, values)
    return native.paged_attention(q, *pools, tables, o.index(sequences, tokens), positions, block, 1.0, out)


MADE: list[Callable[[Operands], NativeLaunch | None]] = [
    gated_linear,
    quantized_linear,
    expert_linear,
    quantized_expert_linear,
    quantized_embedding,
    rope,
    index_copy_pair,
    index_select,
    elementwise,
    place_of_extreme,
    reduce_last,
    combine,
    group_norm,
    argsort,
    gather,
    rounded_attention,
    quantized_index_copy,
    paged_attention,
]


def some_launches(seed: int) -> Iterator[NativeLaunch]:
    """Yield the launches of a random layer, and one of those that only language models need."""
    yield from launches_of(draw(seed, 0))
    launch = random.Random(seed).choice(MADE)(Operands(seed))
    if launch is not None:
        yield launch


def bytes_at(start: int, size: int) -> np.ndarray:
    """An array over memory that a launch keeps."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(start))


def touched(launch: NativeLaunch) -> list[Extent]:
    return [x for x in launch.args.extents(launch.name) if x.address and x.begin < x.end]


@settings(max_examples=30)
@given(seed=SEEDS, cut=st.integers(1, 5))
def test_an_operand_that_is_too_small_is_refused_by_name(seed: int, cut: int) -> None:
    for launch in some_launches(seed):
        extents = touched(launch)
        assert len(extents) >= 2
        whole = {x.address: bytes_at(x.address + x.begin, x.end - x.begin) for x in extents if not x.begin}
        NativeLaunch(launch.name, launch.args, tuple(arrays_in(launch._keep)))
        for short in extents:
            others = [memory for start, memory in whole.items() if start != short.address]
            part = bytes_at(short.address, max(short.end - cut, 1))
            if short.end == 1 or sum(x.address == short.address for x in extents) > 1:
                continue
            with pytest.raises(DeviceError, match=f"kernel {launch.name} does not fit its operand '{short.operand}'"):
                NativeLaunch(launch.name, launch.args, (*others, part))
            with pytest.raises(DeviceError, match=f"operand '{short.operand}' is no array that its launch keeps"):
                NativeLaunch(launch.name, launch.args, others)


@settings(max_examples=30)
@given(seed=SEEDS)
def test_a_kernel_needs_no_more_memory_than_its_block_tells(seed: int) -> None:
    """A kernel runs on arrays cut to the declared bytes; with guarded arrays, an access beyond ends the process."""
    for launch in some_launches(seed):
        extents = touched(launch)
        ranges = {(x.address + x.begin, x.end - x.begin) for x in extents}
        sizes = {x.address: max(y.end for y in extents if y.address == x.address) for x in extents}
        spans = sorted((start, start + size) for start, size in sizes.items())
        if any(x.begin for x in extents) or any(a[1] > b[0] for a, b in zip(spans, spans[1:], strict=False)):
            continue  # operands that overlap in memory, such as halves of one tensor
        block = type(launch.args).from_buffer_copy(launch.args)
        copies = {start: bytes_at(start, size).copy() for start, size in sizes.items()}
        for start, memory in copies.items():
            for pointer, _ in pointers(block, start, 1):
                pointer.value = address(memory)
        NativeLaunch(launch.name, block, tuple(copies.values()))()
        launch()
        for start, size in ranges:
            np.testing.assert_array_equal(copies[start][:size], bytes_at(start, size), err_msg=launch.name)


def test_a_bias_that_is_too_short_is_refused() -> None:
    x, out = np.zeros((1, 3, 4, 4), np.float32), np.zeros((1, 5, 4, 4), np.float32)
    weight = conv.pack_conv_weight(np.ones((5, 3, 1, 1), np.float32))
    with pytest.raises(DeviceError, match="its operand 'bias': it would touch bytes 0 to 20, and there are 0 to 16"):
        conv.conv2d(x, weight, np.zeros(4, np.float32), None, "none", (1, 1), (0, 0, 0, 0), (1, 1), 1, out)


def test_maps_whose_rows_run_together_wrongly_are_refused() -> None:
    """The block that a stride beyond the map once led to: as many results as the map has pixels."""
    x, out = np.zeros((1, 3, 4, 4), np.float32), np.zeros((1, 5, 1, 1), np.float32)
    weight = conv.pack_conv_weight(np.ones((5, 3, 1, 1), np.float32))
    launch = conv.conv2d(x, weight, None, None, "none", (9, 9), (0, 0, 0, 0), (1, 1), 1, out)
    assert launch is not None
    launch.args.in_h, launch.args.in_w, launch.args.out_h, launch.args.out_w = 1, 16, 1, 16
    with pytest.raises(DeviceError, match="its operand 'out': it would touch bytes 0 to 320, and there are 0 to 20"):
        NativeLaunch(launch.name, launch.args, launch._keep)


@pytest.mark.parametrize("stride", [2, 9])
def test_windows_that_begin_behind_the_map_are_refused(stride: int) -> None:
    x, out = np.zeros((1, 3, 7, 7), np.float32), np.zeros((1, 3, 4, 6), np.float32)
    with pytest.raises(ValueError, match=r"a window of \(1, 3, 4, 6\) begins behind the padded map of \(1, 3, 7, 7\)"):
        conv.max_pool2d(x, (3, 3), (2, stride), (1, 1, 1, 1), (1, 1), out)


@pytest.mark.parametrize(("rows", "kv_heads"), [(3, 1), (4, 2), (4, 3)])
def test_pages_without_a_whole_block_or_with_more_heads_than_queries_have_no_native_kernel(
    rows: int, kv_heads: int
) -> None:
    q, pool = np.zeros((1, 1, 8), np.float32), np.zeros((rows, kv_heads, 8), np.float32)
    one = np.zeros(1, np.int32)
    assert native.paged_attention(q, pool, pool.copy(), one[None], one, one, 4, 1.0, q.copy()) is None


BINDINGS: dict[str, Callable[[Operands], tuple[Callable[..., Any], list[np.ndarray]]]] = {
    "matmul": lambda o: (native.matmul, [o.floats(2, 5, 7), o.floats(2, 7, 9), o.floats(2, 5, 9)]),
    "combine": lambda o: (
        lambda a, b, c, out: native.combine("scale_shift", [a, b, c], out),
        [o.floats(5, 7) for _ in range(4)],
    ),
    "group_norm": lambda o: (
        lambda x, weight, bias, out: native.group_norm(x, weight, bias, 2, 1e-5, out),
        [o.floats(2, 6, 5), o.floats(6), o.floats(6), o.floats(2, 6, 5)],
    ),
    "reduce_last": lambda o: (lambda x, out: native.reduce_last("norm", x, 1, out), [o.floats(5, 7), o.floats(5)]),
    "rope": lambda o: (
        native.rope,
        [o.floats(2, 3, 5, 8), o.floats(1, 1, 5, 8), o.floats(1, 1, 5, 8), o.floats(2, 3, 5, 8)],
    ),
    "copy": lambda o: (native.copy, [o.floats(5, 7), o.floats(5, 7)]),
    "elementwise": lambda o: (
        lambda a, b, out: native.elementwise("sub", [a, b], out),
        [o.floats(5, 7, dtype=FLOATS[0]) for _ in range(3)],
    ),
    "place_of_extreme": lambda o: (
        lambda x, out: native.place_of_extreme(x, out, True),
        [o.floats(5, 7), np.zeros(5, np.int32)],
    ),
    "embedding": lambda o: (native.embedding, [o.index(5, 3), o.floats(5, 7), o.floats(3, 7)]),
    "softmax": lambda o: (lambda x, out: native.softmax(x, 1.0, out), [o.floats(5, 7), o.floats(5, 7)]),
    "layer_norm": lambda o: (
        lambda x, weight, bias, out: native.layer_norm(x, weight, bias, 1e-5, out),
        [o.floats(5, 7), o.floats(7), o.floats(7), o.floats(5, 7)],
    ),
    "linear": lambda o: (
        lambda x, w, bias, residual, out: native.linear(x, native.pack_linear_weight(w), bias, residual, "relu", out),
        [o.floats(5, 7), o.floats(9, 7), o.floats(9), o.floats(5, 9), o.floats(5, 9)],
    ),
    "attention": lambda o: (
        lambda q, k, v, mask, sinks, out: native.attention(q, k, v, mask, False, 1.0, out, sinks=sinks),
        [
            *(o.floats(2, 4, 5, 8), *(o.floats(2, 2, 6, 8) for _ in "kv"), o.floats(2, 1, 5, 6)),
            *(o.floats(4), o.floats(2, 4, 5, 8)),
        ],
    ),
    "conv2d": lambda o: (
        lambda x, w, bias, residual, out: conv.conv2d(
            x, conv.pack_conv_weight(w), bias, residual, "relu", (2, 1), (1, 1, 1, 1), (1, 1), 1, out
        ),
        [o.floats(2, 3, 7, 6), o.floats(5, 3, 3, 3), o.floats(5), o.floats(2, 5, 4, 6), o.floats(2, 5, 4, 6)],
    ),
    "max_pool2d": lambda o: (
        lambda x, out: conv.max_pool2d(x, (3, 3), (2, 2), (1, 1, 1, 1), (1, 1), out),
        [o.floats(2, 3, 7, 7), o.floats(2, 3, 4, 4)],
    ),
    "paged_attention": lambda o: (
        lambda *arrays: native.paged_attention(*arrays[:6], 2, 1.0, arrays[6]),
        [o.floats(3, 2, 8), *(o.floats(6, 2, 8) for _ in "kv"), o.index(3, 2, 2), o.index(2, 3), o.index(4, 3),
         o.floats(3, 2, 8)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BINDINGS)
@settings(max_examples=40)
@given(seed=SEEDS)
def test_bindings_survive_operands_that_are_too_small(name: str, seed: int) -> None:
    """Launches that are not refused run; with guarded arrays, touching more than there is ends the process."""
    o = Operands(seed)
    binding, arrays = BINDINGS[name](o)
    position = o.rng.randrange(len(arrays))
    axis = o.rng.randrange(arrays[position].ndim)
    kept = o.rng.randrange(arrays[position].shape[axis])
    arrays[position] = np.take(arrays[position], range(kept), axis)
    try:
        launch = binding(*arrays)
    except (ValueError, DeviceError, AttributeError) as error:
        assert "NoneType" in str(error) or not isinstance(error, AttributeError)
        return
    if launch is not None:
        launch()
