"""The command `report`, which writes a page on a model's graph, kernels, time, bytes and energy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from npu_sim.commands.checks import check_file, check_not_overwritten, check_output
from npu_sim.commands.completion import chips, models, targets
from npu_sim.commands.console import concerning, note, print_json, progress, step
from npu_sim.commands.int8 import INT8, for_timing
from npu_sim.commands.options import (
    AllowCode,
    AsJSON,
    DisabledFusions,
    Inputs,
    Seed,
    SimulatedDtype,
    WeightFormat,
    Weights,
)
from npu_sim.commands.resources import inputs_for, load_onto, weights_for
from npu_sim.commands.settings import DeviceSettings
from npu_sim.commands.simulate import check_ops
from npu_sim.commands.targets import find_target

if TYPE_CHECKING:
    from npu_compiler import CodegenTarget, CompiledProgram, CompileOptions, IRGraph, PartitionPlan
    from npu_model import Chip
    from npu_runtime import Device
    from npu_sim.report import Measurement, Roof, StageGraphs

PROGRAM, MODULE = ".npubin", ".npumod"
RUNS = 5
TARGET = "op_level"


def _model(path: Path) -> Path:
    from npu_compiler.errors import InputError

    if path.suffix == MODULE:
        raise InputError(f"'{path}' is a saved module; give its IR, or one program")
    if not is_vision_model(path) and not is_language_model(path):
        check_file(path, "program" if path.suffix == PROGRAM else "IR file")
    return path


def optional_model(path: Path | None) -> Path | None:
    """Check the name of a model or program and return it; None, for an argument left out, stays None."""
    return None if path is None else _model(path)


def is_vision_model(model: Path) -> bool:
    """Whether the argument is the name of a vision model."""
    from npu_sim.vision.models import MODELS

    return str(model) in MODELS


def is_language_model(model: Path) -> bool:
    """Whether the argument names a language model: a shorthand, a folder, a GGUF file or a Hugging Face id.

    No file is read. Raises an error if such a model cannot be found.
    """
    from npu_sim.llm.loading import SHORTHANDS, find_checkpoint

    is_id = len(model.parts) == 2 and not model.suffix and not model.parent.exists()
    if str(model) not in SHORTHANDS and not model.is_dir() and model.suffix != ".gguf" and not is_id:
        return False
    find_checkpoint(str(model))
    return True


def _rate(value: float | None) -> float | None:
    from npu_compiler.errors import InputError

    if value is not None and not (math.isfinite(value) and value > 0):
        raise InputError(f"a peak rate must be a finite number above 0, not {value}")
    return value


ModelFile = Annotated[
    Path,
    typer.Argument(
        metavar="MODEL|PROGRAM",
        callback=_model,
        autocompletion=models,
        help="IR file (JSON), ONNX file, compiled program (.npubin), vision model by name, or a language model: "
        "Hugging Face id, folder, .gguf file or smollm2.",
    ),
]
Target = Annotated[
    str | None,
    typer.Option(
        "--target",
        metavar="NAME",
        autocompletion=targets,
        help="Target to compile IR for, as in `compile`. Default: that of --device, else op_level.",
    ),
]
Runs = Annotated[int, typer.Option("--runs", min=1, metavar="INTEGER", help="Number of timed runs.")]


def report(
    model: ModelFile,
    *,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", callback=check_output, help="Output file (.html).")
    ],
    weights: Weights = None,
    inputs: Inputs = None,
    device_settings: DeviceSettings,
    allow_code: AllowCode = False,
    dtype: SimulatedDtype = None,
    quantization: WeightFormat = None,
    disable_fusion: DisabledFusions = None,
    target: Target = None,
    runs: Runs = RUNS,
    seed: Seed = None,
    verify: Annotated[bool, typer.Option("--verify", help="Also compare each kernel with PyTorch.")] = False,
    npu: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE.toml",
            autocompletion=chips,
            help="Also simulate on a chip: edge, phone, datacenter, … or a file.",
        ),
    ] = None,
    sweep: Annotated[
        str | None,
        typer.Option(
            "--sweep",
            metavar="RANGES",
            help="Also simulate many chips like it, as `simulate --sweep` does; of a language model, its decode step.",
        ),
    ] = None,
    bandwidth: Annotated[
        float | None,
        typer.Option(metavar="GB/S", callback=_rate, help="Memory bandwidth for the roofline, in GB/s."),
    ] = None,
    flops: Annotated[
        float | None,
        typer.Option(metavar="GFLOP/S", callback=_rate, help="Peak rate for the roofline, in GFLOP/s."),
    ] = None,
    json: AsJSON = False,
) -> None:
    """Write a report on a model or a program as one HTML file that needs no network.

    With --weights or --device, the time of each kernel is measured; with --npu, it is simulated.
    """
    from npu_compiler import CompileOptions
    from npu_compiler.errors import InputError
    from npu_compiler.fusion_patterns import check_fusion_names
    from npu_model.analysis.sweep import parse_sweep
    from npu_sim.arrays import assigned_files

    is_program = model.suffix == PROGRAM
    is_measured = weights is not None or device_settings.device is not None
    options = CompileOptions(dtype, quantization, disabled_fusions=disable_fusion or ())
    if is_program:
        _check_compiled(model, options, target)
    if verify and (is_program or not is_measured or quantization or disable_fusion):
        raise InputError("--verify is for an IR file with --weights, compiled without other options than --dtype")
    if (bandwidth is None) != (flops is None):
        raise InputError("--bandwidth and --flops belong together; give both")
    if inputs and not is_measured:
        raise InputError("--input is for measuring; give --weights or --device too")
    check_measuring("a report", is_measured, target)
    if dtype == INT8 and (is_measured or is_language_model(model)):
        raise InputError("--dtype int8 is for the simulated time of a network; leave it out where values are computed")
    if is_measured and not is_program and is_language_model(model):
        raise InputError(f"a report measures no language model; for '{model}', leave out --weights and --device")
    if sweep is not None and npu is None:
        raise InputError("--sweep is of a chip; give it with --npu")
    check_fusion_names(options.disabled_fusions)
    chip = None if npu is None else chip_named(npu)
    codegen = find_target(target or TARGET) if chip is None or target else target_for(chip, sweep is not None)
    if chip is not None and sweep is not None:
        parse_sweep(sweep, chip)
    check_not_overwritten(output, [model, weights, *assigned_files(inputs)])

    from npu_sim.report import Roof

    roof = None if bandwidth is None or flops is None else Roof(1e9 * bandwidth, 1e9 * flops)
    opened = device_settings.open() if is_measured and not is_program else None
    if is_program:
        subject = load(model, allow_code)
        check_ops(subject.programs, chip)
    else:
        subject = compile_model(model, opened.backend.target if opened else codegen, options)
    measurement, numerics = None, None
    if is_measured and subject.plan is None:
        (program,) = subject.programs
        chosen = opened or device_settings.open_for(program)
        measurement, numerics = measure_program(subject, chosen, weights, inputs, runs, seed, verify)
        roof = roof or Roof.of(chosen.backend.ceilings, program.compute_dtype)
    elif is_measured:
        subject.notes.append("The model is partitioned, so its kernels were not measured.")
    simulations = simulated(subject.programs, chip)
    swept = None if chip is None or sweep is None else _swept(subject.programs[-1], chip, sweep)
    _write(subject, output, measurement, simulations, roof, numerics, swept, json)


def _check_compiled(model: Path, options: CompileOptions, target: str | None) -> None:
    """Raise `InputError` if compiler options are given for a program, which is compiled already."""
    from npu_compiler.errors import InputError

    for option, value in {
        "--dtype": options.compute_dtype,
        "--quantization": options.quantization,
        "--disable-fusion": options.disabled_fusions,
        "--target": target,
    }.items():
        if value:
            raise InputError(f"{option} is for an IR file; '{model}' is compiled already")


def check_measuring(what: str, is_measured: bool, target: str | None) -> None:
    """Raise `InputError` if a target is given although a device is to measure, which determines the target itself.

    Args:
        what: The kind of model, for the message.
        is_measured: Whether the time is to be measured on a device.
    """
    from npu_compiler.errors import InputError

    if is_measured and target is not None:
        raise InputError(f"--target is for {what} without measuring; leave out --target, --weights or --device")


def chip_named(npu: str) -> Chip:
    """Load the chip that the option `--npu` names. Raises `InputError`, with the option's name, if that fails."""
    from npu_model import load_chip

    with concerning("--npu"):
        return load_chip(npu)


