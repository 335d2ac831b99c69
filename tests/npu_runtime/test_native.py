"""Native kernels against float64 torch references, over odd shapes, strides and all storage types."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from native_on_tensors import native
from torch.nn import functional

from npu_compiler import DeviceError
from npu_runtime.cpu.native import NativeLaunch, NativeSequence
from npu_runtime.cpu.native.rows.pointwise import COMBINATIONS

pytestmark = pytest.mark.skipif(not native.available(), reason=f"no native kernels: {native.failure_reason()}")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "none": lambda x: x,
    "relu": torch.relu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "silu": functional.silu,
    "relu6": functional.relu6,
    "hardswish": functional.hardswish,
    "hardsigmoid": functional.hardsigmoid,
    "sigmoid": torch.sigmoid,
}


@pytest.fixture(autouse=True)
def seed_and_single_threaded_references() -> Iterator[None]:
    """Seed torch and run it on one thread: on a busy machine its parallel operations wait for idle threads."""
    torch.manual_seed(7)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def strided(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Random values whose rows are further apart than they are long."""
    return torch.randn(*shape[:-1], shape[-1] + 5).to(dtype)[..., : shape[-1]]


def blank(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A strided result that shows what a kernel left out."""
    return torch.full((*shape[:-1], shape[-1] + 3), torch.nan, dtype=dtype)[..., : shape[-1]]


def run(launch: NativeLaunch | None) -> None:
    assert launch is not None, "the kernel refused operands that it should handle"
    launch()


def check(out: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-5) -> None:
    """Compares with float64 values: float32 results up to `tolerance`, 16-bit ones also up to one rounding."""
    rounding = torch.finfo(out.dtype).eps if out.dtype != torch.float32 else 0.0
    torch.testing.assert_close(out.double(), expected.double(), atol=tolerance, rtol=tolerance + rounding)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", (1, 2, 5, 12, 13, 47, 128, 401))
def test_linear(dtype: torch.dtype, rows: int) -> None:
    for columns, inner in ((1, 1), (7, 3), (64, 64), (100, 33), (192, 576), (37, 4999)):
        if rows > 100 and inner > 600:
            continue
        x, residual = strided(rows, inner, dtype=dtype), strided(rows, columns, dtype=dtype)
        weight, bias = (torch.randn(columns, inner) / inner**0.5).to(dtype), torch.randn(columns).to(dtype)
        packed = native.pack_linear_weight(weight)
        plain = x.double() @ weight.double().T
        for name, function in ACTIVATIONS.items():
            for out_dtype in {dtype, torch.float32}:
                out = blank(rows, columns, dtype=out_dtype)
                run(native.linear(x, packed, bias, residual, name, out))
                check(out, function(plain + bias.double()) + residual.double(), 3e-5)
        out = blank(rows, columns)
        run(native.linear(x, packed, None, None, "none", out))
        check(out, plain, 3e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("left_over", range(1, 33))
def test_linear_ends_with_any_part_of_a_panel(dtype: torch.dtype, left_over: int, seed: int) -> None:
    rng = random.Random(f"{seed} {left_over}")
    rows, columns, inner = rng.randint(13, 100), 32 * rng.randint(0, 2) + left_over, rng.randint(1, 200)
    x, weight = strided(rows, inner, dtype=dtype), (torch.randn(columns, inner) / inner**0.5).to(dtype)
    bias, residual = torch.randn(columns).to(dtype), strided(rows, columns, dtype=dtype)
    packed, sums = native.pack_linear_weight(weight), x.double() @ weight.double().T + bias.double()
    for name, added in (("relu", None), ("none", residual)):
        out = blank(rows, columns, dtype=dtype)
        run(native.linear(x, packed, bias, added, name, out))
        check(out, ACTIVATIONS[name](sums) + (0 if added is None else added.double()), 3e-5)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_of_extreme_values_are_pytorchs(name: str) -> None:
    magnitudes = [0.0, 1e-40, 1e-9, 0.5, 1.0, 6.0, 80.0, 86.5, 88.0, 89.5, 104.0, 1e9, 1e37]
    values = torch.tensor([torch.nan, torch.inf, *magnitudes, *(-x for x in magnitudes)])
    out = blank(len(values), 40)
    run(native.linear(values[:, None], native.pack_linear_weight(torch.ones(40, 1)), None, None, name, out))
    expected = ACTIVATIONS[name](values.double()).float()[:, None].expand_as(out)
    torch.testing.assert_close(out, expected, rtol=2e-5, atol=1e-9, equal_nan=True)


def test_linear_long_inner_dimension_is_sliced() -> None:
    for dtype in DTYPES:
        x, weight = torch.randn(30, 9001).to(dtype), (torch.randn(70, 9001) / 95).to(dtype)
        out = blank(30, 70)
        run(native.linear(x, native.pack_linear_weight(weight), None, None, "none", out))
        check(out, x.double() @ weight.double().T, 3e-5)


def test_linear_packs_transposed_weights_and_reads_operands_at_run_time() -> None:
    weight = torch.randn(48, 80).T
    x, out = torch.randn(3, 48), torch.empty(3, 80)
    launch = native.linear(x, native.pack_linear_weight(weight), None, None, "none", out)
    for _ in range(2):
        x.normal_()
        run(launch)
        check(out, x.double() @ weight.double().T)


def test_linear_rounds_once_and_overflows_to_infinity() -> None:
    weight = native.pack_linear_weight(torch.eye(40))
    x = torch.cat([torch.randn(2, 40) * 10.0**power for power in range(-42, 39, 8)])
    for dtype in (torch.bfloat16, torch.float16):
        out = blank(x.shape[0], 40, dtype=dtype)
        run(native.linear(x, weight, None, None, "none", out))
        torch.testing.assert_close(out, x.to(dtype), rtol=0, atol=0)
    assert torch.isinf(out).any()


def test_linear_refuses_what_it_does_not_handle() -> None:
    packed = native.pack_linear_weight(torch.randn(4, 8))
    out = torch.empty(2, 4)
    assert native.pack_linear_weight(torch.ones(4, 8, dtype=torch.int32)) is None
    assert native.linear(torch.randn(2, 8).bfloat16(), packed, None, None, "none", out) is None
    assert native.linear(torch.randn(8, 2).T, packed, None, None, "none", out) is None
    assert native.linear(torch.randn(2, 8), packed, None, None, "tanh", out) is None


@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_linear(dtype: torch.dtype) -> None:
    for columns, inner in ((1, 1), (7, 3), (64, 64), (100, 33), (192, 576), (17000, 20)):
        x, bias = strided(1, inner, dtype=dtype), torch.randn(2 * columns).to(dtype)
        weight = (torch.randn(2 * columns, inner) / inner**0.5).to(dtype)
        packed = native.pack_linear_weight(weight)
        for name, function in ACTIVATIONS.items():
            for added in (bias, None):
                gate, up = functional.linear(
                    x.double(), weight.double(), None if added is None else added.double()
                ).chunk(2, -1)
                for out_dtype in {dtype, torch.float32}:
                    out = blank(1, columns, dtype=out_dtype)
                    run(native.gated_linear(x, packed, added, name, out))
                    check(out, function(gate) * up, 3e-5)


def test_gated_linear_refuses_what_it_does_not_handle() -> None:
    packed, out = native.pack_linear_weight(torch.randn(8, 6)), torch.empty(1, 4)
    x, bias = torch.randn(1, 6), torch.randn(8)
    assert native.gated_linear(x, packed, bias, "silu", out) is not None
    assert native.gated_linear(torch.randn(2, 6), packed, bias, "silu", torch.empty(2, 4)) is None
    assert native.gated_linear(x, packed, bias[:4], "silu", out) is None
    assert native.gated_linear(x, packed, bias, "tanh", out) is None
    assert native.gated_linear(x.bfloat16(), packed, bias, "silu", out) is None
    assert native.gated_linear(x, native.pack_linear_weight(torch.randn(9, 6)), None, "silu", out) is None


@pytest.mark.parametrize("dtype", DTYPES)
def test_matmul(dtype: torch.dtype) -> None:
    for batch, rows, inner, columns in (((), 1, 1, 1), ((3,), 5, 17, 33), ((2, 3), 29, 64, 31), ((2, 1), 12, 250, 70)):
        a = strided(*batch, rows, inner, dtype=dtype)
        for b in (strided(*batch, inner, columns, dtype=dtype), strided(*batch, columns, inner, dtype=dtype).mT):
            out = blank(*batch, rows, columns)
            run(native.matmul(a, b, out))
            check(out, a.double() @ b.double(), 5e-5)
    a, b, out = torch.randn(2, 3, 4, 5), torch.randn(3, 5, 6), torch.empty(2, 3, 4, 6)
    run(native.matmul(a, b, out))
    check(out, a.double() @ b.double())


def attention_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float,
    soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    groups = q.shape[1] // k.shape[1]
    scores = q.double() @ k.double().repeat_interleave(groups, 1).mT * scale
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    if causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
    if mask is not None and mask.dtype is torch.bool:
        scores = scores.masked_fill(~mask, -torch.inf)
    elif mask is not None:
        scores = (scores.float() + mask.float()).double()
    weights = scores
    if sinks is not None:
        weights = torch.cat([scores, sinks.double()[:, None, None].expand(*scores.shape[:3], 1)], -1)
    # As torch defines it: a row that attends nothing is zero.
    weights = torch.softmax(weights, -1)[..., : k.shape[2]].nan_to_num(0.0)
    return weights @ v.double().repeat_interleave(groups, 1)


def attention_masks(batch: int, heads: int, queries: int, keys: int, dtype: torch.dtype) -> list[torch.Tensor | None]:
    boolean = torch.rand(batch, 1, queries, keys) > 0.5
    boolean[:, :, queries // 2] = False
    lowest = torch.where(torch.arange(keys) > keys // 3, torch.finfo(dtype).min, 0.0).to(dtype).repeat(queries, 1)
    lowest[queries // 2] = torch.finfo(dtype).min
    sparse = torch.where(torch.rand(1, heads, queries, keys) > 0.95, 0.0, -torch.inf)
    one_for_all_keys = torch.rand(batch, 1, queries, 1)
    return [
        *(None, boolean, torch.randn(queries, keys), lowest, sparse, torch.rand(1, 1, 1, keys) > 0.3),
        *(one_for_all_keys > 0.3, torch.where(one_for_all_keys > 0.3, one_for_all_keys, -torch.inf)),
    ]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("queries", (1, 3, 5, 29, 130))
def test_attention(dtype: torch.dtype, queries: int) -> None:
    cases = ((1, 1, 1, 64, 64), (15, 4, 1, 40, 24), (100, 9, 3, 64, 64), (257, 2, 2, 33, 100), (600, 2, 1, 128, 128))
    for keys, heads, kv_heads, width, value_width in cases:
        if queries > 100 and heads > 2:
            continue
        q = strided(2, queries, heads, width, dtype=dtype).transpose(1, 2)
        k, v = (strided(2, kv_heads, keys, size, dtype=dtype) for size in (width, value_width))
        for mask in attention_masks(2, heads, queries, keys, dtype):
            for causal in {mask is None, False}:
                out = blank(2, queries, heads, value_width).transpose(1, 2)
                run(native.attention(q, k, v, mask, causal, width**-0.5, out))
                # Prefill in bfloat16 rounds the softmax's weights, as torch does.
                tolerance = 1e-2 if dtype is torch.bfloat16 and queries > 4 else 5e-5
                expected = attention_reference(q, k, v, mask, causal, width**-0.5)
                # Beside the lowest float16 a score is rounded to multiples of 1/256, here or there by one more.
                if mask is not None and mask.dtype is torch.float16:
                    hidden = (mask == torch.finfo(torch.float16).min).all(-1)
                    check(out[:, :, hidden], expected[:, :, hidden], 5e-3)
                    out, expected = out[:, :, ~hidden], expected[:, :, ~hidden]
                check(out, expected, tolerance)


@settings(max_examples=60)
@given(
    queries=st.sampled_from([1, 2, 4, 5, 40]), keys=st.integers(1, 300), shared=st.integers(1, 2),
    group=st.integers(1, 3), width=st.sampled_from([8, 33, 64]), dtype=st.sampled_from(DTYPES),
    soft_cap=st.sampled_from([0.0, 0.5, 3.0, 50.0]), sinks=st.sampled_from([None, -2.0, 0.0, 4.0]),
    seed=st.integers(0, 2**31),
)  # fmt: skip
def test_attention_with_a_soft_cap_and_sinks(
    queries: int,
    keys: int,
    shared: int,
    group: int,
    width: int,
    dtype: torch.dtype,
    soft_cap: float,
    sinks: float | None,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    q, k, v = (
        strided(2, heads, rows, width, dtype=dtype)
        for heads, rows in ((shared * group, queries), (shared, keys), (shared, keys))
    )
    beside = None if sinks is None else (sinks + 2.0 * torch.randn(shared * group)).to(dtype)
    lowest = torch.where(torch.rand(queries, 1) > 0.3, 0.0, torch.finfo(torch.float32).min).repeat(1, keys)
    kinds = {
        "none": None,
        "bool": torch.rand(2, 1, queries, keys) > 0.3,
        "float": torch.randn(queries, keys),
        "lowest": lowest,  # in whole rows
    }
    for kind, mask in kinds.items():
        for causal in (False, True):
            out = blank(2, shared * group, queries, width)
            run(native.attention(q, k, v, mask, causal, 2.0 * width**-0.5, out, None, soft_cap, beside))
            tolerance = 2e-2 if dtype is torch.bfloat16 and queries > 4 else 1e-4
            expected = attention_reference(q, k, v, mask, causal, 2.0 * width**-0.5, soft_cap, beside)
            assert torch.allclose(out.double(), expected, tolerance, tolerance), f"{kind}, {causal}"


def test_a_row_that_attends_to_nothing_is_zero_with_a_sink_too() -> None:
    q, k = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 7, 8)
    seen = torch.tensor([True, False, True])[:, None].expand(3, 7)
    for mask in (seen, torch.where(seen, 0.0, -torch.inf)):
        out, sinks = blank(1, 2, 3, 8), torch.tensor([-torch.inf, 1000.0])
        run(native.attention(q, k, k, mask, False, 1.0, out, None, 0.0, sinks))
        check(out[:, :1], attention_reference(q[:, :1], k[:, :1], k[:, :1], mask, False, 1.0), 1e-5)
        assert out[:, 1].abs().max() == 0


def masks_with_holes(heads: int, queries: int, keys: int) -> dict[str, torch.Tensor]:
    """Boolean masks that hide whole panels and tiles of keys from some or all queries."""
    key, query = torch.arange(keys), torch.arange(queries)[:, None]
    masks = {
        "start of a cache": key <= query,
        "end of a cache": key > keys - queries + query,
        "hole": ((key < 40) | (key > keys - 70)).expand(queries, keys),
        "stripes": ((key // 32 + query // 7) % 3 == 0).clone(),
        "window": (key - 3 * query).abs() < 50,
        "padding": (key < keys // 2 + 1)[None],
        "per head": (key // 64 + query // 16)[None] % (torch.arange(heads)[:, None, None] + 1) == 0,
        "one key per head": key == (queries * 5 + 97 * torch.arange(heads)[:, None, None] + query) % keys,
        "nothing": torch.zeros(queries, keys, dtype=torch.bool),
    }
    masks["stripes"][queries // 2 :: 2] = False
    masks["per head and batch"] = torch.stack([masks["per head"], masks["per head"].flip(-1)])
    return masks


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("queries, keys", ((5, 2047), (12, 257), (13, 31), (61, 1), (61, 801), (130, 129)))
def test_attention_with_holes_in_the_mask(dtype: torch.dtype, queries: int, keys: int) -> None:
    heads, kv_heads, width, tolerance = 6, 2, 16, 5e-5 if dtype is torch.float32 else 1e-2
    shapes = ((2, heads, queries, width), (2, kv_heads, keys, width), (2, kv_heads, keys, width))
    q, k, v = (strided(*shape, dtype=dtype) for shape in shapes)
    for name, seen in masks_with_holes(heads, queries, keys).items():
        hidden = ~torch.broadcast_to(seen, (2, heads, queries, keys)).unflatten(1, (kv_heads, -1)).any(2).any(2)
        for low in (None, -torch.inf, torch.finfo(torch.bfloat16).min, torch.finfo(torch.float32).min):
            mask = seen if low is None else torch.where(seen, 0.0, low)
            for causal in (False, True):
                out, expected = blank(2, heads, queries, width), attention_reference(q, k, v, mask, causal, 0.25)
                run(native.attention(q, k, v, mask, causal, 0.25, out))
                assert torch.allclose(out.double(), expected, tolerance, tolerance), f"{name}, {low}, {causal}"
        # Panels that no query of a key head sees are not read.
        panels = functional.pad(hidden, (0, -keys % 32), value=True).unflatten(-1, (-1, 32)).all(-1)
        unread = panels.repeat_interleave(32, -1)[..., :keys, None]
        poisoned = [x.masked_fill(unread, torch.nan) for x in (k, v)]
        out = blank(2, heads, queries, width)
        run(native.attention(q, *poisoned, seen, False, 0.25, out))
        check(out, attention_reference(q, k, v, seen, False, 0.25), tolerance)


def test_attention_causal_does_not_read_the_future() -> None:
    q, k, v = torch.randn(1, 2, 40, 16), torch.randn(1, 2, 3000, 16), torch.randn(1, 2, 3000, 16)
    expected = attention_reference(q, k, v, None, True, 0.25)
    k[:, :, 64:], v[:, :, 64:] = torch.nan, torch.nan
    out = torch.empty(1, 2, 40, 16)
    run(native.attention(q, k, v, None, True, 0.25, out))
    check(out, expected)


def test_attention_mask_of_nan_hides_nothing() -> None:
    for queries in (1, 9):
        q, k = torch.randn(1, 1, queries, 16), torch.randn(1, 1, 300, 16)
        mask = torch.full((queries, 300), -torch.inf)
        mask[:, 290] = 0.0
        mask[0, 40] = torch.nan
        out = torch.empty(1, 1, queries, 16)
        run(native.attention(q, k, k, mask, False, 1.0, out))
        assert out[0, 0, 0].isnan().all() and not out[0, 0, 1:].isnan().any()


@pytest.mark.parametrize("queries", (1, 9))
def test_attention_does_not_read_masked_keys(queries: int) -> None:
    q, k, v = torch.randn(1, 2, queries, 16), torch.randn(1, 2, 5000, 16), torch.randn(1, 2, 5000, 16)
    mask = torch.full((1, 1, queries, 5000), torch.finfo(torch.float32).min)
    mask[..., 1024:1100] = 0.0
    expected = functional.scaled_dot_product_attention(q, k, v, mask)
    # Whole tiles outside are never touched, so that an unused part of a cache may hold anything.
    k[:, :, 2048:], v[:, :, 2048:] = torch.nan, torch.nan
    out = torch.empty(1, 2, queries, 16)
    run(native.attention(q, k, v, mask, False, 0.25, out))
    check(out, expected)


def test_attention_passes_nan_on() -> None:
    for queries in (1, 9):
        q, k = torch.randn(1, 1, queries, 16), torch.randn(1, 1, 40, 16)
        q[0, 0, 0, 3] = torch.nan
        out = torch.empty(1, 1, queries, 16)
        run(native.attention(q, k, k, None, False, 1.0, out))
        assert out[0, 0, 0].isnan().all() and not out[0, 0, 1:].isnan().any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", (1, 16, 31, 576, 5003))
def test_norms(dtype: torch.dtype, width: int) -> None:
    x = strided(2, 7, width, dtype=dtype) + 3
    weight, bias = torch.randn(width).to(dtype), torch.randn(width)
    exact = x.double()

    def rms(values: torch.Tensor) -> torch.Tensor:
        return values * torch.rsqrt((values * values).mean(-1, keepdim=True) + 1e-5)

    out = blank(2, 7, width, dtype=dtype)
    run(native.rms_norm(x, weight, 1e-5, 0.0, out))
    check(out, rms(exact) * weight.double())
    run(native.rms_norm(x, weight, 1e-5, 1.0, out))
    check(out, rms(exact) * (weight.double() + 1))
    run(native.rms_norm(x, None, 1e-5, 1.0, out))
    check(out, rms(exact))
    run(native.layer_norm(x, weight, bias, 1e-5, out))
    check(out, functional.layer_norm(exact, (width,), weight.double(), bias.double(), 1e-5), 1e-4)
    run(native.layer_norm(x, None, None, 1e-5, out))
    check(out, functional.layer_norm(exact, (width,), eps=1e-5), 1e-4)
    run(native.softmax(x, 0.3, out))
    check(out, torch.softmax(exact * 0.3, -1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", ((1,), (3, 17), (2, 3, 5, 40), (4, 9001)))
def test_pointwise(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    a, b, out = strided(*shape, dtype=dtype), strided(*shape, dtype=dtype), blank(*shape, dtype=dtype)
    run(native.combine("add", [a, b], out))
    check(out, a.double() + b.double())
    run(native.combine("multiply", [a, torch.randn(shape[-1]).to(dtype).expand(shape)], out))
    run(native.combine("multiply", [a, b[..., :1]], out))
    check(out, a.double() * b[..., :1].double())
    run(native.activation_mul("silu", a, b, out))
    check(out, functional.silu(a.double()) * b.double())
    run(native.clamped_silu_mul(a * 4, b * 4, 1.25, 3.0, out))
    check(out, clamped_gate((a * 4).double(), (b * 4).double(), 1.25, 3.0))
    for name, function in ACTIVATIONS.items():
        run(native.activation(name, a * 4, out))
        check(out, function(a.double() * 4))
    for other in DTYPES:
        converted = blank(*shape, dtype=other)
        run(native.cast(a, converted))
        torch.testing.assert_close(converted, a.to(other), rtol=0, atol=0)


def clamped_gate(gate: torch.Tensor, up: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * (gate * torch.sigmoid(gate * alpha))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows, width", ((1, 5), (4, 33), (3, 9001)))
def test_a_clamped_gate_reads_neighbouring_columns(dtype: torch.dtype, rows: int, width: int) -> None:
    both, out = (3 * torch.randn(rows, 2 * width)).to(dtype), blank(rows, width, dtype=dtype)
    run(native.clamped_silu_mul(both[:, ::2], both[:, 1::2], 1.702, 7.0, out))
    check(out, clamped_gate(both[:, ::2].double(), both[:, 1::2].double(), 1.702, 7.0))
    run(native.clamped_silu_mul(both[:, ::2].float(), both[:, 1::2], 1.702, 2.0, out))
    check(out, clamped_gate(both[:, ::2].double(), both[:, 1::2].double(), 1.702, 2.0))


def test_a_clamped_gate_passes_nan_on_and_clamps_infinity() -> None:
    nan, inf = torch.nan, torch.inf
    a, b = torch.tensor([nan, 1.0, inf, 2.0, 3.0, -1e30]), torch.tensor([1.0, nan, -2.0, inf, -inf, 5.0])
    out = blank(6)
    run(native.clamped_silu_mul(a, b, 1.702, 7.0, out))
    torch.testing.assert_close(out, clamped_gate(a, b, 1.702, 7.0), equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("channels, pixels", ((3, 5), (16, 32), (37, 49), (130, 257)))
def test_pointwise_of_transposed_operands(dtype: torch.dtype, channels: int, pixels: int) -> None:
    a, out = strided(2, channels, pixels, dtype=dtype), blank(2, channels, pixels, dtype=dtype)
    turned = strided(2, pixels, channels, dtype=dtype).transpose(1, 2)
    run(native.combine("add", [a, turned], out))
    check(out, a.double() + turned.double())
    run(native.combine("multiply", [turned, turned[:, :, :1]], out))
    check(out, turned.double() * turned[:, :, :1].double())
    run(native.activation_mul("silu", turned, a, out))
    check(out, functional.silu(turned.double()) * a.double())
    run(native.combine("add", [a, turned.float()], out))
    check(out, a.double() + turned.double())
    run(native.combine("add", [a.transpose(1, 2), turned.transpose(1, 2)], out.transpose(1, 2)))
    check(out, a.double() + turned.double())


def test_activations_over_their_whole_range() -> None:
    x = torch.cat([torch.linspace(-110, 110, 200_003), torch.tensor([0.0, -0.0, torch.inf, 1e30, -1e30])])
    out = torch.empty_like(x)
    for name, function in ACTIVATIONS.items():
        run(native.activation(name, x, out))
        torch.testing.assert_close(out.double(), function(x.double()), atol=4e-7, rtol=1e-6)
    run(native.activation("silu", torch.tensor([torch.nan]), out[:1]))
    assert out[0].isnan()


def test_softmax_is_accurate_where_weights_are_tiny() -> None:
    x = torch.linspace(-100, 0, 1001)[None]
    out = torch.empty_like(x)
    run(native.softmax(x, 1.0, out))
    torch.testing.assert_close(out.double(), torch.softmax(x.double(), -1), rtol=2e-6, atol=1e-44)


def test_casts_round_to_nearest_even_everywhere() -> None:
    bits = torch.randint(-(2**31), 2**31, (200_000,), dtype=torch.int64).to(torch.int32)
    x = bits.view(torch.float32)
    x = torch.cat([x, torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 65519.9, 65520.0, 1e-40, 6e-8, 2e-8])])
    for dtype in (torch.bfloat16, torch.float16):
        out = torch.empty(x.shape, dtype=dtype)
        run(native.cast(x, out))
        torch.testing.assert_close(out, x.to(dtype), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", (2, 20, 64, 128))
def test_rope(dtype: torch.dtype, width: int) -> None:
    x = strided(2, 11, 3, width, dtype=dtype).transpose(1, 2)
    for table_dtype, table_width in ((torch.float32, width), (dtype, width), (torch.float32, width // 2)):
        cos, sin = (strided(1, 1, 11, table_width, dtype=table_dtype) for _ in range(2))
        repeats = width // table_width
        low, high = x.double().chunk(2, -1)
        rotated = torch.cat((-high, low), -1)
        expected = x.double() * cos.double().repeat(1, 1, 1, repeats) + rotated * sin.double().repeat(1, 1, 1, repeats)
        out = blank(2, 3, 11, width, dtype=dtype)
        run(native.rope(x, cos, sin, out))
        check(out, expected)
        in_place = x.clone(memory_format=torch.preserve_format)
        run(native.rope(in_place, cos, sin, in_place))
        torch.testing.assert_close(in_place, out, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", (torch.uint8, torch.bfloat16, torch.float32, torch.int64))
def test_copy(dtype: torch.dtype) -> None:
    base = torch.randint(0, 100, (3, 40, 50, 7)).to(dtype)
    sources = [base, base.permute(3, 1, 0, 2), base.permute(0, 2, 1, 3), base[:, ::3, :, 1:2], base[0, 0, 0, 0]]
    sources += [base[0, 0].T, base[:1].expand(4, 40, 50, 7)]
    sources.append(base.view(3, 4, 10, 5, 10, 7).permute(5, 3, 1, 0, 2, 4))
    for source in sources:
        targets = [torch.zeros(source.shape, dtype=dtype)]
        if source.dim() > 1:
            targets.append(torch.zeros(source.transpose(0, -1).shape, dtype=dtype).transpose(0, -1))
            targets.append(torch.zeros(*source.shape[:-1], source.shape[-1] + 2, dtype=dtype)[..., 1:-1])
        for target in targets:
            run(native.copy(source, target))
            assert torch.equal(target, source)
    assert native.copy(base, torch.empty(3, 40, 50, 7, dtype=torch.float64)) is None


def test_embedding() -> None:
    for dtype in DTYPES:
        table = torch.randn(50, 77).to(dtype)
        for ids in (torch.randint(0, 50, (2, 9), dtype=torch.int32), torch.randint(0, 50, (1,))):
            out = torch.empty(*ids.shape, 77, dtype=dtype)
            run(native.embedding(ids, table, out))
            assert torch.equal(out, table[ids.long()])
        outside = torch.tensor([-1, 50, 3], dtype=torch.int32)
        out = torch.empty(3, 77, dtype=dtype)
        run(native.embedding(outside, table, out))
        assert not out[:2].any() and torch.equal(out[2], table[3])


def test_index_copy() -> None:
    for dtype in (torch.float32, torch.float16, torch.int64):
        for dim in (0, 1, 2, -1):
            target = torch.randint(0, 100, (3, 4, 20, 8)).to(dtype)
            index = torch.randperm(target.shape[dim], dtype=torch.int32)[:2]
            source = torch.randint(0, 100, (3, 4, 20, 8)).to(dtype).narrow(dim, 1, 2).contiguous()
            expected = target.clone().index_copy_(dim, index.long(), source)
            run(native.index_copy(target, dim, index, source))
            assert torch.equal(target, expected)
    cache, new = torch.zeros(1, 3, 16, 8), torch.randn(1, 2, 3, 8).transpose(1, 2)
    run(native.index_copy(cache, 2, torch.tensor([5, 16], dtype=torch.int32), new))
    assert torch.equal(cache[:, :, 5], new[:, :, 0]) and cache.count_nonzero() == 24
    pool, new = torch.zeros(16, 3, 8), torch.randn(3, 2, 8).transpose(0, 1)
    run(native.index_copy(pool, 0, torch.tensor([5, 2], dtype=torch.int32), new))
    assert torch.equal(pool[[5, 2]], new) and pool.count_nonzero() == 48


def test_index_copy_pair() -> None:
    index = torch.tensor([5, 2, 16], dtype=torch.int32)
    for dtype in (torch.float32, torch.bfloat16):
        caches = [torch.randn(1, 2, 16, 8).to(dtype) for _ in range(2)]
        sources = [torch.randn(1, 2, 3, 8).to(dtype), torch.randn(1, 3, 2, 8).to(dtype).transpose(1, 2)]
        expected = [
            cache.index_copy(2, index[:2].long(), source[:, :, :2])
            for cache, source in zip(caches, sources, strict=True)
        ]
        run(native.index_copy_pair(caches, 2, index, sources))
        assert all(torch.equal(cache, wanted) for cache, wanted in zip(caches, expected, strict=True))
    assert native.index_copy_pair(caches, 2, index, [sources[0], sources[1].float()]) is None


def test_index_select() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int32):
        for dim in (0, 1, 2, -1):
            source = torch.randint(0, 100, (3, 4, 6, 8)).to(dtype)
            index = torch.randint(0, source.shape[dim], (5,), dtype=torch.int32)
            expected = source.index_select(dim, index)
            out = torch.zeros_like(expected)
            run(native.index_select(source, dim, index, out))
            assert torch.equal(out, expected)


@pytest.mark.parametrize("wrong", [-1, 50])
def test_an_unchecked_index_out_of_range_fails_the_kernel(wrong: int) -> None:
    index, table, rows = torch.tensor([3, wrong], dtype=torch.int32), torch.randn(50, 8), torch.zeros(2, 8)
    for launch in (
        native.embedding(index, table, rows, False),
        native.index_select(table, 0, index, rows),
        native.index_copy(table, 0, index, rows, False),
    ):
        with pytest.raises(DeviceError, match=f"index {wrong} is out of range for 50 rows in kernel copy_indexed"):
            run(launch)


SCALAR_OPS: dict[str, Callable[..., torch.Tensor]] = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "abs": torch.abs, "neg": torch.neg, "cos": torch.cos,
    "sin": torch.sin, "eq": torch.eq, "ne": torch.ne, "lt": torch.lt, "le": torch.le, "gt": torch.gt, "ge": torch.ge,
    "true_divide": torch.true_divide,
}  # fmt: skip


def numbers(generator: random.Random, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Random values in the strides of another order of the dimensions, special ones among them."""
    order = generator.sample(range(len(shape)), len(shape))
    if dtype == torch.bool:
        values = torch.rand([shape[d] for d in order]) < 0.5
    elif dtype == torch.int32:
        values = torch.randint(-3, 4, [shape[d] for d in order], dtype=dtype)
        values.view(-1)[:1] = generator.choice((-(2**31), 2**31 - 1, 0))
    else:
        values = torch.randn([shape[d] for d in order]).round(decimals=1)
        values.view(-1)[:1] = generator.choice((torch.nan, torch.inf, -0.0))
    return values.permute([order.index(d) for d in range(len(shape))])


@settings(max_examples=150)
@given(generator=st.randoms(use_true_random=False))
def test_elementwise_ops_are_pytorchs(generator: random.Random) -> None:
    dtype = generator.choice((torch.float32, torch.int32, torch.bool))
    shape = tuple(generator.choice((1, 2, 3, 17)) for _ in range(generator.randint(0, 4)))

    def operand() -> torch.Tensor | float:
        if generator.random() < 0.2 and dtype != torch.bool:
            return generator.choice((0, 1, -2, 3)) if dtype == torch.int32 else generator.choice((0.5, -1.0, torch.inf))
        return numbers(generator, dtype, tuple(generator.choice((1, size)) for size in shape))

    op = generator.choice((*SCALAR_OPS, "where", "copy"))
    first = numbers(generator, dtype, shape)
    if op == "copy":
        targets = {torch.bool: (torch.float32, torch.int32), torch.int32: (torch.float32, torch.bool)}
        target = generator.choice(targets.get(dtype, (torch.float32,)))
        operands, expected = [first], first.to(target)
    elif op == "where":
        condition = numbers(generator, torch.bool, tuple(generator.choice((1, size)) for size in shape))
        operands = [condition, first, operand()]
        expected = torch.where(condition, first, torch.as_tensor(operands[2], dtype=dtype))
    else:
        operands = [first] if op in ("abs", "neg", "cos", "sin") else [first, operand()]
        try:
            expected = SCALAR_OPS[op](*operands)
        except RuntimeError:  # PyTorch has none for booleans
            return
    out = torch.zeros_like(numbers(generator, expected.dtype, shape))
    launch = native.elementwise(op, operands, out)
    if launch is None:  # which is right only where PyTorch's result has another dtype, or for booleans
        assert dtype == torch.bool or (op in ("cos", "sin", "true_divide") and dtype == torch.int32)
        return
    launch()
    torch.testing.assert_close(out, expected.expand(shape), equal_nan=True, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [1, 7, 16, 33, 1000])
def test_places_of_extremes_are_pytorchs(dtype: torch.dtype, columns: int) -> None:
    rows = torch.randn(6, columns).round(decimals=1).to(dtype)
    rows[1], rows[2] = -torch.inf, torch.inf
    rows[3, columns // 2 :] = torch.nan
    out = torch.full((6,), -1, dtype=torch.int32)
    for least, expected in ((False, rows.argmax(-1)), (True, rows.argmin(-1))):
        run(native.place_of_extreme(rows, out, least))
        assert torch.equal(out.long(), expected)


REDUCTIONS = {"sum": torch.sum, "mean": torch.mean, "norm": torch.linalg.vector_norm}


@settings(max_examples=200)
@given(
    reduction=st.sampled_from(sorted(REDUCTIONS)),
    shape=st.lists(st.sampled_from([1, 2, 3, 8, 17, 40]), min_size=1, max_size=4),
    dtypes=st.tuples(st.sampled_from(DTYPES), st.sampled_from(DTYPES)),
    generator=st.randoms(use_true_random=False),
)
def test_reductions_are_pytorchs(
    reduction: str, shape: list[int], dtypes: tuple[torch.dtype, ...], generator: random.Random
) -> None:
    x = numbers(generator, torch.float32, tuple(shape)).nan_to_num(0.0, 0.0).to(dtypes[0])
    count = generator.randint(1, len(shape))
    kept = tuple(shape[: len(shape) - count])
    out = torch.zeros_like(numbers(generator, torch.float32, kept), dtype=dtypes[1])
    launch = native.reduce_last(reduction, x, count, out)
    if launch is None:  # the reduced dimensions are not one in memory
        assert count > 1
        return
    launch()
    expected = REDUCTIONS[reduction](x.double(), dim=tuple(range(len(kept), len(shape))))
    tolerance = 1e-5 if dtypes[1] == torch.float32 else 1e-2
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("shape", [(2, 1_000_001), (1_000_001, 24)])
def test_long_sums_lose_little_to_rounding(shape: tuple[int, int]) -> None:
    x = 1 + torch.rand(shape)
    long = x if shape[0] == 2 else x.T
    out = torch.empty(len(long))
    run(native.reduce_last("sum", long, 1, out))
    torch.testing.assert_close(out.double(), long.double().sum(1), rtol=2e-6, atol=0)


def combination(how: str, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """Return what `native.combine` should compute, in float64."""
    a, b, c = a.double(), b.double(), c.double()
    results = {
        "none": a, "add": a + b, "multiply": a * b, "divide": a / b, "scale_shift": a * b + c,
        "add_relu": torch.relu(a + b), "scale_below_zero": torch.where(a > 0, a, a * b),
        "at_least": torch.where(a < b, b, a),
    }  # fmt: skip
    return results[how]


@settings(max_examples=200)
@given(
    how=st.sampled_from(COMBINATIONS),
    shape=st.lists(st.sampled_from([1, 2, 3, 8, 17, 40]), min_size=1, max_size=4),
    dtype=st.sampled_from(DTYPES),
    whole=st.lists(st.tuples(*[st.booleans()] * 4), min_size=2, max_size=2),
    generator=st.randoms(use_true_random=False),
)
def test_combinations_are_pytorchs(
    how: str, shape: list[int], dtype: torch.dtype, whole: list[tuple[bool, ...]], generator: random.Random
) -> None:
    """`whole` says in which dimensions the second and the third operand are as large as the result."""
    shapes = [shape, *([n if is_whole else 1 for n, is_whole in zip(shape, own, strict=False)] for own in whole)]
    a, b, c = (numbers(generator, torch.float32, tuple(own)).to(dtype) for own in shapes)
    count = {"none": 1, "scale_shift": 3}.get(how, 2)
    out = torch.zeros_like(a)
    launch = native.combine(how, [a, b, c][:count], out)
    if launch is None:  # they need more than four dimensions, or the result's neighbours do not follow each other
        return
    launch()
    expected = combination(how, *(x.expand(shape) for x in (a, b, c)))
    tolerance = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
    torch.testing.assert_close(out.double(), expected.to(dtype).double(), rtol=tolerance, atol=1e-5, equal_nan=True)


@settings(max_examples=60)
@given(
    images=st.integers(1, 3), groups=st.sampled_from([1, 2, 4]), width=st.integers(1, 5), affine=st.booleans(),
    pixels=st.sampled_from([2, 7, 64, 300]), dtype=st.sampled_from(DTYPES), seed=st.integers(0, 99),
)  # fmt: skip
def test_group_norms_are_pytorchs(
    images: int, groups: int, width: int, pixels: int, dtype: torch.dtype, affine: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    channels = groups * width
    x = (100 + 3 * torch.randn(images, channels, pixels, 1)).to(dtype)
    weight, bias = (torch.randn(channels).to(dtype) if affine else None for _ in range(2))
    out = torch.empty_like(x)
    run(native.group_norm(x, weight, bias, groups, 1e-5, out))
    doubles = [None if each is None else each.double() for each in (weight, bias)]
    expected = functional.group_norm(x.double(), groups, *doubles)
    tolerance = 1e-3 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


@settings(max_examples=60)
@given(
    rows=st.integers(1, 5), columns=st.sampled_from([1, 2, 31, 128, 700]), dtype=st.sampled_from(DTYPES),
    descending=st.booleans(), seed=st.integers(0, 2**31),
)  # fmt: skip
def test_orders_are_pytorchs(rows: int, columns: int, dtype: torch.dtype, descending: bool, seed: int) -> None:
    torch.manual_seed(seed)
    x = torch.randn(rows, columns).round(decimals=1).to(dtype)
    special = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0], dtype=dtype)
    x = torch.where(torch.rand(rows, columns) < 0.2, special[torch.randint(5, (rows, columns))], x)
    out = torch.full((rows, columns + 2), -1, dtype=torch.int32)[:, :columns]
    run(native.argsort(x, out, descending))
    assert torch.equal(out.long(), torch.argsort(x, dim=-1, descending=descending, stable=True))


@settings(max_examples=60)
@given(generator=st.randoms(use_true_random=False), wide=st.booleans())
def test_elements_are_gathered_as_by_pytorch(generator: random.Random, wide: bool) -> None:
    shape = [generator.choice((1, 2, 5, 17)) for _ in range(generator.randint(1, 4))]
    dim, dtype = generator.randrange(len(shape)), generator.choice((*DTYPES, torch.int32, torch.bool))
    picked = [generator.randint(1, 9) if d == dim else generator.randint(1, size) for d, size in enumerate(shape)]
    x, out = numbers(generator, dtype, tuple(shape)), torch.zeros_like(numbers(generator, dtype, tuple(picked)))
    index = torch.randint(0, shape[dim], picked, dtype=torch.int64 if wide else torch.int32)
    run(native.gather(x, dim - len(shape) * generator.randint(0, 1), index, out))
    torch.testing.assert_close(out, x.gather(dim, index.long()), equal_nan=True, rtol=0, atol=0)
    index.view(-1)[-1] = generator.choice((-1, shape[dim]))
    with pytest.raises(DeviceError, match="is out of range"):
        run(native.gather(x, dim, index, out))


def decode_step(width: int) -> tuple[NativeSequence, torch.Tensor, torch.Tensor, Callable[[], torch.Tensor]]:
    x, hidden, out = torch.randn(1, width), torch.empty(1, 4 * width), torch.empty(1, width)
    up, down = torch.randn(4 * width, width) / width, torch.randn(width, 4 * width) / width
    launches = [
        native.linear(x, native.pack_linear_weight(up), None, None, "silu", hidden),
        native.linear(hidden, native.pack_linear_weight(down), None, x, "none", out),
    ]
    assert all(launches)
    return NativeSequence(launches), x, out, lambda: functional.silu(x @ up.T) @ down.T + x


def test_sequence_runs_all_launches_in_order() -> None:
    sequence, x, out, reference = decode_step(320)
    assert len(sequence) == 2
    for _ in range(20):
        x.normal_()
        sequence()
        check(out, reference(), 1e-4)
    NativeSequence([])()


def test_threads_take_turns() -> None:
    failures: list[Exception] = []

    def work() -> None:
        try:
            sequence, _, out, reference = decode_step(320)
            for _ in range(100):
                sequence()
            check(out, reference(), 1e-4)
        except Exception as error:  # an assertion in a thread would go unnoticed
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this platform")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_gets_its_own_pool() -> None:
    sequence, x, out, _ = decode_step(320)
    sequence()
    expected = out.clone()
    child = os.fork()
    if child == 0:
        out.zero_()
        sequence()
        os._exit(0 if torch.equal(out, expected) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    sequence()
