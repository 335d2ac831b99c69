"""Devices for tests: the CPU, and an NVIDIA GPU where one can be used."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from cuda_runtime import CUDABackend
from cuda_runtime.cuda_device import CUDADevice
from npu_compiler import DeviceError
from npu_compiler.program.kernels import KernelCall
from npu_compiler.program.views import View
from npu_runtime import Backend, DeviceBuffer, Operand
from npu_runtime.backend import Launch


def gpu_problem() -> str:
    """Return the reason why no GPU can be used here; empty where one can."""
    try:
        CUDADevice()
    except DeviceError as error:
        return str(error)
    return ""


PROBLEM = gpu_problem()
# The devices by name, as parameters of a test: the CPU, the GPU where there is one, and one that TEST_DEVICE names.
DEVICES: list[Any] = [
    "cpu",
    *([] if PROBLEM else [pytest.param("cuda", marks=pytest.mark.gpu)]),
    *filter(None, [os.environ.get("TEST_DEVICE")]),
]


def need_gpu() -> None:
    """Skip the calling test module, as a whole, where there is no GPU."""
    if PROBLEM:
        pytest.skip(PROBLEM, allow_module_level=True)


def prepared(
    backend: Backend, calls: Sequence[KernelCall], sources: Mapping[str, str], memory: Mapping[str, DeviceBuffer]
) -> list[Launch]:
    """Calls of generated kernels, compiled and ready to run on the buffers that their views name."""

    def operands(views: Sequence[View]) -> list[Operand]:
        return [Operand(memory[view.buffer], view, 0, False) for view in views]

    backend.compile(calls, sources)
    return [backend.prepare(call, operands(call.inputs), operands(call.outputs)) for call in calls]


def cuda_backends() -> tuple[CUDABackend, ...]:
    """The CUDA device, for tests that run on every device there is; none without a GPU."""
    return () if PROBLEM else (CUDABackend(),)
