"""`describe` and `run` for a saved module (`.npumod`)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from npu_sim.commands.console import note, print_json, step

if TYPE_CHECKING:
    import numpy as np

    from npu_compiler import CompiledProgram, PartitionPlan
    from npu_runtime import Device
    from npu_sim.module.saved_file import SavedModule

SUFFIX = ".npumod"


def describe_module(file: Path, json: bool) -> None:
    """Print what a saved module takes, returns and holds."""
    from npu_compiler.program.describe import format_bytes
    from npu_sim.module.saved_file import read_module

    content, tensors = read_module(file)
    facts: dict[str, Any] = {
        "name": content.name,
        "compute_dtype": content.dtype,
        "compiler_version": content.compiler_version,
        "inputs": [{"name": x.name, "shape": _sizes(x.shape, content), "dtype": x.dtype} for x in content.graph_inputs],
        "sizes": {x.title: [x.low, x.high] for x in content.symbols},
        "results": content.result.paths(),
        "weights": len(tensors),
        "weight_bytes": sum(tensors[name].nbytes for name in tensors),
        "programs": [{"target": x.target, "sizes": list(x.sizes), "bytes": len(x.content)} for x in content.programs],
        "off_device": [{"node": x.node, "op": x.op, "reason": x.reason} for x in content.off_device],
    }
    if json:
        print_json(facts)
        return
    typer.echo(f"module {content.name}")
    typer.echo(f"  compute dtype {content.dtype or 'of the weights'}, compiler {content.compiler_version}")
    typer.echo(f"  {facts['weights']} weights, {format_bytes(facts['weight_bytes'])}")
    for given in facts["inputs"]:
        typer.echo(f"  input {given['name']}: {given['dtype']}[{', '.join(map(str, given['shape']))}]")
    for symbol in content.symbols:
        typer.echo(f"  size {symbol.title}: {symbol.low} to {'any' if symbol.high is None else symbol.high}")
    typer.echo(f"  results: {', '.join(facts['results'])}")
    for program in content.programs:
        sizes = ", ".join(f"{x.title}={size}" for x, size in zip(content.symbols, program.sizes, strict=True))
        typer.echo(f"  program for {program.target}{f' and {sizes}' if sizes else ''}")
    for node in content.off_device:
        typer.echo(f"  in PyTorch: {node.node} ({node.op}): {node.reason}")


def _sizes(shape: tuple[Any, ...], content: SavedModule) -> list[Any]:
    """Sizes as numbers or, where they may change, as text."""
    titles = {symbol.name: symbol.title for symbol in content.symbols}
    texts = [size if isinstance(size, int) else next(iter(size.values())) for size in shape]
    return [titles.get(size, size) if isinstance(size, str) else size for size in texts]


def run_module(
    file: Path, device: Device, inputs: list[str] | None, allow_code: bool, seed: int | None
) -> tuple[dict[str, np.ndarray], int | None, CompiledProgram | PartitionPlan]:
    """Run a saved module once.

    Args:
        inputs: Assignments as for `choose_inputs`, by the names that `describe` shows. Random inputs have the smallest
            sizes allowed.

    Returns:
        The arrays of the result by their place in it, the seed of random inputs, and what the device ran.
    """
    import numpy as np

    from npu_sim.arrays import random_inputs, read_arrays
    from npu_sim.module.saved import LoadedModule

    module = LoadedModule(file, device.backend, allow_code=allow_code)
    content = module.content
    if inputs:
        arrays, used = read_arrays(inputs, [x.name for x in content.graph_inputs]), None
    else:
        used = int(np.random.SeedSequence().generate_state(1)[0]) if seed is None else seed
        arrays = random_inputs(content.smallest_inputs(), used)
        note(f"random inputs, seed {used}")
    with step(f"running {content.name} on {device.name}"):
        arrays = module.laid_out(arrays)
        result = module.call_leaves([arrays[x.name] if x.name is not None else x.value for x in content.inputs])
    leaves = content.result.leaves(result) or []
    named = zip(content.result.paths(), leaves, strict=True)
    return {path: x for path, x in named if isinstance(x, np.ndarray)}, used, module.ran
