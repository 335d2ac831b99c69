"""Whether an NVIDIA GPU can be used here, and what tests run on where it can."""

from __future__ import annotations

import os
from typing import Any

import pytest

from cuda_runtime import CUDABackend
from cuda_runtime.cuda_device import CUDADevice
from npu_compiler import DeviceError


def gpu_problem() -> str:
    """Why no GPU can be used here; empty where one can."""
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


def cuda_backends() -> tuple[CUDABackend, ...]:
    """The CUDA device, for tests that run on every device there is; none without a GPU."""
    return () if PROBLEM else (CUDABackend(),)
