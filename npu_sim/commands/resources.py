"""Resources that several commands open before their own work: the device, the weights and the inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from npu_sim.collector import collector_paused
from npu_sim.commands.console import note, progress, step
from npu_sim.commands.options import Inputs

if TYPE_CHECKING:
    import numpy as np

    from npu_compiler import CompiledProgram, IRGraph, TensorSpec
    from npu_runtime import Device, DeviceBuffer


def open_device(name: str | None, no_tune: bool = False) -> Device:
    """Open the device of that name or, if the name is None, the best one on this machine.

    Args:
        no_tune: Use the CPU's default kernels instead of measuring which are the fastest.

    Raises:
        DeviceError: the device cannot be used.
    """
    with step("opening the device"):
        return _open(name, no_tune)


def open_device_for(program: CompiledProgram, name: str | None, no_tune: bool) -> Device:
    """Open a device as `open_device` does. Raises `DeviceError` also if the program was compiled for another device."""
    from npu_compiler.errors import DeviceError

    device = open_device(name, no_tune)
    runs = device.backend.runs_targets
    if program.target not in runs:
        raise DeviceError(
            f"'{program.name}' was compiled for {program.target}, but {device.name} runs programs for "
            f"{' and '.join(runs)}: choose another --device, or compile with another --target"
        )
    return device


def open_in_background(name: str | None, no_tune: bool = False) -> Future[Device]:
    """Start `open_device` in a thread, so that starting a driver overlaps with other work; return its future result."""
    pool = ThreadPoolExecutor(1, "open-device")
    opening = pool.submit(_open, name, no_tune)
    pool.shutdown(wait=False)
    return opening


def _open(name: str | None, no_tune: bool) -> Device:
    from npu_compiler.errors import DeviceError
    from npu_runtime import Device

    try:
        with collector_paused():
            device = Device(name)
    except DeviceError as error:
        raise DeviceError(f"{error}; `npu-sim doctor` shows which devices --device can name here") from error
    if no_tune:
        from npu_runtime import CPUBackend

        device.backend = CPUBackend(tune=False)
    return device


def read_graph(path: Path, shapes: Sequence[str] | None) -> IRGraph:
    """Read the graph of an IR file or an ONNX file.

    Args:
        shapes: Sizes of dynamic dimensions of an ONNX model, as for `parse_sizes`. Default: the model's own.

    Raises:
        InputError: sizes are given for a file that is not ONNX.
        IRError: the file cannot be read.
    """
    from npu_compiler import read_ir
    from npu_compiler.errors import InputError

    if not shapes:
        return read_ir(path)
    from npu_sim.onnx.sources import SUFFIX, ir_of_file, parse_sizes

    if path.suffix != SUFFIX:
        raise InputError("--shape is for an ONNX file; other IR has static shapes")
    return read_ir(ir_of_file(path, parse_sizes(shapes)))


def weights_for(model: CompiledProgram | IRGraph, weights: Path | None) -> Mapping[str, Any]:
    """Read the state dict of a model from a file; it is empty without a file.

    Args:
        weights: The file. None is allowed only for a model without weights.

    Raises:
        WeightError: the file cannot be read, or is missing for a model that has weights.
    """
    from npu_compiler import CompiledProgram
    from npu_compiler.errors import WeightError
    from npu_compiler.program.plan import WeightSpec
    from npu_sim.arrays import read_weights
    from npu_sim.onnx.sources import SUFFIX

    needed = model.weight_specs if isinstance(model, CompiledProgram) else model.weights
    if weights is None and needed:
        raise WeightError(f"'{model.name}' has {len(needed)} weights; give their file with --weights")
    state = read_weights(weights)
    if weights is None or weights.suffix != SUFFIX:
        return state
    recipes = (weight.recipe if isinstance(weight, WeightSpec) else weight for weight in needed.values())
    keys = {key for recipe in recipes for key in recipe.keys()}
    return {key: tensor for key, tensor in state.items() if key in keys}  # an ONNX file holds shapes and the like too


def load_onto(device: Device, program: CompiledProgram, state: Mapping[str, Any]) -> dict[str, DeviceBuffer]:
    """Upload a program's weights with a progress bar. Raises `WeightError` if a name, shape or dtype does not fit."""
    from npu_runtime import load_weights

    with progress("loading weights") as report:
        return load_weights(state, program, device, progress=report)


def inputs_for(
    specs: Sequence[TensorSpec], inputs: Inputs, seed: int | None
) -> tuple[dict[str, np.ndarray], int | None]:
    """Return inputs from the user's files and None, or random inputs and their seed, which is printed to stderr."""
    from npu_sim.arrays import choose_inputs

    arrays, used_seed = choose_inputs(inputs or (), specs, seed)
    if used_seed is not None:
        note(f"random inputs, seed {used_seed}")
    return arrays, used_seed
