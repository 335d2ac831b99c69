"""A short profile of a program: the time of each kernel call, and that of whole runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from npu_compiler.compiled_program import CompiledProgram
from npu_runtime import Device, DeviceBuffer, Executor, Profiler
from npu_runtime.hardware import Ceilings


@dataclass(frozen=True)
class Roof:
    """Peak rates of a device, which bound the roofline.

    Attributes:
        bandwidth: Bytes per second.
        flops: FLOP per second.
        of_device: Whether the rates were reported by the measuring device, rather than given by the user.
    """

    bandwidth: float
    flops: float
    of_device: bool = False

    @classmethod
    def of(cls, ceilings: Ceilings, dtype: str) -> Roof | None:
        """Return the peak rates that a device reports for a dtype; None if it does not report them."""
        bandwidth, flops = ceilings.bandwidth, ceilings.flops.get(dtype)
        return cls(bandwidth, flops, of_device=True) if bandwidth and flops else None


@dataclass(frozen=True)
class Measurement:
    """Measured times: medians over the runs, in seconds.

    Attributes:
        device: The device's description.
        runs: Number of timed runs.
        calls: Time of each call, in order, with the device synchronized after each.
        run: Time of a whole run without profiling.
    """

    device: str
    runs: int
    calls: tuple[float, ...]
    run: float


def measure(
    program: CompiledProgram,
    device: Device,
    inputs: Mapping[str, np.ndarray],
    weights: Mapping[str, DeviceBuffer],
    runs: int,
    progress: Callable[[int, int], None],
) -> Measurement:
    """Time a program on a device; a first run is not counted.

    Args:
        inputs: Input name → array.
        weights: Result of `load_weights`.
        runs: Number of timed runs.
        progress: Called with (runs done, runs).
    """
    executor, backend = Executor(program, device), device.backend
    buffers = {spec.name: backend.allocate_buffer(inputs[spec.name], spec=spec) for spec in program.input_specs}
    executor.run(buffers, weights)
    whole, calls = [], []
    for index in range(runs):
        start = backend.clock()
        executor.run(buffers, weights)
        backend.synchronize()
        whole.append(backend.clock() - start)
        profiler = Profiler()
        executor.run(buffers, weights, profiler)
        calls.append(profiler.seconds_per_call(program.kernels))
        progress(index + 1, runs)
    medians = np.median(calls, axis=0)
    return Measurement(backend.device, runs, tuple(map(float, medians)), float(np.median(whole)))
