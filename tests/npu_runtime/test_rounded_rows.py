"""Rows that are rounded at run time: activations before products, and KV caches; each against plain NumPy."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from quantized_products import (
    DTYPES,
    EPS,
    INTEGERS,
    KINDS,
    SCALES,
    SHAPES,
    blank,
    bound,
    rng,
    strided,
    whole_numbers,
)
from rounding_ties import row_beside_ties

from npu_compiler.errors import InputError
from npu_compiler.graph.quantization import (
    ROW_FORMATS,
    QuantizedArray,
    QuantizedFormat,
    dequantize_rows,
    quantize,
    quantize_rows,
)
from npu_runtime.cpu import native
from npu_runtime.cpu.arrays import BFLOAT16
from npu_runtime.cpu.kernels import CPU_KERNELS

needs_native = pytest.mark.skipif(not native.available(), reason=f"no native kernels: {native.failure_reason()}")
LARGEST = {"int8": 127, "float8_e4m3": 448}


@pytest.mark.parametrize("kind", ROW_FORMATS)
@given(rows=hnp.arrays(np.float32, (3, 9), elements=st.floats(-(2.0**100), 2.0**100, width=32)))
def test_a_rounded_row_is_within_half_a_step_and_keeps_its_largest(kind: str, rows: np.ndarray) -> None:
    codes, scales = quantize_rows(rows, kind)
    found = dequantize_rows(codes, scales, kind).astype(np.float64)
    largest = np.abs(rows).max(axis=1).astype(np.float64)
    wanted = (np.abs(rows).max(axis=1) / np.float32(LARGEST[kind])).astype(np.float32)
    least = np.finfo(np.float32).tiny
    np.testing.assert_array_equal(scales, np.where(wanted < least, 0, wanted))
    # Half a step of int8; of float8, a sixteenth of the element or half its least.
    step = scales[:, None] * (0.5 if kind == "int8" else 2.0**-10) + (kind != "int8") * np.abs(rows) / 16
    allowed = step * (1 + 1e-5) + np.where(wanted < least, largest, 1e-38)[:, None]
    assert (np.abs(found - rows) <= allowed).all()
    normal = largest > 1e-30
    np.testing.assert_allclose(np.abs(found).max(axis=1)[normal], largest[normal], rtol=1e-6)


@pytest.mark.parametrize("kind", ROW_FORMATS)
def test_a_row_that_is_not_finite_is_nan(kind: str) -> None:
    rows = np.ones((3, 4), np.float32)
    rows[1, 2] = np.inf
    codes, scales = quantize_rows(rows, kind)
    assert np.isnan(scales).tolist() == [False, True, False] and not codes[1].any()


def test_formats_that_do_not_exist_are_refused() -> None:
    with pytest.raises(InputError, match="activations cannot be rounded to 'int3'; choose one of none, int8"):
        QuantizedFormat("int8", activations="int3")
    format = QuantizedFormat("int8", activations="int8")
    with pytest.raises(InputError, match="a stored matrix has no activations"):
        QuantizedArray(format, (1, 2), np.zeros((1, 2), np.uint8), np.ones((1, 1), np.float32))
    assert quantize(np.ones((1, 2)), format).format == format.stored == QuantizedFormat("int8")


def product(x: np.ndarray, weight: QuantizedArray, activations: str) -> np.ndarray:
    packed, out = native.pack_quantized(weight), blank(x.shape[0], weight.shape[0])
    assert packed is not None
    launch = native.quantized_linear(strided(x), packed, None, None, "none", out, activations)
    assert launch is not None
    launch()
    return out


@needs_native
@pytest.mark.parametrize("rows", (1, 2, 13, 47))
@pytest.mark.parametrize(("codes", "offsets"), KINDS)
def test_products_of_whole_codes_are_exact(codes: str, offsets: str, rows: int) -> None:
    """Rows whose largest element is 127 have the scale 1, so that all sums are whole numbers."""
    for index, (n, k, group) in enumerate(SHAPES):
        weight = whole_numbers(QuantizedFormat(codes, group, SCALES[index % 3], offsets), n, k)
        wide = weight.dequantize().astype(np.float64)
        x = rng().integers(-4, 5, (rows, k))
        x[:, rng().integers(k)] = rng().choice([-127, 127])
        for dtype in DTYPES:
            np.testing.assert_array_equal(product(x.astype(dtype), weight, "int8"), x.astype(np.float64) @ wide.T)


@needs_native
@pytest.mark.parametrize("rows", (1, 7))
@pytest.mark.parametrize(("codes", "offsets"), INTEGERS)
def test_the_largest_codes_do_not_overflow(codes: str, offsets: str, rows: int) -> None:
    low, high = (0, 15) if codes == "int4" else (-128, 127)
    for group in (16, 64, 96, 0):
        format = QuantizedFormat(codes, group, "float32", offsets)
        parts = format.parts((5, 960))
        for code, zero in ((low, high), (high, low)):
            stored = code * 17 if codes == "int4" else code
            offset = None if offsets == "none" else np.full(parts["scales"][0], zero)
            if offset is not None:
                offset = offset.astype(np.float32) if offsets == "minimum" else offset.astype(np.int8).view(np.uint8)
            weight = QuantizedArray(
                format,
                (5, 960),
                np.full(parts["codes"][0], stored, np.int64).astype(np.uint8),
                np.ones(parts["scales"][0], np.float32),
                offset,
            )
            for sign in (-1, 1):
                x = np.full((rows, 960), 127 * sign, np.float32)
                expected = x.astype(np.float64) @ weight.dequantize().astype(np.float64).T
                np.testing.assert_array_equal(product(x, weight, "int8"), expected)


@needs_native
@pytest.mark.parametrize("activations", ROW_FORMATS)
@pytest.mark.parametrize(("codes", "offsets"), KINDS)
def test_products_are_those_of_the_rounded_rows(codes: str, offsets: str, activations: str) -> None:
    random = rng()
    for index, (n, k, group) in enumerate(SHAPES):
        format = QuantizedFormat(codes, group, SCALES[index % 3], offsets)
        weight = quantize(random.standard_normal((n, k)) + 0.3, format)
        for dtype in DTYPES:
            for rows in (1, 5, 50):
                x = (random.standard_normal((rows, k)) * 2 ** random.uniform(-20, 5, (rows, k))).astype(dtype)
                rounded = dequantize_rows(*quantize_rows(x, activations), activations)
                expected = rounded.astype(np.float64) @ weight.dequantize().astype(np.float64).T
                # Numbers of 16-bit rows go through the integers of `bound`; the scale is one more rounding.
                seen = rounded.astype(BFLOAT16) if dtype != np.float32 else rounded
                allowed = bound(seen, weight) * (1 + 2**-7) + 8 * EPS * np.abs(expected)
                assert (np.abs(product(x, weight, activations) - expected) <= allowed).all(), (n, k, group, dtype)


@needs_native
@pytest.mark.parametrize("activations", ROW_FORMATS)
@pytest.mark.parametrize("value", (np.nan, np.inf))
def test_a_row_that_is_not_finite_leaves_the_others_alone(value: float, activations: str) -> None:
    weight = quantize(rng().standard_normal((20, 96)) + 3, QuantizedFormat("int4", 32, "float16", "minimum"))
    x = np.ones((3, 96), BFLOAT16)
    x[1, 70] = value
    out = product(x, weight, activations)
    assert np.isfinite(out[[0, 2]]).all() and np.isnan(out[1]).all()


@needs_native
@pytest.mark.parametrize("activations", ROW_FORMATS)
def test_gated_products_with_a_bias_agree_with_numpy(activations: str) -> None:
    weight = quantize(rng().standard_normal((80, 96)) / 10, QuantizedFormat("int8", 32))
    packed, out = native.pack_quantized(weight), blank(1, 40)
    assert packed is not None
    x, bias = rng().standard_normal((1, 96)).astype(np.float32), rng().standard_normal(80).astype(np.float32)
    launch = native.quantized_gated_linear(x, packed, bias, "silu", out, activations)
    assert launch is not None
    launch()
    params = {
        **{"k": 96, "groups": 3, "codes": "int8", "offsets": "none", "has_offset": 0, "has_bias": 1},
        **{"activation": "silu", "activations": activations},
    }
    expected = np.empty((1, 40), np.float32)
    operands = [x, weight.codes, weight.scales, bias]
    CPU_KERNELS["dynamic_quantized_gated_matmul_vec_kernel"](operands, [expected], params)
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-5)


@settings(deadline=None)
@given(
    rows=hnp.arrays(np.float32, (2, 3, 4, 11), elements=st.floats(-(2.0**100), 2.0**100, width=32)),
    dtype=st.sampled_from(DTYPES),
    kind=st.sampled_from(ROW_FORMATS),
    index=st.permutations(range(6)),
)
def test_updates_of_a_cache_round_every_row_alike(
    rows: np.ndarray, dtype: np.dtype, kind: str, index: list[int]
) -> None:
    with np.errstate(over="ignore"):
        source = rows.astype(dtype)
    places = np.array(index[:4], np.int32)
    wanted_codes, wanted_scales = np.full((2, 3, 6, 11), 77, np.uint8), np.full((2, 3, 6), 5, np.float32)
    wanted_codes[:, :, places], wanted_scales[:, :, places] = quantize_rows(source, kind)
    for library in ("native", "numpy"):
        codes, scales = np.full((2, 3, 6, 11), 77, np.uint8), np.full((2, 3, 6), 5, np.float32)
        if library != "native":
            CPU_KERNELS["quantized_index_copy_kernel"]([places, source], [codes, scales], {"format": kind})
        elif native.available():
            launch = native.quantized_index_copy(codes, scales, places, source, kind)
            assert launch is not None
            launch()
        else:
            continue
        np.testing.assert_array_equal(codes, wanted_codes)
        np.testing.assert_array_equal(scales, wanted_scales)


@needs_native
@pytest.mark.parametrize("kind", ROW_FORMATS)
def test_every_float16_is_rounded_alike(kind: str) -> None:
    """Rows hold 448, so that their scale is 1, and a float16: all codes of float8 and all ties occur."""
    every = np.arange(2**16, dtype=np.uint16).view(np.float16)
    every = every[np.isfinite(every) & (np.abs(every) <= LARGEST[kind])]
    source = np.stack([np.full(len(every), LARGEST[kind], np.float16), every], axis=1)[None, None]
    codes, scales = np.empty(source.shape, np.uint8), np.empty(source.shape[:3], np.float32)
    launch = native.quantized_index_copy(codes, scales, np.arange(len(every), dtype=np.int32), source, kind)
    assert launch is not None
    launch()
    dtype = np.int8 if kind == "int8" else ml_dtypes.float8_e4m3fn
    expected = np.rint(every) if kind == "int8" else every.astype(np.float32)
    np.testing.assert_array_equal(codes[0, 0, :, 1], expected.astype(dtype).view(np.uint8))
    assert (scales == 1).all()


@needs_native
@pytest.mark.parametrize("kind", ROW_FORMATS)
def test_elements_beside_ties_are_rounded_alike(kind: str) -> None:
    random = np.random.default_rng(0)
    source = np.stack([row_beside_ties(kind, 2.0 ** random.uniform(-60, 60), random) for _ in range(200)])[None, None]
    codes, scales = np.empty(source.shape, np.uint8), np.empty(source.shape[:3], np.float32)
    launch = native.quantized_index_copy(codes, scales, np.arange(200, dtype=np.int32), source, kind)
    assert launch is not None
    launch()
    wanted_codes, wanted_scales = quantize_rows(source, kind)
    np.testing.assert_array_equal(codes, wanted_codes)
    np.testing.assert_array_equal(scales, wanted_scales)


def masks(kind: str, batch: int, heads: int, queries: int, keys: int) -> np.ndarray | None:
    if kind == "none":
        return None
    seen = np.arange(keys)[None] <= np.linspace(keys // 3, keys - 1, queries).astype(int)[:, None]
    mask = seen if kind == "boolean" else np.where(seen, 0, np.finfo(np.float32).min).astype(np.float32)
    return np.broadcast_to(mask, (batch, heads, queries, keys))


def followed_by_nan(array: np.ndarray) -> np.ndarray:
    """The array in memory that goes on with NaN, so that a read beyond its end shows in the results."""
    memory = np.full(array.size + 64, np.nan, array.dtype)
    memory[: array.size] = array.ravel()
    return memory[: array.size].reshape(array.shape)


@needs_native
@pytest.mark.parametrize("kind", ROW_FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("queries", "keys", "width", "value_width"), ((1, 1, 8, 8), (1, 700, 64, 64), (3, 77, 20, 36), (40, 300, 64, 72))
)
def test_attention_reads_codes_as_it_reads_their_numbers(
    queries: int, keys: int, width: int, value_width: int, dtype: np.dtype, kind: str
) -> None:
    random = rng()
    q = random.standard_normal((2, 6, queries, width)).astype(dtype)
    k, k_scales = quantize_rows(random.standard_normal((2, 3, keys, width)) * random.uniform(0.1, 3, (keys, 1)), kind)
    v, v_scales = quantize_rows(
        random.standard_normal((2, 3, keys, value_width)) * random.uniform(0.1, 3, (keys, 1)), kind
    )
    for mask_kind in ("none", "boolean", "additive"):
        mask, out = masks(mask_kind, 2, 6, queries, keys), np.full((2, 6, queries, value_width), np.nan, np.float32)
        sinks = random.normal(2.0, 2.0, 6).astype(dtype) if mask_kind == "boolean" else None
        rounded = native.QuantizedCache(kind, followed_by_nan(k_scales), followed_by_nan(v_scales))
        launch = native.attention(q, k, v, mask, False, 0.2, out, rounded, sinks=sinks)
        assert launch is not None
        launch()
        others = [np.ascontiguousarray(x) for x in (mask, sinks) if x is not None]
        inputs = [q, k, k_scales, v, v_scales, *others]
        params = {"format": kind, "scale": 0.2, "causal": 0, "soft_cap": 0.0}
        params |= {"has_mask": int(mask is not None), "has_sinks": int(sinks is not None)}
        expected, summed = np.empty_like(out), np.empty_like(out)
        CPU_KERNELS["quantized_attention_kernel"](inputs, [expected], params)
        inputs[3] = np.abs(v.view(np.int8)).view(v.dtype) if kind == "int8" else v & 0x7F  # their magnitudes
        CPU_KERNELS["quantized_attention_kernel"](inputs, [summed], params)
        inputs[3] = v
        # Where pairs of bfloat16 are multiplied, weights are rounded to it: 2**-8 of each and of their sum at most.
        step = 2.0**-7 if dtype == BFLOAT16 else 2.0**-16
        assert np.max((np.abs(out - expected) - 1e-6) / summed) <= step


@needs_native
def test_operands_that_do_not_fit_are_left_to_the_reference() -> None:
    k, scales = quantize_rows(np.ones((1, 2, 5, 8)), "int8")
    q = np.ones((1, 2, 1, 8), np.float32)
    fits = native.QuantizedCache("int8", scales, scales)
    assert native.attention(q, k, k, None, False, 1.0, q.copy(), fits) is not None
    assert native.attention(q, k, k, None, False, 1.0, q.copy()) is None
    wrong = native.QuantizedCache("int8", scales[:, :, :4], scales)
    assert native.attention(q, k, k, None, False, 1.0, q.copy(), wrong) is None
    index, rows = np.zeros(1, np.int32), np.ones((1, 2, 1, 8), np.float32)
    assert native.quantized_index_copy(k, scales, index, rows, "int8") is not None
    assert native.quantized_index_copy(k, scales, index, rows[..., :7], "int8") is None
    assert native.quantized_index_copy(k, scales[:, :, ::2], index, rows, "int8") is None
    assert native.quantized_index_copy(k, scales, index.astype(np.int16), rows, "int8") is None
    assert native.quantized_index_copy(k, scales, index, rows.astype(np.float64), "int8") is None


def test_the_reference_of_rounded_products_rounds_rows() -> None:
    weight = quantize(rng().standard_normal((7, 32)), QuantizedFormat("int4", 16))
    x = rng().standard_normal((3, 32)).astype(BFLOAT16)
    params = {
        **{"k": 32, "groups": 2, "codes": "int4", "offsets": "none", "has_offset": 0, "has_bias": 0},
        **{"has_residual": 0, "activation": "none"},
    }
    for activations in ROW_FORMATS:
        result = np.empty((3, 7), np.float32)
        inputs = [x, weight.codes, weight.scales]
        chosen = {**params, "activations": activations}
        CPU_KERNELS["dynamic_quantized_matmul_kernel"](inputs, [result], chosen)
        rounded = dequantize_rows(*quantize_rows(x, activations), activations)
        np.testing.assert_allclose(result, rounded @ weight.dequantize().T, rtol=1e-5, atol=1e-5)
