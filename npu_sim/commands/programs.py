"""The commands for compiled programs: `compile`, `describe` and `run`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from npu_sim.commands.checks import check_not_overwritten, check_output, check_program_or_ir
from npu_sim.commands.completion import programs_and_ir, targets
from npu_sim.commands.console import note, print_json, step
from npu_sim.commands.modules import SUFFIX as MODULE
from npu_sim.commands.modules import describe_module, run_module, run_onnx
from npu_sim.commands.options import (
    ActivationFormat,
    AllowCode,
    AsJSON,
    DisabledFusions,
    Dtype,
    Inputs,
    IRFile,
    RunnableFile,
    Seed,
    Shapes,
    WeightFormat,
    Weights,
)
from npu_sim.commands.resources import inputs_for, load_onto, read_graph, weights_for
from npu_sim.commands.settings import DeviceSettings
from npu_sim.commands.stages import describe_stages
from npu_sim.commands.targets import find_target
from npu_sim.onnx.sources import SUFFIX as ONNX

if TYPE_CHECKING:
    import numpy as np

    from npu_compiler import CompiledProgram, CompileOptions, PartitionPlan, TensorSpec


def compile(
    ir: IRFile,
    *,
    shapes: Shapes = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", callback=check_output, help="Output file (.npubin)."),
    ] = None,
    target: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            autocompletion=targets,
            help="Target: op_level (for the CPU and Metal), metal_gpu, cuda_gpu, npu:CHIP or an installed package's.",
        ),
    ] = "op_level",
    dtype: Dtype = None,
    quantization: WeightFormat = None,
    activations: ActivationFormat = None,
    disable_fusion: DisabledFusions = None,
    phase_clocks: Annotated[
        bool,
        typer.Option(
            "--phase-clocks", help="For cuda_gpu: time the phases inside resident kernels, for profile --trace."
        ),
    ] = False,
    stages: Annotated[
        bool,
        typer.Option("--stages", help="Print what each compiler stage changes in the graph or its kernels."),
    ] = False,
    full: Annotated[
        bool, typer.Option("--full", help="With --stages: print the whole graph, or all kernels, after each stage.")
    ] = False,
    json: AsJSON = False,
) -> None:
    """Compile IR or an ONNX model into a program (.npubin)."""
    from npu_compiler import compile as compile_ir
    from npu_compiler import trace_compilation
    from npu_compiler.errors import InputError

    if full and not stages:
        raise InputError("--full is for --stages")
    if output is None and (json or not stages):
        raise InputError("give an output file (-o FILE.npubin)" + ("" if json else ", --stages, or both"))
    check_not_overwritten(output, [ir])
    codegen = find_target(target, phase_clocks)
    options = _compile_options(dtype, quantization, activations, disable_fusion or ())
    with step(f"reading {ir}"):
        graph = read_graph(ir, shapes)
    for text in describe_stages(trace_compilation(graph, codegen, options), full=full) if stages else ():
        typer.echo(text, err=json)
    if output is None:
        return
    with step(f"compiling {graph.name}"):
        program = compile_ir(graph, codegen, options)
        program.save(output)
    _print_totals(program, output, json)


def _compile_options(
    dtype: str | None, quantization: str | None, activations: str | None, disabled: Sequence[str]
) -> CompileOptions:
    """Return compiler options from a command's options. Raises `InputError` if the options contradict each other."""
    from npu_compiler import CompileOptions
    from npu_compiler.errors import InputError
    from npu_compiler.fusion_patterns import check_fusion_names

    if activations is not None:
        if quantization is None:
            raise InputError("--activations is for layers with quantized weights: give their --quantization too")
        quantization = f"{quantization}+{activations}"
    check_fusion_names(disabled)
    return CompileOptions(dtype, quantization, disabled_fusions=disabled)


def _print_totals(program: CompiledProgram, output: Path, json: bool) -> None:
    from npu_compiler.program.describe import format_bytes, summary

    totals = summary(program.plan)
    if json:
        print_json({"program": str(output), "bytes": output.stat().st_size, **_header(program), "summary": totals})
    else:
        typer.echo(
            f"{output}: {program.compute_dtype} for {program.target}, {totals['kernel launches']} kernel launches, "
            f"{format_bytes(int(totals['weight bytes']))} of weights, {format_bytes(int(totals['arena bytes']))} arena"
        )


def describe(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            callback=check_program_or_ir,
            autocompletion=programs_and_ir,
            help="Compiled program (.npubin), saved module (.npumod), IR file (.json) or ONNX file.",
        ),
    ],
    full: Annotated[bool, typer.Option("--full", help="Show every layer, also those like the one before.")] = False,
    json: AsJSON = False,
) -> None:
    """Show the kernels, buffers and weights of a program, the nodes of an IR or ONNX file, or a saved module."""
    if file.suffix == MODULE:
        describe_module(file, json)
    elif file.suffix in (".json", ".onnx"):
        _describe_graph(file, json)
    else:
        _describe_program(file, full, json)


