"""Products, convolutions and attention on chips: drawn at random, compared with the CPU device."""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from drawn import drawn
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from ir_builder import IRBuilder
from on_chips import assert_close, chip, rounding_of_sums, run_on
from quantized_networks import Network
from tile_calls import assert_same, tensor

from npu_compiler import CompileOptions, ConstraintError
from npu_compiler import compile as compile_ir
from npu_compiler.graph.quantization import QuantizedFormat, named_format
from npu_model import NPUTarget

CHIPS = ("edge", "odd")
TOLERANCE = {
    "float32": 2e-6,
    "float16": 2e-3,
    "bfloat16": 1.6e-2,
}  # of activations and the result, by its largest value
STEEPEST = 1.13  # derivative of an activation, that of GELU
DRAWS = settings(max_examples=12, deadline=None)


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def magnitude(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.abs(array))


@pytest.mark.parametrize("name", drawn(CHIPS, 1 / 2))
@DRAWS
@given(
    m=st.integers(1, 40), n=st.integers(1, 300), k=st.integers(1, 300), seed=st.integers(0, 2**32),
    dtype=st.sampled_from(list(TOLERANCE)), act=st.sampled_from(["relu", "gelu", "silu", ""]), extra=st.booleans(),
)  # fmt: skip
def test_a_linear_layer(name: str, m: int, n: int, k: int, seed: int, dtype: str, act: str, extra: bool) -> None:
    rng = np.random.default_rng(seed)
    g = IRBuilder()
    y = g("aten.linear.default", g.input("x", m, k), g.weight("w", n, k), g.weight("b", n))
    if act:
        y = g(f"aten.{act}.default", y)
    if extra:
        y = g("aten.add.Tensor", y, g.input("r", m, n))
    g.output(y)
    inputs = {"x": normal(rng, m, k), **({"r": normal(rng, m, n)} if extra else {})}
    weights = {"w": normal(rng, n, k) / k**0.5, "b": normal(rng, n)}
    outcome = run_on(name, g, inputs, weights, dtype)
    magnitudes = np.abs(inputs["x"]) @ np.abs(weights["w"]).T + np.abs(weights["b"])
    magnitudes += np.abs(inputs["r"]) if extra else 0
    assert_close(outcome, TOLERANCE[dtype], rounding=STEEPEST * rounding_of_sums(k + 2, magnitudes))


def test_terms_that_cancel_are_compared_by_their_magnitudes() -> None:
    rng, k = np.random.default_rng(0), 225
    x, w = normal(rng, 1, k), normal(rng, 8, k) / k**0.5
    bias = 1e-3 - (x[0].astype(np.float64) @ w.T).astype(np.float32)
    g = IRBuilder()
    g.output(g("aten.linear.default", g.input("x", 1, k), g.weight("w", 8, k), g.weight("b", 8)))
    outcome = run_on("odd", g, {"x": x}, {"w": w, "b": bias}, "float32")
    rounding = rounding_of_sums(k + 1, np.abs(x) @ np.abs(w).T + np.abs(bias))
    assert_close(outcome, TOLERANCE["float32"], rounding=rounding)
    (ours,) = outcome.ours.values()
    ours += x @ (w.astype(np.float16) - w).T
    with pytest.raises(AssertionError, match="more than allowed"):
        assert_close(outcome, TOLERANCE["float32"], rounding=rounding)


@st.composite
def convolutions(draw: st.DrawFn) -> dict[str, int]:
    kernel, dilation = draw(st.integers(1, 5)), draw(st.integers(1, 2))
    groups = draw(st.sampled_from([1, 1, 2, 4]))
    least = (kernel - 1) * dilation + 1
    padding = draw(st.integers(0, kernel - 1))
    return {
        "images": draw(st.integers(1, 2)), "groups": groups, "kernel": kernel, "dilation": dilation,
        "channels": groups * draw(st.integers(1, 9)), "outputs": groups * draw(st.integers(1, 20)),
        "stride": draw(st.integers(1, 3)), "padding": padding,
        "height": draw(st.integers(max(1, least - 2 * padding), 24)),
        "width": draw(st.integers(max(1, least - 2 * padding), 24)),
    }  # fmt: skip


