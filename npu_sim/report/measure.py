"""A short profile of a program: the time of each kernel call, and that of whole runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from npu_compiler.compiled_program import CompiledProgram
from npu_runtime import Device, DeviceBuffer, Executor, Profiler


@dataclass
class CallProfiler(Profiler):
    """A profiler that keeps the seconds of each call of a run, in the order of the program's calls."""

    seconds_of_calls: list[float] = field(default_factory=list)

    def add_kernel(self, name: str, seconds: float) -> None:
        super().add_kernel(name, seconds)
        self.seconds_of_calls.append(seconds)


@dataclass(frozen=True)
class Measurement:
    """Medians over the runs, in seconds.

    Attributes:
        device: What it ran on, in words.
        calls: Of each call by itself, in order, with the device synchronized after each.
        run: Of a whole run without profiling.
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
    """Time a program, after one run that is not counted.

    Args:
        inputs: Input name → array.
        weights: From `load_weights`.
        progress: Called with (runs done, runs).
    """
    executor, backend = Executor(program, device), device.backend
    buffers = {spec.name: backend.allocate_buffer(inputs[spec.name], spec=spec) for spec in program.input_specs}
    executor.run(buffers, weights)
    whole, calls = [], []
    for index in range(runs):
        start = time.perf_counter()
        executor.run(buffers, weights)
        backend.synchronize()
        whole.append(time.perf_counter() - start)
        profiler = CallProfiler()
        executor.run(buffers, weights, profiler)
        calls.append(profiler.seconds_of_calls)
        progress(index + 1, runs)
    medians = np.median(calls, axis=0)
    return Measurement(backend.device, runs, tuple(map(float, medians)), float(np.median(whole)))
