"""The twins of the resident kernel's phases agree with the op-level calls, and the phases agree with their twins."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random

import cuda_gpu
import cuda_toolchain
import ml_dtypes
import numpy as np
import pytest
from cuda_on_cpu import EmulatedBackend
from cuda_phases import Phases, resident, run_reference, run_resident
from drawn import drawn
from hypothesis import given
from hypothesis import strategies as st

from cuda_compiler.resident import twins
from cuda_compiler.resident.layout import SLOT_BYTES
from npu_compiler.graph.quantization import QuantizedFormat
from npu_compiler.program.elementwise import ACTIVATIONS
from npu_runtime import Backend

TOLERANCE = {"float32": 2e-5, "bfloat16": 2.0**-6, "float16": 2.0**-9}
LOOSER = {"bfloat16": 2.0**-4, "float16": 2.0**-7}  # with x as integers of 15 bits per span, other results round up
SEEDS = st.integers(0, 2**32 - 1)


@given(
    seed=SEEDS,
    dtype=st.sampled_from(sorted(TOLERANCE)),
    rows=st.integers(1, 8),
    n=st.integers(1, 40),
    k=st.integers(1, 70),
    activation=st.sampled_from(["none", *ACTIVATIONS]),
    flags=st.tuples(*[st.booleans()] * 4),
)
def test_a_product_means_what_its_calls_do(
    seed: int, dtype: str, rows: int, n: int, k: int, activation: str, flags: tuple[bool, ...]
) -> None:
    phases = Phases(dtype, np.random.default_rng(seed))
    normed, gated, bias, residual = flags
    phases.product(phases.operand("x", rows, k), "out", n, activation, normed, gated, bias, residual and not gated)
    phases.check(run_reference(phases), TOLERANCE[dtype])


def check_attention(phases: Phases, dtype: str, normed: bool) -> None:
    """Compare the twin's attention with the reference, with 4 times the tolerance for norms.

    With norms, the order of a sum may change the last bit of a query or key, which their product makes larger.
    """
    found = run_reference(phases)
    attended = {"attended": found.pop("attended")}
    phases.check(found, TOLERANCE[dtype])
    phases.check(attended, (4 if normed else 1) * TOLERANCE[dtype])


@given(
    seed=SEEDS,
    dtype=st.sampled_from(sorted(TOLERANCE)),
    sharing=st.integers(1, 4),
    kv_heads=st.integers(1, 3),
    queries=st.integers(1, 8),
    keys=st.integers(8, 100),
    half_width=st.integers(1, 20),
    splits=st.integers(1, 8),
    normed=st.booleans(),
    soft_cap=st.sampled_from([0.0, 1.5]),
    sinks=st.booleans(),
    data=st.data(),
)
def test_attention_over_splits_means_what_its_calls_do(
    seed: int,
    dtype: str,
    sharing: int,
    kv_heads: int,
    queries: int,
    keys: int,
    half_width: int,
    splits: int,
    normed: bool,
    soft_cap: float,
    sinks: bool,
    data: st.DataObject,
) -> None:
    phases = Phases(dtype, np.random.default_rng(seed))
    start = data.draw(st.integers(0, keys - queries))
    sizes = (sharing * kv_heads, kv_heads, queries, keys, 2 * half_width, start, splits, normed)
    phases.attention(*sizes, soft_cap, sinks)
    check_attention(phases, dtype, normed)


@given(
    seed=SEEDS,
    dtype=st.sampled_from(sorted(TOLERANCE)),
    sharing=st.integers(1, 4),
    kv_heads=st.integers(1, 3),
    reached=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 70)), min_size=1, max_size=8, unique=True),
    half_width=st.integers(1, 20),
    splits=st.integers(1, 8),
    block_size=st.sampled_from([4, 16, 32]),
    normed=st.booleans(),
    window=st.sampled_from([0, 1, 9, 33]),
    soft_cap=st.sampled_from([0.0, 1.5]),
    sinks=st.booleans(),
)
def test_attention_over_a_pool_means_what_its_calls_do(
    seed: int,
    dtype: str,
    sharing: int,
    kv_heads: int,
    reached: list[tuple[int, int]],
    half_width: int,
    splits: int,
    block_size: int,
    normed: bool,
    window: int,
    soft_cap: float,
    sinks: bool,
) -> None:
    phases = Phases(dtype, np.random.default_rng(seed))
    sizes = (sharing * kv_heads, kv_heads, reached, 2 * half_width, splits, block_size, normed)
    phases.paged_attention(*sizes, window, soft_cap, sinks)
    check_attention(phases, dtype, normed)


@given(seed=SEEDS, span=st.sampled_from([16, 32]), spread=st.integers(0, 60))
def test_integers_stand_for_what_bfloat16_holds_of_a_span(seed: int, span: int, spread: int) -> None:
    rng = np.random.default_rng(seed)
    drawn = rng.standard_normal((2, 4 * span)) * 2.0 ** rng.integers(-spread, spread + 1, (2, 4 * span))
    x = drawn.astype(ml_dtypes.bfloat16)
    integers, powers = twins.span_integers(x, span)
    assert np.abs(integers).max() <= 2**14
    exact = x.astype(np.float32).reshape(2, -1, span)
    found = integers.reshape(exact.shape) * powers[..., None]
    largest = np.abs(exact).max(-1, keepdims=True)
    np.testing.assert_array_equal(*(np.where(np.abs(exact) >= largest / 64, value, 0) for value in (found, exact)))
    assert (np.abs(found - exact) <= largest / 2**14).all()


def test_a_span_that_is_not_finite_stays_so() -> None:
    x = np.ones((1, 64), np.float32)
    x[0, 40] = np.inf
    assert np.isnan(twins.span_integers(x, 32)[1]).tolist() == [[False, True]]


def test_a_row_that_attends_to_no_key_gets_zeros() -> None:
    q, cache, bias = np.ones((1, 1, 1, 4)), np.ones((1, 1, 40, 4)), np.full((1, 1, 1, 40), -np.inf)
    assert not twins.attend_keys(q, cache, cache, bias, 1.0, splits=2).any()


def test_rows_outside_the_cache_are_dropped() -> None:
    rows = np.arange(1.0, 5.0).reshape(1, 1, 4, 1)
    found = twins.update_cache(np.zeros((1, 1, 3, 1)), np.array([2, -1, 3, 0]), rows)
    assert found.ravel().tolist() == [4, 0, 1]


def products(dtype: str, seed: int, rows: int) -> Phases:
    """A chain that has each form of the product; all but the first read a mailbox."""
    phases = Phases(dtype, np.random.default_rng(seed))
    h = phases.product(phases.operand("x", rows, 256), "first", 320, "gelu", normed=True, bias=True)
    if rows == 1:
        h = phases.product(h, "gated", 336, "silu", normed=True, gated=True, bias=True)
    phases.product(h, "second", 9_000, "relu", bias=True, residual=True)
    return phases


def attention(dtype: str, seed: int, queries: int) -> Phases:
    """Attention and a product of its result, which comes through the mailbox; some splits have no keys."""
    phases = Phases(dtype, np.random.default_rng(seed))
    phases.product(phases.attention(6, 2, queries, 500, 64, 201, splits=8), "out", 96, normed=True)
    return phases


def normed_attention(dtype: str, seed: int, queries: int) -> Phases:
    """Attention as in `attention`, with the RMSNorm of every head; its pairs of packs are five."""
    phases = Phases(dtype, np.random.default_rng(seed))
    phases.product(phases.attention(6, 2, queries, 500, 80, 201, splits=8, normed=True), "out", 96)
    return phases


def attention_with_sinks(dtype: str, seed: int, queries: int) -> Phases:
    """Attention as in `attention`, with capped scores and heads that have sinks, of which five share keys."""
    phases = Phases(dtype, np.random.default_rng(seed))
    h = phases.attention(10, 2, queries, 500, 64, 201, splits=8, soft_cap=1.5, sinks=True)
    phases.product(h, "out", 96, normed=True)
    return phases


def wide_attention(dtype: str, seed: int, queries: int) -> Phases:
    """Attention as in `normed_attention`, with heads whose dimensions two warps share."""
    phases = Phases(dtype, np.random.default_rng(seed))
    phases.product(phases.attention(4, 2, queries, 700, 256, 301, splits=4, normed=True), "out", 96)
    return phases


def wider_attention(dtype: str, seed: int, queries: int) -> Phases:
    """Attention with heads whose dimensions four warps share, the last one fewer of them."""
    phases = Phases(dtype, np.random.default_rng(seed))
    phases.product(phases.attention(6, 2, queries, 500, 464, 201, splits=8), "out", 96)
    return phases


# Of sequences of different lengths; tokens in a row, in one tile and across its end; the first of a sequence.
REACHED = [(1, 300), (0, 14), (0, 15), (0, 16), (3, 1999), (2, 0), (1, 301), (4, 700)]


def windowed_paged_attention(dtype: str, seed: int, tokens: int) -> Phases:
    """Paged attention of tokens that see a window alone, with a soft cap of their scores."""
    phases = Phases(dtype, np.random.default_rng(seed))
    h = phases.paged_attention(6, 2, REACHED[:tokens], 64, splits=8, window=100, soft_cap=1.5)
    phases.product(h, "out", 96, normed=True)
    return phases


def paged_attention_with_sinks(dtype: str, seed: int, tokens: int) -> Phases:
    """Paged attention whose heads have sinks; some splits of some tokens have no keys, and a window hides others."""
    phases = Phases(dtype, np.random.default_rng(seed))
    h = phases.paged_attention(6, 2, REACHED[:tokens], 64, splits=8, window=400, sinks=True)
    phases.product(h, "out", 96, normed=True)
    return phases


def paged_attention(dtype: str, seed: int, tokens: int) -> Phases:
    """Attention to keys in a pool, and a product of its result; some splits of some tokens have no keys."""
    phases = Phases(dtype, np.random.default_rng(seed))
    phases.product(phases.paged_attention(6, 2, REACHED[:tokens], 64, splits=8), "out", 96, normed=True)
    return phases


def normed_paged_attention(dtype: str, seed: int, tokens: int) -> Phases:
    """Paged attention with the RMSNorm of every head, larger blocks of the pool, and two problems of a KV head."""
    phases = Phases(dtype, np.random.default_rng(seed))
    h = phases.paged_attention(40, 2, REACHED[:tokens], 80, splits=8, block_size=32, normed=True)
    phases.product(h, "out", 96)
    return phases


def wide_paged_attention(dtype: str, seed: int, tokens: int) -> Phases:
    """Paged attention with heads whose dimensions two warps share."""
    phases = Phases(dtype, np.random.default_rng(seed))
    h = phases.paged_attention(4, 2, REACHED[:tokens], 256, splits=8, normed=True)
    phases.product(h, "out", 96)
    return phases


def products_between_norms(dtype: str, seed: int, rows: int) -> Phases:
    """Products whose results are normalized and added to the residual, with and without the RMSNorm of the next one."""
    phases = Phases(dtype, np.random.default_rng(seed))
    x = phases.operand("x", rows, 320)
    h = phases.product(phases.operand("attended", rows, 256), "first", 320)
    h = phases.product(h, "up", 640, "gelu_tanh", normed=True, base=x)
    h = phases.product(h, "down", 320)
    whole = next(view for call in phases.calls for view in call.outputs if view.buffer == "up.whole")
    h = phases.product(h, "second", 320, base=whole)
    phases.product(h, "end", 700, normed=True, base=phases.operand("other", rows, 320))
    return phases


def long_products(dtype: str, seed: int, rows: int) -> Phases:
    """Products whose inputs do not fit shared memory where they have eight rows."""
    phases = Phases(dtype, np.random.default_rng(seed))
    h = phases.product(phases.operand("x", rows, 256), "gated", 6_000, "silu", normed=True, gated=True)
    h = phases.product(h, "down", 272, residual=True)
    h = phases.product(h, "up", 9_216, "gelu")
    phases.product(h, "end", 2_500, bias=True)
    return phases


def experts(dtype: str, seed: int, rows: int) -> Phases:
    """Experts of two layers, between products, of more ratings than a warp has lanes; some factors are float32.

    The ratings of the second layer are not a multiple of 16, so they are read behind the barrier.
    """
    phases = Phases(dtype, np.random.default_rng(seed))
    h = phases.product(phases.operand("x", 1, 192), "first", 320)
    h = phases.experts(h, "few", experts=48, choices=4, inner=192)
    h = phases.product(h, "wider", 1280, normed=True)
    h = phases.experts(h, "many", experts=70, choices=6, inner=320, factors_dtype="float32")
    phases.product(h, "last", 700, normed=True)
    return phases


def biased_experts(dtype: str, seed: int, rows: int) -> Phases:
    """Experts with biases and halves that alternate, several or one for a row, and experts of which only one is so."""
    phases = Phases(dtype, np.random.default_rng(seed))
    h = phases.product(phases.operand("x", 1, 192), "first", 320)
    h = phases.experts(h, "both", 32, 4, 192, gate="clamped_silu_mul", biases=True, interleaved=True)
    h = phases.experts(h, "biased", experts=48, choices=3, inner=128, biases=True)
    h = phases.experts(h, "interleaved", experts=16, choices=2, inner=64, interleaved=True)
    h = phases.experts(h, "one", experts=16, choices=1, inner=192, biases=True, interleaved=True)
    h = phases.experts(h, "halves", experts=16, choices=1, inner=128)
    phases.product(h, "last", 700, normed=True)
    return phases


FORMATS = [
    QuantizedFormat("int4", 32, "float16", "zero_point"),
    QuantizedFormat("int4", 32, "float32", "minimum"),
    QuantizedFormat("int4", 64, "bfloat16"),
    QuantizedFormat("int8"),
    QuantizedFormat("int8", 16, "float16", "minimum"),
    QuantizedFormat("int8", 0, "float32", "zero_point"),
    QuantizedFormat("float8_e4m3"),
    QuantizedFormat("float8_e4m3", 32, "bfloat16"),
    QuantizedFormat("float4_e2m1", 32, "bfloat16"),
    QuantizedFormat("iq4_nl", 64, "float32"),
]


def products_in_few_bits(dtype: str, seed: int, rows: int, format: QuantizedFormat) -> Phases:
    """Products whose weights are in few bits; rows of the last one take several slots, or end within a line."""
    phases = Phases(dtype, np.random.default_rng(seed))
    h = phases.product(phases.operand("x", rows, 320), "first", 320, "gelu", normed=True, bias=True, format=format)
    if rows == 1:
        h = phases.product(h, "gated", 336, "silu", normed=True, gated=True, bias=True, format=format)
        h = phases.product(h, "dense", 192, residual=True)
    h = phases.product(h, "between", 192, normed=True, format=format, base=phases.operand("base", *h.shape))
    h = phases.product(h, "long", 3008, "relu", format=format)
    phases.product(h, "second", 1600, bias=True, residual=True, format=format)
    return phases


def experts_in_few_bits(dtype: str, seed: int, rows: int, format: QuantizedFormat) -> Phases:
    """Experts in few bits, with and without biases; rows of the second products end within a line, or fill several."""
    phases = Phases(dtype, np.random.default_rng(seed))
    h = phases.product(phases.operand("x", 1, 192), "first", 320)
    h = phases.experts(h, "plain", experts=48, choices=4, inner=192, format=format)
    gate = "clamped_silu_mul"
    h = phases.experts(h, "biased", 32, 3, 448, gate=gate, biases=True, interleaved=True, format=format)
    h = phases.experts(h, "wide", experts=16, choices=2, inner=1344, format=format, interleaved=True)
    h = phases.experts(h, "one", 16, 1, 192, biases=True, interleaved=True, format=format)
    phases.product(h, "last", 700, normed=True)
    return phases


PHASES_IN_16_BITS = {
    "products": products,
    "long products": long_products,
    "attention": attention,
    "normed attention": normed_attention,
    "attention with sinks": attention_with_sinks,
    "wide attention": wide_attention,
    "wider attention": wider_attention,
    "paged attention": paged_attention,
    "wide paged attention": wide_paged_attention,
    "windowed paged attention": windowed_paged_attention,
    "paged attention with sinks": paged_attention_with_sinks,
    "products between norms": products_between_norms,
    "normed paged attention": normed_paged_attention,
    "experts": experts,
    "biased experts": biased_experts,
}
PHASES: dict[str, Callable[[str, int, int], Phases]] = {
    **PHASES_IN_16_BITS,
    **{str(format): partial(products_in_few_bits, format=format) for format in FORMATS},
    **{f"experts in {format}": partial(experts_in_few_bits, format=format) for format in FORMATS},
}
needs_gpu = pytest.mark.skipif(bool(cuda_gpu.PROBLEM), reason=cuda_gpu.PROBLEM)


@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize("kind", drawn(PHASES, 1 / 4))
def test_the_phases_are_connected_and_mean_what_their_calls_do(kind: str, rows: int, seed: int) -> None:
    phases = PHASES[kind]("bfloat16", seed, rows)
    # The calls round what each expert computes.
    phases.check(run_reference(phases), (2 if "experts" in kind else 1) * TOLERANCE["bfloat16"])
    call, make = resident(phases)
    text = make.sources[call.source]
    # Experts are chosen by ratings from the mailbox, which takes them 16 at a time.
    received, choosing = (text.count(f"constexpr bool {name} = true;") for name in ("from_mailbox", "rated_by_mailbox"))
    barriers = kind == "experts"  # of the layer with 70 experts
    assert choosing == [each.kernel for each in phases.calls].count("route") - barriers
    assert received + choosing == text.count("namespace phase") - 1 - barriers > 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", PHASES_IN_16_BITS)
def test_the_phases_compile(kind: str) -> None:
    sources = [source for rows in (1, 8) for source in resident(PHASES[kind]("float16", 0, rows))[1].sources.values()]
    cuda_toolchain.compile_sources(sources)


@pytest.mark.slow
@pytest.mark.parametrize(("turn", "format"), list(enumerate(FORMATS)))
def test_the_phases_compile_for_weights_in_few_bits(turn: int, format: QuantizedFormat) -> None:
    rows, dtype = (1, 3)[turn % 2], ("float16", "bfloat16")[turn // 2 % 2]
    made = resident(PHASES[str(format)](dtype, 0, rows))[1]
    cuda_toolchain.compile_in_turn(made.sources.values(), 2 if turn % 4 else 1)


ON_A_CPU = drawn([kind for kind in PHASES if kind != "long products"], 1 / 24)
ON_A_CPU.append(pytest.param("long products", id="long products", marks=pytest.mark.slow))  # a minute with eight rows


@pytest.mark.parametrize("kind", ON_A_CPU)
def test_the_phases_do_on_a_cpu_what_their_twins_say(
    kind: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few blocks whose threads take turns, compiled as for a GPU with a copy engine or without one."""
    draw = Random(seed)
    long_bytes, slot_bytes = draw.choice([(16 << 20, SLOT_BYTES), (1000, SLOT_BYTES), (1000, 8192)])
    monkeypatch.setattr("cuda_compiler.resident.phases._LONG_BYTES", long_bytes)  # small weights count as long
    monkeypatch.setattr("cuda_compiler.resident.products.SLOT_BYTES", slot_bytes)
    rows, dtype = draw.choice([1, 3, 8]), draw.choice(["bfloat16", "float16"])
    backend = EmulatedBackend(tmp_path, capability=draw.choice([80, 90]), blocks=draw.choice([2, 3]))
    check_phases(kind, rows, dtype, seed, backend, times=2)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize("kind", PHASES)
def test_the_phases_do_what_their_twins_say(kind: str, rows: int, dtype: str, seed: int) -> None:
    check_phases(kind, rows, dtype, seed, cuda_gpu.cuda_backends()[0])


def check_phases(kind: str, rows: int, dtype: str, seed: int, backend: Backend, times: int = 3) -> None:
    phases = PHASES[kind](dtype, seed, rows)
    runs = run_resident(phases, backend, times)
    for found in runs:
        phases.check(found, TOLERANCE[dtype] if kind in PHASES_IN_16_BITS else LOOSER[dtype])
        for name, array in found.items():
            assert array.tobytes() == runs[0][name].tobytes(), name