def target_for(chip: Chip, is_swept: bool) -> CodegenTarget:
    """Return the target that compiles programs for a chip.

    Args:
        is_swept: Compile to a program of ops, which can be lowered for each variant of the chip in a sweep, instead of
            one that is lowered for this chip.
    """
    from npu_model import ChipOpsTarget, NPUTarget

    return ChipOpsTarget(chip) if is_swept else NPUTarget(chip)


def _swept(program: CompiledProgram, chip: Chip, ranges: str) -> dict[str, Any]:
    from npu_sim.report import sweep_facts

    with progress("simulating the sweep") as advance:
        return sweep_facts(program, chip, ranges, advance)


def simulated(programs: Sequence[CompiledProgram], chip: Chip | None) -> list[dict[str, Any]]:
    """Simulate each program on the chip and return the results as JSON data; an empty list without a chip."""
    from npu_sim.report import simulated_facts

    if chip is None:
        return []
    runs = []
    with progress(f"simulating on {chip.name}") as advance:
        for program in programs:
            runs.append(simulated_facts(program, chip))
            advance(len(runs), len(programs))
    return runs


@dataclass
class Subject:
    """The subject of a report: the compiled programs of a model.

    Attributes:
        programs: Compiled programs: one, the partitions of a model on the device, or prefill and decode.
        title: Title of the page.
        graph: The model's graph. None for a file that was compiled already.
        stages: The graph after each compiler stage. None for a file that was compiled already.
        plan: The division of the model between device and host. None if the device runs all of it.
        notes: Remarks for the page.
    """

    programs: list[CompiledProgram]
    title: str
    graph: IRGraph | None = None
    stages: StageGraphs | None = None
    plan: PartitionPlan | None = None
    notes: list[str] = field(default_factory=list)


