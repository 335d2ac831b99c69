"""The commands that show programs: `report`, and `diff` for two of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from npu_sim.commands.checks import check_file, check_not_overwritten, check_output, check_weights
from npu_sim.commands.completion import chips, models_and_programs, targets
from npu_sim.commands.console import concerning, note, print_json, progress, step
from npu_sim.commands.options import AllowCode, AsJSON, DisabledFusions, Dtype, Inputs, Seed, WeightFormat, Weights
from npu_sim.commands.resources import inputs_for, load_onto, weights_for
from npu_sim.commands.settings import DeviceSettings
from npu_sim.commands.simulate import check_ops
from npu_sim.commands.targets import find_target

if TYPE_CHECKING:
    from npu_compiler import CodegenTarget, CompiledProgram, CompileOptions, IRGraph, PartitionPlan
    from npu_model import Chip, Result
    from npu_runtime import Device
    from npu_sim.report import Measurement, Roof, StageGraphs

PROGRAM, MODULE = ".npubin", ".npumod"
RUNS = 5
TARGET = "op_level"


def _model_file(path: Path) -> Path:
    from npu_compiler.errors import InputError

    if path.suffix == MODULE:
        raise InputError(f"'{path}' is a saved module; give its IR, or one program")
    return check_file(path, "program" if path.suffix == PROGRAM else "IR file")


def _rate(value: float | None) -> float | None:
    from npu_compiler.errors import InputError

    if value is not None and not (math.isfinite(value) and value > 0):
        raise InputError(f"a peak rate must be a finite number above 0, not {value}")
    return value


ModelFile = Annotated[
    Path,
    typer.Argument(
        metavar="MODEL|PROGRAM",
        callback=_model_file,
        autocompletion=models_and_programs,
        help="IR file (JSON), or compiled program (.npubin).",
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
    dtype: Dtype = None,
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
    _check_measuring("a report", is_measured, target)
    check_fusion_names(options.disabled_fusions)
    codegen = find_target(target or TARGET)
    chip = None if npu is None else _chip(npu)
    check_not_overwritten(output, [model, weights, *assigned_files(inputs)])

    from npu_model import simulate
    from npu_sim.report import Roof

    roof = None if bandwidth is None or flops is None else Roof(1e9 * bandwidth, 1e9 * flops)
    opened = device_settings.open() if is_measured and not is_program else None
    simulations: Sequence[Result] | None = None
    if is_program:
        subject = _load(model, allow_code)
        if chip is not None:
            check_ops(subject.programs, chip)
    elif chip is not None and not is_measured and target is None:
        subject, simulations = _on_chip(model, chip, options)
    else:
        subject = _compile(model, opened.backend.target if opened else codegen, options)
    measurement, numerics = None, None
    if is_measured and subject.plan is None:
        (program,) = subject.programs
        chosen = opened or device_settings.open_for(program)
        measurement, numerics = _measure(subject, chosen, weights, inputs, runs, seed, verify)
        roof = roof or Roof.of(chosen.backend.ceilings, program.compute_dtype)
    elif is_measured:
        subject.notes.append("The model is partitioned, so its kernels were not measured.")
    if simulations is None:
        simulations = [] if chip is None else [simulate(program, chip) for program in subject.programs]
    _write(subject, output, measurement, simulations, roof, numerics, json)


def _check_compiled(model: Path, options: CompileOptions, target: str | None) -> None:
    """Raises `InputError` where a program, which is compiled already, is to be compiled in some way."""
    from npu_compiler.errors import InputError

    for option, value in {
        "--dtype": options.compute_dtype,
        "--quantization": options.quantization,
        "--disable-fusion": options.disabled_fusions,
        "--target": target,
    }.items():
        if value:
            raise InputError(f"{option} is for an IR file; '{model}' is compiled already")


def _check_measuring(what: str, is_measured: bool, target: str | None) -> None:
    from npu_compiler.errors import InputError

    if is_measured and target is not None:
        raise InputError(f"--target is for {what} without measuring; leave out --target, --weights or --device")


def _chip(npu: str) -> Chip:
    from npu_model import load_chip

    with concerning("--npu"):
        return load_chip(npu)


@dataclass
class _Subject:
    """The subject of a report: the programs of a model and, where it was compiled here, how they came about."""

    programs: list[CompiledProgram]
    title: str
    graph: IRGraph | None = None
    stages: StageGraphs | None = None
    plan: PartitionPlan | None = None
    notes: list[str] = field(default_factory=list)


def _load(path: Path, allow_code: bool) -> _Subject:
    from npu_compiler import CompiledProgram

    program = CompiledProgram.load(path, allow_code)
    return _Subject([program], program.name)


def _compile(path: Path, target: CodegenTarget, options: CompileOptions) -> _Subject:
    """The program of an IR file or, where the NPU cannot run all of it, those of its device partitions."""
    from npu_compiler import compile as compile_ir
    from npu_compiler import partition, read_ir, trace_stages
    from npu_compiler.errors import ConstraintError
    from npu_sim.report import stage_graphs

    with step(f"compiling {path}"):
        graph = read_ir(path)
        try:
            program = compile_ir(graph, target, options)
        except ConstraintError:
            plan = partition(
                graph, target=target, compute_dtype=options.compute_dtype, quantization=options.quantization
            )
            stages = stage_graphs([("read", graph)])
            stages.add_partitions(plan)
            parts = [plan.compile(part, target) for part in plan.partitions if part.device == "npu"]
            if not parts:
                raise
            return _Subject(parts, graph.name, graph, stages, plan)
        stages = stage_graphs(trace_stages(graph, target, options))
    return _Subject([program], graph.name, graph, stages)


def _on_chip(path: Path, chip: Chip, options: CompileOptions) -> tuple[_Subject, Sequence[Result]]:
    """The program of an IR file and its run on a chip or, where that lacks ops, those of its part of a plan."""
    from npu_compiler import compile as compile_ir
    from npu_compiler import partition, read_ir, trace_stages
    from npu_compiler.errors import ConstraintError
    from npu_model import ChipOpsTarget, NPUTarget, simulate, simulate_plan
    from npu_sim.report import stage_graphs

    with step(f"compiling {path}"):
        graph, target = read_ir(path), ChipOpsTarget(chip)
        try:
            program = compile_ir(graph, target, options)
            simulations = [simulate(program, chip)]
        except ConstraintError:
            plan = partition(graph, npu=chip, compute_dtype=options.compute_dtype, quantization=options.quantization)
        else:
            return _Subject(
                [program], graph.name, graph, stage_graphs(trace_stages(graph, target, options))
            ), simulations
        stages = stage_graphs([("read", graph)])
        stages.add_partitions(plan)
        run = simulate_plan(plan, chip)
    programs = [program for program in plan.programs(NPUTarget(chip)) if program.kernels]
    subject = _Subject(programs, graph.name, graph, stages, plan)
    subject.notes.append(run.summary())
    return subject, run.results


def _measure(
    subject: _Subject, device: Device, weights: Path | None, inputs: Inputs, runs: int, seed: int | None, verify: bool
) -> tuple[Measurement, dict[str, Any] | None]:
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
    subject: _Subject,
    output: Path,
    measurement: Measurement | None,
    simulations: Sequence[Result],
    roof: Roof | None,
    numerics: dict[str, Any] | None,
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
        notes=subject.notes,
    )
    with step(f"writing {output}"):
        size = write_page(output, subject.title, contents)
    for remark in subject.notes:
        note(f"note: {remark}")
    if json:
        facts = [
            {name: program[name] for name in ("name", "target", "dtype", "totals", "measured", "simulated")}
            for program in contents["programs"]
        ]
        print_json({"report": str(output), "bytes": size, "programs": facts, "notes": subject.notes})
    else:
        calls = sum(len(program["calls"]) for program in contents["programs"])
        typer.echo(f"{output}: {calls} kernel launches, {format_bytes(size)}")


def diff(
    a: ModelFile,
    b: ModelFile,
    *,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", callback=check_output, help="Also write the comparison as HTML."
        ),
    ] = None,
    weights: Annotated[
        list[Path] | None,
        typer.Option(
            "--weights", "-w", metavar="FILE", help="Weights, to measure the time; twice if the models' own differ."
        ),
    ] = None,
    device_settings: DeviceSettings,
    allow_code: AllowCode = False,
    target: Target = None,
    runs: Runs = RUNS,
    seed: Seed = None,
    json: AsJSON = False,
) -> None:
    """Compare two programs: kernels, bytes, memory and, with --weights or --device, time."""
    from npu_compiler import CompileOptions
    from npu_compiler.errors import InputError

    given = [path for path in map(check_weights, weights or ()) if path is not None]
    is_measured = bool(given) or device_settings.device is not None
    if len(given) > 2:
        raise InputError("--weights is given more than twice; there are two programs")
    _check_measuring("a comparison", is_measured, target)
    codegen = find_target(target or TARGET)
    check_not_overwritten(output, [a, b, *given])

    from npu_sim.report import diff_contents, write_page

    programs, measurements = [], []
    for index, path in enumerate((a, b)):
        opened = device_settings.open() if is_measured and path.suffix != PROGRAM else None
        subject = (
            _load(path, allow_code)
            if path.suffix == PROGRAM
            else _compile(path, opened.backend.target if opened else codegen, CompileOptions())
        )
        if subject.plan is not None:
            raise InputError(f"'{path}' needs partitions, and only whole programs can be compared")
        (program,) = subject.programs
        programs.append(program)
        chosen = opened or (device_settings.open_for(program) if is_measured else None)
        state = given[min(index, len(given) - 1)] if given else None
        measurements.append(_measure(subject, chosen, state, None, runs, seed, False)[0] if chosen else None)
    labels = (a.name, b.name) if a.name != b.name else (str(a), str(b))
    contents = diff_contents(labels, programs, measurements)
    if output is not None:
        size = write_page(output, contents["title"], contents)
        note(f"{output}: {size} bytes")
    if json:
        print_json({name: contents[name] for name in ("labels", "is_measured", "totals", "kernels", "nodes")})
    else:
        typer.echo(_table(contents))


def _table(contents: Mapping[str, Any]) -> str:
    """The comparison as text: totals, kernels, and how many nodes other kernels compute."""
    from npu_compiler.program.describe import format_bytes, format_flops

    formats: dict[str, Callable[[float], str]] = {
        "bytes": lambda value: format_bytes(int(value)),
        "flops": lambda value: format_flops(int(value)),
        "seconds": lambda value: f"{1e3 * value:.3f} ms",
        "count": str,
    }
    lines = [f"a: {contents['labels'][0]}", f"b: {contents['labels'][1]}", ""]
    lines.append(f"{'':34} {'a':>14} {'b':>14} {'change':>9}")
    for row in contents["totals"]:
        show = formats[row["unit"]]
        lines.append(f"{row['name']:34} {show(row['a']):>14} {show(row['b']):>14} {_change(row['a'], row['b']):>9}")
    unit = "seconds" if contents["is_measured"] else "bytes"
    lines += ["", f"{'kernel':34} {'launches':>14} {'time' if unit == 'seconds' else 'bytes':>24} {'change':>9}"]
    for row in contents["kernels"]:
        launches = f"{row['count_a']} → {row['count_b']}"
        before, after = row[f"{unit}_a"], row[f"{unit}_b"]
        both = f"{formats[unit](before)} → {formats[unit](after)}"
        lines.append(f"{row['kernel']:34} {launches:>14} {both:>24} {_change(before, after):>9}")
    nodes = len(contents["nodes"])
    lines += ["", f"{nodes} nodes are computed by other kernels" if nodes else "each node has the same kernels in both"]
    return "\n".join(lines)


def _change(before: float, after: float) -> str:
    if before == after:
        return "="
    return f"{after / before - 1:+.1%}" if before else "new"
