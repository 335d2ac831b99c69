"""Runs generated CUDA kernels on the CPU: compiled as C++, with a thread for each thread of a block.

For small grids of kernels that use no more of CUDA than common.cuh, warp shuffles, block barriers and products of
tensor cores, which the lanes of a warp compute together as on GPUs before Ampere.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import traces

from cuda_compiler import CUDACodegenTarget
from cuda_compiler.cuda_program import kernel_launch_of
from npu_compiler.graph.dtypes import itemsize
from npu_compiler.program.kernels import KernelCall
from npu_compiler.program.plan import ExecutionPlan
from npu_runtime import CPUBackend, Operand
from npu_runtime.backend import Launch

_HEADERS = ("algorithm", "barrier", "cmath", "cstring", "map", "memory", "mutex", "thread", "vector")
# A `__shared__` variable of an inline function would be one for all libraries that the process has loaded.
_COMPILER = ("g++", "-std=c++20", "-O0", "-w", "-pthread", "-fPIC", "-fvisibility=hidden")
_SHIM = """
using std::isnan, std::max, std::min;
#define __device__
#define __global__
#define __forceinline__ inline
#define __shared__ static
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))
struct Size { unsigned x, y, z; };
static thread_local Size threadIdx;
static Size blockIdx;
static float __int_as_float(int bits) { float x; std::memcpy(&x, &bits, 4); return x; }
static float __uint_as_float(unsigned bits) { float x; std::memcpy(&x, &bits, 4); return x; }
static unsigned __float_as_uint(float x) { unsigned bits; std::memcpy(&bits, &x, 4); return bits; }
static unsigned long above_32_bits;  // of the addresses of shared memory, which kernels keep in 32 bits
static unsigned long __cvta_generic_to_shared(const void *x) {
    above_32_bits = (unsigned long)x >> 32 << 32;
    return (unsigned long)x;
}
static void *__cvta_shared_to_generic(unsigned long x) { return (void *)(above_32_bits | (unsigned)x); }
static float rsqrtf(float x) { return 1.0f / sqrtf(x); }
static int __float_as_int(float x) { int bits; std::memcpy(&bits, &x, 4); return bits; }
static unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
static unsigned prmt(unsigned a, unsigned b, unsigned selector) {
    unsigned result = 0;
    for (int i = 0; i < 4; i++, selector >>= 4) {
        const unsigned byte = unsigned((((unsigned long long)(b) << 32) | a) >> 8 * (selector & 7)) & 0xff;
        result |= (selector & 8 ? (byte & 0x80 ? 0xffu : 0u) : byte) << 8 * i;
    }
    return result;
}
static unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) { return prmt(a, b, selector & 0x7777u); }
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
static uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static int atomicAdd(int *to, int value) { return __sync_fetch_and_add(to, value); }
static unsigned atomicInc(unsigned *to, unsigned most) {  // blocks run one after the other
    const unsigned before = *to;
    *to = before >= most ? 0 : before + 1;
    return before;
}
template <typename T> T __ldcg(const T *from) { return *from; }
static void __threadfence() {}
static int __popc(unsigned bits) { return __builtin_popcount(bits); }
static int __ffs(unsigned bits) { return __builtin_ffs(int(bits)); }
"""
_ASSEMBLY = {
    "cvt.f32.f16": "_Float16 half; std::memcpy(&half, &value, 2); result = float(half);",
    "cvt.rn.f16.f32": "const _Float16 half = _Float16(value); std::memcpy(&result, &half, 2);",
    "ex2.approx": "result = exp2f(a);",
    "rcp.approx": "result = 1.0f / (1.0f + near_exp2(-1.44269504f * a));",
    "ld.global.nc.L1::no_allocate.v4": "std::memcpy(&words, data, 16);",
    "bar.sync %0": "cpu_meet(2 + threadIdx.x / (WARP * team), WARP * team);",
}
_PERMUTED = r'"prmt.b32 %0, (%\d), (%\d), (%\d);"\s*:\s*"=r"\((\w+)\)\s*:(.*)'
# sums[16 × 8] += a[16 × 32] · b[32 × 8] of bytes, as `quantized.cuh` declares it for GPUs that lack it.
_NO_PRODUCT = "void multiply(int (&)[4], const unsigned (&)[4], unsigned, unsigned) {}"
_PRODUCT = """void multiply(int (&sums)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    const int lane = threadIdx.x % WARP;
    for (int part = 0; part < 4; part++) {
        for (int half = 0; half < 2; half++) {
            const unsigned top = __shfl_sync(0xffffffffu, a[2 * half], lane / 4 * 4 + part);
            const unsigned bottom = __shfl_sync(0xffffffffu, a[2 * half + 1], lane / 4 * 4 + part);
            for (int column = 0; column < 2; column++) {
                const unsigned right = __shfl_sync(0xffffffffu, half ? b1 : b0, (lane % 4 * 2 + column) * 4 + part);
                for (int byte = 0; byte < 4; byte++) {
                    const int factor = (signed char)(right >> 8 * byte);
                    sums[column] += (signed char)(top >> 8 * byte) * factor;
                    sums[2 + column] += (signed char)(bottom >> 8 * byte) * factor;
                }
            }
        }
    }
}"""
# The product of 16-bit floats that `tensor_cores.cuh` has for GPUs before Ampere, with one exchange among the lanes.
_FLOAT_PRODUCT = re.compile(r"#else\n    // GPUs before Ampere: the same sums.*?#endif\n", re.DOTALL)
_ONE_EXCHANGE = """#else
    CpuWarp &warp = *cpu_warps[threadIdx.x / 32];
    const int lane = threadIdx.x % WARP;
    const unsigned own[6] = {a0, a1, a2, a3, b0, b1};
    std::memcpy(warp.operands[lane], own, sizeof own);
    warp.turn.arrive_and_wait();
    for (int part = 0; part < 4; part++) {
        const unsigned *rows = warp.operands[(lane & ~3) | part];
        for (int i = 0; i < 8; i++) {
            const int half = i / 4, column = i / 2 % 2, bottom = i % 2;
            const unsigned left = rows[2 * half + bottom];
            const unsigned right = warp.operands[(lane % 4 * 2 + column) * 4 + part][4 + half];
            float &sum = sums[2 * bottom + column];
            sum = fmaf(to_float(low_half(left)), to_float(low_half(right)), sum);
            sum = fmaf(to_float(high_half(left)), to_float(high_half(right)), sum);
        }
    }
    warp.turn.arrive_and_wait();
