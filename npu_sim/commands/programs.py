"""The commands for compiled programs: `compile`, `describe`, `run` and `profile`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from npu_sim.commands.console import print_json, progress, step
from npu_sim.commands.options import (
    AllowCode,
    AsJSON,
    CPULevel,
    DeviceName,
    Dtype,
    Fast,
    Inputs,
    IRFile,
    NoTune,
    ProgramFile,
    Seed,
    Weights,
)
from npu_sim.commands.resources import find_target, inputs_for, load_onto, open_device

if TYPE_CHECKING:
    import numpy as np

    from npu_compiler import CompiledProgram, TensorSpec


def compile(
    ir: IRFile,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Output file (.npubin).")
    ] = None,
    target: Annotated[
        str,
        typer.Option(
            "--target", metavar="NAME", help="Target: op_level (for the CPU and Metal), metal_gpu or cuda_gpu."
        ),
    ] = "op_level",
    dtype: Dtype = None,
    disable_fusion: Annotated[
        list[str] | None, typer.Option("--disable-fusion", metavar="NAME", help="Disable a fusion; repeatable.")
    ] = None,
    stages: Annotated[bool, typer.Option("--stages", help="Print the graph after each compiler stage.")] = False,
    json: AsJSON = False,
) -> None:
    """Compile IR into a program (.npubin)."""
    from npu_compiler import compile as compile_ir
    from npu_compiler import print_graph, read_ir, trace_stages
    from npu_compiler.errors import InputError
    from npu_compiler.program.describe import summary

    if output is None and not stages:
        raise InputError("give an output file (-o FILE.npubin), --stages, or both")
    codegen, disabled = find_target(target), disable_fusion or ()
    with step(f"reading {ir}"):
        graph = read_ir(ir)
    if stages:
        for name, state in trace_stages(graph, codegen, compute_dtype=dtype, disabled_fusions=disabled):
            typer.echo(f"after {name}: {len(state.nodes)} nodes\n{print_graph(state)}\n", err=json)
    if output is None:
        return
    with step(f"compiling {graph.name}"):
        program = compile_ir(graph, codegen, compute_dtype=dtype, disabled_fusions=disabled)
        program.save(output)
    totals = summary(program.plan)
    if json:
        print_json({"program": str(output), "bytes": output.stat().st_size, **_header(program), "summary": totals})
    else:
        typer.echo(
            f"{output}: {program.compute_dtype} for {program.target}, {totals['kernel launches']} kernel launches, "
            f"{int(totals['weight bytes']) / 1e6:.1f} MB of weights, {int(totals['arena bytes']) / 1e6:.1f} MB arena"
        )


def describe(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Compiled program (.npubin) or IR file (.json).")],
    json: AsJSON = False,
) -> None:
    """Show the kernels, buffers and weights of a program, or the nodes of an IR file."""
    from npu_compiler import CompiledProgram, print_graph, read_ir
    from npu_compiler.program.describe import summary

    if file.suffix == ".json":
        graph = read_ir(file)
        if json:
            print_json(
                {
                    "name": graph.name,
                    "inputs": [_spec(graph.tensors[name]) for name in graph.inputs],
                    "outputs": [_spec(graph.tensors[name]) for name in graph.outputs],
                    "weights": {name: str(recipe) for name, recipe in graph.weights.items()},
                    "nodes": [
                        {"name": n.name, "op": n.op_type, "inputs": n.inputs, "outputs": n.outputs} for n in graph
                    ],
                }
            )
        else:
            typer.echo(print_graph(graph))
        return
    program = CompiledProgram.load(file)
    if not json:
        typer.echo(program.describe())
        return
    print_json(
        {
            **_header(program),
            "weights": {name: {**_spec(w.spec), "recipe": str(w.recipe)} for name, w in program.weight_specs.items()},
            "kernels": [
                {
                    "kernel": call.kernel,
                    "node": call.node,
                    "shape": call.outputs[0].shape,
                    "dtype": call.outputs[0].dtype,
                    "flops": call.flops,
                    "bytes": call.bytes_moved,
                }
                for call in program.kernels
            ],
            "summary": summary(program.plan),
        }
    )


def _header(program: CompiledProgram) -> dict[str, Any]:
    return {
        "name": program.name,
        "target": program.target,
        "compute_dtype": program.compute_dtype,
        "compiler_version": program.compiler_version,
        "code": str(program.trust) if program.contains_code else None,
        "inputs": [_spec(spec) for spec in program.input_specs],
        "outputs": [_spec(spec) for spec in program.output_specs],
    }


def _spec(spec: TensorSpec) -> dict[str, Any]:
    return {"name": spec.name, "shape": list(spec.shape), "dtype": spec.dtype, "storage": spec.storage or spec.dtype}


def run(
    program_file: ProgramFile,
    weights: Weights = None,
    inputs: Inputs = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write the outputs to this .npz file.")
    ] = None,
    device: DeviceName = None,
    cpu_level: CPULevel = None,
    fast: Fast = False,
    no_tune: NoTune = False,
    allow_code: AllowCode = False,
    seed: Seed = None,
    json: AsJSON = False,
) -> None:
    """Run a program once."""
    from npu_compiler import CompiledProgram
    from npu_runtime import Executor
    from npu_sim.arrays import write_outputs

    program = CompiledProgram.load(program_file, allow_code)
    arrays, used_seed = inputs_for(program, inputs, seed)
    chosen = open_device(device, fast, no_tune)
    loaded = load_onto(chosen, program, weights)
    with step(f"running {program.name} on {chosen.name}"):
        results = Executor(program, chosen).run(arrays, loaded)
    values = {spec.name: results[spec.name].to_numpy(spec=spec) for spec in program.output_specs}
    if output is not None:
        write_outputs(output, values)
    rows = [{"name": name, **_statistics(value)} for name, value in values.items()]
    if json:
        print_json(
            {
                "device": chosen.name,
                "seed": used_seed,
                "outputs": rows,
                "file": None if output is None else str(output),
            }
        )
        return
    for row in rows:
        numbers = ", ".join(f"{key} {row[key]:.6g}" for key in ("min", "max", "mean") if key in row)
        typer.echo(f"{row['name']}: {row['dtype']}{row['shape']} {numbers}")
    if output is not None:
        typer.echo(f"outputs written to {output}")


def _statistics(value: np.ndarray) -> dict[str, Any]:
    import numpy as np

    facts: dict[str, Any] = {"shape": list(value.shape), "dtype": value.dtype.name}
    if value.size:
        wide = np.asarray(value, np.float64)
        finite = wide[np.isfinite(wide)]
        facts["not_finite"] = int(wide.size - finite.size)
        if finite.size:
            facts.update(min=float(finite.min()), max=float(finite.max()), mean=float(finite.mean()))
    return facts


def profile(
    program_file: ProgramFile,
    weights: Weights = None,
    inputs: Inputs = None,
    device: DeviceName = None,
    cpu_level: CPULevel = None,
    fast: Fast = False,
    no_tune: NoTune = False,
    allow_code: AllowCode = False,
    runs: Annotated[int, typer.Option("--runs", min=1, metavar="INTEGER", help="Number of timed runs.")] = 10,
    seed: Seed = None,
    json: AsJSON = False,
) -> None:
    """Measure the time of each kernel of a program."""
    import time

    from npu_compiler import CompiledProgram
    from npu_runtime import Executor, Profiler

    program = CompiledProgram.load(program_file, allow_code)
    arrays, used_seed = inputs_for(program, inputs, seed)
    chosen = open_device(device, fast, no_tune)
    loaded = load_onto(chosen, program, weights)
    executor, profiler = Executor(program, chosen), Profiler()
    buffers = {spec.name: chosen.backend.allocate_buffer(arrays[spec.name], spec=spec) for spec in program.input_specs}
    with progress("running") as report:
        executor.run(buffers, loaded)
        plain = []
        for index in range(runs):
            start = time.perf_counter()
            executor.run(buffers, loaded)
            chosen.backend.synchronize()
            plain.append(1e3 * (time.perf_counter() - start))
            executor.run(buffers, loaded, profiler)
            report(index + 1, runs)
    median = sorted(plain)[len(plain) // 2]
    if json:
        print_json(
            {
                "device": chosen.name,
                "description": chosen.backend.device,
                "seed": used_seed,
                "median_ms": median,
                **profiler.to_dict(),
            }
        )
    else:
        typer.echo(profiler.report())
        typer.echo(f"{'median run (without profiling)':36} {median:10.3f}")
