"""The commands for graphs: `extract`, `partition` and `verify`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from npu_sim.commands.checks import check_not_overwritten, check_output
from npu_sim.commands.completion import targets, tasks
from npu_sim.commands.console import EXIT_DIFFERS, note, print_json, progress, step
from npu_sim.commands.options import AsJSON, Dtype, Inputs, IRFile, Seed, Weights
from npu_sim.commands.resources import weights_for
from npu_sim.commands.settings import DeviceSettings
from npu_sim.commands.targets import find_target

if TYPE_CHECKING:
    from npu_compiler import PartitionPlan

SAMPLES = 3
TOKENS = 128


def extract(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="package.module:factory, file.py:factory, or a Hugging Face folder (with --task)."
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
    weights: Annotated[
        Path | None,
        typer.Option(metavar="FILE", callback=check_output, help="Also write the weights to this .safetensors file."),
    ] = None,
    json: AsJSON = False,
) -> None:
    """Extract IR from a PyTorch model."""
    from npu_compiler.errors import InputError
    from npu_sim.extract import check_source, extract_ir, load_model, write_ir, write_weights

    if weights == output:
        raise InputError("--output and --weights name the same file")
    if tokens is not None and not Path(model).is_dir():
        raise InputError("--tokens is for a Hugging Face folder")
    check_not_overwritten(output, [Path(model.rpartition(":")[0])])
    check_source(model, inputs or (), task)
    with step(f"creating {model}"):
        module, examples, name = load_model(model, inputs or (), task=task, tokens=tokens or TOKENS)
    with step(f"tracing {name}"):
        ir = extract_ir(module, examples, name=name)
        write_ir(ir, output)
        if weights is not None:
            write_weights(module, weights)
    if json:
        print_json({"ir": str(output), "name": name, "nodes": len(ir["nodes"]), "weights": len(ir["weights"])})
    else:
        typer.echo(f"{output}: {name}, {len(ir['nodes'])} nodes, {len(ir['weights'])} weights")


def partition(
    ir: IRFile,
    json: AsJSON = False,
    mermaid: Annotated[bool, typer.Option("--mermaid", help="Print a Mermaid flowchart.")] = False,
    cpu: Annotated[
        list[str] | None,
        typer.Option(metavar="OP", help="Run this op, given by its ATen name, on the CPU; repeatable."),
    ] = None,
    target: Annotated[
        str,
        typer.Option(metavar="NAME", autocompletion=targets, help="Target whose missing ops run on the CPU."),
    ] = "op_level",
    dtype: Dtype = None,
) -> None:
    """Show how a graph is partitioned between the device and the CPU."""
    from npu_compiler import is_op_supported
    from npu_compiler import partition as partition_graph
    from npu_compiler.errors import InputError
    from npu_compiler.graph.model import base_op
    from npu_compiler.graph.reader import read_ir

    if json and mermaid:
        raise InputError("choose either --json or --mermaid")
    codegen = find_target(target)
    with step(f"partitioning {ir}"):
        graph = read_ir(ir)
        kept = {base_op(op) for op in cpu or ()}
        absent = sorted(kept - {node.base for node in graph})
        plan = partition_graph(
            graph,
            lambda op, attrs: base_op(op) not in kept and is_op_supported(op, attrs),
            target=codegen,
            compute_dtype=dtype,
        )
    if absent:
        note(f"warning: the graph has no op {', '.join(absent)}")
    if mermaid:
        typer.echo(plan.to_mermaid())
    elif json:
        print_json(_plan_facts(plan))
    else:
        typer.echo(str(plan))
        for node, reason in plan.reasons.items():
            typer.echo(f"  {node} is on the CPU: {reason}")


def _plan_facts(plan: PartitionPlan) -> dict[str, Any]:
    """A plan as JSON data."""
    return {
        "compute_dtype": plan.compute_dtype,
        "device_share": plan.device_share,
        "partitions": [
            {
                "index": p.index,
                "device": p.device,
                "nodes": [node.name for node in p.graph],
                "inputs": p.graph.inputs,
                "outputs": p.graph.outputs,
                "transfers": [
                    {"tensor": t.tensor, "from": t.source, "to": t.target, "bytes": t.bytes} for t in p.transfers
                ],
            }
            for p in plan.partitions
        ],
        "output_transfers": [{"tensor": t.tensor, "bytes": t.bytes} for t in plan.output_transfers],
        "cpu_reasons": dict(plan.reasons),
    }


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