#endif
"""
# For kernels whose threads know nothing of each other: one after the other. A kernel that calls one of these, whatever
# its source holds besides, does not compile.
_ALONE = """
#define MEETS __attribute__((error("threads meet")))
MEETS void __syncthreads();
MEETS void __syncwarp();
MEETS int __syncthreads_or(int);
MEETS unsigned __ballot_sync(unsigned, int);
MEETS int __any_sync(unsigned, int);
MEETS void cpu_meet(unsigned, unsigned);
template <typename T> MEETS T __shfl_sync(unsigned, T value, int);
template <typename T> MEETS T __shfl_xor_sync(unsigned, T value, int);
"""
_LAUNCH_ALONE = """
static void run_block(void **operands, unsigned threads) {
    for (unsigned i = 0; i < threads; i++) {
        threadIdx = {i, 0, 0};
        KERNEL_NAME(ARGUMENTS);
    }
}
"""
_LAUNCH = """
extern "C" __attribute__((visibility("default"))) void launch(void **operands, const unsigned *grid, unsigned threads) {
    for (unsigned z = 0; z < grid[2]; z++) {
        for (unsigned y = 0; y < grid[1]; y++) {
            for (unsigned x = 0; x < grid[0]; x++) {
                blockIdx = {x, y, z};
                run_block(operands, threads);
            }
        }
    }
}
"""
_TOGETHER = """
struct CpuWarp { std::barrier<> turn{32}; unsigned long long words[32]; unsigned operands[32][6]; };
static std::unique_ptr<std::barrier<>> cpu_block;
static std::vector<std::unique_ptr<CpuWarp>> cpu_warps;
static void __syncthreads() { cpu_block->arrive_and_wait(); }
template <typename T> T __shfl_sync(unsigned, T value, int lane) {
    static_assert(sizeof(T) <= sizeof(CpuWarp::words[0]));
    CpuWarp &warp = *cpu_warps[threadIdx.x / 32];
    std::memcpy(&warp.words[threadIdx.x % 32], &value, sizeof(T));
    warp.turn.arrive_and_wait();
    std::memcpy(&value, &warp.words[lane], sizeof(T));
    warp.turn.arrive_and_wait();
    return value;
}
template <typename T> T __shfl_xor_sync(unsigned mask, T value, int step) {
    return __shfl_sync(mask, value, threadIdx.x % 32 ^ step);
}
static unsigned __ballot_sync(unsigned, int bit) {
    CpuWarp &warp = *cpu_warps[threadIdx.x / 32];
    warp.words[threadIdx.x % 32] = bit != 0;
    warp.turn.arrive_and_wait();
    unsigned bits = 0;
    for (int lane = 0; lane < 32; lane++) bits |= unsigned(warp.words[lane]) << lane;
    warp.turn.arrive_and_wait();
    return bits;
}
static int __any_sync(unsigned mask, int bit) { return __ballot_sync(mask, bit) != 0; }
static void __syncwarp() { cpu_warps[threadIdx.x / 32]->turn.arrive_and_wait(); }
static std::mutex cpu_lock;
static std::map<unsigned, std::unique_ptr<std::barrier<>>> cpu_meetings;
static void cpu_meet(unsigned number, unsigned threads) {
    std::unique_lock<std::mutex> held(cpu_lock);
    auto &meeting = cpu_meetings[number];
    if (!meeting) meeting = std::make_unique<std::barrier<>>(threads);
    held.unlock();
    meeting->arrive_and_wait();
}
static int cpu_some;
static int __syncthreads_or(int one) {
    __syncthreads();
    cpu_some = 0;
    __syncthreads();
    if (one) __atomic_store_n(&cpu_some, 1, __ATOMIC_RELAXED);
    __syncthreads();
    return cpu_some;
}
"""
_LAUNCH_TOGETHER = """
static void run_block(void **operands, unsigned threads) {
    cpu_block = std::make_unique<std::barrier<>>(threads);
    cpu_warps.clear();
    for (unsigned i = 0; i < threads; i += 32) cpu_warps.push_back(std::make_unique<CpuWarp>());
    std::vector<std::thread> running;
    for (unsigned i = 0; i < threads; i++) running.emplace_back([=] {
        threadIdx = {i, 0, 0};
        KERNEL_NAME(ARGUMENTS);
        cpu_block->arrive_and_drop();
        cpu_warps[i / 32]->turn.arrive_and_drop();
    });
    for (std::thread &each : running) each.join();
}
"""


def run_on_cpu(plan: ExecutionPlan, values: Mapping[str, np.ndarray], folder: Path) -> dict[str, np.ndarray]:
    """Run all calls of a program of generated kernels; return the values of all buffers.

    Args:
        values: Input, weight and constant buffers by name, each as it lies in memory.
        folder: Folder for the compiled kernels.
    """
    memory = {name: np.ascontiguousarray(value) for name, value in values.items()}
    for name, buffer in plan.buffers.items():
        if name not in memory:
            memory[name] = np.zeros(buffer.alloc_shape, buffer.dtype)
    for call in (*plan.prologue, *plan.calls):
        views = (*call.inputs, *call.outputs)
        addresses = [memory[x.buffer].ctypes.data + x.offset * memory[x.buffer].itemsize for x in views]
        _run(call, plan.sources[call.source], addresses, folder)
    return memory


class EmulatedBackend(CPUBackend):
    """The memory of the CPU device, with the CUDA target's kernels, for `metal_harness.run_case`."""

    def __init__(self, folder: Path, target: CUDACodegenTarget | None = None) -> None:
        super().__init__()
        self._folder, self._cuda, self._sources = folder, target or CUDACodegenTarget(), dict[str, str]()

    @property
    def target(self) -> Any:
        return self._cuda

    def compile(self, calls: Sequence[KernelCall], sources: Mapping[str, str]) -> None:
        self._sources |= sources

    def prepare(self, call: KernelCall, inputs: Sequence[Operand], outputs: Sequence[Operand]) -> Launch:
        addresses = [
            operand.memory.native_handle.ctypes.data + operand.byte_offset + view.offset * itemsize(view.dtype)
            for operand, view in ((operand, operand.view) for operand in (*inputs, *outputs))
        ]
        return partial(_run, call, self._sources[call.source], addresses, self._folder)


