"""Times of this machine's CPU device for the programs of `benchmarks.simulated`, whole and call by call.

    python -m benchmarks.simulated_cpu --measure docs/simulated-cpu.json [--only resnet]
    python -m benchmarks.simulated_cpu --measured docs/simulated-cpu.json --chip chip.toml

The second line compares the calls with a chip's. A quiet minute is enough for a few of the programs. Of a program that
the file has already, the faster of the two measurements stays.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.simulated import PROGRAMS, spearman
from benchmarks.simulated_programs import Case, cpu_cases
from npu_compiler import CompiledProgram
from npu_compiler.files import write_atomically
from npu_model.chip import Chip, load_chip
from npu_model.simulation import simulate
from npu_runtime import Device, Executor, NPUBuffer, Profiler, load_weights

RUNS, PROFILED = 5, 5
LONG = 10.0  # seconds of runs after which no further one begins
_PATTERN = 1 << 20


@dataclass(frozen=True)
class Times:
    """Median milliseconds of a run, the least, and the median of each call when every call is timed by itself."""

    ms: float
    least_ms: float
    calls_ms: tuple[float, ...]


def measure(program: CompiledProgram, values: Mapping[str, Any]) -> Times:
    """Run a program with random weights on the CPU; inputs that are not among the values are zeros."""
    device = Device("cpu")
    executor, weights = Executor(program, device), load_weights(_random_weights(program), program, device)
    inputs = {}
    for spec in program.input_specs:
        inputs[spec.name] = NPUBuffer.zeros(spec.shape, device, spec.storage, spec.alloc_shape)
        if spec.name in values:
            inputs[spec.name].write(np.asarray(values[spec.name]).reshape(spec.shape), spec)
        elif spec.dtype.startswith(("float", "bfloat")) and spec.name not in program.plan.donations:
            inputs[spec.name].write(_random(spec.shape), spec)
    seconds: list[float] = []
    executor.run(inputs, weights)
    while len(seconds) < 2 or ((len(seconds) < RUNS or sum(seconds) < 2) and sum(seconds) < LONG):
        start = time.perf_counter()
        executor.run(inputs, weights)
        seconds.append(time.perf_counter() - start)
    profiled: list[list[float]] = []
    while len(profiled) < PROFILED and (len(profiled) < 1 or sum(seconds) < LONG):
        profiler = Profiler()
        executor.run(inputs, weights, profiler)
        profiled.append([1e3 * timed.seconds for timed in profiler.calls])
    calls = tuple(float(value) for value in np.median(profiled, axis=0))
    return Times(1e3 * statistics.median(seconds), 1e3 * min(seconds), calls)


def _random(shape: tuple[int, ...]) -> np.ndarray:
    return np.resize(np.random.default_rng(0).standard_normal(_PATTERN, np.float32), shape)


def _random_weights(program: CompiledProgram) -> dict[str, np.ndarray]:
    """Weights that keep activations in range; all share one memory, of which each is loaded into its own."""
    shapes = {key: shape for spec in program.weight_specs.values() for key, shape in spec.source_shapes.items()}
    most = max((int(np.prod(shape)) for shape in shapes.values()), default=0)
    normal = 0.05 * _random((most,))
    positive = np.abs(normal) + 0.5
    return {
        key: (positive if "running_var" in key else normal)[: int(np.prod(shape))].reshape(shape)
        for key, shape in shapes.items()
    }


def load(path: Path) -> dict[str, Times]:
    """Title and dtype of a program → its times, from a file that this benchmark wrote."""
    if not path.exists():
        return {}
    rows = json.loads(path.read_text("utf-8"))["programs"]
    return {name: Times(row["ms"], row["least_ms"], tuple(row["calls_ms"])) for name, row in rows.items()}


def save(path: Path, measured: Mapping[str, Times]) -> None:
    rows = [
        f"{json.dumps(name)}: {json.dumps({**vars(times), 'calls_ms': [float(f'{ms:.4g}') for ms in times.calls_ms]})}"
        for name, times in measured.items()
    ]
    write_atomically(path, ('{"programs": {\n' + ",\n".join(rows) + "\n}}\n").encode())


def rank(case: Case, times: Times, chip: Chip, folder: Path) -> float:
    """The rank correlation of predicted and measured time over the calls of a program."""
    calls = simulate(case.program(folder), chip).calls
    return spearman([call.cycles for call in calls], times.calls_ms)


def _wanted(only: str) -> Iterator[Case]:
    words = only.split(",")
    for case in cpu_cases():
        if any(word.lower() in case.name.lower() for word in words):
            yield case


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="programs whose title contains one of these words")
    parser.add_argument("--programs", type=Path, default=PROGRAMS, help="where compiled programs are kept")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--compile", action="store_true", help="only compile the programs")
    what.add_argument("--measure", type=Path, metavar="FILE", help="measure, and add the times to this file")
    what.add_argument("--measured", type=Path, metavar="FILE", help="compare the calls of this file with a chip's")
    parser.add_argument("--chip", default="cpu", help="the chip to compare with, a name or a file")
    arguments = parser.parse_args()
    if arguments.compile:
        for case in _wanted(arguments.only):
            case.program(arguments.programs)
    elif arguments.measure:
        measured = load(arguments.measure)
        for case in _wanted(arguments.only):
            times, name = measure(case.program(arguments.programs), case.values), case.name
            print(f"{name}: {times.ms:.4g} ms", flush=True)
            measured[name] = min((times, measured.get(name, times)), key=lambda correlation: correlation.ms)
            save(arguments.measure, measured)
    else:
        measured, chip = load(arguments.measured), load_chip(arguments.chip)
        for case in _wanted(arguments.only):
            if case.name in measured:
                times = measured[case.name]
                correlation = rank(case, times, chip, arguments.programs)
                print(f"{case.name}: rank correlation over {len(times.calls_ms)} calls {correlation:.3f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
