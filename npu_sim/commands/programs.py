"""`compile`, `describe`, `run`, `profile`: what one does with a program."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from npu_sim.console import note, print_json, progress, step

if TYPE_CHECKING:
    import numpy as np

    from npu_compiler import CompiledProgram, TensorSpec
    from npu_runtime import Device, DeviceBuffer

IRFile = Annotated[Path, typer.Argument(metavar="IR", help="IR JSON, as torch_ir or `npu-sim extract` writes it.")]
ProgramFile = Annotated[Path, typer.Argument(metavar="PROGRAM", help="A .npubin file.")]
Dtype = Annotated[
    str | None, typer.Option("--dtype", help="float16, bfloat16 or float32; by default what the model suggests.")
]
Weights = Annotated[
    Path | None, typer.Option("--weights", "-w", help="Weights: .safetensors (or a folder of them), .pt, .pth or .npz.")
]
Inputs = Annotated[
    list[str] | None, typer.Option("--input", "-i", metavar="NAME=FILE.npy", help="An input; without any: random.")
]
DeviceName = Annotated[
    str | None, typer.Option("--device", help="cpu, metal, metal-emulator, cuda, cuda:1; by default the best one here.")
]
Fast = Annotated[bool, typer.Option("--fast", help="With --device metal-emulator: leave its checks out.")]
Seed = Annotated[int | None, typer.Option("--seed", min=0, help="Seed of random inputs.")]
AsJSON = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def find_target(name: str) -> Any:
    """The code generation target of that name.

    Raises:
        InputError: there is none.
    """
    from cuda_compiler import CUDACodegenTarget
    from npu_compiler import MetalCodegenTarget
    from npu_compiler.errors import InputError

    if name in ("cuda", "cuda_gpu"):
        return CUDACodegenTarget()
    if name not in ("cpu", "metal", "metal_gpu"):
        raise InputError(f"unknown target '{name}'; there are metal_gpu (for Metal and the CPU device) and cuda_gpu")
    return MetalCodegenTarget()


def compile(
    ir: IRFile,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Where to write the .npubin.")] = None,
    target: Annotated[str, typer.Option("--target", help="The target to generate kernels for.")] = "metal_gpu",
    dtype: Dtype = None,
    disable_fusion: Annotated[
        list[str] | None, typer.Option("--disable-fusion", metavar="NAME", help="Leave a fusion out; may be repeated.")
    ] = None,
    stages: Annotated[bool, typer.Option("--stages", help="Print the graph after each stage.")] = False,
    json: AsJSON = False,
) -> None:
    """Compile IR into a .npubin program."""
    from npu_compiler import compile as compile_ir
    from npu_compiler import print_graph, read_ir, trace_stages
    from npu_compiler.errors import InputError
    from npu_compiler.program.describe import summary

    if output is None and not stages:
        raise InputError("say where the program goes (-o FILE.npubin), or ask for --stages")
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
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A .npubin program or IR JSON.")], json: AsJSON = False
) -> None:
    """Show what a program (or an IR file) holds: kernels, buffers, memory, weights."""
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
        "inputs": [_spec(spec) for spec in program.input_specs],
        "outputs": [_spec(spec) for spec in program.output_specs],
    }


def _spec(spec: TensorSpec) -> dict[str, Any]:
    return {"name": spec.name, "shape": list(spec.shape), "dtype": spec.dtype, "storage": spec.storage or spec.dtype}


def open_device(name: str | None, fast: bool = False) -> Device:
    """The device of that name, or the best one here; `DeviceError` says which there are.

    Raises:
        InputError: `fast` is asked of a device that has no such mode.
    """
    with step("opening the device"):
        return _open(name, fast)


def open_meanwhile(name: str | None, fast: bool = False) -> Future[Device]:
    """`open_device` in a thread: while libraries load and a driver starts, there is other work to do."""
    pool = ThreadPoolExecutor(1, "open-device")
    opening = pool.submit(_open, name, fast)
    pool.shutdown(wait=False)
    return opening


def _open(name: str | None, fast: bool) -> Device:
    from npu_compiler.errors import InputError
    from npu_runtime import Device

    if fast and name != "metal-emulator":
        raise InputError("--fast goes with --device metal-emulator")
    return Device("metal-emulator-fast" if fast else name)


def load_onto(device: Device, program: CompiledProgram, weights: Path | None) -> dict[str, DeviceBuffer]:
    """Upload a program's weights with a progress bar."""
    from npu_compiler.errors import WeightError
    from npu_runtime import load_weights
    from npu_sim.arrays import read_weights

    if weights is None and program.weight_specs:
        raise WeightError(f"'{program.name}' has {len(program.weight_specs)} weights: name their file with --weights")
    with progress("loading weights") as report:
        return load_weights(read_weights(weights), program, device, strict=weights is not None, progress=report)


def inputs_for(program: CompiledProgram, inputs: Inputs, seed: int | None) -> tuple[dict[str, np.ndarray], int | None]:
    """The arrays that the user named, or random ones with the seed that made them, which is shown."""
    from npu_sim.arrays import choose_inputs

    arrays, used_seed = choose_inputs(inputs or (), program.input_specs, seed)
    if used_seed is not None:
        note(f"random inputs, seed {used_seed}")
    return arrays, used_seed


def run(
    program_file: ProgramFile,
    weights: Weights = None,
    inputs: Inputs = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the outputs here, as .npz.")] = None,
    device: DeviceName = None,
    fast: Fast = False,
    seed: Seed = None,
    json: AsJSON = False,
) -> None:
    """Run a program once."""
    from npu_compiler import CompiledProgram
    from npu_runtime import Executor
    from npu_sim.arrays import write_outputs

    program = CompiledProgram.load(program_file)
    arrays, used_seed = inputs_for(program, inputs, seed)
    chosen = open_device(device, fast)
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
        typer.echo(f"written to {output}")


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
    fast: Fast = False,
    runs: Annotated[int, typer.Option("--runs", min=1, help="Runs to average over, after one to warm up.")] = 10,
    seed: Seed = None,
    json: AsJSON = False,
) -> None:
    """Show where the time of a run goes, kernel by kernel."""
    import time

    from npu_compiler import CompiledProgram
    from npu_runtime import Executor, Profiler

    program = CompiledProgram.load(program_file)
    arrays, used_seed = inputs_for(program, inputs, seed)
    chosen = open_device(device, fast)
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