@pytest.mark.parametrize("name", drawn(CHIPS, 1 / 2))
@DRAWS
@given(c=convolutions(), seed=st.integers(0, 2**32), dtype=st.sampled_from(list(TOLERANCE)))
def test_a_convolution(name: str, c: dict[str, int], seed: int, dtype: str) -> None:
    rng = np.random.default_rng(seed)
    g = IRBuilder()
    shape = (c["images"], c["channels"], c["height"], c["width"])
    weight = (c["outputs"], c["channels"] // c["groups"], c["kernel"], c["kernel"])
    pairs = [[c[key]] * 2 for key in ("stride", "padding", "dilation")]
    y = g(
        "aten.conv2d.default",
        g.input("x", *shape),
        g.weight("w", *weight),
        g.weight("b", weight[0]),
        *pairs,
        c["groups"],
    )
    g.output(g("aten.relu.default", y))
    fan = weight[1] * c["kernel"] ** 2
    weights, x = {"w": normal(rng, *weight) / fan**0.5, "b": normal(rng, weight[0])}, normal(rng, *shape)
    magnitudes = F.conv2d(*map(magnitude, (x, weights["w"], weights["b"])), *pairs, c["groups"]).numpy()
    rounding = rounding_of_sums(fan + 1, magnitudes)
    assert_close(run_on(name, g, {"x": x}, weights, dtype), TOLERANCE[dtype], rounding=rounding)


@pytest.mark.parametrize("name", drawn(CHIPS, 1 / 2))
@DRAWS
@given(c=convolutions(), seed=st.integers(0, 2**32), depthwise=st.booleans(), signed=st.booleans())
def test_a_convolution_of_codes_is_equal_bit_for_bit(
    name: str, c: dict[str, int], seed: int, depthwise: bool, signed: bool
) -> None:
    rng = np.random.default_rng(seed)
    if depthwise:
        c = {**c, "groups": c["channels"], "outputs": c["channels"]}
    dtype, zero = ("int8", -3) if signed else ("uint8", 7)
    net = Network()
    shape = (c["images"], c["channels"], c["height"], c["width"])
    weight = (c["outputs"], c["channels"] // c["groups"], c["kernel"], c["kernel"])
    x = net.rounded(net.g.input("x", *shape), 0.05, zero, dtype)
    w = net.weight("w", rng.integers(-127, 128, weight).astype(np.int8), rng.uniform(0.001, 0.01, weight[0]))
    net.state["b"] = normal(rng, weight[0])
    pairs = [[c[key]] * 2 for key in ("stride", "padding", "dilation")]
    y = net.g("aten.conv2d.default", x, w, net.g.weight("b", weight[0]), *pairs, c["groups"])
    y = net.rounded(net.g("aten.relu.default", y), 0.03, zero, dtype)
    net.g.output(y)
    outcome = run_on(name, net.g, {"x": normal(rng, *shape)}, net.state, "float32")
    for key, expected in outcome.reference.items():
        np.testing.assert_array_equal(outcome.ours[key], expected)


@pytest.mark.parametrize("name", drawn(CHIPS, 1 / 2))
@DRAWS
@given(m=st.integers(1, 20), n=st.integers(1, 100), k=st.integers(1, 300), seed=st.integers(0, 2**32))
def test_a_linear_layer_of_codes_is_equal_bit_for_bit(name: str, m: int, n: int, k: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    net = Network()
    x = net.rounded(net.g.input("x", m, k), 0.05, 5)
    w = net.weight("w", rng.integers(-127, 128, (n, k)).astype(np.int8), rng.uniform(0.001, 0.01, n))
    net.state["b"] = normal(rng, n)
    net.g.output(net.rounded(net.g("aten.linear.default", x, w, net.g.weight("b", n)), 0.1, 9))
    outcome = run_on(name, net.g, {"x": normal(rng, m, k)}, net.state, "float32")
    for key, expected in outcome.reference.items():
        np.testing.assert_array_equal(outcome.ours[key], expected)


@pytest.mark.parametrize("name", drawn(CHIPS, 1 / 2))
@DRAWS
@given(
    b=st.integers(1, 2), shared=st.integers(1, 2), rep=st.integers(1, 3), t=st.integers(1, 40), keys=st.integers(1, 90),
    d=st.sampled_from([8, 16, 40]), causal=st.booleans(), mask=st.sampled_from(["", "float", "bool"]),
    seed=st.integers(0, 2**32),
)  # fmt: skip
def test_attention(
    name: str, b: int, shared: int, rep: int, t: int, keys: int, d: int, causal: bool, mask: str, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    if causal:
        mask, keys = "", t
    g = IRBuilder()
    inputs = {
        "q": normal(rng, b, shared * rep, t, d),
        "k": normal(rng, b, shared, keys, d),
        "v": normal(rng, b, shared, keys, d),
    }
    operands = [g.input(key, *x.shape) for key, x in inputs.items()]
    masked = None
    if mask:
        hidden = rng.random((b, 1, t, keys)) < 0.3
        inputs["mask"] = ~hidden if mask == "bool" else np.where(hidden, -np.inf, 0.5).astype(np.float32)
        masked = g.input("mask", b, 1, t, keys, dtype="bool" if mask == "bool" else "float32")
    options = {"enable_gqa": True} if rep > 1 else {}
    g.output(g("aten.scaled_dot_product_attention.default", *operands, masked, 0.0, causal, **options))
    assert_close(run_on(name, g, inputs, {}, "float32"), 1e-5)


@pytest.mark.parametrize("name", drawn(CHIPS, 1 / 2))
@DRAWS
@given(
    heads=st.integers(1, 3), t=st.integers(1, 40), keys=st.integers(1, 90), soft_cap=st.sampled_from([0.5, 3.0]),
    seed=st.integers(0, 2**32),
)  # fmt: skip
def test_attention_with_a_soft_cap(name: str, heads: int, t: int, keys: int, soft_cap: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    g = IRBuilder()
    q, k, v = (g.input(key, 1, heads, rows, 16) for key, rows in (("q", t), ("k", keys), ("v", keys)))
    scores = g("aten.matmul.default", q, g("aten.transpose.int", k, 2, 3))
    scores = g("aten.div.Tensor", g("aten.mul.Tensor", scores, 0.5), soft_cap)
    capped = g("aten.mul.Tensor", g("aten.tanh.default", scores), soft_cap)
    masked = g("aten.add.Tensor", capped, g.input("mask", 1, 1, t, keys))
    g.output(g("aten.matmul.default", g("aten.softmax.int", masked, -1), v))
    inputs = {key: normal(rng, 1, heads, rows, 16) for key, rows in (("q", t), ("k", keys), ("v", keys))}
    inputs["mask"] = np.where(rng.random((1, 1, t, keys)) < 0.3, -np.inf, 0.5).astype(np.float32)
    assert_close(run_on(name, g, inputs, {}, "float32"), 1e-5)


@pytest.mark.parametrize("name", drawn(("edge", "tiny"), 1 / 2))
@DRAWS
@given(
    b=st.integers(1, 2), shared=st.integers(1, 3), rep=st.integers(1, 3), t=st.integers(1, 40), keys=st.integers(1, 90),
    d=st.integers(1, 16), e=st.integers(1, 24), soft_cap=st.sampled_from([0.0, 1.5]), causal=st.booleans(),
    mask=st.sampled_from(["", "float32", "bool"]), dtype=st.sampled_from(["float32", "float16"]),
    seed=st.integers(0, 2**32),
)  # fmt: skip
def test_attention_with_sinks(
    name: str, b: int, shared: int, rep: int, t: int, keys: int, d: int, e: int, soft_cap: float, causal: bool,
    mask: str, dtype: str, seed: int,
) -> None:  # fmt: skip
    rng = np.random.default_rng(seed)
    heads = shared * rep
    shapes = {"q": (b, heads, t, d), "k": (b, shared, keys, d), "v": (b, shared, keys, e)}
    operands = [tensor(rng, key, shape, dtype, packed=1) for key, shape in shapes.items()]
    if mask:  # some queries may attend to no key
        seen = rng.random((b, heads, t, keys)) < rng.choice([0.1, 0.7])
        data = seen if mask == "bool" else np.where(seen, 0.5, -np.inf)
        operands.append(tensor(rng, "mask", seen.shape, mask, packed=1, data=data))
    operands.append(tensor(rng, "sinks", (heads,), dtype, packed=1))
    params = {
        "scale": d**-0.5, "causal": int(causal), "soft_cap": soft_cap, "has_mask": int(bool(mask)), "has_sinks": 1
    }  # fmt: skip
    out = tensor(rng, "out", (b, heads, t, e), dtype, packed=1)
    assert_same(name, "attention_kernel", operands, [out], params, tolerance=4.0)


@pytest.mark.parametrize("format", ["int4", "int8", "fp8", "int4+int8", "int8+int8"])
@pytest.mark.parametrize("name", drawn(CHIPS, 1 / 2))
def test_weights_in_few_bits(name: str, format: str) -> None:
    rng = np.random.default_rng(5)
    for m, n, k in ((1, 64, 256), (3, 50, 128)):
        g = IRBuilder()
        g.output(g("aten.linear.default", g.input("x", m, k), g.weight("w", n, k), g.weight("b", n)))
        weights = {"w": normal(rng, n, k) / k**0.5, "b": normal(rng, n)}
        outcome = run_on(name, g, {"x": normal(rng, m, k)}, weights, "float16", quantization=format)
        assert_close(outcome, 4e-3)


BYTES = [QuantizedFormat("int8", activations="int8"), QuantizedFormat("int4", activations="int8"),
         QuantizedFormat("float4_e2m1", activations="int8"), QuantizedFormat("iq4_nl", activations="int8"),
         QuantizedFormat("int4", scales="float16", offsets="zero_point", activations="int8")]  # fmt: skip


@pytest.mark.parametrize("name", (*CHIPS, "uneven"))
@DRAWS
@given(
    m=st.integers(1, 20), n=st.integers(1, 90), k=st.integers(1, 150), seed=st.integers(0, 2**32),
    format=st.sampled_from(BYTES), act=st.sampled_from(["", "silu"]), gated=st.booleans(),
)  # fmt: skip
def test_rounded_rows_are_multiplied_with_a_weights_codes_as_integers(
    name: str, m: int, n: int, k: int, seed: int, format: QuantizedFormat, act: str, gated: bool
) -> None:
    rng, k = np.random.default_rng(seed), 2 * k
    g = IRBuilder()
    m = 1 if gated else m
    x = g.input("x", m, k)
    weights = {key: normal(rng, n, k) / k**0.5 for key in (("w", "up") if gated else ("w",))}
    y, *up = (g("aten.linear.default", x, g.weight(key, n, k)) for key in weights)
    y = g(f"aten.{act}.default", y) if act else y
    g.output(g("aten.mul.Tensor", y, *up) if gated else y)
    outcome = run_on(name, g, {"x": normal(rng, m, k)}, weights, "float32", quantization=format)
    assert_close(outcome, 2e-6, scale=1.0)  # inputs and weights are such that sums are near 1
    assert {dtype for counts in outcome.run.sections for dtype in counts.macs} == {"int8"}


def test_codes_are_multiplied_on_a_chip_that_has_nothing_but_bytes() -> None:
    g = IRBuilder()
    g.output(g("aten.linear.default", g.input("x", 4, 64), g.weight("w", 32, 64)))
    edge = chip("edge")
    assert edge.matrix is not None
    narrow = dataclasses.replace(edge, matrix=dataclasses.replace(edge.matrix, rates={"int8": 1.0}))
    for quantization, refusal in (("int8+int8", ""), ("int8", "multiplies int8, not float16")):
        options = CompileOptions(compute_dtype="float16", quantization=quantization)
        with pytest.raises(ConstraintError, match=refusal) if refusal else nullcontext():
            compile_ir(g.ir(), NPUTarget(narrow), options)


@pytest.mark.parametrize("format", ["", "int4", "int8", "fp8", "int8+int8"])
def test_layers_of_which_no_usual_tile_fits_are_computed_in_smaller_ones(format: str) -> None:
    rng = np.random.default_rng(8)
    n, k = 40, 8960
    g = IRBuilder()
    g.output(g("aten.linear.default", g.input("x", 5, k), g.weight("w", n, k), g.weight("b", n)))
    weights = {"w": normal(rng, n, k) / k**0.5, "b": normal(rng, n)}
    outcome = run_on("uneven", g, {"x": normal(rng, 5, k)}, weights, "float16", quantization=format or None)
    assert_close(outcome, 4e-3)


@pytest.mark.parametrize("name", drawn(("edge", "tiny"), 1 / 2))
@DRAWS
@given(
    n=st.integers(1, 5), shared=st.integers(1, 3), rep=st.integers(1, 3), d=st.integers(1, 16), e=st.integers(1, 24),
    block=st.integers(1, 8), pool=st.integers(1, 6), s=st.integers(1, 3), t=st.integers(1, 9),
    window=st.sampled_from([0, 1, 5]), soft_cap=st.sampled_from([0.0, 1.5]), sinks=st.booleans(),
    dtype=st.sampled_from(["float32", "float16"]), seed=st.integers(0, 2**32),
)  # fmt: skip
def test_attention_over_a_pool_of_blocks(
    name: str, n: int, shared: int, rep: int, d: int, e: int, block: int, pool: int, s: int, t: int, window: int,
    soft_cap: float, sinks: bool, dtype: str, seed: int,
) -> None:  # fmt: skip
    rng = np.random.default_rng(seed)
    lists = {  # some are out of range, and count as the nearest
        "tables": rng.integers(-1, pool + 1, (s, t)),
        "sequences": rng.integers(-1, s + 1, n),
        "positions": rng.integers(-1, t * block + 1, n),
    }
    shapes = {"q": (n, shared * rep, d), "k": (pool * block, shared, d), "v": (pool * block, shared, e)}
    operands = [tensor(rng, key, shape, dtype, packed=1) for key, shape in shapes.items()]
    operands += [tensor(rng, key, x.shape, "int32", packed=1, data=x) for key, x in lists.items()]
    operands += [tensor(rng, "sinks", (shared * rep,), dtype, packed=1) for _ in range(sinks)]
    out = tensor(rng, "out", (n, shared * rep, e), dtype, packed=1)
    params = {
        "scale": d**-0.5, "block_size": block, "window": window, "soft_cap": soft_cap, "has_sinks": int(sinks)
    }  # fmt: skip
    assert_same(name, "paged_attention_kernel", operands, [out], params, tolerance=4.0)


@pytest.mark.parametrize("kv_cache", drawn(["int8", "fp8"], 1 / 2))
@pytest.mark.parametrize("name", drawn(CHIPS, 1 / 2))
@DRAWS
@given(
    b=st.integers(1, 2), shared=st.integers(1, 3), rep=st.integers(1, 3), t=st.integers(1, 5),
    length=st.integers(5, 70), d=st.sampled_from([1, 8, 40]), sinks=st.booleans(), seed=st.integers(0, 2**32),
)  # fmt: skip
def test_attention_over_a_cache_of_bytes(
    name: str, kv_cache: str, b: int, shared: int, rep: int, t: int, length: int, d: int, sinks: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    g = IRBuilder()
    q, mask = g.input("q", b, shared * rep, t, d), g.input("mask", b, 1, t, length, dtype="bool")
    at = g.input("at", t, dtype="int64")
    caches = [g.input(key, b, shared, length, d) for key in ("k", "v")]
    rows = [g.input(key, b, shared, t, d) for key in ("keys", "values")]
    updated = [
        g("aten.index_copy.default", cache, 2, at, new, name=f"{cache}_new")
        for cache, new in zip(caches, rows, strict=True)
    ]
    beside = {"sinks": normal(rng, shared * rep)} if sinks else {}
    if sinks:
        operands, out = (q, *updated, mask, g.input("sinks", shared * rep)), ((b, shared * rep, t, d), "float32")
        attended = g("npu.attention.default", *operands, out=out, scale=0.3)
    else:
        options = {"enable_gqa": True} if rep > 1 else {}
        attended = g("aten.scaled_dot_product_attention.default", q, *updated, mask, **options)
    g.output(attended, *updated)
    places = np.sort(rng.permutation(length)[:t])
    new = {key: normal(rng, b, shared, t, d) for key in ("keys", "values")}
    new["keys"][0, 0, 0, 0] = rng.choice([0, 1e-40, np.nan, np.inf])
    codes = {key: rng.integers(0, 120, (b, shared, length, d)).astype(np.uint8) for key in ("k", "v")}
    scales = {f"{key}.scales": rng.uniform(0, 0.02, (b, shared, length)).astype(np.float32) for key in ("k", "v")}
    seen = rng.random((b, 1, t, length)) < 0.7
    if not np.isfinite(new["keys"]).all():
        seen[..., places[0]] = False
    inputs = {"q": normal(rng, b, shared * rep, t, d), "mask": seen, "at": places, **new, **codes, **scales, **beside}
    outcome = run_on(name, g, inputs, {}, "float32", kv_cache=kv_cache)
    for key in ("k_new", "v_new", "k_new.scales", "v_new.scales"):
        np.testing.assert_array_equal(outcome.ours.pop(key), outcome.reference.pop(key))
    assert_close(outcome, 1e-5)


@pytest.mark.parametrize("name", drawn(CHIPS, 1 / 2))
def test_batched_products(name: str) -> None:
    rng = np.random.default_rng(6)
    for b, m, n, k in ((3, 5, 7, 9), (4, 64, 50, 33)):
        g = IRBuilder()
        g.output(g("aten.bmm.default", g.input("a", b, m, k), g.input("b", b, k, n)))
        assert_close(run_on(name, g, {"a": normal(rng, b, m, k), "b": normal(rng, b, k, n)}), 2e-3)


@pytest.mark.parametrize("name", drawn(CHIPS, 1 / 2))
@DRAWS
@given(
    c=convolutions(), extra=st.integers(0, 2), seed=st.integers(0, 2**32), dtype=st.sampled_from(list(TOLERANCE))
)  # fmt: skip
def test_a_transposed_convolution(name: str, c: dict[str, int], extra: int, seed: int, dtype: str) -> None:
    rng = np.random.default_rng(seed)
    extra = min(extra, max(c["stride"], c["dilation"]) - 1)
    size = [(c[key] - 1) * c["stride"] - 2 * c["padding"] + (c["kernel"] - 1) * c["dilation"] + extra + 1
            for key in ("height", "width")]  # fmt: skip
    assume(min(size) > 0)
    g = IRBuilder()
    shape = (c["images"], c["channels"], c["height"], c["width"])
    weight = (c["channels"], c["outputs"] // c["groups"], c["kernel"], c["kernel"])
    pairs = [[value] * 2 for value in (c["stride"], c["padding"], extra)]
    y = g(
        "aten.conv_transpose2d.input", g.input("x", *shape), g.weight("w", *weight), g.weight("b", c["outputs"]),
        *pairs, c["groups"], [c["dilation"]] * 2,
    )  # fmt: skip
    g.output(y)
    weights, x = {"w": normal(rng, *weight) / weight[0] ** 0.5, "b": normal(rng, c["outputs"])}, normal(rng, *shape)
    own = map(magnitude, (x, weights["w"], weights["b"]))
    magnitudes = F.conv_transpose2d(*own, *pairs, c["groups"], c["dilation"]).numpy()
    rounding = rounding_of_sums(weight[0] // c["groups"] * c["kernel"] ** 2 + 1, magnitudes)
    assert_close(run_on(name, g, {"x": x}, weights, dtype), TOLERANCE[dtype], rounding=rounding)


@pytest.mark.parametrize("format", ["int4", "int8", "fp8"])
@pytest.mark.parametrize("name", drawn(CHIPS, 1 / 2))
def test_lookups_in_tables_of_few_bits(name: str, format: str) -> None:
    rng = np.random.default_rng(7)
    g = IRBuilder()
    g.output(g("aten.embedding.default", g.weight("w", 50, 256), g.input("ids", 2, 7, dtype="int64")))
    inputs = {"ids": rng.integers(0, 50, (2, 7))}
    outcome = run_on(name, g, inputs, {"w": normal(rng, 50, 256)}, "float16", quantization={"w": named_format(format)})
    assert_close(outcome, 1e-6)


def test_a_group_that_does_not_fit_is_summed_over_parts_of_its_channels() -> None:
    """The fourth convolution of AlexNet, of two groups with 192 channels each, on Eyeriss."""
    rng, g = np.random.default_rng(0), IRBuilder("groups")
    x, w = g.input("x", 1, 384, 13, 13), g.weight("w", 384, 192, 3, 3)
    g.output(g("aten.conv2d.default", x, w, None, [1, 1], [1, 1], [1, 1], 2))
    data = {"x": normal(rng, 1, 384, 13, 13)}, {"w": normal(rng, 384, 192, 3, 3)}
    outcome = run_on("eyeriss", g, *data)
    assert_close(outcome, 4e-3)
    assert outcome.run.sections[0].macs == {"float16": 384 * 192 * 9 * 13 * 13}
