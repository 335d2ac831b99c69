"""Runs generated CUDA kernels on the CPU: compiled as C++, with a coroutine for each thread of a block.

For small grids. Kernels are compiled as for GPUs before Ampere; resident ones, whose blocks run at the same time, for a
compute capability of one's choice; those in clusters, whose blocks do so too, for Hopper. `cuda_on_cpu.hpp` has what
they use of CUDA, and here each instruction of PTX has its C++.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import traces

from cuda_compiler import CUDACodegenTarget
from cuda_compiler.cuda_program import ConvolutionLaunch, GemmLaunch, LaunchKind, gemm_of, kernel_launch_of, launch_of
from cuda_compiler.specialization.c_text import TYPES
from cuda_runtime.tuned_convolutions import kernels_of
from npu_compiler.graph.dtypes import itemsize
from npu_compiler.program.kernels import KernelCall
from npu_compiler.program.plan import ExecutionPlan
from npu_compiler.target_config import CUDA_GPU
from npu_runtime import CPUBackend, Operand
from npu_runtime.backend import Launch
from npu_runtime.cpu.backend import bind
from npu_runtime.torch_arrays import view_tensor

_CLUSTERS_FROM = 90  # the first compute capability, times 10, that has clusters
_COMPILER = ("g++", "-std=c++20", "-w", "-fPIC", "-fvisibility=hidden")
_SHIM = Path(__file__).with_suffix(".hpp")
_ASSEMBLY = re.compile(r"\basm(?: volatile)?\(")
_OPERAND = re.compile(r'"([=+]?)\w+"\s*(?=\()')
# The first words of an instruction → what it does in C++, with its operands as in the instruction. Of two that fit, the
# longer one counts.
_INSTRUCTIONS = {
    "bar.sync": "cpu_meet(%0, %1)",
    "bar.sync 1, %0": "cpu_meet(1, %0)",
    "barrier.cluster.arrive": "cpu_meet_cluster()",
    "cp.async.bulk.prefetch": "",
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes": "cpu_copy_bulk(%0, %1, %2, %3)",
    "cp.async.ca.shared.global": "cpu_copy(%0, %1, %2, %3)",
    "cp.async.cg.shared.global [%0], [%1], 16;": "cpu_copy(%0, %1, 16, 16)",
    "cp.async.cg.shared.global [%0], [%1], 16, %2;": "cpu_copy(%0, %1, 16, %2)",
    "cp.async.commit_group": "",
    "cp.async.mbarrier.arrive.noinc": "cpu_arrive(%0)",
    "cp.async.wait_group": "",
    "createpolicy": "",
    "cvt.f32.f16": "%0 = cpu_half(%1)",
    "cvt.rn.bf16.f32": "%0 = cpu_to_brain(%1)",
    "cvt.rn.bf16x2.f32": "%0 = cpu_pair(cpu_to_brain(%1), cpu_to_brain(%2))",
    "cvt.rn.f16.f32": "%0 = cpu_to_half(%1)",
    "cvt.rn.f16x2.f32": "%0 = cpu_pair(cpu_to_half(%1), cpu_to_half(%2))",
    "ex2.approx": "%0 = exp2f(%1)",
    "fma.rn.bf16x2": "%0 = cpu_fma_pair(cpu_brain, cpu_to_brain, %1, %2, %3)",
    "fma.rn.f16x2": "%0 = cpu_fma_pair(cpu_half, cpu_to_half, %1, %2, %3)",
    "fence": "",
    "griddepcontrol": "",
    "ld.acquire.cta.shared.u32": "%0 = cpu_poll<unsigned>(%1)",
    "ld.acquire.gpu.global.u32": "%0 = cpu_poll<unsigned>(%1)",
    "ld.global.nc.L1::no_allocate.v4": (
        "%0 = cpu_at<uint4>(%4).x, %1 = cpu_at<uint4>(%4).y, %2 = cpu_at<uint4>(%4).z, %3 = cpu_at<uint4>(%4).w"
    ),
    "ld.relaxed.gpu.global.u16": "cpu_yield(), %0 = cpu_at<unsigned short>(%1)",
    "ld.relaxed.gpu.global.v2.b64": (
        "cpu_yield(), %0 = cpu_at<unsigned long long>(%2), %1 = (&cpu_at<unsigned long long>(%2))[1]"
    ),
    "ld.shared::cluster.f32": "%0 = cpu_at<float>(%1)",
    "ld.shared::cluster.v4.f32": (
        "%0 = cpu_at<float>(%4), %1 = cpu_at<float>((%4) + 4), "
        "%2 = cpu_at<float>((%4) + 8), %3 = cpu_at<float>((%4) + 12)"
    ),
    "ld.shared.f32": "%0 = cpu_at<float>(%1)",
    "ld.shared.u32": "%0 = cpu_at<unsigned>(%1)",
    "mapa.shared::cluster.u32": "%0 = cpu_address_in(%2, %1)",
    "mbarrier.arrive.expect_tx.shared.b64": "cpu_arrive(%0, %1)",
    "mbarrier.arrive.shared.b64": "cpu_arrive(%0)",
    "mbarrier.init": "cpu_start_barrier(%0, %1)",
    "mma.sync.aligned.m16n8k16.row.col.f32.bf16": "cpu_product(cpu_add_brains, sums, %4, %5, %6, %7, %8, %9)",
    "mma.sync.aligned.m16n8k16.row.col.f32.f16": "cpu_product(cpu_add_halves, sums, %4, %5, %6, %7, %8, %9)",
    "mma.sync.aligned.m16n8k32.row.col.s32.s8": "cpu_product(cpu_add_bytes, sums, %4, %5, %6, %7, %8, %9)",
    "mov.u32 %0, %%dynamic_smem_size": "%0 = cpu_shared_bytes",
    "mov.u32 %0, %%tid.x": "%0 = threadIdx.x",
    "mul.rn.f16x2": "%0 = cpu_fma_pair(cpu_half, cpu_to_half, %1, %2, 0x80008000u)",
    "prefetch": "",
    "prmt.b32": "%0 = cpu_permute(%1, %2, %3)",
    "prmt.b32 %0, %1, %1, %2;": "%0 = cpu_permute(%1, %1, %2)",
    "rcp.approx": "%0 = 1.0f / (%1)",
    "red.release.gpu.global.add.u32": "cpu_at<unsigned>(%0) += %1",
    "setmaxnreg": "",
    "st.relaxed.gpu.global.u16": "cpu_at<unsigned short>(%0) = %1",
    "st.relaxed.gpu.global.v2.b64": "cpu_at<unsigned long long>(%0) = %1, (&cpu_at<unsigned long long>(%0))[1] = %2",
    "st.release.cta.shared.u32": "cpu_at<unsigned>(%0) = %1",
    "st.shared::cluster.f32": "cpu_at<float>(%0) = %1",
    "st.shared.u32": "cpu_at<unsigned>(%0) = %1",
    "st.shared.v2.b32": "cpu_at<unsigned>(%0) = %1, (&cpu_at<unsigned>(%0))[1] = %2",
    "st.shared.v2.u32 [%0], {%1, %1};": "cpu_at<unsigned>(%0) = %1, (&cpu_at<unsigned>(%0))[1] = %1",
    "{ .reg .pred p; mbarrier.test_wait.parity.shared.b64": "%0 = cpu_is_over(%1, %2)",
    "{ .reg .pred p; mbarrier.try_wait.parity.shared.b64": "%0 = cpu_is_over(%1, %2)",
    "{ .reg .pred wanted; setp.ne.u32 wanted, %5, 0; @wanted ld.relaxed.gpu.global.v4.u32": (
        "cpu_yield(); if (%5) { %0 = cpu_at<uint4>(%4).x; %1 = cpu_at<uint4>(%4).y; "
        "%2 = cpu_at<uint4>(%4).z; %3 = cpu_at<uint4>(%4).w; }"
    ),
}
# Shared memory whose size the launch says, in a function and outside of all.
_SHARED = [
    (re.compile(rf"^{space}extern __shared__ (?:__align__\(\d+\) )?([\w ]+) (\w+)\[\];", re.MULTILINE), text)
    for space, text in ((" +", r"\1 *const \2 = (\1 *)cpu_shared();"), ("", r"#define \2 ((\1 *)cpu_shared())"))
]
# Products that templates have for GPUs before Ampere, in many exchanges among the lanes, or not at all.
_FLOAT_PRODUCT = re.compile(r"#else\n    // GPUs before Ampere: the same sums.*?#endif\n", re.DOTALL)
_ONE_EXCHANGE = """#else
    constexpr auto add = [](float &sum, unsigned a, unsigned b) {
        sum = fmaf(to_float(low_half(a)), to_float(low_half(b)), sum);
        sum = fmaf(to_float(high_half(a)), to_float(high_half(b)), sum);
    };
    cpu_product(add, sums, a0, a1, a2, a3, b0, b1);
