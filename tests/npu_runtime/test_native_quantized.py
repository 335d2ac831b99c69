"""Native kernels for weights in few bits against NumPy, over all formats and odd shapes.

Products of small integers with scales that are powers of two are exact in float32, in whatever order they are added:
those are compared bit for bit. Bounds of the others follow from how rows of x are rounded (quantized.h).
"""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quantized_products import DTYPES, EPS, KINDS, SCALES, SHAPES, blank, bound, rng, strided, whole_numbers

from npu_compiler.graph.quantization import QuantizedArray, QuantizedFormat, quantize
from npu_runtime.cpu import native
from npu_runtime.cpu.arrays import BFLOAT16

pytestmark = pytest.mark.skipif(not native.available(), reason=f"no native kernels: {native.failure_reason()}")


def product(x: np.ndarray, weight: QuantizedArray, dtype: np.dtype = DTYPES[0]) -> np.ndarray:
    """Return x · weightᵀ as the kernel computes it."""
    packed, out = native.pack_quantized(weight), blank(x.shape[0], weight.shape[0], dtype)
    assert packed is not None
    launch = native.quantized_linear(strided(x), packed, None, None, "none", out)
    assert launch is not None
    launch()
    return out


@pytest.mark.parametrize("rows", (1, 2, 4, 7, 12, 13, 47, 101))
@pytest.mark.parametrize(("codes", "offsets"), KINDS)
def test_products_of_whole_numbers_are_exact(codes: str, offsets: str, rows: int) -> None:
    for index, (n, k, group) in enumerate(SHAPES):
        weight = whole_numbers(QuantizedFormat(codes, group, SCALES[index % 3], offsets), n, k)
        wide = weight.dequantize().astype(np.float64)
        for dtype in DTYPES:
            x = rng().integers(-4, 5, (rows, k)).astype(dtype)
            np.testing.assert_array_equal(product(x, weight), x.astype(np.float64) @ wide.T)


