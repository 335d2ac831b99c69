"""The commands `describe` and `run` for a saved module (`.npumod`), and `run` for an ONNX file."""

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
    """Print the inputs, outputs and contents of a saved module."""
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
    """Return the sizes of a shape: numbers or, for dynamic dimensions, their names."""
    titles = {symbol.name: symbol.title for symbol in content.symbols}
    texts = [size if isinstance(size, int) else next(iter(size.values())) for size in shape]
    return [titles.get(size, size) if isinstance(size, str) else size for size in texts]


def run_module(
    file: Path, device: Device, inputs: list[str] | None, allow_code: bool, seed: int | None
) -> tuple[dict[str, np.ndarray], int | None, CompiledProgram | PartitionPlan]:
    """Run a saved module once.

    Args:
        inputs: Assignments as for `choose_inputs`, by the names that `describe` shows. None: random inputs with the
            smallest sizes that the module allows.
        allow_code: Let the code in the file run, whoever made it (see `npu_sim.load`).
        seed: Seed of random inputs. Default: a random one.

    Returns:
        The arrays of the result by their position in it, the seed of random inputs (None for inputs from files), and
        what the device ran.
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


def run_onnx(
    file: Path, device: Device, inputs: list[str] | None, shapes: list[str] | None, seed: int | None
) -> tuple[dict[str, np.ndarray], int | None, PartitionPlan]:
    """Compile an ONNX file and run it once.

    Args:
        inputs: Assignments as for `choose_inputs`, by the names of the model's inputs. None: random inputs.
        shapes: Sizes as for `parse_sizes`. Default: the model's own.
        seed: Seed of random inputs. Default: a random one.

    Returns:
        The outputs by their names, the seed of random inputs (None for inputs from files), and what the device ran.
    """
    from npu_compiler import TensorSpec
    from npu_compiler.errors import InputError
    from npu_compiler.graph.dtypes import numpy_dtype
    from npu_sim.commands.resources import inputs_for
    from npu_sim.module.compiled import CompiledModule
    from npu_sim.module.compiled import compile as compile_module
    from npu_sim.onnx.sources import load, parse_sizes

    with step(f"compiling {file}"):
        module = load(file, parse_sizes(shapes or ()))
        compiled = compile_module(module, module.examples, device=device)
    if not isinstance(compiled, CompiledModule):
        raise InputError(f"'{file}' does not become one graph")

    from npu_sim.onnx.dtypes import tensor_of

    named = list(zip(module.input_names, module.examples, strict=True))
    specs = [TensorSpec(name, tuple(x.shape), str(x.dtype).removeprefix("torch.")) for name, x in named]
    arrays, used = inputs_for(specs, inputs, seed)
    with step(f"running {module.name} on {device.name}"):
        given = [tensor_of(arrays[spec.name].astype(numpy_dtype(spec.dtype), copy=False)) for spec in specs]
        results = compiled(*given)
    results = results if isinstance(results, tuple) else (results,)
    wide = [x.float() if str(x.dtype) == "torch.bfloat16" else x for x in results]
    return {name: x.numpy() for name, x in zip(module.output_names, wide, strict=True)}, used, compiled.ran
