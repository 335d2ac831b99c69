"""The rounding of rows in the CUDA templates, compiled as C++ for this CPU, against NumPy: bit for bit."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rounding_ties import row_beside_ties

from cuda_compiler.specialization.template_files import template_text
from npu_compiler.graph.quantization import ROW_FORMATS, quantize_rows

COMPILER = shutil.which("c++")
# What the template takes from CUDA and from `common.cuh`; arithmetic is IEEE's on both sides.
SHIM = """
#include <cmath>
#include <cstring>
#define __device__
#define __forceinline__ inline
#define NAN_F __builtin_nanf("")
#define __CUDA_ARCH__ 800
static inline unsigned __float_as_uint(float a) { unsigned b; std::memcpy(&b, &a, 4); return b; }
static inline float __uint_as_float(unsigned a) { float b; std::memcpy(&b, &a, 4); return b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __frcp_rn(float a) { return 1.0f / a; }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fsub_rn(float a, float b) { return a - b; }
static inline unsigned __byte_perm(unsigned a, unsigned b, unsigned which) {
    const unsigned long long both = (unsigned long long)(b) << 32 | a;
    unsigned found = 0;
    for (int i = 0; i < 4; i++) {
        found |= unsigned(both >> (which >> 4 * i & 7) * 8 & 255) << 8 * i;
    }
    return found;
}
constexpr int smaller(int a, int b) { return a < b ? a : b; }
template <typename T, int N> struct Pack { T item[N]; };
constexpr bool to_int8 = TO_INT8;
"""
ENTRY = """
extern "C" void round_row(const float *values, unsigned char *codes, float *numbers, float *scale, int count) {
    unsigned largest = 0;
    for (int i = 0; i < count; i++) {
        const unsigned bits = __float_as_uint(values[i]) & 0x7fffffffu;
        largest = bits > largest ? bits : largest;
    }
    const RowRounding rounding(largest);
    *scale = rounding.scale;
    for (int i = 0; i < count; i += 8) {
        Pack<unsigned char, 8> found;
        float few[8];
        std::memcpy(few, values + i, sizeof few);
        rounding.codes(found, few);
        std::memcpy(codes + i, found.item, 8);
        for (int j = 0; j < 8; j++) {
            numbers[i + j] = rounding.number(few[j]);
        }
    }
}
"""


@pytest.fixture(scope="module", params=ROW_FORMATS)
def rounded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ctypes.CDLL]:
    """A format, and the template for it as a library."""
    if COMPILER is None:
        pytest.skip("needs a C++ compiler")
    folder = Path(tmp_path_factory.mktemp("rounding"))
    text = SHIM.replace("TO_INT8", str(request.param == "int8").lower())
    (folder / "rounding.cpp").write_text(text + template_text("common/row_rounding.cuh") + ENTRY, encoding="utf-8")
    # Without contraction, as every multiplication and addition of the template stands for itself.
    options = ["-std=c++17", "-O1", "-ffp-contract=off", "-shared", "-fPIC", "-o", "rounding.so", "rounding.cpp"]
    subprocess.run([COMPILER, *options], cwd=folder, check=True)
    return request.param, ctypes.CDLL(str(folder / "rounding.so"))


def check(codes: str, library: ctypes.CDLL, values: np.ndarray) -> None:
    row = np.ascontiguousarray(values, np.float32)
    found, numbers, scale = np.empty(len(row), np.uint8), np.empty(len(row), np.float32), ctypes.c_float()
    arrays = [ctypes.c_void_p(array.ctypes.data) for array in (row, found, numbers)]
    library.round_row(*arrays, ctypes.byref(scale), len(row))
    (wanted,), (wanted_scale,) = quantize_rows(row[None], codes)
    np.testing.assert_array_equal(found, wanted)
    np.testing.assert_array_equal(np.float32(scale.value), wanted_scale)
    if np.isfinite(wanted_scale):
        floats = wanted.view(np.int8).astype(np.float32) if codes == "int8" else _float8(wanted)
        np.testing.assert_array_equal(numbers, floats)


def _float8(codes: np.ndarray) -> np.ndarray:
    import ml_dtypes

    values: np.ndarray = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    return values


@given(exponent=st.integers(-126, 110), spread=st.integers(0, 24), seed=st.integers(0, 2**32 - 1))
def test_rows_of_any_magnitude(rounded: tuple[str, ctypes.CDLL], exponent: int, spread: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    with np.errstate(under="ignore"):
        values = (random.standard_normal(256) * 2.0 ** (exponent - random.integers(0, spread + 1, 256))).astype(
            np.float32
        )
    values[random.random(256) < 0.05] = -0.0
    check(*rounded, values)


@given(largest=st.floats(2.0**-60, 2.0**60, width=32), seed=st.integers(0, 2**32 - 1))
def test_multiples_of_the_scale_at_and_beside_ties(rounded: tuple[str, ctypes.CDLL], largest: float, seed: int) -> None:
    codes, library = rounded
    check(codes, library, row_beside_ties(codes, largest, np.random.default_rng(seed)))


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_rows_that_are_not_finite(rounded: tuple[str, ctypes.CDLL], wrong: float) -> None:
    values = np.arange(16, dtype=np.float32)
    values[5] = wrong
    check(*rounded, values)


def test_rows_of_zeros(rounded: tuple[str, ctypes.CDLL]) -> None:
    check(*rounded, np.array([0, -0.0] * 8, np.float32))
