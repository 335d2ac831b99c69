"""The emulator's core: what a kernel computes, and which faults the checks report."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from metal_emulator import compiler, syntax
from metal_emulator.compiler import CompileError, KernelFault, Library, compile_source

HEADER = "#include <metal_stdlib>\nusing namespace metal;\n"
SEEDS = (0, 1, 2, 3)

SIXTEEN_BITS = """
kernel void widen(device const {T} *x [[buffer(0)]], device float *out [[buffer(1)]],
                  uint i [[thread_position_in_grid]]) {{
    out[i] = float(x[i]);
}}
kernel void narrow(device const float *x [[buffer(0)]], device {T} *out [[buffer(1)]],
                   uint i [[thread_position_in_grid]]) {{
    out[i] = {T}(x[i]);
}}
"""

MEMORY = """
struct Size {
    uint n;
    uint unused;
};

kernel void twice(device const float *x [[buffer(0)]], device float *out [[buffer(1)]],
                  constant Size &size [[buffer(2)]], uint i [[thread_position_in_grid]]) {
    if (i < size.n) {
        out[i] = x[i] * 2.0;
    }
}

kernel void four(device const half *x [[buffer(0)]], device half *out [[buffer(1)]],
                 constant uint &start [[buffer(2)]]) {
    *(device half4 *)(out + start) = *(device const half4 *)(x + start) + half4(1.0h);
}

kernel void optional(device const float *bias [[buffer(0)]], device float *out [[buffer(1)]]) {
    out[0] = bias[0];
}

kernel void reversed(device const float *x [[buffer(0)]], device float *out [[buffer(1)]],
                     uint i [[thread_index_in_threadgroup]], uint n [[threads_per_threadgroup]]) {
    threadgroup float tile[64];
    tile[i] = x[i];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    out[i] = tile[n - 1 - i];
}

kernel void racing(device float *out [[buffer(0)]], uint i [[thread_index_in_threadgroup]]) {
    threadgroup float tile[32];
    tile[i] = float(i);
    simdgroup_barrier(mem_flags::mem_none);
    out[i] = tile[(i + 1) % 32];
}

