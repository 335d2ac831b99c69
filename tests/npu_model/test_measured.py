"""Factors of measured calls: how they are interpolated, and what they do to a simulation."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ir_builder import IRBuilder

from npu_compiler import CompiledProgram
from npu_compiler import compile as compile_ir
from npu_model import load_chip, simulate
from npu_model.measured import slowdown

EDGE = load_chip("edge")
SIZES = st.tuples(*[st.integers(1, 10**6)] * 5)


def linear(m: int, k: int, n: int) -> CompiledProgram:
    g = IRBuilder("linear")
    g.output(g("aten.linear.default", g.input("x", m, k), g.weight("w", n, k)))
    return compile_ir(g.ir(), compute_dtype="float16")


def test_a_measured_call_has_its_own_factor() -> None:
    rows = [[64, 64, 64, 1, 1, 3.0], [128, 64, 64, 1, 1, 2.0]]
    assert slowdown({"product": rows}, "product", (64, 64, 64, 1, 1)) == 3.0


def test_halfway_between_two_calls_is_the_geometric_mean_of_their_factors() -> None:
    rows = [[64, 64, 64, 1, 1, 8.0], [256, 64, 64, 1, 1, 2.0]]
    assert slowdown({"product": rows}, "product", (128, 64, 64, 1, 1)) == pytest.approx(4)


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
