"""The command `profile`, which measures the time of kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from npu_sim.commands.checks import check_not_overwritten, check_program_or_ir
from npu_sim.commands.completion import programs_and_ir
from npu_sim.commands.console import note, print_json, progress, step
from npu_sim.commands.options import AllowCode, AsJSON, Inputs, Seed, Trace, Weights
from npu_sim.commands.resources import inputs_for, load_onto, weights_for
from npu_sim.commands.settings import DeviceSettings

if TYPE_CHECKING:
    import numpy as np

    from npu_compiler import CodegenTarget, CompiledProgram, PartitionPlan
    from npu_runtime import Device, Profiler

Run = Callable[["Profiler | None"], object]


def profile(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            callback=check_program_or_ir,
            autocompletion=programs_and_ir,
            help="Compiled program (.npubin), or IR file (.json), which is partitioned between the device and the CPU.",
        ),
    ],
    *,
    weights: Weights = None,
    inputs: Inputs = None,
    device_settings: DeviceSettings,
    allow_code: AllowCode = False,
    runs: Annotated[int, typer.Option(min=1, metavar="INTEGER", help="Number of timed runs.")] = 10,
    trace: Trace = None,
    seed: Seed = None,
    json: AsJSON = False,
) -> None:
    """Measure the time of each kernel of a program."""
    from npu_compiler import CompiledProgram
    from npu_runtime import Profiler
    from npu_sim.arrays import assigned_files
    from npu_sim.devices import simulated

    check_not_overwritten(trace, [file, weights, *assigned_files(inputs)])
    divided: PartitionPlan | None = None
    if file.suffix not in (".json", ".onnx"):
        model = CompiledProgram.load(file, allow_code)
        state = weights_for(model, weights)
        arrays, used_seed = inputs_for(model.input_specs, inputs, seed)
        chosen = device_settings.open_for(model)
        run, programs = _program_run(model, chosen, state, arrays), [model]
    else:
        chosen = device_settings.open()
        divided = plan = _partitioned(file, chosen.backend.target)
        state = weights_for(plan.graph, weights)
        arrays, used_seed = inputs_for([plan.graph.tensors[name] for name in plan.graph.inputs], inputs, seed)
        run, programs = _plan_run(plan, chosen, state, arrays)
    chip, profiler = simulated(chosen), Profiler(chosen.backend.clock)
    median = _timed(run, runs, chosen, profiler)
    if trace is not None:
        with step(f"writing {trace}"):
            if chip is None or not programs:
                profiler.save_trace(trace)
            elif divided is not None and divided.price is not None:
                from npu_model import simulate_plan

                simulate_plan(divided, chip.chip, spans=True).timeline().save(trace)
            else:
                from npu_model.analysis.trace import timeline

                timeline(*(chip.result(program, spans=True) for program in programs)).save(trace)
    if json:
        print_json(
            {
                "device": chosen.name,
                "description": chosen.backend.device,
                "seed": used_seed,
                "median_ms": median,
                **profiler.to_dict(),
                "trace": None if trace is None else str(trace),
            }
        )
        return
    typer.echo(profiler.report())
    typer.echo(f"{'median run (without profiling)':36} {median:10.3f}")
    if chip is not None:
        note(f"simulated: times are those of chip {chip.chip.name}; transfers and work on this machine take none of it")
    if trace is not None:
        typer.echo(f"trace written to {trace}; ui.perfetto.dev opens it")


def _timed(run: Run, runs: int, device: Device, profiler: Profiler) -> float:
    """Return the median time of unprofiled runs in milliseconds; each of them is followed by a profiled run."""
    times, clock = [], device.backend.clock
    with progress("running") as report:
        run(None)
        for index in range(runs):
            start = clock()
            run(None)
            device.backend.synchronize()
            times.append(1e3 * (clock() - start))
            run(profiler)
            report(index + 1, runs)
    return sorted(times)[len(times) // 2]


def _partitioned(ir: Path, target: CodegenTarget) -> PartitionPlan:
    from npu_compiler import partition, read_ir
    from npu_compiler.partitioning.prices import prices_of

    with step(f"partitioning {ir}"):
        plan = partition(read_ir(ir), target=target)
        prices = prices_of(target) if plan.is_open else None
        return plan if prices is None else partition(plan.source, target=target, prices=prices)


def _program_run(
    program: CompiledProgram, device: Device, state: Mapping[str, Any], arrays: Mapping[str, np.ndarray]
) -> Run:
    """Load a program and its inputs onto the device, and return a function that runs it with an optional profiler."""
    from npu_runtime import Executor

    loaded = load_onto(device, program, state)
    with step(f"preparing {program.name}"):
        executor = Executor(program, device)
    buffers = {spec.name: device.backend.allocate_buffer(arrays[spec.name], spec=spec) for spec in program.input_specs}
    return lambda profiler: executor.run(buffers, loaded, profiler)


def _plan_run(
    plan: PartitionPlan, device: Device, state: Mapping[str, Any], arrays: Mapping[str, np.ndarray]
) -> tuple[Run, list[CompiledProgram]]:
    """Return a function that runs a partitioned model, transfers included, and its device partitions' programs."""
    from npu_runtime import DAGExecutor

    with step(f"compiling {plan.graph.name}"):
        executor = DAGExecutor(plan, device)
    with step("loading weights"):
        executor.load_weights(state)
    programs = [each.program for each in executor.executors.values()]
    return lambda profiler: executor.execute(arrays, profiler), programs
