"""The modules and names that the documents promise, and the porting guide's example."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

import msgpack
import pytest
from ir_builder import IRBuilder

import npu_compiler
from cuda_compiler import CUDA_GPU, CudaCodegenTarget
from cuda_compiler.cuda_program import (
    Convolution,
    ConvolutionLaunch,
    CUDAProgram,
    GemmLaunch,
    KernelForm,
    KernelLaunch,
    Launch,
    LaunchKind,
    launch_of,
)
from cuda_runtime import CudaBackend, CudaExecutor
from npu_compiler import DeviceError, OpLevelTarget, ProgramFormatError
from npu_compiler.program.kernels import KernelCall
from npu_runtime.cpu.backend import CPUBackend

PROMISED = {
    "cuda_compiler.buffer_planner": ["plan_memory"],
    "cuda_compiler.cuda_codegen": ["generate_elementwise"],
    "cuda_compiler.cuda_program": ["CUDAProgram"],
    "cuda_compiler.cuda_templates": ["RULES", "Specializer"],
    "cuda_compiler.op_classify": ["classify"],
    "cuda_compiler.op_support": ["get_supported_ops", "is_op_supported"],
    "cuda_compiler.subgraph_analyzer": ["find_groups"],
    "cuda_runtime.cuda_backend": ["CUDABackend", "CUDABuffer", "CudaBackend", "CudaBuffer"],
    "cuda_runtime.cuda_executor": ["CUDAExecutor", "CudaExecutor"],
}
KERNEL = KernelLaunch((3, 2, 1), (64, 1, 1), 1024)
LAUNCHES: list[Launch] = [
    KERNEL,
    KernelLaunch((1, 1, 1), (384, 1, 1), 100_000, LaunchKind.RESIDENT),
    GemmLaunch(m=9, n=16, k=64, lda=64, ldb=64, ldr=16, ldc=16, trans_b=True, has_bias=True, activation="relu"),
    ConvolutionLaunch(
        KERNEL, Convolution((1, 2), (0, 1, 2, 3), (1, 1), 4, "none", True, False), (KernelForm("k", "s", KERNEL),)
    ),
]


@pytest.mark.parametrize("module", PROMISED)
def test_documented_modules_have_their_names(module: str) -> None:
    found = import_module(module)
    assert all(hasattr(found, name) for name in PROMISED[module])
    assert all(hasattr(found, name) for name in getattr(found, "__all__", []))


def graph() -> IRBuilder:
    g = IRBuilder()
    g.output(g("aten.relu.default", g.input("x", 4, 4)))
    return g


class OnCPU(CPUBackend):
    """The CPU device, for op-level programs that are named like CUDA's."""

    config = CUDA_GPU
    runs_targets = (CUDA_GPU.name,)
    create_executor: Callable[..., CudaExecutor] = CudaBackend.create_executor


class OpLevel(OpLevelTarget):
    config = CUDA_GPU


def test_a_backend_creates_the_executor_of_the_porting_guide() -> None:
    program: CUDAProgram = npu_compiler.compile(graph().ir(), target=OpLevel())
    backend = OnCPU()
    executor = backend.create_executor(program)
    assert isinstance(executor, CudaExecutor) and executor.backend is backend
    assert isinstance(CudaExecutor(program, backend, config=CUDA_GPU), CudaExecutor)


def test_an_executor_refuses_a_program_for_another_target() -> None:
    assert npu_compiler.compile(graph().ir(), target=CudaCodegenTarget()).target == CUDA_GPU.name
    with pytest.raises(DeviceError, match="compiled for 'op_level', but this device runs 'cuda_gpu'"):
        CudaExecutor(npu_compiler.compile(graph().ir(), target=OpLevelTarget()), OnCPU())


def test_a_call_without_a_launch_says_what_to_do() -> None:
    (call,) = npu_compiler.compile(graph().ir(), target=OpLevel()).plan.calls
    with pytest.raises(ProgramFormatError, match="does not say how it is launched.*compile it with CUDACodegenTarget"):
        launch_of(call)


@pytest.mark.parametrize("launch", LAUNCHES, ids=lambda launch: type(launch).__name__)
def test_a_launch_survives_the_file(launch: Launch) -> None:
    stored = msgpack.unpackb(msgpack.packb(launch.params()))
    assert launch_of(KernelCall("kernel", "", (), (), stored, "node")) == launch