#endif
"""
_NO_PRODUCT = "void multiply(int (&)[4], const unsigned (&)[4], unsigned, unsigned) {}"
_BYTE_PRODUCT = """void multiply(int (&sums)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    cpu_product(cpu_add_bytes, sums, a[0], a[1], a[2], a[3], b0, b1);
}"""
_LAUNCH = """
static void **cpu_operands;
static void cpu_kernel() { KERNEL(ARGUMENTS); }
extern "C" __attribute__((visibility("default")))
void launch(void **operands, const unsigned *grid, unsigned threads, unsigned shared, bool together) {
    cpu_operands = operands;
    cpu_launch(cpu_kernel, {grid[0], grid[1], grid[2]}, threads, shared, together);
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
    """The memory of the CPU device, with the CUDA target's kernels, for single calls and whole programs."""

    config = CUDA_GPU
    runs_targets = (CUDA_GPU.name,)

    def __init__(
        self, folder: Path, target: CUDACodegenTarget | None = None, capability: int = 80, blocks: int = 2
    ) -> None:
        """Use a folder for the compiled kernels.

        Args:
            capability, blocks: The compute capability, times 10, and the number of blocks of resident kernels.
        """
        super().__init__()
        self._capability, self._blocks = capability, blocks
        self._folder, self._cuda, self._sources = folder, target or CUDACodegenTarget(), dict[str, str]()

    @property
    def target(self) -> Any:
        return self._cuda

    def compile(self, calls: Iterable[KernelCall], sources: Mapping[str, str] = MappingProxyType({})) -> None:
        self._sources |= sources

    def laid_out(self, plan: ExecutionPlan) -> ExecutionPlan:
        return plan

    def prepare(self, call: KernelCall, inputs: Sequence[Operand], outputs: Sequence[Operand]) -> Launch:
        operands = (*inputs, *outputs)
        if call.kernel == LaunchKind.CUBLAS_GEMM:
            return lambda: _multiply(
                gemm_of(call), [view_tensor(bind(x)) for x in inputs], view_tensor(bind(outputs[0]))
            )
        if isinstance(launch_of(call), ConvolutionLaunch):  # any kernel but those of warpgroups
            call = next(form for form in kernels_of(call) if form.kernel != "conv_wgmma")
        source = self._sources[call.source]

        def launch() -> None:  # holds the operands' memory, which nobody else may need any more
            addresses = [
                x.memory.native_handle.ctypes.data + x.byte_offset + x.view.offset * itemsize(x.view.dtype)
                for x in operands
            ]
            _run(call, source, addresses, self._folder, self._capability, self._blocks)

        return launch


def _multiply(gemm: GemmLaunch, inputs: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """Compute a product of cuBLASLt, reading memory by the launch's numbers as cuBLASLt does."""

    def matrices(view: torch.Tensor, rows: int, columns: int, leading: int, stride: int) -> torch.Tensor:
        return view.as_strided((gemm.batch, rows, columns), (stride, leading, 1), view.storage_offset())

    a, b, *addends = inputs
    m, n, k = gemm.m, gemm.n, gemm.k
    left = matrices(a, k, m, gemm.lda, gemm.stride_a).mT if gemm.trans_a else matrices(a, m, k, gemm.lda, gemm.stride_a)
    right = (
        matrices(b, n, k, gemm.ldb, gemm.stride_b).mT if gemm.trans_b else matrices(b, k, n, gemm.ldb, gemm.stride_b)
    )
    sums = gemm.alpha * (left.float() @ right.float())
    if gemm.has_bias:
        sums += addends.pop(0).float()
    if gemm.has_residual:
        sums += matrices(addends[0], m, n, gemm.ldr, gemm.stride_r).float()
    if gemm.activation != "none":
        sums = F.relu(sums) if gemm.activation == "relu" else F.gelu(sums, approximate="tanh")
    matrices(out, m, n, gemm.ldc, gemm.stride_c).copy_(sums)


def _run(
    call: KernelCall, source: str, addresses: Sequence[int], folder: Path, capability: int = 80, blocks: int = 2
) -> None:
    """Run a call whose operands begin at these addresses.

    Args:
        capability, blocks: As in `EmulatedBackend`.
    """
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    launch = kernel_launch_of(call)
    is_resident = launch.kind is LaunchKind.RESIDENT
    in_clusters = "__global__ void CLUSTER(" in source
    library = folder / f"{call.source}.so"
    if not library.exists():
        types = [TYPES[view.dtype] for view in (*call.inputs, *call.outputs)]
        arguments = ", ".join(f"({kind} *)cpu_operands[{at}]" for at, kind in enumerate(types))
        if is_resident:
            arguments = "*(const Operands *)cpu_operands"
        version = capability if is_resident else _CLUSTERS_FROM
        architecture = f"#define __CUDA_ARCH__ {10 * version}\n" if is_resident or in_clusters else ""
        text = _translated(source).replace(_NO_PRODUCT, _BYTE_PRODUCT)
        for shared, text_of_it in _SHARED:
            text = shared.sub(text_of_it, text)
        text = _FLOAT_PRODUCT.sub(_ONE_EXCHANGE, text)
        file = library.with_suffix(".cpp")
        file.write_text(architecture + text + _LAUNCH.replace("KERNEL", call.kernel).replace("ARGUMENTS", arguments))
        errors = _errors(
            "-O1" if is_resident else "-O0", "-shared", "-include", str(_header()), str(file), "-o", str(library)
        )
        assert not errors, errors
    operands = (ctypes.c_void_p * len(addresses))(*addresses)
    assert launch.block[1:] == (1, 1)
    grid = (ctypes.c_uint * 3)(*((blocks, 1, 1) if is_resident else launch.grid))
    ctypes.CDLL(str(library)).launch(operands, grid, launch.block[0], launch.shared, is_resident or in_clusters)


@functools.cache
def _header() -> Path:
    """The file that says what CUDA is, compiled beside it once for all of pytest's workers."""
    path = Path(os.environ[traces.FOLDER], _SHIM.name)
    compiled = path.with_name(path.name + ".gch")
    if not compiled.exists():
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            own = Path(folder, path.name)
            own.write_text(_SHIM.read_text())
            errors = _errors("-x", "c++-header", str(own), "-o", f"{folder}/compiled")
            assert not errors, errors
            os.replace(own, path)
            os.replace(f"{folder}/compiled", compiled)
    return path


def _errors(*arguments: str) -> str:
    """Run the compiler with these arguments; return its errors, or an empty text if it succeeds."""
    built = subprocess.run([*_COMPILER, *arguments], capture_output=True, text=True, check=False)
    return built.stderr[:4000] if built.returncode else ""


def _translated(source: str) -> str:
    """CUDA C with C++ in the place of its instructions."""
    parts, end = [], 0
    for found in _ASSEMBLY.finditer(source):
        if found.start() < end:
            continue
        parts.append(source[end : found.start()])
        end = _closing(source, found.end() - 1) + 1
        parts.append(_statement(source[found.end() : end - 1]))
    return "".join([*parts, source[end:]])


def _closing(text: str, at: int) -> int:
    """The index of the bracket that closes the one at index `at`."""
    depth = 0
    for index in range(at, len(text)):
        depth += (text[index] == "(") - (text[index] == ")")
        if depth == 0:
            return index
    raise AssertionError("a bracket is not closed")


def _statement(assembly: str) -> str:
    """The C++ of an instruction, given as what is between the brackets of `asm(…)`."""
    strings = re.match(r'(?:\s*"[^"]*")+', assembly)
    assert strings is not None
    instruction = " ".join("".join(re.findall(r'"([^"]*)"', strings[0])).replace("\\n", " ").split())
    operands, at = [], strings.end()
    while operand := _OPERAND.search(assembly, at):
        at = _closing(assembly, operand.end())
        operands.append(assembly[operand.end() : at + 1])
    words = max((words for words in _INSTRUCTIONS if instruction.startswith(words)), key=len, default=None)
    text = "cpu_unknown()" if words is None else _INSTRUCTIONS[words]
    return re.sub(r"%(\d)", lambda place: operands[int(place[1])], text)