def _run(call: KernelCall, source: str, addresses: Sequence[int], folder: Path) -> None:
    """Run a call whose operands begin at these addresses."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    library = folder / f"{call.source}.so"
    views = (*call.inputs, *call.outputs)
    if not library.exists():
        text = re.sub(r"asm(?: volatile)?\((.*?)\);", _plain, source, flags=re.DOTALL)
        shared = kernel_launch_of(call).shared
        text = re.sub(r"extern (__shared__ .*)\[\];", rf"\1[{shared}];", text)
        text = text.replace(_NO_PRODUCT, _PRODUCT)
        (declared,) = re.findall(rf'extern "C" __global__ void .*?{call.kernel}\((.*?)\)', text)[-1:] or [""]
        types = [each.replace("__restrict__", "").rsplit("*", 1)[0] for each in declared.split(", ")]
        if not declared or len(types) != len(views):  # a template, whose signature is a macro
            (declared,) = re.findall(r"#define WAITING_KERNEL\(name\) .* name\((.*)\)", text)
            types = [each.replace("__restrict__", "").rsplit("*", 1)[0] for each in declared.split(", ")]
        arguments = ", ".join(f"({kind} *)operands[{at}]" for at, kind in enumerate(types))
        file = library.with_suffix(".cpp")

        def compiles(threads: str, text: str, launch: str) -> str:
            """Compile the kernel with what its threads are; return the errors."""
            launch = (launch + _LAUNCH).replace("KERNEL_NAME", call.kernel).replace("ARGUMENTS", arguments)
            file.write_text(_SHIM + threads + text + launch)
            return _errors("-shared", "-include", str(_headers()), str(file), "-o", str(library))

        if "__shared__" in text or compiles(_ALONE, text, _LAUNCH_ALONE):
            errors = compiles(_TOGETHER, _FLOAT_PRODUCT.sub(_ONE_EXCHANGE, text), _LAUNCH_TOGETHER)
            assert not errors, errors
    launch = kernel_launch_of(call)
    operands = (ctypes.c_void_p * len(addresses))(*addresses)
    assert launch.block[1:] == (1, 1)
    ctypes.CDLL(str(library)).launch(operands, (ctypes.c_uint * 3)(*launch.grid), launch.block[0])


@functools.cache
def _headers() -> Path:
    """The file that includes the headers which kernels need, compiled beside it once for all of pytest's workers."""
    path = Path(os.environ[traces.FOLDER], "cuda_on_cpu.h")
    compiled = path.with_suffix(".h.gch")
    if not compiled.exists():
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            own = Path(folder, path.name)
            own.write_text("".join(f"#include <{name}>\n" for name in _HEADERS))
            errors = _errors("-x", "c++-header", str(own), "-o", f"{folder}/compiled")
            assert not errors, errors
            os.replace(own, path)
            os.replace(f"{folder}/compiled", compiled)
    return path


def _errors(*arguments: str) -> str:
    """Run the compiler with these arguments; return its errors, or an empty text if it succeeds."""
    built = subprocess.run([*_COMPILER, *arguments], capture_output=True, text=True, check=False)
    return built.stderr[:4000] if built.returncode else ""


def _plain(match: re.Match[str]) -> str:
    if permuted := re.fullmatch(
        r'"prmt.b32 %0, (%\d), (%\d), (%\d);"\s*:\s*"=r"\((\w+)\)\s*:(.*)', match[1], re.DOTALL
    ):
        *places, target, given = permuted.groups()
        operands = [target, *(each.strip()[4:-1] for each in re.split(r',\s*(?="r")', given))]
        return f"{target} = prmt({', '.join(operands[int(place[1:])] for place in places)});"
    return next((text for name, text in _ASSEMBLY.items() if name in match[1]), ";")
