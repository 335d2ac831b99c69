"""The modules and names that the documents promise, and the porting guide's example."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

import pytest
from ir_builder import IRBuilder

import npu_compiler
from cuda_compiler import CUDA_GPU, CudaCodegenTarget
from cuda_compiler.cuda_program import CUDAProgram
from cuda_runtime import CudaBackend, CudaExecutor
from npu_compiler import DeviceError, OpLevelTarget
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
    with pytest.raises(DeviceError, match="compiled for 'op_level', not for 'cuda_gpu'"):
        CudaExecutor(npu_compiler.compile(graph().ir(), target=OpLevelTarget()), OnCPU())
