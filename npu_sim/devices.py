"""Factories of devices that combine packages which do not import each other; pyproject.toml registers them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from npu_compiler.errors import DeviceError
from npu_runtime import Backend

if TYPE_CHECKING:
    from npu_compiler.compiled_program import CompiledProgram
    from npu_compiler.partitioner import PartitionPlan
    from npu_model import NPUBackend
    from npu_runtime import Device


def metal_emulator() -> Backend:
    """Open the Metal backend on the Metal emulator, which runs Metal kernels on the CPU and checks every memory access.

    Raises:
        DeviceError: there is no C++ compiler.
    """
    return _emulated(checks=True)


def metal_emulator_fast() -> Backend:
    """Open the Metal backend on the Metal emulator without bounds checks. Raises `DeviceError` without a compiler."""
    return _emulated(checks=False)


def _emulated(checks: bool) -> Backend:
    import metal_emulator
    from npu_runtime import MetalBackend
    from npu_runtime.cpu.native.build import find_compiler

    if find_compiler() is None:
        raise DeviceError("the Metal emulator needs a C++ compiler; none of $CXX, c++, g++ and clang++ was found")
    return MetalBackend(metal_emulator.api(checks=checks))


def npu(chip: str) -> Backend:
    """Open a simulated chip, which runs programs of tile instructions and whose clock shows simulated time.

    Args:
        chip: A .toml file, or the name of a chip that comes with `npu_model`.

    Raises:
        DeviceError: there is no such chip, or its file is malformed.
    """
    from npu_compiler.errors import InputError
    from npu_model import NPUBackend, load_chip

    try:
        return NPUBackend(load_chip(chip))
    except InputError as error:
        raise DeviceError(str(error)) from error


def npu_model(chip: str) -> Backend:
    """Raise `DeviceError` for the former device name `npu-model:CHIP`, and name its successor `npu:CHIP`."""
    raise DeviceError(f"the device 'npu-model:{chip}' is now 'npu:{chip}', and computes on the simulated chip")


def simulated(device: Device) -> NPUBackend | None:
    """Return a device's backend if the device simulates a chip, else None."""
    if not device.name.startswith("npu:"):
        return None
    from npu_model import NPUBackend

    return device.backend if isinstance(device.backend, NPUBackend) else None


def simulated_run(device: Device, ran: CompiledProgram | PartitionPlan) -> dict[str, Any] | None:
    """Return what a simulated chip took for a model's run, as `simulate --json` prints it; None for other devices.

    For a `PartitionPlan`, a division between chip and host, that has no prices, only the chip's own time is known.

    Args:
        ran: The program, or the partitioned model, that the device ran.
    """
    from npu_compiler.compiled_program import CompiledProgram
    from npu_model import simulate_plan

    chip = simulated(device)
    if chip is None:
        return None
    if isinstance(ran, CompiledProgram):
        if ran.kernels:
            return chip.result(ran).to_dict()
    elif ran.price is not None:
        return simulate_plan(ran, chip.chip).to_dict()
    return {"chip": chip.chip.name, "latency_us": 1e6 * chip.simulated_seconds}


def cuda(device_id: int = 0) -> Backend:
    """Open the backend for one NVIDIA GPU.

    Args:
        device_id: The number of the GPU, from 0.

    Raises:
        DeviceError: there is no such GPU, or a package that it needs is not installed.
    """
    from cuda_runtime import CUDABackend

    return CUDABackend(device_id)
