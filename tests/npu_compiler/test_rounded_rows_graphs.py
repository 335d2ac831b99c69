"""Graphs whose activations or KV caches are rounded at run time: text in, text out, and what the programs compute."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ir_builder import IRBuilder

from cuda_compiler import CUDACodegenTarget
from npu_compiler import (
    CodegenTarget,
    CompiledProgram,
    CompileOptions,
    MetalCodegenTarget,
    compile,
    print_graph,
    trace_stages,
)
from npu_compiler.errors import InputError
from npu_compiler.graph.quantization import (
    NAMED_FORMATS,
    NAMED_ROW_FORMATS,
    dequantize_rows,
    named_format,
    quantize,
    quantize_rows,
)
from npu_compiler.program.describe import summary
from npu_runtime import CPUBackend, Executor, load_weights

BACKENDS = (CPUBackend(), CPUBackend(native=False), CPUBackend(native=False, pytorch=False))
TARGETS = (MetalCodegenTarget(), CUDACodegenTarget())


def linear(rows: int, n: int, k: int) -> dict[str, Any]:
    g = IRBuilder()
    g.output(g("aten.linear.default", g.input("x", rows, k), g.weight("w", n, k), name="y"))
    return g.ir()


@settings(max_examples=30, deadline=None)
@given(
    weights=st.sampled_from(sorted(NAMED_FORMATS)),
    activations=st.sampled_from(sorted(NAMED_ROW_FORMATS)),
    rows=st.integers(1, 9),
    k=st.sampled_from([32, 64, 96, 128, 160]),
    seed=st.integers(0, 2**32 - 1),
)
def test_every_backend_rounds_activations_as_numpy_does(
    weights: str, activations: str, rows: int, k: int, seed: int
) -> None:
    random = np.random.default_rng(seed)
    program = compile(
        linear(rows, 20, k), options=CompileOptions(compute_dtype="float32", quantization=f"{weights}+{activations}")
    )
    assert [call.kernel for call in program.kernels] == ["dynamic_quantized_matmul_kernel"]
    program = CompiledProgram.from_bytes(program.to_bytes())
    x, w = random.standard_normal((rows, k)).astype(np.float32), random.standard_normal((20, k)).astype(np.float32)
    (spec,) = {recipe.format for weight in program.weight_specs.values() for recipe in weight.recipe.leaves()}
    rounded = dequantize_rows(*quantize_rows(x, NAMED_ROW_FORMATS[activations]), NAMED_ROW_FORMATS[activations])
    expected = rounded.astype(np.float64) @ quantize(w, spec).dequantize().astype(np.float64).T
    for backend in BACKENDS:
        found = Executor(program, backend).run({"x": x}, load_weights({"w": w}, program, backend))
        np.testing.assert_allclose(found["y"].to_numpy(), expected, rtol=1e-5, atol=1e-5)


def test_activations_are_no_part_of_how_a_weight_is_stored() -> None:
    programs = [
        compile(linear(2, 4, 64), options=CompileOptions(quantization=name))
        for name in ("int8", "int8+int8", "int8+fp8")
    ]
    assert len({str(program.weight_specs) for program in programs}) == 1
    assert str(named_format("int4+fp8")) == "int4 group 128 float16 zero_point, activations float8_e4m3"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("int3", "unknown quantization 'int3'; choose one of int4, int8, fp8"),
        ("int3+int8", r"unknown quantization 'int3\+int8'; choose one of int4, int8, fp8"),
        ("int8+int4", "activations cannot be rounded to 'int4'; choose one of int8, fp8"),
        ("int8+", "activations cannot be rounded to ''; choose one of int8, fp8"),
    ],
)
def test_a_name_that_is_no_format_is_refused(name: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        compile(linear(1, 4, 32), options=CompileOptions(quantization=name))


def test_a_target_that_rounds_no_activations_says_so() -> None:
    with pytest.raises(InputError, match="the target metal_gpu does not round activations, as the format of 'w' asks"):
        compile(linear(1, 4, 32), MetalCodegenTarget(), CompileOptions(quantization="int8+int8"))


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.config.name)
def test_targets_that_round_no_caches_say_so(target: CodegenTarget) -> None:
    with pytest.raises(InputError, match=f"the target {target.config.name} has no kernels for a KV cache in int8"):
        compile(cached_attention(), target, CompileOptions(kv_cache="int8"))


def cached_attention(
    tokens: int = 2, length: int = 10, shares_rows: bool = True, sinks: bool = False
) -> dict[str, Any]:
    """Attention of 4 heads over a cache of 2, whose tokens see those before them."""
    g = IRBuilder()
    q, mask = g.input("q", 1, 4, tokens, 16), g.input("mask", 1, 1, tokens, length, dtype="bool")
    at = g.input("at", tokens, dtype="int64")
    caches = [g.input(name, 1, 2, length, 16) for name in ("k", "v")]
    rows = [g.input(name, 1, 2, tokens, 16) for name in ("keys", "values")]
    updated = [
        g("aten.index_copy.default", cache, 2, at, new, name=f"{cache}_new")
        for cache, new in zip(caches, rows, strict=True)
    ]
    if sinks:
        out = ((1, 4, tokens, 16), "float32")
        attended = g("npu.attention.default", q, *updated, mask, g.input("sinks", 4), out=out, scale=0.25, name="y")
    else:
        attended = g("aten.scaled_dot_product_attention.default", q, *updated, mask, enable_gqa=True, name="y")
    g.output(attended, *updated)
    if not shares_rows:
        g.output(g("aten.neg.default", updated[0], name="other"))
    return g.ir()


def test_a_cache_becomes_codes_and_scales() -> None:
    stages = dict(trace_stages(cached_attention(), options=CompileOptions(compute_dtype="float32", kv_cache="int8")))
    assert "\n" + print_graph(stages["quantize_caches"]) + "\n" == EXPECTED
    assert stages["assign_layout"].output_names == ["y", "k_new", "k_new.scales", "v_new", "v_new.scales"]


EXPECTED = """
graph test(%q: f32[1, 4, 2, 16], %mask: bool[1, 1, 2, 10], %at: int32[2], %k: uint8[1, 2, 10, 16], \
%k.scales: f32[1, 2, 10], %v: uint8[1, 2, 10, 16], %v.scales: f32[1, 2, 10], %keys: f32[1, 2, 2, 16], \
%values: f32[1, 2, 2, 16])
  %k_new: uint8[1, 2, 10, 16], %k_new.scales: f32[1, 2, 10] = \