kernel void overwritten(device float *out [[buffer(0)]], uint i [[thread_index_in_threadgroup]]) {
    threadgroup float total;
    for (uint round = 0; round < 2; round++) {
        if (i == 0) {
            total = float(round);
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        out[i] = total;
    }
}

kernel void within_simdgroup(device float *out [[buffer(0)]], uint i [[thread_index_in_threadgroup]]) {
    threadgroup float tile[64];
    tile[i] = float(i);
    simdgroup_barrier(mem_flags::mem_threadgroup);
    out[i] = tile[i ^ 1];
}

kernel void across_simdgroups(device float *out [[buffer(0)]], uint i [[thread_index_in_threadgroup]]) {
    threadgroup float tile[64];
    tile[i] = float(i);
    simdgroup_barrier(mem_flags::mem_threadgroup);
    out[i] = tile[i ^ 32];
}

kernel void wrong_flags(device float *out [[buffer(0)]], uint i [[thread_index_in_threadgroup]]) {
    threadgroup float tile[32];
    tile[i] = float(i);
    threadgroup_barrier(mem_flags::mem_device);
    out[i] = tile[(i + 1) % 32];
}

kernel void never_written(device float *out [[buffer(0)]], uint i [[thread_index_in_threadgroup]]) {
    threadgroup float tile[4][8];
    if (i < 31) {
        tile[i / 8][i % 8] = 1.0;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    out[i] = tile[i / 8][i % 8];
}

kernel void wrong_row(device float *out [[buffer(0)]], uint i [[thread_index_in_threadgroup]]) {
    threadgroup float tile[4][8];
    tile[0][i] = 1.0;
    out[i] = tile[0][i];
}

kernel void too_much(device float *out [[buffer(0)]], uint i [[thread_index_in_threadgroup]]) {
    threadgroup float tile[64][129];
    tile[0][i] = 1.0;
    out[i] = tile[0][i];
}

kernel void same_element(device float *out [[buffer(0)]], uint i [[thread_position_in_grid]]) {
    out[i / 2] = 1.0;
}

kernel void shared_bytes(device uchar *out [[buffer(0)]], uint i [[thread_position_in_grid]]) {
    out[i] = uchar(i);
}

kernel void handed_over(device float *out [[buffer(0)]], uint i [[thread_index_in_threadgroup]]) {
    out[i] = float(i);
    threadgroup_barrier(mem_flags::mem_device);
    out[i ^ 1] += 1.0;
}

kernel void divergent_barrier(device float *out [[buffer(0)]], uint i [[thread_index_in_threadgroup]]) {
    if (i >= 40) {
        return;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    out[i] = 1.0;
}

kernel void two_barriers(device float *out [[buffer(0)]], uint i [[thread_index_in_threadgroup]]) {
    if (i < 32) {
        threadgroup_barrier(mem_flags::mem_threadgroup);
    } else {
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    out[i] = 1.0;
}

kernel void divergent_sum(device float *out [[buffer(0)]], uint i [[thread_index_in_threadgroup]]) {
    float value = 1.0;
    if (i != 5) {
        value = simd_sum(value);
    }
    out[i] = value;
}

kernel void local_array(device float *out [[buffer(0)]], uint i [[thread_index_in_threadgroup]]) {
    float values[16] = {};
    values[i] = 1.0;
    out[i] = values[i];
}

kernel void divided(device int *out [[buffer(0)]], uint i [[thread_index_in_threadgroup]]) {
    out[i] = 100 / (20 - int(i));
}

kernel void counted(device atomic_uint *counter [[buffer(0)]], uint i [[thread_position_in_grid]]) {
    atomic_fetch_add_explicit(&counter[0], i, memory_order_relaxed);
}
"""

SIMD = """
kernel void functions(device const float *x [[buffer(0)]], device float *out [[buffer(1)]],
                      uint i [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
                      uint n [[threads_per_threadgroup]]) {
    const float value = x[i];
    out[0 * n + i] = simd_sum(value);
    out[1 * n + i] = simd_max(value);
    out[2 * n + i] = simd_min(value);
    out[3 * n + i] = simd_prefix_inclusive_sum(value);
    out[4 * n + i] = simd_prefix_exclusive_sum(value);
    out[5 * n + i] = simd_shuffle_down(value, 3);
    out[6 * n + i] = simd_shuffle_up(value, 2);
    out[7 * n + i] = simd_broadcast(value, 1);
    out[8 * n + i] = simd_broadcast_first(value);
    out[9 * n + i] = float(simd_any(value > 1.0));
    out[10 * n + i] = float(simd_all(value < 1.0));
    out[11 * n + i] = float(simd_or(1u << lane) == 0xffffffffu);
}

kernel void swapped(device const float *x [[buffer(0)]], device float *out [[buffer(1)]],
                    uint i [[thread_index_in_threadgroup]]) {
    out[i] = simd_shuffle_xor(x[i], 1);
}

kernel void product(device const half *a [[buffer(0)]], device const half *b [[buffer(1)]],
                    device float *out [[buffer(2)]], uint i [[thread_index_in_threadgroup]]) {
    threadgroup half tile[8][9];
    for (uint place = i; place < 64; place += 32) {
        tile[place / 8][place % 8] = b[place];
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    simdgroup_half8x8 left, right;
    simdgroup_float8x8 sum = make_filled_simdgroup_matrix<float, 8, 8>(1.0f);
    simdgroup_load(left, a, 8);
    simdgroup_load(right, &tile[0][0], 9, ulong2(0, 0), true);
    simdgroup_multiply_accumulate(sum, left, right, sum);
    sum.thread_elements()[0] *= 2.0f;
    sum.thread_elements()[1] *= 2.0f;
    simdgroup_store(sum, out, 8);
}

kernel void partial_matrix(device const half *a [[buffer(0)]], device float *out [[buffer(1)]]) {
    simdgroup_half8x8 matrix;
    simdgroup_load(matrix, a, 8);
    out[0] = float(matrix.thread_elements()[0]);
}
"""

LANGUAGE = """
template <typename T, uint N> inline T total(threadgroup const T *values) {
    T sum = T(0);
    for (uint i = 0; i < N; i++) {
        sum += values[i];
    }
    return sum;
}

inline void fill(threadgroup float (&tile)[4][8], uint i, float value) {
    tile[i / 8][i % 8] = value;
    tile[i / 8][i % 8] += 1.0;
}

template <typename T>
kernel void summed(device const T *x [[buffer(0)]], device T *out [[buffer(1)]],
                   uint i [[thread_index_in_threadgroup]]) {
    threadgroup T values[32];
    values[i] = x[i];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    out[i] = total<T, 32>(values);
}
template [[host_name("summed_float")]] kernel void summed<float>(device const float *, device float *, uint);
template [[host_name("summed_int")]] kernel void summed<int>(device const int *, device int *, uint);

[[kernel]] void passed_on(device float *out [[buffer(0)]], uint i [[thread_index_in_threadgroup]]) {
    threadgroup float tile[4][8], other[32];
    fill(tile, i, float(i));
    other[i] = 1.0;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    threadgroup float *row = &tile[i / 8][0];
    device float *target = out + i;
    *target = row[7 - i % 8] + *(other + 31 - i);
    *target -= 1.0;
}

[[kernel]] void vectors(device const float4 *x [[buffer(0)]], device float *out [[buffer(1)]],
                        device half4 *narrow [[buffer(2)]], uint i [[thread_index_in_threadgroup]]) {
    threadgroup float4 tile[32];
    tile[i] = x[i].zwxy;
    tile[i].x *= 2.0;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const float4 value = tile[31 - i];
    out[i] = dot(value.xy, value.zw) + float(as_type<uint>(value.y) >> 31) + max(value.x, max(value.y, value.z));
    narrow[i] = half4(select(value, -value, value < 0.0));
    narrow[i].w = 1.0h;
}

kernel void positions(device uint *out [[buffer(0)]], uint3 grid [[thread_position_in_grid]],
                      ushort2 group [[threadgroup_position_in_grid]], uint3 local [[thread_position_in_threadgroup]],
                      uint3 size [[threads_per_threadgroup]], uint3 groups [[threadgroups_per_grid]],
                      uint3 all [[threads_per_grid]], uint simds [[simdgroups_per_threadgroup]],
                      uint index [[thread_index_in_threadgroup]]) {
    device uint *mine = out + 8 * (grid.x + all.x * (grid.y + all.y * grid.z));
    mine[0] = group.x;
    mine[1] = group.y;
    mine[2] = local.x + 10 * local.y + 100 * local.z;
    mine[3] = size.x + 10 * size.y + 100 * size.z;
    mine[4] = groups.x + 10 * groups.y + 100 * groups.z;
    mine[5] = all.x + 10 * all.y + 100 * all.z;
    mine[6] = simds;
    mine[7] = index;
}
"""

CONDITIONS = """
struct Size {
    uint n;
    float limit;
};
inline float pick(device const float *x, uint i, constant Size &size) {
    const float value = i >= size.n ? 0.0 : x[i];
    return value < size.limit ? value : size.limit;
}
kernel void conditions(device const float *x [[buffer(0)]], device float *out [[buffer(1)]],
                       constant Size &size [[buffer(2)]], uint i [[thread_position_in_grid]]) {
    const int before = int(i) - 1;
    if (i > 90 || i == 80) { return; }
    for (uint k = 0; k < 2; k++) {
        if (before >= 0 && (before < int(size.n))) {
            out[i] = x[before];
        }
    }
    if (i >= size.n) {
        out[i] = pick(x, i, size);
    }
}
"""

GUARDED = """
constant uint limit [[function_constant(0)]];
constant bool flag [[function_constant(1)]];
constant uint doubled = 2 * limit;
struct Size {
    uint n;
};
inline uint cut(uint value) { return flag ? min(value, doubled) : value; }
kernel void guarded(device const float *x [[buffer(0)]], device float *out [[buffer(1)]],
                    constant Size &size [[buffer(2)]], uint i [[thread_position_in_grid]],
                    uint lane [[thread_index_in_threadgroup]]) {
    threadgroup float tile[32];
    tile[lane] = i < size.n ? x[i] : 0.0;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const float value = tile[31 - lane];
    if (value > 3.0) {
        return;
    }
    if (i > 7) {  // not a guard
        out[i] = float(cut(i));
    }
}
"""


@pytest.fixture(scope="module")
def memory() -> Library:
    return compile_source(HEADER + MEMORY, {})


@pytest.fixture(scope="module")
def simd() -> Library:
    return compile_source(HEADER + SIMD, {})


def bound(*arrays: np.ndarray) -> dict[int, tuple[int, int]]:
    return {index: (array.ctypes.data, array.nbytes) for index, array in enumerate(arrays)}


def run(
    library: Library,
    kernel: str,
    *arrays: np.ndarray,
    groups: int = 1,
    threads: int = 32,
    constants: Mapping[str, int | float | bool] | None = None,
    **options: Any,
) -> None:
    launch = library.functions[kernel].dispatch
    launch((groups, 1, 1), (threads, 1, 1), bound(*arrays), constants or {}, **options)


def fault(library: Library, kernel: str, *arrays: np.ndarray, **options: Any) -> str:
    with pytest.raises(KernelFault) as raised:
        run(library, kernel, *arrays, **options)
    return str(raised.value)


def floats(count: int) -> np.ndarray:
    return np.zeros(count, np.float32)


@pytest.mark.parametrize("software", [False, True], ids=["native", "software"])
@pytest.mark.parametrize("name, dtype", [("half", np.float16), ("bfloat", ml_dtypes.bfloat16)])
def test_sixteen_bit_floats_round_as_numpys_do(name: str, dtype: Any, software: bool) -> None:
    macros = {"METAL_SOFTWARE_HALF": "1"} if software else {}
    library = compile_source(HEADER + SIXTEEN_BITS.format(T=name), macros)
    every = np.arange(65536, dtype=np.uint16).view(dtype)
    wide = floats(65536)
    run(library, "widen", every, wide, groups=256, threads=256)
    expected = every.astype(np.float32)
    numbers = ~np.isnan(expected)
    assert np.array_equal(wide[numbers].view(np.uint32), expected[numbers].view(np.uint32))
    assert np.isnan(wide[~numbers]).all()

    step = wide[:-1].view(np.uint32) + ((wide[1:].view(np.uint32) - wide[:-1].view(np.uint32)) // 2)
    halfway = np.concatenate([step - 1, step, step + 1, np.arange(0, 2**32, 65521, dtype=np.uint32)])
    values = np.resize(halfway, -(-halfway.size // 256) * 256).astype(np.uint32).view(np.float32)
    narrow = np.zeros(values.size, dtype)
    run(library, "narrow", values, narrow, groups=values.size // 256, threads=256)
    with np.errstate(all="ignore"):
        want = values.astype(dtype)
    numbers = ~np.isnan(values)
    assert np.array_equal(narrow[numbers].view(np.uint16), want[numbers].view(np.uint16))
    assert np.isnan(narrow[~numbers].astype(np.float32)).all()


@pytest.mark.parametrize("checks", [True, False], ids=["checked", "fast"])
def test_a_barrier_orders_threads_whatever_their_order(checks: bool) -> None:
    library = compile_source(HEADER + MEMORY, {}, checks=checks)
    x, out = np.arange(64, dtype=np.float32), floats(64)
    for seed in SEEDS:
        out[:] = 0
        run(library, "reversed", x, out, threads=64, seed=seed)
        assert np.array_equal(out, x[::-1])


def test_threadgroups_at_the_edge_of_a_grid_of_threads_are_smaller(memory: Library) -> None:
    x, out = np.arange(64, dtype=np.float32), floats(64)
    run(memory, "reversed", x, out, threads=32, grid_threads=(20, 1, 1))
    assert np.array_equal(out[:20], x[:20][::-1])
    assert not out[20:].any()


def test_memory_within_bounds_is_read_and_written(memory: Library) -> None:
    x, out = np.arange(100, dtype=np.float32), floats(100)
    run(memory, "twice", x, out, np.array([100, 0], np.uint32), groups=4, threads=32)
    assert np.array_equal(out, 2 * x)


@pytest.mark.parametrize("seed", SEEDS)
def test_an_out_of_bounds_read_names_buffer_index_and_thread(memory: Library, seed: int) -> None:
    x, out = floats(99), floats(128)
    message = fault(memory, "twice", x, out, np.array([100, 0], np.uint32), groups=4, seed=seed)
    assert message == (
        "twice: out-of-bounds read of device 'x' [99]: it holds 99 elements of 4 bytes; "
        "thread 3 of threadgroup 3 (thread 99 in the grid)"
    )


def test_an_out_of_bounds_write_is_reported(memory: Library) -> None:
    message = fault(memory, "twice", floats(128), floats(99), np.array([100, 0], np.uint32), groups=4)
    assert message.startswith("twice: out-of-bounds write of device 'out' [99]")


def test_a_parameter_struct_must_be_bound_whole(memory: Library) -> None:
    message = fault(memory, "twice", floats(1), floats(1), np.array([1], np.uint32))
    assert "out-of-bounds read of constant 'size' [0]" in message


def test_a_buffer_that_is_not_bound_is_named(memory: Library) -> None:
    out = floats(1)
    with pytest.raises(KernelFault, match="read of device buffer 'bias', which is not bound"):
        memory.functions["optional"].dispatch((1, 1, 1), (1, 1, 1), {1: bound(out)[0]}, {})


def test_vectors_are_aligned(memory: Library) -> None:
    x = np.arange(12, dtype=np.float16)
    out = np.zeros(12, np.float16)
    run(memory, "four", x, out, np.array([4], np.uint32), threads=1)
    assert np.array_equal(out[4:8], x[4:8] + 1)
    message = fault(memory, "four", x, out, np.array([3], np.uint32), threads=1)
    assert "misaligned read of device 'x': 8 bytes at byte offset 6 need an alignment of 8" in message
    message = fault(memory, "four", x, out, np.array([9], np.uint32), threads=1)
    assert "out-of-bounds read of device 'x'" in message


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "kernel, threads, what",
    [
        ("racing", 32, r"race on threadgroup 'tile' \[\d+\]|read of threadgroup 'tile' \[\d+\], which no"),
        ("wrong_flags", 32, r"race on threadgroup 'tile' \[\d+\]"),
        ("across_simdgroups", 64, r"race on threadgroup 'tile' \[\d+\]|read of threadgroup 'tile' \[\d+\], which no"),
        ("overwritten", 64, r"race on threadgroup 'total' \[0\]: .* by thread \d+ and .* by .*, with no barrier"),
        ("never_written", 32, r"read of threadgroup 'tile' \[31\], which no thread has written; thread 31"),
        ("wrong_row", 32, r"index \d+ of threadgroup array 'tile' is not below 8"),
        ("too_much", 1, r"threadgroup memory of 33024 bytes exceeds the 32768"),
        ("same_element", 32, r"race on device 'out' \[\d+\]: write by thread \d+ and write by thread \d+"),
    ],
)
def test_unsynchronized_memory_is_reported(memory: Library, kernel: str, threads: int, what: str, seed: int) -> None:
    with pytest.raises(KernelFault, match=f"^{kernel}: (?:{what})"):
        run(memory, kernel, floats(64), threads=threads, seed=seed)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kernel", ["within_simdgroup", "handed_over"])
def test_what_a_barrier_orders_is_no_race(memory: Library, kernel: str, seed: int) -> None:
    out = floats(64)
    run(memory, kernel, out, threads=64, seed=seed)
    expected = {"within_simdgroup": np.arange(64) ^ 1, "handed_over": np.arange(64) + 1}[kernel]
    assert np.array_equal(out, expected)


def test_threadgroups_may_not_write_the_same_element(memory: Library) -> None:
    message = fault(memory, "same_element", floats(64), groups=32, threads=1)
    assert "by thread 0 of another threadgroup" in message


def test_neighbouring_bytes_of_different_threads_are_no_race(memory: Library) -> None:
    out = np.zeros(512, np.uint8)
    run(memory, "shared_bytes", out, groups=4, threads=128)
    assert np.array_equal(out, np.arange(512) % 256)


def test_an_input_that_overlaps_the_output_races(memory: Library) -> None:
    both = floats(65)
    size = np.array([64, 0], np.uint32)
    x, out = both[:64], both[1:]
    message = fault(memory, "twice", x, out, size, groups=2)
    assert "race on device" in message
    run(memory, "twice", x, x, size, groups=2)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "kernel, what",
    [
        ("divergent_barrier", "barrier in divergent flow: 40 of 64 threads wait at line \\d+, 24 have returned"),
        ("two_barriers", "barrier in divergent flow: 32 of 64 threads wait at line \\d+, 0 have returned, 32 wait"),
        ("divergent_sum", "SIMD operation in divergent flow: 31 of 32 threads wait at line \\d+, 1 have returned"),
    ],
)
def test_divergent_flow_is_reported(memory: Library, kernel: str, what: str, seed: int) -> None:
    with pytest.raises(KernelFault, match=f"^{kernel}: {what}"):
        run(memory, kernel, floats(64), threads=64, seed=seed)


def test_arrays_of_a_thread_are_bounds_checked(memory: Library) -> None:
    message = fault(memory, "local_array", floats(32))
    line = (HEADER + MEMORY).splitlines().index("    values[i] = 1.0;") + 1
    assert message.startswith(f"local_array: index 16 is outside of the array at program_source:{line}; thread 16")


def test_a_division_by_zero_is_reported(memory: Library) -> None:
    assert "divided: division by zero" in fault(memory, "divided", np.zeros(32, np.int32))


def test_atomics_are_no_race(memory: Library) -> None:
    counter = np.zeros(1, np.uint32)
    run(memory, "counted", counter, groups=40, threads=64, seed=1)
    assert counter[0] == 2560 * 2559 // 2


@pytest.mark.parametrize("threads", [32, 45, 64])
def test_simd_functions_know_partial_simdgroups(simd: Library, threads: int) -> None:
    x = np.random.default_rng(threads).standard_normal(threads).astype(np.float32)
    for seed in SEEDS:
        out = floats(12 * threads)
        run(simd, "functions", x, out, threads=threads, seed=seed)
        rows = out.reshape(12, threads)
        for start in range(0, threads, 32):
            lanes = x[start : start + 32]
            got = rows[:, start : start + 32]
            count = lanes.size
            at = np.arange(count)
            assert np.allclose(got[0], lanes.sum(), atol=1e-5)
            assert (got[1] == lanes.max()).all() and (got[2] == lanes.min()).all()
            assert np.allclose(got[3], lanes.cumsum(), atol=1e-5)
            assert np.allclose(got[4], lanes.cumsum() - lanes, atol=1e-5)
            assert np.array_equal(got[5], lanes[np.where(at + 3 < count, at + 3, at)])
            assert np.array_equal(got[6], lanes[np.where(at >= 2, at - 2, at)])
            assert (got[7] == lanes[1]).all() and (got[8] == lanes[0]).all()
            assert (got[9] == (lanes > 1).any()).all() and (got[10] == (lanes < 1).all()).all()
            assert (got[11] == (count == 32)).all()


def test_a_shuffle_from_a_missing_lane_is_reported(simd: Library) -> None:
    run(simd, "swapped", floats(34), floats(34), threads=34)
    message = fault(simd, "swapped", floats(33), floats(33), threads=33)
    assert "reads lane 1 of 1" in message


@pytest.mark.parametrize("seed", SEEDS)
def test_simdgroup_matrices_multiply(simd: Library, seed: int) -> None:
    rng = np.random.default_rng(seed)
    a, b = (rng.standard_normal((8, 8)).astype(np.float16) for _ in range(2))
    out = floats(64)
    run(simd, "product", a, b, out, seed=seed)
    expected = 2 * (a.astype(np.float64) @ b.astype(np.float64).T + 1)
    assert np.allclose(out.reshape(8, 8), expected, atol=1e-5)


def test_simdgroup_matrices_need_a_whole_simdgroup(simd: Library) -> None:
    square = np.zeros(64, np.float16)
    message = fault(simd, "partial_matrix", square, floats(64), threads=20)
    assert "in a SIMD group of 20 threads" in message


@pytest.mark.parametrize("checks", [True, False], ids=["checked", "fast"])
def test_templates_references_and_pointers_work(checks: bool) -> None:
    library = compile_source(HEADER + LANGUAGE, {}, checks=checks)
    assert sorted(library.functions) == ["passed_on", "positions", "summed_float", "summed_int", "vectors"]
    for kernel, dtype in (("summed_float", np.float32), ("summed_int", np.int32)):
        x, out = np.arange(32, dtype=dtype), np.zeros(32, dtype)
        run(library, kernel, x, out, seed=1)
        assert (out == x.sum()).all()
    out = floats(32)
    run(library, "passed_on", out, seed=1)
    assert np.array_equal(out.reshape(4, 8), np.arange(32).reshape(4, 8)[:, ::-1] + 1)


@pytest.mark.parametrize("checks", [True, False], ids=["checked", "fast"])
def test_vectors_compute_by_component(checks: bool) -> None:
    library = compile_source(HEADER + LANGUAGE, {}, checks=checks)
    x = np.random.default_rng(0).standard_normal((32, 4)).astype(np.float32)
    out, narrow = floats(32), np.zeros((32, 4), np.float16)
    run(library, "vectors", x, out, narrow, seed=1)
    value = (x[:, [2, 3, 0, 1]] * np.float32([2, 1, 1, 1]))[::-1]
    expected = value[:, 0] * value[:, 2] + value[:, 1] * value[:, 3] + np.signbit(value[:, 1]) + value[:, :3].max(1)
    assert np.allclose(out, expected, atol=1e-6)
    assert np.array_equal(narrow[:, :3], np.abs(value[:, :3]).astype(np.float16))
    assert (narrow[:, 3] == 1).all()


def test_threads_know_their_positions() -> None:
    library = compile_source(HEADER + LANGUAGE, {})
    out = np.zeros((3, 5, 6, 8), np.uint32)
    library.functions["positions"].dispatch((2, 2, 2), (4, 4, 2), bound(out), {}, seed=1, grid_threads=(6, 5, 3))
    for (z, y, x), row in zip(np.ndindex(3, 5, 6), out.reshape(-1, 8), strict=True):
        size = [min(4, 6 - x // 4 * 4), min(4, 5 - y // 4 * 4), min(2, 3 - z // 2 * 2)]
        index = x % 4 + size[0] * (y % 4 + size[1] * (z % 2))
        simdgroups = -(-size[0] * size[1] * size[2] // 32)
        want = [x // 4, y // 4, x % 4 + 10 * (y % 4) + 100 * (z % 2), size[0] + 10 * size[1] + 100 * size[2], 222, 356]
        assert row.tolist() == [*want, simdgroups, index]


def test_a_library_lists_arguments_and_constants() -> None:
    library = compile_source(HEADER + GUARDED, {})
    function = library.functions["guarded"]
    assert [(a.name, a.kind, a.index, a.address_space, a.is_const) for a in function.arguments] == [
        ("x", "buffer", 0, "device", True),
        ("out", "buffer", 1, "device", False),
        ("size", "buffer", 2, "constant", True),
        ("i", "builtin", -1, "", False),
        ("lane", "builtin", -1, "", False),
    ]
    assert {name: (c.index, c.type) for name, c in library.constants.items()} == {
        "limit": (0, "uint"),
        "flag": (1, "bool"),
    }
    assert function.used_constants == {"limit", "flag"}


@pytest.mark.parametrize(
    ("source", "communicating", "alone"),
    [
        (SIMD, {"functions", "swapped", "product", "partial_matrix"}, set()),
        (GUARDED, {"guarded"}, set()),
        (CONDITIONS, set(), {"conditions"}),
        (LANGUAGE, {"summed_float", "passed_on", "vectors"}, {"positions"}),
        (MEMORY, {"counted", "reversed"}, {"twice"}),
    ],
    ids=["simd", "guarded", "conditions", "language", "memory"],
)
def test_a_library_knows_which_kernels_threads_communicate(
    source: str, communicating: set[str], alone: set[str]
) -> None:
    found = {
        name for name, function in compile_source(HEADER + source, {}).functions.items() if function.threads_communicate
    }
    assert found >= communicating and not found & alone


def test_function_constants_reach_functions_and_derived_constants() -> None:
    library = compile_source(HEADER + GUARDED, {})
    x, out = floats(32), floats(32)
    run(library, "guarded", x, out, np.array([32], np.uint32), constants={"limit": 5, "flag": True})
    assert np.array_equal(out, np.where(np.arange(32) > 7, np.minimum(np.arange(32), 10), 0))
    run(library, "guarded", x, out, np.array([32], np.uint32), constants={"limit": 5, "flag": False})
    assert np.array_equal(out, np.where(np.arange(32) > 7, np.arange(32), 0))
    with pytest.raises(ValueError, match="no function constant named other"):
        run(library, "guarded", x, out, constants={"other": 1})


def test_barriers_and_guards_can_be_switched_off() -> None:
    library = compile_source(HEADER + GUARDED, {}, mutants=True)
    assert [(m.id, m.kind, m.function, m.text) for m in library.mutants] == [
        (1, "barrier", "guarded", "threadgroup_barrier(mem_flags::mem_threadgroup)"),
        (2, "guard", "guarded", "i < size.n"),
    ]
    lines = (HEADER + GUARDED).splitlines()
    assert all(mutant.text in lines[mutant.line - 1] for mutant in library.mutants)
    arrays = floats(30), floats(32), np.array([30], np.uint32)
    run(library, "guarded", *arrays, constants={"limit": 5})
    assert "tile" in fault(library, "guarded", *arrays, mutant=1)
    assert "out-of-bounds read of device 'x' [30]" in fault(library, "guarded", *arrays, mutant=2)


def test_a_guard_is_switched_off_to_where_it_does_not_stop_a_thread() -> None:
    library = compile_source(HEADER + CONDITIONS, {}, mutants=True)
    assert [(m.function, m.text) for m in library.mutants] == [
        ("pick", "i >= size.n"),
        ("conditions", "i > 90"),
        ("conditions", "before >= 0"),
        ("conditions", "before < int(size.n)"),
        ("conditions", "i >= size.n"),
    ]
    x, size = np.arange(1, 65, dtype=np.float32), np.zeros(2, np.uint32)
    size[0], size[1:].view(np.float32)[0] = 64, 100
    want = np.concatenate([[0], x[:63], np.zeros(32)]).astype(np.float32)

    def run_mutant(mutant: int, groups: int = 2) -> np.ndarray:
        out = floats(96)
        run(library, "conditions", x, out, size, groups=groups, mutant=mutant)
        return out

    assert np.array_equal(run_mutant(0, groups=3), want)
    assert "out-of-bounds read of device 'x' [64]" in fault(
        library, "conditions", x, floats(96), size, groups=3, mutant=1
    )
    assert np.array_equal(run_mutant(2, groups=3), want)
    assert "out-of-bounds read of device 'x' [-1]" in fault(library, "conditions", x, floats(96), size, mutant=3)
    assert "out-of-bounds read of device 'x' [64]" in fault(
        library, "conditions", x, floats(96), size, groups=3, mutant=4
    )
    assert np.array_equal(run_mutant(5), want)


def test_mutants_are_compiled_only_when_asked_for() -> None:
    library = compile_source(HEADER + GUARDED, {})
    assert library.mutants == ()
    with pytest.raises(ValueError, match="compiled without mutants"):
        run(library, "guarded", mutant=1)


@pytest.mark.parametrize(
    "statement, message",
    [
        ("out[i] = erf(x[i]);", "erf"),
        ("out[i] = log1p(x[i]);", "log1p"),
        ("const double wide = 1.0; out[i] = float(wide);", "double"),
        ("x[i] = 1.0;", "const"),
        ("threadgroup float tile[32]; device float *p = &tile[0]; p[i] = 1.0;", "threadgroup"),
        ("out[i] = value;", "value"),
    ],
)
def test_what_metal_rejects_does_not_compile(statement: str, message: str) -> None:
    source = f"""kernel void bad(device const float *x [[buffer(0)]], device float *out [[buffer(1)]],
                         uint i [[thread_position_in_grid]]) {{
        {statement}
    }}"""
    with pytest.raises(CompileError) as raised:
        compile_source(HEADER + source, {})
    assert message in str(raised.value)
    assert "program_source:5" in str(raised.value)


def test_threadgroup_sizes_beyond_metals_are_refused(memory: Library) -> None:
    with pytest.raises(ValueError, match="1025 threads in a threadgroup; it can have 1 to 1024"):
        run(memory, "racing", floats(32), threads=1025)


def test_a_source_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source = HEADER + SIXTEEN_BITS.format(T="half")
    first = compile_source(source, {})
    (path,) = tmp_path.glob("npu-simulation/metal-emulator/kernels-*.so")
    monkeypatch.setattr(compiler, "_compile", None)
    assert compile_source(source, {}) is first
    assert list(tmp_path.glob("npu-simulation/metal-emulator/kernels-*")) == [path]


needs_clang = pytest.mark.skipif(shutil.which("clang++") is None, reason="there is no clang++")


@needs_clang
@pytest.mark.parametrize(
    "statement, message",
    [
        ("threadgroup float tile[32]; device float *p = &tile[0]; p[i] = 1.0;", "cannot initialize a variable"),
        ("thread float *p = out; p[i] = 1.0;", "cannot initialize a variable"),
        ("size.n = 1;", "const"),
        ("out[i] = erf(x[i]);", "erf"),
        ("double wide = 1.0; out[i] = float(wide);", "DOUBLE"),
    ],
)
def test_the_syntax_check_keeps_address_spaces_apart(statement: str, message: str) -> None:
    source = f"""struct Size {{ uint n; }};
kernel void bad(device const float *x [[buffer(0)]], device float *out [[buffer(1)]], constant Size &size [[buffer(2)]],
                uint i [[thread_position_in_grid]]) {{
    {statement}
}}"""
    assert message in syntax.check(HEADER + source, {})


@needs_clang
def test_the_syntax_check_accepts_what_the_emulator_runs() -> None:
    for source in (MEMORY, SIMD, LANGUAGE, CONDITIONS, GUARDED):
        assert syntax.check(HEADER + source, {}) == ""


@needs_clang
def test_every_kernel_passes_the_syntax_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert syntax.main([]) == 0
    assert ", 0 with errors" in capsys.readouterr().out


def test_the_syntax_check_says_that_there_is_no_clang(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert syntax.main([]) == 0
    assert "skipped: no clang++" in capsys.readouterr().out