def load(path: Path, allow_code: bool) -> Subject:
    """Load a compiled program as the subject of a report.

    Args:
        allow_code: Let the program's code run, whoever compiled it (see `CompiledProgram.load`).
    """
    from npu_compiler import CompiledProgram

    program = CompiledProgram.load(path, allow_code)
    return Subject([program], program.name)


def compile_model(path: Path, target: CodegenTarget, options: CompileOptions) -> Subject:
    """Compile a model to one program or, if the chip cannot run all of it, to one for each partition on the device.

    For a language model, compile the prefill of a prompt and a decode step, as `simulate` does.
    """
    from npu_compiler import compile as compile_ir
    from npu_compiler import read_ir, trace_stages
    from npu_compiler.errors import ConstraintError
    from npu_sim.commands.simulate import language_programs
    from npu_sim.report import stage_graphs
    from npu_sim.vision.models import extract_model_ir, find_model

    with step(f"compiling {path}"):
        if is_language_model(path):
            quantization = options.quantization
            assert quantization is None or isinstance(quantization, str)
            programs, tokens = language_programs(str(path), target, options.compute_dtype, quantization, None, None)
            notes = [f"A prefill of {tokens} tokens, and a decode step."]
            return Subject(programs, path.name, notes=notes)
        graph = read_ir(extract_model_ir(find_model(str(path))) if is_vision_model(path) else path)
        graph, dtype = for_timing(graph, options.compute_dtype)
        options = replace(options, compute_dtype=dtype)
        try:
            program = compile_ir(graph, target, options)
        except ConstraintError:
            subject = _divided(graph, target, options)
            if not subject.programs:
                raise
            return subject
        stages = stage_graphs(trace_stages(graph, target, options))
    return Subject([program], graph.name, graph, stages)


