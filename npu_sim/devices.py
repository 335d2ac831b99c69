"""Devices that combine packages which may not know of each other; registered as entry points in pyproject.toml."""

from npu_compiler.errors import DeviceError
from npu_runtime import Backend


def metal_emulator() -> Backend:
    """The Metal backend on the emulator, every access checked."""
    return _emulated(checks=True)


def metal_emulator_fast() -> Backend:
    """The same without the checks."""
    return _emulated(checks=False)


def _emulated(checks: bool) -> Backend:
    import metal_emulator
    from npu_runtime import MetalBackend
    from npu_runtime.cpu.native.build import find_compiler

    if find_compiler() is None:
        raise DeviceError("the Metal emulator needs a C++ compiler (looked for $CXX, c++, g++ and clang++)")
    return MetalBackend(metal_emulator.api(checks=checks))


def cuda(device_id: int = 0) -> Backend:
    """An NVIDIA GPU."""
    from cuda_runtime import CUDABackend

    return CUDABackend(device_id)
