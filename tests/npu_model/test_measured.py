"""Factors of measured calls: how they are interpolated, and what they do to a simulation."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ir_builder import IRBuilder

from npu_compiler import CompiledProgram, CompileOptions
from npu_compiler import compile as compile_ir
from npu_compiler.errors import InputError
from npu_model import load_chip, simulate
from npu_model.chip import parse_chip
from npu_model.measured import multiplied, slowdown

EDGE = load_chip("edge")
SIZES = st.tuples(*[st.integers(1, 10**6)] * 5)


def linear(m: int, k: int, n: int) -> CompiledProgram:
    g = IRBuilder("linear")
    g.output(g("aten.linear.default", g.input("x", m, k), g.weight("w", n, k)))
    return compile_ir(g.ir(), options=CompileOptions(compute_dtype="float16"))


def test_a_measured_call_has_its_own_factor() -> None:
    rows = [[64, 64, 64, 1, 1, 3.0], [128, 64, 64, 1, 1, 2.0]]
    assert slowdown({"product": rows}, "product", (64, 64, 64, 1, 1)) == 3.0


def test_halfway_between_two_calls_is_the_geometric_mean_of_their_factors() -> None:
    rows = [[64, 64, 64, 1, 1, 8.0], [256, 64, 64, 1, 1, 2.0]]
    assert slowdown({"product": rows}, "product", (128, 64, 64, 1, 1)) == pytest.approx(4)


def test_calls_of_a_dtype_count_before_those_of_any() -> None:
    measured = {"product": [[64, 64, 64, 1, 1, 3.0]], "bfloat16.product": [[8, 8, 8, 1, 1, 2.0]]}
    assert slowdown(measured, "product", (64, 64, 64, 1, 1), "bfloat16") == 2.0
    assert slowdown(measured, "product", (64, 64, 64, 1, 1), "float16") == 3.0


def test_convolutions_of_the_same_window_and_stride_count_before_nearer_ones() -> None:
    rows = [[196, 256, 256, 9, 1, 0.5], [3136, 64, 64, 9, 2, 2.0]]
    assert slowdown({"convolution": rows}, "convolution", (196, 256, 256, 9, 2)) == 2.0
    assert slowdown({"convolution": rows}, "convolution", (196, 256, 256, 1, 1)) < 1


def test_only_a_convolution_may_multiply_less() -> None:
    measured = {"product": [[64, 64, 64, 1, 1, 0.5]], "convolution": [[64, 64, 64, 9, 1, 0.4], [64, 64, 64, 9, 2, 3.0]]}
    assert multiplied(measured, "product", (64, 64, 64, 1, 1)) == 1
    assert multiplied(measured, "convolution", (64, 64, 64, 9, 1)) == 0.4
    assert multiplied(measured, "convolution", (64, 64, 64, 9, 2)) == 1


def test_a_convolution_that_multiplies_less_has_a_lower_roofline() -> None:
    g = IRBuilder("convolution")
    x = g.input("x", 1, 64, 32, 32)
    g.output(g("aten.conv2d.default", x, g.weight("w", 64, 64, 3, 3), None, [1, 1], [1, 1]))
    program = compile_ir(g.ir(), options=CompileOptions(compute_dtype="float16"))
    (call,) = simulate(program, EDGE).calls
    faster = dataclasses.replace(EDGE, measured={"convolution": ((1024.0, 64.0, 64.0, 9.0, 1.0, 0.4),)})
    result = simulate(program, faster)
    assert result.compute_cycles == pytest.approx(0.4 * call.least_cycles)
    assert result.cycles >= result.roofline_cycles and result.calls[0].array_cycles < call.array_cycles


def test_a_chip_file_has_measured_calls_by_dtype() -> None:
    text = """[chip]
name = "a"
clock_ghz = 1.0
[vector]
lanes = 1
rates = { float32 = 1.0 }
[sram]
size = 4096
banks = 1
ports = 1
bytes_per_cycle = 8
[dram]
bandwidth_gb_s = 1.0
latency_ns = 0
[dma]
channels = 1
[measured]
norm = [[64, 8, 2.0]]
[measured.bfloat16]
norm = [[64, 8, 3.0]]
"""
    assert parse_chip(text, "a").measured == {"norm": ((64, 8, 2.0),), "bfloat16.norm": ((64, 8, 3.0),)}
    with pytest.raises(InputError, match=r"'measured.bfloat16.norm' has \[64, 3.0\]; write rows of 3 numbers"):
        parse_chip(text.replace("[[64, 8, 3.0]]", "[[64, 3.0]]"), "a")
    with pytest.raises(InputError, match=r"unknown key 'measured.bfloat16.nerm'"):
        parse_chip(text.replace("norm = [[64, 8, 3.0]]", "nerm = []"), "a")


@given(SIZES, st.lists(st.tuples(SIZES, st.floats(0.5, 100)), min_size=1, max_size=12))
def test_no_factor_is_beyond_those_measured(sizes: tuple[int, ...], rows: list[tuple[tuple[int, ...], float]]) -> None:
    found = slowdown({"product": [(*at, factor) for at, factor in rows]}, "product", sizes)
    factors = [factor for _, factor in rows]
    assert min(factors) * (1 - 1e-9) <= found <= max(factors) * (1 + 1e-9) and math.isfinite(found)


def test_a_kind_that_was_not_measured_has_the_factor_of_one_like_it() -> None:
    assert slowdown({"product": [[64, 32, 144, 1, 1, 3.0]]}, "convolution", (64, 32, 16, 9, 1)) == 3.0
    assert slowdown({"product": [[64, 32, 144, 1, 1, 3.0]]}, "softmax", (4096, 64)) == 1.0


@pytest.mark.parametrize("factor", [0.25, 4.0])
def test_computing_takes_longer_by_the_factor_but_never_less_than_at_the_peak(factor: float) -> None:
    program = linear(256, 512, 1000)
    chip = dataclasses.replace(EDGE, measured={"product": ((256.0, 1000.0, 512.0, 1.0, 1.0, factor),)})
    plain, measured = simulate(program, EDGE), simulate(program, chip)
    least = program.kernels[0].flops / 2 / EDGE.peak_macs("float16")
    assert measured.calls[0].array_cycles >= max(least, factor * least) * (1 - 1e-9)
    assert (measured.cycles > plain.cycles) == (factor > 1)