def _describe_graph(file: Path, json: bool) -> None:
    """Print the nodes of an IR or ONNX file."""
    from npu_compiler import print_graph, read_ir

    graph = read_ir(file)
    if not json:
        typer.echo(print_graph(graph))
        return
    print_json(
        {
            "name": graph.name,
            "inputs": [_spec(graph.tensors[name]) for name in graph.inputs],
            "outputs": [_spec(graph.tensors[name]) for name in graph.outputs],
            "weights": {name: str(recipe) for name, recipe in graph.weights.items()},
            "nodes": [{"name": n.name, "op": n.op_type, "inputs": n.inputs, "outputs": n.outputs} for n in graph],
        }
    )


def _describe_program(file: Path, full: bool, json: bool) -> None:
    """Print the totals, kernels, buffers and weights of a compiled program."""
    from npu_compiler import CompiledProgram
    from npu_compiler.program.describe import summary

    program = CompiledProgram.load(file)
    if not json:
        typer.echo(program.describe(full=full))
        if program.target.startswith("npu:"):
            typer.echo(_tile_program(program, full), nl=False)
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


def _tile_program(program: CompiledProgram, full: bool) -> str:
    """Return the instructions of a program for a simulated chip, as assembly text.

    Args:
        full: Print every kernel call; otherwise calls like an earlier one are left out.
    """
    from dataclasses import replace

    from npu_model.isa.assembly import disassemble
    from npu_model.isa.encoding import decode

    tiles = decode(program.plan.machine_code)
    shown = {(section.kernel, section.comment): section for section in reversed(tiles.sections)}
    if full:
        return disassemble(tiles)
    first = tuple(section for section in tiles.sections if section is shown[section.kernel, section.comment])
    left_out = len(tiles.sections) - len(first)
    text = disassemble(replace(tiles, sections=first))
    return f"{text}# and {left_out} more sections like these (--full)\n" if left_out else text


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
    program_file: RunnableFile,
    *,
    weights: Weights = None,
    inputs: Inputs = None,
    shapes: Shapes = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", callback=check_output, help="Write the outputs to this .npz file."
        ),
    ] = None,
    device_settings: DeviceSettings,
    allow_code: AllowCode = False,
    seed: Seed = None,
    json: AsJSON = False,
) -> None:
    """Run a program, a saved module or an ONNX model once."""
    from npu_compiler import CompiledProgram
    from npu_compiler.errors import InputError
    from npu_runtime import Executor
    from npu_runtime.numerics import doubtful_values
    from npu_sim.arrays import assigned_files
    from npu_sim.devices import simulated_run

    check_not_overwritten(output, [program_file, weights, *assigned_files(inputs)])
    if shapes and program_file.suffix != ONNX:
        raise InputError("--shape is for an ONNX file; a program has static shapes")
    if program_file.suffix in (MODULE, ONNX):
        if weights is not None:
            raise InputError(f"'{program_file}' has its weights inside; leave out --weights")
        chosen = device_settings.open()
        ran: CompiledProgram | PartitionPlan
        if program_file.suffix == ONNX:
            values, used_seed, ran = run_onnx(program_file, chosen, inputs, shapes, seed)
        else:
            values, used_seed, ran = run_module(program_file, chosen, inputs, allow_code, seed)
        _report(chosen.name, used_seed, values, output, json, simulated_run(chosen, ran))
        return
    program = CompiledProgram.load(program_file, allow_code)
    state = weights_for(program, weights)
    arrays, used_seed = inputs_for(program.input_specs, inputs, seed)
    chosen = device_settings.open_for(program)
    loaded = load_onto(chosen, program, state)
    with step(f"running {program.name} on {chosen.name}"):
        results = Executor(program, chosen).run(arrays, loaded)
    values = {spec.name: results[spec.name].to_numpy(spec=spec) for spec in program.output_specs}
    for problem in doubtful_values(values, program.output_specs):
        note(f"warning: {problem}")
    _report(chosen.name, used_seed, values, output, json, simulated_run(chosen, program))


def _report(
    device: str,
    seed: int | None,
    values: Mapping[str, np.ndarray],
    output: Path | None,
    json: bool,
    simulation: Mapping[str, Any] | None,
) -> None:
    """Write a run's outputs to a file, if one is given, and print statistics of each output.

    Args:
        seed: Seed of random inputs. None: the inputs came from files.
        output: The .npz file to write. None: no file is written.
        simulation: For a simulated chip, the run as `npu-sim simulate --json` prints it. None for other devices.
    """
    from npu_sim.arrays import write_outputs

    if output is not None:
        write_outputs(output, values)
    rows = [{"name": name, **_statistics(value)} for name, value in values.items()]
    if json:
        print_json(
            {
                "device": device,
                "seed": seed,
                "outputs": rows,
                **({} if simulation is None else {"simulated": simulation}),
                "file": None if output is None else str(output),
            }
        )
        return
    for row in rows:
        numbers = ", ".join(f"{key} {row[key]:.6g}" for key in ("min", "max", "mean") if key in row)
        typer.echo(f"{row['name']}: {row['dtype']}{row['shape']} {numbers}")
    if output is not None:
        typer.echo(f"outputs written to {output}")
    if simulation is not None:
        note(f"simulated: {1e-3 * simulation['latency_us']:.4g} ms on chip {simulation['chip']}")


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
