"""Diagnosis of a CUDA installation, one component at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cuda_runtime.cublaslt import load_library
from cuda_runtime.cuda_device import CUDADevice, load_cupy, load_nvrtc
from cuda_runtime.cudnn import load_cudnn
from npu_compiler.errors import DeviceError


@dataclass(frozen=True)
class Component:
    """The state of one component of a CUDA installation: its version, or what is wrong and how to fix it."""

    name: str
    version: str | None
    problem: str | None


def components() -> list[Component]:
    """The components in the order of their dependencies; the list ends early if one that all others need is missing."""
    states: list[Component] = []
    for name, find in _PARTS.items():
        states.append(_examined(name, find))
        if name in _FOUNDATIONS and states[-1].problem is not None:
            break
    return states


def _examined(name: str, find: Callable[[], str]) -> Component:
    try:
        return Component(name, find(), None)
    except Exception as error:  # a broken driver may raise anything
        return Component(name, None, (str(error).splitlines() or [type(error).__name__])[0])


def _driver() -> str:
    cupy = load_cupy()
    try:
        number = cupy.cuda.runtime.driverGetVersion()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise DeviceError(
            f"the NVIDIA driver does not respond ({error}); install one, or run this on a machine with a GPU"
        ) from error
    if not number:
        raise DeviceError("there is no NVIDIA driver here")
    return f"for CUDA {_dotted(number)}"


def _gpus() -> str:
    cupy = load_cupy()
    count = CUDADevice().runtime.getDeviceCount()
    names = [cupy.cuda.runtime.getDeviceProperties(number)["name"].decode() for number in range(count)]
    return ", ".join(f"{number}: {name}" for number, name in enumerate(names))


def _nvrtc() -> str:
    return ".".join(map(str, load_nvrtc(load_cupy()).getVersion()))


def _cublaslt() -> str:
    number = int(load_library(CUDADevice()).cublasLtGetVersion())
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def _cudnn() -> str:
    module: Any = load_cudnn()
    number = int(module.backend_version())
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def _dotted(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


_FOUNDATIONS = ("CuPy", "driver", "GPUs")
_PARTS: dict[str, Callable[[], str]] = {
    "CuPy": lambda: str(load_cupy().__version__),
    "driver": _driver,
    "GPUs": _gpus,
    "NVRTC": _nvrtc,
    "cuBLASLt": _cublaslt,
    "cuDNN (convolutions; else our own kernels)": _cudnn,
}