npu.quantized_index_copy(%k, %at, %keys, %k.scales) {format=int8}
  %v_new: uint8[1, 2, 10, 16], %v_new.scales: f32[1, 2, 10] = \
npu.quantized_index_copy(%v, %at, %values, %v.scales) {format=int8}
  %y: f32[1, 4, 2, 16] = \
npu.quantized_attention(%q, %k_new, %k_new.scales, %v_new, %v_new.scales, %mask) {enable_gqa=True, format=int8}
  return %y, %k_new, %k_new.scales, %v_new, %v_new.scales
"""


@pytest.mark.parametrize("is_masked", [True, False])
def test_attention_over_a_rounded_cache_keeps_its_sinks(is_masked: bool) -> None:
    ir = cached_attention(sinks=True)
    (node,) = (node for node in ir["nodes"] if node["name"] == "y")
    if not is_masked:  # the trace says then which of the optional tensors there is
        node["inputs"] = [each for each in node["inputs"] if each["name"] != "mask"]
        node["attrs"]["_tensor_names"] = ["query", "key", "value", "sinks"]
    program = compile(ir, options=CompileOptions(compute_dtype="float32", kv_cache="int8"))
    (call,) = (call for call in program.kernels if call.kernel == "quantized_attention_kernel")
    assert (call.params["has_mask"], call.params["has_sinks"]) == (int(is_masked), 1)
    assert call.inputs[-1].shape == (4,) and len(call.inputs) == 6 + is_masked


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("kv_cache", sorted(NAMED_ROW_FORMATS))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_decoding_with_a_rounded_cache_is_attention_over_rounded_rows(dtype: str, kv_cache: str, sinks: bool) -> None:
    kind, random = NAMED_ROW_FORMATS[kv_cache], np.random.default_rng(3)
    program = compile(cached_attention(sinks=sinks), options=CompileOptions(compute_dtype=dtype, kv_cache=kv_cache))
    program = CompiledProgram.from_bytes(program.to_bytes())
    donations = program.plan.donations
    assert donations == {name: name.replace("_new", "") for name in donations} and len(donations) == 4
    for backend in BACKENDS:
        executor = Executor(program, backend)
        specs = {spec.name: spec for spec in program.input_specs}
        codes = {name: np.zeros(specs[name].shape, np.uint8) for name in ("k", "v")}
        scales = {f"{name}.scales": np.zeros(specs[f"{name}.scales"].shape, np.float32) for name in ("k", "v")}
        kept = {"k": np.zeros((1, 2, 10, 16), np.float32), "v": np.zeros((1, 2, 10, 16), np.float32)}
        for start in (0, 2, 4):
            rows = {
                name: random.standard_normal(specs[name].shape).astype(specs[name].storage)
                for name in ("q", "keys", "values", *(["sinks"] if sinks else []))
            }
            at = np.arange(start, start + 2)
            mask = (np.arange(10)[None] <= at[:, None])[None, None]
            found = executor.run({**codes, **scales, **rows, "at": at, "mask": mask})
            for cache, new in (("k", "keys"), ("v", "values")):
                kept[cache][:, :, at] = dequantize_rows(*quantize_rows(rows[new], kind), kind)
                codes[cache] = found[f"{cache}_new"].to_numpy()
                scales[f"{cache}.scales"] = found[f"{cache}_new.scales"].to_numpy()
                read = dequantize_rows(codes[cache], scales[f"{cache}.scales"], kind)
                np.testing.assert_array_equal(read, kept[cache])
            scores = rows["q"].astype(np.float32) @ kept["k"].repeat(2, 1).swapaxes(2, 3) / 4
            weights = np.exp(np.where(mask, scores, -np.inf))
            beside = np.exp(rows["sinks"].astype(np.float32))[:, None, None] if sinks else 0.0
            expected = weights / (weights.sum(-1, keepdims=True) + beside) @ kept["v"].repeat(2, 1)
            tolerance = 1e-5 if dtype == "float32" else 2e-2
            np.testing.assert_allclose(found["y"].to_numpy().astype(np.float32), expected, atol=tolerance)


def test_a_rounded_cache_takes_half_the_bytes_of_a_16_bit_one() -> None:
    """A byte an element, and 4 for the scale of each 64 elements here of 16."""
    sizes = [
        summary(compile(cached_attention(), options=CompileOptions(compute_dtype="bfloat16", kv_cache=kv_cache)).plan)[
            "peak bytes without weights"
        ]
        for kv_cache in (None, "int8")
    ]
    saved = 2 * 2 * 10 * (16 * 2 - (16 + 4))
    assert int(sizes[0]) - int(sizes[1]) >= saved


def test_graphs_without_such_a_cache_are_refused() -> None:
    with pytest.raises(InputError, match="the graph has no KV cache that could be quantized"):
        compile(linear(1, 4, 32), options=CompileOptions(kv_cache="int8"))
    with pytest.raises(InputError, match="the graph has no KV cache that could be quantized"):
        compile(cached_attention(shares_rows=False), options=CompileOptions(kv_cache="int8"))
    with pytest.raises(InputError, match="a KV cache cannot be rounded to 'int4'; choose one of int8, fp8"):
        compile(cached_attention(), options=CompileOptions(kv_cache="int4"))