@settings(max_examples=60)
@given(
    kind=st.sampled_from(KINDS), count=st.integers(1, 9), rows=st.integers(1, 5), choices=st.integers(1, 8),
    dtype=st.sampled_from(DTYPES), activations=st.sampled_from(["none", "int8", "float8_e4m3"]),
    shape=st.sampled_from(SHAPES), seed=st.integers(0, 2**31),
)  # fmt: skip
def test_a_product_by_experts_is_that_of_each_row_with_its_expert(
    kind: tuple[str, str], count: int, rows: int, choices: int, dtype: np.dtype, activations: str,
    shape: tuple[int, int, int], seed: int,
) -> None:  # fmt: skip
    draw = np.random.default_rng(seed)
    (codes, offsets), (n, k, group) = kind, shape
    format = QuantizedFormat(codes, group, "float32", offsets)
    experts = [quantize(draw.standard_normal((n, k)).astype(np.float32), format) for _ in range(count)]
    parts = {name: np.concatenate([x.part(name) for x in experts]) for name in format.parts((n, k))}
    packed = native.pack_quantized_experts(QuantizedArray(format, (count * n, k), **parts), count)
    x, bias = draw.standard_normal((rows, k)).astype(dtype), draw.standard_normal((count, n)).astype(np.float32)
    chosen = draw.integers(-1, count + 1, rows * choices).astype(np.int32)
    out, one = blank(len(chosen), n, DTYPES[0]), blank(1, n, DTYPES[0])
    assert packed is not None
    launch = native.quantized_expert_linear(x, packed, chosen, bias, out, activations)
    assert launch is not None
    launch()
    for row, expert in enumerate(chosen):
        if not 0 <= expert < count:
            assert not out[row].any()
            continue
        weight, own = native.pack_quantized(experts[expert]), x[row // choices :][:1]
        assert weight is not None
        single = native.quantized_linear(own, weight, bias[expert], None, "none", one, activations)
        assert single is not None
        single()
        np.testing.assert_allclose(out[row], one[0], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("rows", (1, 3))
@pytest.mark.parametrize("codes", ("int4", "int8"))
def test_the_largest_integers_do_not_overflow(codes: str, rows: int) -> None:
    low, high = (0, 15) if codes == "int4" else (-128, 127)
    for k in (64, 640):
        for extreme, zero in ((low, high), (high, low)):
            format = QuantizedFormat(codes, 0, "float32", "zero_point")
            zeros = np.full((5, 1), zero, np.int16).astype(np.uint8)
            weight = QuantizedArray(
                format, (5, k), format.code_format.pack(np.full((5, k), extreme)), np.ones((5, 1), np.float32), zeros
            )
            for dtype, value in ((BFLOAT16, 1.9921875), (np.dtype(np.float16), -1.9990234375)):
                expected = value * (extreme - zero) * k
                np.testing.assert_allclose(product(np.full((rows, k), value, dtype), weight), expected, rtol=k * EPS)


@pytest.mark.parametrize("rows", (1, 5, 50))
@pytest.mark.parametrize(("codes", "offsets"), KINDS)
def test_products_are_those_of_the_dequantized_weight(codes: str, offsets: str, rows: int) -> None:
    random = rng()
    for index, (n, k, group) in enumerate(SHAPES):
        weight = quantize(
            random.standard_normal((n, k)) + 0.3, QuantizedFormat(codes, group, SCALES[index % 3], offsets)
        )
        for dtype in DTYPES:
            # Magnitudes from 2^-20 to 2^5, so that blocks have outliers.
            x = (random.standard_normal((rows, k)) * 2 ** random.uniform(-20, 5, (rows, k))).astype(dtype)
            error = np.abs(product(x, weight) - x.astype(np.float64) @ weight.dequantize().astype(np.float64).T)
            assert (error <= bound(x, weight)).all(), (n, k, group, dtype)


def test_tiny_and_huge_rows_keep_their_precision() -> None:
    weight = quantize(rng().standard_normal((20, 96)), QuantizedFormat("int8", 32))
    wide = weight.dequantize().astype(np.float64)
    for exponent in (-120, -90, -30, 30, 90):
        for rows in (1, 7):
            x = (rng().standard_normal((rows, 96)) * 2.0**exponent).astype(BFLOAT16)
            error = np.abs(product(x, weight) - x.astype(np.float64) @ wide.T)
            # No integer stands for less than the smallest normal number.
            assert (error <= bound(x, weight) + 2.0**-127 * np.abs(wide).sum(axis=1)).all(), exponent
    assert not product(np.zeros((2, 96), BFLOAT16), weight).any()


@pytest.mark.parametrize("value", (np.nan, np.inf, -np.inf))
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_that_is_not_finite_shows_it_and_leaves_the_others_alone(dtype: np.dtype, value: float) -> None:
    weight = quantize(rng().standard_normal((20, 96)) + 3, QuantizedFormat("int4", 32, "float16", "minimum"))
    x = np.ones((3, 96), dtype)
    x[1, 70] = value
    out = product(x, weight)
    assert np.isfinite(out[[0, 2]]).all() and not np.isfinite(out[1]).any()
    assert not np.isfinite(product(x[1:2], weight)).any()


def test_a_float8_nan_makes_its_output_nan() -> None:
    weight = quantize(rng().standard_normal((20, 96)), QuantizedFormat("float8_e4m3", 32))
    weight.codes[3, 50] = 0xFF
    for rows in (1, 9):
        out = product(np.ones((rows, 96), BFLOAT16), weight)
        assert np.isnan(out[:, 3]).all() and np.isfinite(np.delete(out, 3, axis=1)).all()


def silu(x: np.ndarray) -> np.ndarray:
    result: np.ndarray = x / (1 + np.exp(-x))
    return result


@pytest.mark.parametrize("rows", (1, 14))
@pytest.mark.parametrize("codes", ("int4", "float8_e4m3"))
@pytest.mark.parametrize("dtype", DTYPES)
def test_bias_activation_and_residual(dtype: np.dtype, codes: str, rows: int) -> None:
    weight = quantize(rng().standard_normal((37, 96)) / 10, QuantizedFormat(codes, 32))
    packed = native.pack_quantized(weight)
    assert packed is not None
    x, residual = (rng().standard_normal((rows, size)).astype(dtype) for size in (96, 37))
    bias = rng().standard_normal(37).astype(dtype)
    plain = x.astype(np.float64) @ weight.dequantize().astype(np.float64).T + bias.astype(np.float64)
    for out_dtype in DTYPES:
        out = blank(rows, 37, out_dtype)
        launch = native.quantized_linear(x, packed, bias, strided(residual), "silu", out)
        assert launch is not None
        launch()
        rounding = 0 if out_dtype == np.float32 else 2.0 ** (-11 if out_dtype == np.float16 else -8)
        expected = silu(plain) + residual.astype(np.float64)
        error = np.abs(out.astype(np.float64) - expected)
        # silu is nowhere steeper than 1.1; the epilogue rounds a few times.
        assert (error <= 1.1 * bound(x, weight) + rounding * np.abs(expected) + 1e-5).all()


@pytest.mark.parametrize(("codes", "offsets"), KINDS)
def test_gated_products(codes: str, offsets: str) -> None:
    for width in (1, 40):
        weight = quantize(rng().standard_normal((2 * width, 96)) / 10, QuantizedFormat(codes, 32, "float16", offsets))
        packed = native.pack_quantized(weight)
        assert packed is not None
        x, bias = rng().standard_normal((1, 96)).astype(BFLOAT16), rng().standard_normal(2 * width)
        out = blank(1, width)
        launch = native.quantized_gated_linear(x, packed, bias, "silu", out)
        assert launch is not None
        launch()
        gate, up = np.split(x.astype(np.float64) @ weight.dequantize().astype(np.float64).T + bias, 2, axis=1)
        gate_error, up_error = np.split(bound(x, weight) + 1e-5, 2, axis=1)
        allowed = 1.1 * gate_error * np.abs(up) + up_error * np.abs(silu(gate)) + 2 * gate_error * up_error
        assert (np.abs(out - silu(gate) * up) <= allowed).all()


@pytest.mark.parametrize(("codes", "offsets"), KINDS)
def test_lookups_are_the_dequantized_rows(codes: str, offsets: str) -> None:
    for index, (n, k, group) in enumerate(SHAPES):
        weight = quantize(rng().standard_normal((n, k)), QuantizedFormat(codes, group, SCALES[index % 3], offsets))
        for ids in (rng().integers(0, n, (2, 9)).astype(np.int32), np.array([n - 1, n, -1], np.int64)):
            known = (ids >= 0) & (ids < n)
            expected = weight.dequantize()[ids * known] * known[..., None]
            for dtype in DTYPES:
                out = np.full((*ids.shape, k), np.nan, dtype)
                launch = native.quantized_embedding(ids, weight, out)
                assert launch is not None
                launch()
                # A product that is not rounded before the minimum is added moves the result by a rounding.
                step = 2.0 ** {"float32": -23, "float16": -10, "bfloat16": -7}[dtype.name]
                np.testing.assert_allclose(out.astype(np.float32), expected, rtol=step, atol=1e-6)


def test_a_launch_reads_its_operands_when_it_runs() -> None:
    weight = whole_numbers(QuantizedFormat("int4", 32), 40, 96)
    packed, x, out = native.pack_quantized(weight), np.zeros((4, 96), BFLOAT16), blank(4, 40)
    assert packed is not None
    launch = native.quantized_linear(x, packed, None, None, "none", out)
    assert launch is not None
    for _ in range(2):
        x[:] = rng().integers(-4, 5, x.shape)
        launch()
        np.testing.assert_array_equal(out, x.astype(np.float64) @ weight.dequantize().astype(np.float64).T)


def test_what_does_not_fit_is_refused() -> None:
    weight = quantize(np.ones((8, 32)), QuantizedFormat("int4", 32))
    packed = native.pack_quantized(weight)
    assert packed is not None
    x, out = np.ones((2, 32), np.float32), np.ones((2, 8), np.float32)
    assert native.quantized_linear(x, packed, None, None, "none", out) is not None
    assert native.quantized_linear(x[:, :30], packed, None, None, "none", out) is None
    assert native.quantized_linear(x, packed, None, None, "none", out[:, :7]) is None
    assert native.quantized_linear(x, packed, None, None, "tanh", out) is None
    assert native.quantized_linear(x, packed, np.ones(7), None, "none", out) is None
    assert native.quantized_linear(x, packed, None, out[:1], "none", out) is None
    assert native.quantized_linear(x.astype(np.int32), packed, None, None, "none", out) is None
    assert native.quantized_linear(x.reshape(32, 2).T, packed, None, None, "none", out) is None
    assert native.quantized_gated_linear(x, packed, None, "silu", out[:, :4]) is None
    assert native.quantized_gated_linear(x[:1], packed, None, "silu", out[:1]) is None
    ids = np.zeros(2, np.int32)
    assert native.quantized_embedding(ids, weight, np.ones((2, 32), np.float32)) is not None
    assert native.quantized_embedding(ids, weight, np.ones((2, 31), np.float32)) is None
    assert native.quantized_embedding(ids, weight, np.ones((2, 32), np.int32)) is None
    assert native.quantized_embedding(ids.astype(np.int16), weight, np.ones((2, 32), np.float32)) is None


SCRIPT = """
import sys
import numpy as np
from npu_compiler.graph.quantization import QuantizedFormat, quantize
from npu_runtime.cpu import native
random = np.random.default_rng(3)
for codes in ("int4", "float8_e4m3"):
    packed = native.pack_quantized(quantize(random.standard_normal((700, 320)), QuantizedFormat(codes, 32)))
    for rows in (1, 6, 150):
        out = np.empty((rows, 700), np.float32)
        x = random.standard_normal((rows, 320)).astype("float16")
        native.quantized_linear(x, packed, None, None, "none", out)()
        sys.stdout.buffer.write(out.tobytes())
"""


@pytest.mark.slow
def test_the_number_of_threads_changes_no_bit() -> None:
    results = {
        subprocess.run(
            [sys.executable, "-c", SCRIPT],
            env=os.environ | {"NPU_SIM_THREADS": threads, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            check=True,
        ).stdout
        for threads in ("1", "2", "5")
    }
    assert len(results) == 1 and len(results.pop()) == 2 * 157 * 700 * 4