def _divided(graph: IRGraph, target: CodegenTarget, options: CompileOptions) -> Subject:
    """Divide a graph that a target cannot run as a whole, and compile its partitions on the device."""
    from npu_compiler import partition
    from npu_model import ChipOpsTarget, simulate_plan
    from npu_sim.report import stage_graphs

    chip = target.chip if isinstance(target, ChipOpsTarget) else None
    plan = partition(
        graph,
        target=None if chip else target,
        npu=chip,
        compute_dtype=options.compute_dtype,
        quantization=options.quantization,
    )
    stages = stage_graphs([("read", graph)])
    stages.add_partitions(plan)
    programs = [plan.compile(part, target) for part in plan.partitions if part.device == "npu"]
    notes = [] if chip is None else [simulate_plan(plan, chip).summary()]
    return Subject(programs, graph.name, graph, stages, plan, notes)


def measure_program(
    subject: Subject, device: Device, weights: Path | None, inputs: Inputs, runs: int, seed: int | None, verify: bool
) -> tuple[Measurement, dict[str, Any] | None]:
    """Measure the only program of a report and, if `verify` is set, compare its kernels with PyTorch."""
    from npu_sim.report import measure

    (program,) = subject.programs
    state = weights_for(program, weights)
    arrays, used_seed = inputs_for(program.input_specs, inputs, seed)
    loaded = load_onto(device, program, state)
    with progress("measuring") as advance:
        measurement = measure(program, device, arrays, loaded, runs, advance)
    if not verify:
        return measurement, None

    from npu_sim.report import numerics_contents
    from npu_sim.verify import verify as compare
    from npu_sim.verify import verify_kernels

    dtype = program.compute_dtype
    with step("verifying"):
        result = compare(subject.graph, state, [arrays], device, compute_dtype=dtype)
        kernels = verify_kernels(subject.graph, state, arrays, device, compute_dtype=dtype)
    return measurement, numerics_contents(result, kernels, used_seed)


def _write(
    subject: Subject,
    output: Path,
    measurement: Measurement | None,
    simulations: Sequence[Mapping[str, Any]],
    roof: Roof | None,
    numerics: dict[str, Any] | None,
    sweep: dict[str, Any] | None,
    json: bool,
) -> None:
    from npu_compiler.program.describe import format_bytes
    from npu_sim.report import report_contents, write_page

    contents = report_contents(
        subject.title,
        subject.programs,
        measurement=measurement,
        simulations=simulations,
        stages=subject.stages,
        partitions=subject.plan,
        roof=roof,
        numerics=numerics,
        sweep=sweep,
        notes=subject.notes,
    )
    with step(f"writing {output}"):
        size = write_page(output, subject.title, contents)
    for remark in subject.notes:
        note(f"note: {remark}")
    if json:
        kept = ("name", "target", "dtype", "totals", "measured")
        facts = [
            {**{name: program[name] for name in kept}, "simulated": _totals(program["simulated"])}
            for program in contents["programs"]
        ]
        print_json({"report": str(output), "bytes": size, "programs": facts, "notes": subject.notes})
    else:
        calls = sum(len(program["calls"]) for program in contents["programs"])
        typer.echo(f"{output}: {calls} kernel launches, {format_bytes(size)}")


def _totals(run: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return a simulated run without the details that only the page draws; None stays None."""
    drawn = ("calls", "tracks", "scratchpad", "gap")
    return None if run is None else {name: value for name, value in run.items() if name not in drawn}
