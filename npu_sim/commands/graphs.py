"""The commands for graphs: `extract` and `verify`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from npu_sim.commands.checks import check_not_overwritten, check_output
from npu_sim.commands.completion import tasks
from npu_sim.commands.console import EXIT_DIFFERS, note, print_json, progress, step
from npu_sim.commands.options import AsJSON, Dtype, Inputs, IRFile, Seed, Shapes, Weights
from npu_sim.commands.resources import weights_for
from npu_sim.commands.settings import DeviceSettings
from npu_sim.onnx.sources import SUFFIX as ONNX
from npu_sim.onnx.sources import parse_sizes

if TYPE_CHECKING:
    pass

SAMPLES = 3
TOKENS = 128


def extract(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="package.module:factory, file.py:factory, an ONNX file, or a Hugging Face folder (with --task).",
        ),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", callback=check_output, help="Output file (IR JSON).")
    ],
    inputs: Annotated[
        list[str] | None,
        typer.Option(
            "--input", "-i", metavar="DTYPE[SHAPE]", help="Example input, such as float32[1,3,224,224]; repeatable."
        ),
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", autocompletion=tasks, help="Task of a Hugging Face model, such as text-generation."
        ),
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="INTEGER", help=f"Sequence length of a Hugging Face text model. Default: {TOKENS}."
        ),
    ] = None,
    shapes: Shapes = None,
    weights: Annotated[
        Path | None,
        typer.Option(metavar="FILE", callback=check_output, help="Also write the weights to this .safetensors file."),
    ] = None,
    json: AsJSON = False,
) -> None:
    """Extract IR from a PyTorch or ONNX model."""
    from npu_compiler.errors import InputError
    from npu_sim.extract import check_source, extract_ir, load_model, write_ir, write_weights

    if weights == output:
        raise InputError("--output and --weights name the same file")
    if tokens is not None and not Path(model).is_dir():
        raise InputError("--tokens is for a Hugging Face folder")
    if shapes and Path(model).suffix != ONNX:
        raise InputError("--shape is for an ONNX file; describe other inputs with --input")
    check_not_overwritten(output, [Path(model.rpartition(":")[0])])
    check_source(model, inputs or (), task)
    with step(f"creating {model}"):
        module, examples, name = load_model(
            model, inputs or (), task=task, tokens=tokens or TOKENS, sizes=parse_sizes(shapes or ())
        )
    with step(f"tracing {name}"):
        ir = extract_ir(module, examples, name=name)
        write_ir(ir, output)
        if weights is not None:
            write_weights(module, weights)
    if json:
        print_json({"ir": str(output), "name": name, "nodes": len(ir["nodes"]), "weights": len(ir["weights"])})
    else:
        typer.echo(f"{output}: {name}, {len(ir['nodes'])} nodes, {len(ir['weights'])} weights")


def verify(
    ir: IRFile,
    *,
    weights: Weights = None,
    inputs: Inputs = None,
    dtype: Dtype = None,
    device_settings: DeviceSettings,
    samples: Annotated[
        int | None,
        typer.Option(min=1, metavar="INTEGER", help=f"Number of sets of random inputs. Default: {SAMPLES}."),
    ] = None,
    seed: Seed = None,
    json: AsJSON = False,
) -> None:
    """Compare a device with PyTorch and find the first wrong kernel.

    The exit code is 1 if they differ.
    """
    from npu_compiler import read_ir
    from npu_compiler.errors import InputError
    from npu_sim.arrays import choose_inputs, random_inputs

    if samples is not None and inputs:
        raise InputError("--samples is for random inputs; leave out --input")
    with step(f"reading {ir}"):
        graph = read_ir(ir)
        state = weights_for(graph, weights)

        from npu_sim.verify import input_specs  # it imports torch
        from npu_sim.verify import verify as compare

    specs = input_specs(graph, dtype)
    arrays, used_seed = choose_inputs(inputs or (), specs, seed)
    sets = (
        [arrays]
        if used_seed is None
        else [random_inputs(specs, used_seed + index) for index in range(samples or SAMPLES)]
    )
    chosen = device_settings.open()
    with progress("verifying") as report:
        result = compare(graph, state, sets, chosen, compute_dtype=dtype, progress=report)
    simulated = chosen.backend.simulated_seconds
    if json:
        time = {} if simulated is None else {"simulated_seconds": simulated}
        print_json({"seed": used_seed, "device": chosen.name, **result.to_dict(), **time})
    else:
        if used_seed is not None:
            note(f"random inputs, seeds {used_seed} to {used_seed + len(sets) - 1}")
        typer.echo(str(result))
        if simulated is not None:
            note(f"simulated: {1e3 * simulated:.4g} ms on {chosen.name}, all runs together")
    if not result.passed:
        raise typer.Exit(EXIT_DIFFERS)
