"""Pooling and resampling on chips: drawn at random, compared with the CPU device."""

from __future__ import annotations

import numpy as np
import pytest
from drawn import drawn
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from ir_builder import IRBuilder
from on_chips import assert_close, run_on
from quantized_networks import Network

CHIPS = ("edge", "odd")
DRAWS = settings(max_examples=15, deadline=None)
SIZES = st.tuples(st.integers(1, 2), st.integers(1, 9), st.integers(1, 20), st.integers(1, 20))


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("name", drawn(CHIPS, 1 / 2))
@DRAWS
@given(
    shape=SIZES, window=st.integers(1, 7), stride=st.integers(1, 3), share=st.floats(0, 1), ceil=st.booleans(),
    average=st.booleans(), counts=st.booleans(), seed=st.integers(0, 2**32),
)  # fmt: skip
def test_windows(
    name: str, shape: tuple[int, ...], window: int, stride: int, share: float, ceil: bool, average: bool, counts: bool,
    seed: int,
) -> None:  # fmt: skip
    pad = int(share * (window // 2))
    assume(min(shape[2:]) + 2 * pad >= window)
    rng = np.random.default_rng(seed)
    g = IRBuilder()
    pairs = [[value] * 2 for value in (window, stride, pad)]
    x = g.input("x", *shape)
    if average:
        g.output(g("aten.avg_pool2d.default", x, *pairs, ceil, counts))
    else:
        g.output(g("aten.max_pool2d.default", x, *pairs, [1, 1], ceil))
    assert_close(run_on(name, g, {"x": normal(rng, *shape)}), 2e-3)


@pytest.mark.parametrize("name", drawn(CHIPS, 1 / 2))
@DRAWS
@given(shape=SIZES, rows=st.integers(1, 5), columns=st.integers(1, 5), seed=st.integers(0, 2**32))
def test_bins(name: str, shape: tuple[int, ...], rows: int, columns: int, seed: int) -> None:
    g = IRBuilder()
    g.output(g("aten.adaptive_avg_pool2d.default", g.input("x", *shape), [rows, columns]))
    assert_close(run_on(name, g, {"x": normal(np.random.default_rng(seed), *shape)}), 2e-3)


@pytest.mark.parametrize("name", drawn(CHIPS, 1 / 2))
@DRAWS
@given(shape=SIZES, down=st.integers(1, 4), right=st.integers(1, 4), seed=st.integers(0, 2**32))
def test_enlarged_images(name: str, shape: tuple[int, ...], down: int, right: int, seed: int) -> None:
    g = IRBuilder()
    size = [shape[2] * down, shape[3] * right]
    g.output(g("aten.upsample_bilinear2d.vec", g.input("x", *shape), size, False, None))
    assert_close(run_on(name, g, {"x": normal(np.random.default_rng(seed), *shape)}), 2e-3)


@pytest.mark.parametrize("name", drawn(CHIPS, 1 / 2))
@DRAWS
@given(shape=SIZES, seed=st.integers(0, 2**32))
def test_networks_of_codes_are_equal_bit_for_bit(name: str, shape: tuple[int, ...], seed: int) -> None:
    rng = np.random.default_rng(seed)
    net = Network()
    x = net.rounded(net.g.input("x", *shape), 0.05, 7)
    y = net.rounded(net.g("aten.max_pool2d.default", x, [3, 3], [1, 1], [1, 1]), 0.05, 7)
    total = net.rounded(net.g("aten.relu.default", net.g("aten.add.Tensor", x, y)), 0.07, 3)
    net.g.output(net.rounded(net.g("aten.mean.dim", total, [2, 3]), 0.02, 1))
    outcome = run_on(name, net.g, {"x": normal(rng, *shape)}, {}, "float32")
    for key, expected in outcome.reference.items():
        np.testing.assert_array_equal(outcome.ours[key], expected)
