"""Profile of our program for a task of the CPU benchmark: time of each distinct kernel call."""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.cpu.llm import CASES, PROMPT, LanguageContenders
from benchmarks.cpu.measure import start_libraries
from benchmarks.cpu.models import network_of
from benchmarks.cpu.network import NetworkContenders
from npu_runtime import Device, Executor, NPUBuffer, Profiler, load_weights

if TYPE_CHECKING:
    from npu_compiler import CompiledProgram
    from npu_compiler.program.kernels import KernelCall
    from npu_compiler.program.views import View

RUNS = 5


def profile(task: str, batch: int, dtype: str, threads: int) -> str:
    """Return the distinct kernel calls of a task's program as text, the most expensive first; times are medians."""
    start_libraries(threads)
    with tempfile.TemporaryDirectory() as folder:
        if task in CASES:
            language = LanguageContenders(threads, Path(folder))
            program, state = language.program(task, dtype), language.weights(dtype)
            values: dict[str, Any] = {"position": [PROMPT], "positions": range(PROMPT), "last": [PROMPT - 1]}
        else:
            measured = network_of(task)
            network = NetworkContenders(measured.build(), measured.inputs(batch), threads, Path(folder))
            program, state = network.program(dtype), network.state()
            values = {program.input_specs[0].name: network.x.numpy()}
        return _report(program, call_seconds(program, state, values))


def call_seconds(program: CompiledProgram, state: Mapping[str, Any], values: Mapping[str, Any]) -> list[float]:
    """Return the median seconds of each call; inputs that are not among the values are zeros."""
    device = Device("cpu")
    executor, weights = Executor(program, device), load_weights(state, program, device, strict=False)
    inputs = {
        spec.name: NPUBuffer.zeros(spec.shape, device, spec.storage, spec.alloc_shape) for spec in program.input_specs
    }
    for spec in program.input_specs:
        if spec.name in values:
            inputs[spec.name].write(np.asarray(values[spec.name]), spec)
    executor.run(inputs, weights)
    runs = []
    for _ in range(RUNS):
        profiler = Profiler()
        executor.run(inputs, weights, profiler)
        runs.append(profiler.seconds_per_call(program.kernels))
    return [float(seconds) for seconds in np.median(runs, axis=0)]


def _report(program: CompiledProgram, seconds: Sequence[float]) -> str:
    groups: dict[tuple[str, str], list[int]] = defaultdict(list)
    for index, call in enumerate(program.kernels):
        groups[call.kernel, _signature(call, program.compute_dtype)].append(index)
    spent = {key: sum(seconds[index] for index in indices) for key, indices in groups.items()}
    whole = sum(seconds)
    lines = [
        f"{program.name} in {program.compute_dtype}: {1e3 * whole:.2f} ms in {len(seconds)} kernel calls; shapes of "
        "another dtype are marked with it",
        f"{'ms':>9} {'share':>6} {'calls':>5} {'GFLOP/s':>8} {'GB/s':>6}  {'kernel':28} inputs → outputs",
    ]
    for key in sorted(groups, key=lambda key: -spent[key]):
        calls, time = [program.kernels[index] for index in groups[key]], spent[key]
        flops, moved = (
            sum(getattr(call, name) for call in calls) / max(time, 1e-9) / 1e9 for name in ("flops", "bytes_moved")
        )
        figures = f"{1e3 * time:9.3f} {time / whole:6.1%} {len(calls):5} {flops:8.1f} {moved:6.1f}"
        lines.append(f"{figures}  {key[0]:28} {key[1]}")
    return "\n".join(lines)


def _signature(call: KernelCall, dtype: str) -> str:
    sides = (" ".join(_tensor(view, dtype) for view in views) for views in (call.inputs, call.outputs))
    return " → ".join(sides)


def _tensor(view: View, dtype: str) -> str:
    return f"{'' if view.dtype == dtype else view.dtype}[{'×'.join(map(str, view.shape))}]"
