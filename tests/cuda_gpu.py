"""Whether an NVIDIA GPU can be used here, and the CUDA device on it."""

from __future__ import annotations

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


def cuda_backends() -> tuple[CUDABackend, ...]:
    """The CUDA device, for tests that run on every device there is; none without a GPU."""
    return () if PROBLEM else (CUDABackend(),)
