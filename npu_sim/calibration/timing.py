"""Seconds that runs of programs take, with random weights and inputs."""

from __future__ import annotations

import bisect
import math
import time
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np

from npu_compiler import CompiledProgram
from npu_runtime import Device, Executor, NPUBuffer, load_weights

SAMPLE_SECONDS, SAMPLE_SECONDS_OF_A_GPU = 2e-4, 2e-2  # least length of what is timed: a GPU's host is ahead of it
FEWEST_SAMPLES, SOME_SECONDS, MOST_SECONDS = 5, 0.02, 0.15  # of each program
_AGREEMENT = 1.05  # the lower quartile of enough runs over the shortest
_PATTERN = 1 << 20  # random numbers, which larger operands repeat


def least_seconds(program: CompiledProgram, device: Device) -> float:
    """The least seconds of a run, for the rates that nothing may exceed."""
    return min(samples_of([program], device)[0])


def samples_of(programs: Sequence[CompiledProgram], device: Device) -> list[list[float]]:
    """The seconds of runs of each program, taken in turns, the shortest first.

    Disturbances only slow runs, so runs go on until a quarter of them is about as fast as the fastest.
    """
    runs = [_runner(program, device) for program in programs]
    sample = SAMPLE_SECONDS if device.name == "cpu" else SAMPLE_SECONDS_OF_A_GPU
    times = []
    for run in runs:
        run(2)
        times.append(max(1, math.ceil(sample / max(run(1), 1e-6))))
    samples: list[list[float]] = [[] for _ in runs]
    begin = time.perf_counter()

    def enough() -> bool:
        each = (time.perf_counter() - begin) / len(runs)
        if len(samples[0]) < FEWEST_SAMPLES or each < SOME_SECONDS:
            return False
        return each > MOST_SECONDS or all(typical(seconds) < _AGREEMENT * seconds[0] for seconds in samples)

    while not enough():
        for run, count, seconds in zip(runs, times, samples, strict=True):
            bisect.insort(seconds, run(count) / count)
    return samples


def typical(ordered: Sequence[float]) -> float:
    """The lower quartile: seconds of a run that little disturbs."""
    return ordered[len(ordered) // 4]


@cache
def _pattern(size: int) -> np.ndarray:
    pattern = 0.05 * np.random.default_rng(0).standard_normal(min(size, _PATTERN), np.float32)
    return np.resize(pattern, size)


def _random(*shape: int) -> np.ndarray:
    """Random numbers; arrays of similar sizes share their memory."""
    size = math.prod(shape)
    return _pattern(1 << (size - 1).bit_length())[:size].reshape(shape)


def _runner(program: CompiledProgram, device: Device) -> Callable[[int], float]:
    """A function that runs a program with random weights a number of times and returns the seconds."""
    shapes = {key: shape for spec in program.weight_specs.values() for key, shape in spec.source_shapes.items()}
    state = {key: _random(*shape) for key, shape in shapes.items()}
    executor, weights = Executor(program, device), load_weights(state, program, device)
    inputs = {spec.name: NPUBuffer.from_numpy(_random(*spec.shape), device, spec) for spec in program.input_specs}

    def run(times: int) -> float:
        start = time.perf_counter()
        for _ in range(times):
            executor.run(inputs, weights)
        device.backend.synchronize()
        return time.perf_counter() - start

    return run
