"""What several commands need before their own work: the target, the device, the weights and the inputs."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from npu_sim.collector import collector_paused
from npu_sim.commands.console import log_as_notes, note, progress, step
from npu_sim.commands.options import Inputs

if TYPE_CHECKING:
    import numpy as np

    from npu_compiler import CompiledProgram
    from npu_runtime import Device, DeviceBuffer


def find_target(name: str) -> Any:
    """The code generation target of that name. Raises `InputError` if there is none."""
    from cuda_compiler import CUDACodegenTarget
    from npu_compiler import MetalCodegenTarget, OpLevelTarget
    from npu_compiler.errors import InputError

    if name in ("cuda", "cuda_gpu"):
        return CUDACodegenTarget()
    if name in ("metal", "metal_gpu"):
        return MetalCodegenTarget()
    if name not in ("cpu", "op_level"):
        raise InputError(
            f"unknown target '{name}'; choose one of op_level (for the CPU and Metal), metal_gpu and cuda_gpu"
        )
    return OpLevelTarget()


def open_device(name: str | None, fast: bool = False, no_tune: bool = False) -> Device:
    """Open the device of that name or, without a name, the best one on this machine.

    Args:
        fast: Open the Metal emulator without its memory checks.
        no_tune: Use the CPU's default kernels instead of measuring which are the fastest.

    Raises:
        InputError: `fast` or `no_tune` is given for another device.
        DeviceError: the device is unknown or cannot be used.
    """
    with step("opening the device"):
        return _open(name, fast, no_tune)


def open_in_background(name: str | None, fast: bool = False, no_tune: bool = False) -> Future[Device]:
    """`open_device` in a thread, since loading libraries and starting a driver can overlap with other work."""
    pool = ThreadPoolExecutor(1, "open-device")
    opening = pool.submit(_open, name, fast, no_tune)
    pool.shutdown(wait=False)
    return opening


def _open(name: str | None, fast: bool, no_tune: bool) -> Device:
    from npu_compiler.errors import InputError
    from npu_runtime import Device

    if fast and name != "metal-emulator":
        raise InputError("--fast is for --device metal-emulator only")
    # The first CPU device on a machine compiles kernels, which takes seconds and is worth a word.
    with collector_paused(), log_as_notes("npu_runtime.cpu.native.build"):
        device = Device("metal-emulator-fast" if fast else name)
    if no_tune:
        if device.name != "cpu":
            raise InputError(f"--no-tune is for --device cpu only; this is {device.name}")
        from npu_runtime import CPUBackend

        device.backend = CPUBackend(tune=False)
    return device


def load_onto(device: Device, program: CompiledProgram, weights: Path | None) -> dict[str, DeviceBuffer]:
    """Upload a program's weights with a progress bar. Raises `WeightError` if they are missing or do not fit."""
    from npu_compiler.errors import WeightError
    from npu_runtime import load_weights
    from npu_sim.arrays import read_weights

    if weights is None and program.weight_specs:
        raise WeightError(f"'{program.name}' has {len(program.weight_specs)} weights; give their file with --weights")
    with progress("loading weights") as report:
        return load_weights(read_weights(weights), program, device, strict=weights is not None, progress=report)


def inputs_for(program: CompiledProgram, inputs: Inputs, seed: int | None) -> tuple[dict[str, np.ndarray], int | None]:
    """The inputs from the user's files and None, or random ones and their seed, which is printed to stderr."""
    from npu_sim.arrays import choose_inputs

    arrays, used_seed = choose_inputs(inputs or (), program.input_specs, seed)
    if used_seed is not None:
        note(f"random inputs, seed {used_seed}")
    return arrays, used_seed
