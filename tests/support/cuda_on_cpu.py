"""Runs generated CUDA kernels on the CPU: compiled as C++, with a thread for each thread of a block.

For small grids of kernels that use no more of CUDA than common.cuh, warp shuffles and block barriers.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from cuda_compiler.cuda_program import kernel_launch_of
from npu_compiler.program.kernels import KernelCall
from npu_compiler.program.plan import ExecutionPlan

_SHIM = """
#include <algorithm>
#include <cmath>
#include <cstring>
using std::max, std::min;
#define __device__
#define __global__
#define __forceinline__ inline
#define __shared__ static
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __launch_bounds__(...)
struct Size { unsigned x, y, z; };
static thread_local Size threadIdx;
static Size blockIdx;
static float __int_as_float(int bits) { float x; std::memcpy(&x, &bits, 4); return x; }
static float __uint_as_float(unsigned bits) { float x; std::memcpy(&x, &bits, 4); return x; }
static unsigned __float_as_uint(float x) { unsigned bits; std::memcpy(&bits, &x, 4); return bits; }
static unsigned long __cvta_generic_to_shared(const void *x) { return (unsigned long)x; }
static float rsqrtf(float x) { return 1.0f / sqrtf(x); }
"""
_ASSEMBLY = {
    "cvt.f32.f16": "_Float16 half; std::memcpy(&half, &value, 2); result = float(half);",
    "cvt.rn.f16.f32": "const _Float16 half = _Float16(value); std::memcpy(&result, &half, 2);",
    "ex2.approx": "result = exp2f(a);",
}
# For kernels whose threads know nothing of each other: one after the other.
_ALONE = """
static void __syncthreads() {}
template <typename T> T __shfl_sync(unsigned, T value, int) { return value; }
template <typename T> T __shfl_xor_sync(unsigned, T value, int) { return value; }
"""
_LAUNCH_ALONE = """
extern "C" void launch(void **operands, unsigned blocks, unsigned threads) {
    for (unsigned block = 0; block < blocks; block++) {
        for (unsigned i = 0; i < threads; i++) {
            blockIdx = {block, 0, 0};
            threadIdx = {i, 0, 0};
            KERNEL_NAME(ARGUMENTS);
        }
    }
}
"""
_TOGETHER = """
#include <barrier>
#include <memory>
#include <thread>
#include <vector>
struct Warp { std::barrier<> turn{32}; unsigned words[32]; };
static std::unique_ptr<std::barrier<>> everyone;
static std::vector<std::unique_ptr<Warp>> warps;
static void __syncthreads() { everyone->arrive_and_wait(); }
template <typename T> T __shfl_sync(unsigned, T value, int lane) {
    Warp &warp = *warps[threadIdx.x / 32];
    std::memcpy(&warp.words[threadIdx.x % 32], &value, 4);
    warp.turn.arrive_and_wait();
    std::memcpy(&value, &warp.words[lane], 4);
    warp.turn.arrive_and_wait();
    return value;
}
template <typename T> T __shfl_xor_sync(unsigned all, T value, int step) {
    return __shfl_sync(all, value, threadIdx.x % 32 ^ step);
}
"""
_LAUNCH_TOGETHER = """
extern "C" void launch(void **operands, unsigned blocks, unsigned threads) {
    for (unsigned block = 0; block < blocks; block++) {
        blockIdx = {block, 0, 0};
        everyone = std::make_unique<std::barrier<>>(threads);
        warps.clear();
        for (unsigned i = 0; i < threads; i += 32) warps.push_back(std::make_unique<Warp>());
        std::vector<std::thread> running;
        for (unsigned i = 0; i < threads; i++) running.emplace_back([=] {
            threadIdx = {i, 0, 0};
            KERNEL_NAME(ARGUMENTS);
            everyone->arrive_and_drop();
            warps[i / 32]->turn.arrive_and_drop();
        });
        for (std::thread &each : running) each.join();
    }
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
        _run(call, plan.sources[call.source], memory, folder)
    return memory


def _run(call: KernelCall, source: str, memory: dict[str, np.ndarray], folder: Path) -> None:
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    library = folder / f"{call.source}.so"
    views = (*call.inputs, *call.outputs)
    if not library.exists():
        text = re.sub(r"asm(?: volatile)?\((.*?)\);", _plain, source, flags=re.DOTALL)
        shared = kernel_launch_of(call).shared
        text = re.sub(r"extern (__shared__ .*)\[\];", rf"\1[{shared}];", text)
        (declared,) = re.findall(rf'extern "C" __global__ void .*?{call.kernel}\((.*?)\)', text)[-1:] or [""]
        types = [each.replace("__restrict__", "").rsplit("*", 1)[0] for each in declared.split(", ")]
        if not declared or len(types) != len(views):  # a template, whose signature is a macro
            (declared,) = re.findall(r"#define WAITING_KERNEL\(name\) .* name\((.*)\)", text)
            types = [each.replace("__restrict__", "").rsplit("*", 1)[0] for each in declared.split(", ")]
        arguments = ", ".join(f"({kind} *)operands[{at}]" for at, kind in enumerate(types))
        alone = re.search(r"__shared__ .*\[", text) is None
        launch = (
            (_LAUNCH_ALONE if alone else _LAUNCH_TOGETHER)
            .replace("KERNEL_NAME", call.kernel)
            .replace("ARGUMENTS", arguments)
        )
        file = library.with_suffix(".cpp")
        file.write_text(_SHIM + (_ALONE if alone else _TOGETHER) + text + launch)
        command = ["g++", "-std=c++20", "-O0", "-w", "-pthread", "-shared", "-fPIC", str(file), "-o", str(library)]
        built = subprocess.run(command, capture_output=True, text=True, check=False)
        assert built.returncode == 0, built.stderr[:4000]
    launch = kernel_launch_of(call)
    pointers = [memory[view.buffer].ctypes.data + view.offset * memory[view.buffer].itemsize for view in views]
    operands = (ctypes.c_void_p * len(pointers))(*pointers)
    assert launch.grid[1:] == launch.block[1:] == (1, 1)
    ctypes.CDLL(str(library)).launch(operands, launch.grid[0], launch.block[0])


def _plain(match: re.Match[str]) -> str:
    return next((text for name, text in _ASSEMBLY.items() if name in match[1]), ";")
