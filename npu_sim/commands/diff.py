"""The command `diff`, which compares two programs, or one program on two chips."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from npu_sim.commands.checks import check_not_overwritten, check_output, check_weights
from npu_sim.commands.completion import chips, models
from npu_sim.commands.console import note, print_json
from npu_sim.commands.options import AllowCode, AsJSON, Seed
from npu_sim.commands.report import (
    PROGRAM,
    RUNS,
    TARGET,
    ModelFile,
    Runs,
    Target,
    check_measuring,
    chip_named,
    compile_model,
    load,
    measure_program,
    optional_model,
    simulated,
)
from npu_sim.commands.settings import DeviceSettings
from npu_sim.commands.targets import find_target

_TOLD = ("labels", "is_measured", "is_simulated", "totals", "kernels", "nodes", "layers")  # as JSON
OtherModel = Annotated[
    Path | None,
    typer.Argument(
        metavar="[MODEL|PROGRAM]",
        callback=optional_model,
        autocompletion=models,
        help="The other one. Default: the first one, on the second chip of --npu.",
    ),
]


def diff(
    a: ModelFile,
    b: OtherModel = None,
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
    npu: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME|FILE.toml",
            autocompletion=chips,
            help="Chip to simulate on: edge, phone, datacenter, … or a file; twice for one each.",
        ),
    ] = None,
    device_settings: DeviceSettings,
    allow_code: AllowCode = False,
    target: Target = None,
    runs: Runs = RUNS,
    seed: Seed = None,
    json: AsJSON = False,
) -> None:
    """Compare two programs, or one on two chips: kernels, bytes, memory and, if measured or simulated, time.

    With --weights or --device, both are measured; with --npu, simulated. Of a language model, the decode step counts.
    """
    from npu_compiler import CompileOptions
    from npu_compiler.errors import InputError

    given = [path for path in map(check_weights, weights or ()) if path is not None]
    is_measured = bool(given) or device_settings.device is not None
    if len(given) > 2:
        raise InputError("--weights is given more than twice; there are two programs")
    if len(npu or ()) > 2:
        raise InputError("--npu is given more than twice; there are two programs")
    if b is None and len(npu or ()) != 2:
        raise InputError("give two programs, or one and --npu twice")
    check_measuring("a comparison", is_measured, target)
    codegen = find_target(target or TARGET)
    named = [chip_named(name) for name in npu or ()]
    check_not_overwritten(output, [a, *([b] if b else []), *given])

    from npu_sim.report import diff_contents, write_page

    programs, measurements, simulations = [], [], []
    for index, path in enumerate((a, b or a)):
        opened = device_settings.open() if is_measured and path.suffix != PROGRAM else None
        subject = (
            load(path, allow_code)
            if path.suffix == PROGRAM
            else compile_model(path, opened.backend.target if opened else codegen, CompileOptions())
        )
        if subject.plan is not None:
            raise InputError(f"'{path}' needs partitions, and only whole programs can be compared")
        if is_measured and len(subject.programs) > 1:
            raise InputError(f"'{path}' is a language model, which is not measured; leave out --weights and --device")
        program = subject.programs[-1]
        programs.append(program)
        chosen = opened or (device_settings.open_for(program) if is_measured else None)
        state = given[min(index, len(given) - 1)] if given else None
        measurements.append(measure_program(subject, chosen, state, None, runs, seed, False)[0] if chosen else None)
        chip = named[min(index, len(named) - 1)] if named else None
        simulations.append(next(iter(simulated([program], chip)), None))
    contents = diff_contents(_labels(a, b, npu or []), programs, measurements, simulations)
    if output is not None:
        size = write_page(output, contents["title"], contents)
        note(f"{output}: {size} bytes")
    if json:
        print_json({name: contents[name] for name in _TOLD})
    else:
        typer.echo(_table(contents))


def _labels(a: Path, b: Path | None, npu: Sequence[str]) -> tuple[str, str]:
    """Return a distinct label for each of the two compared programs: file names, full paths or names of chips."""
    first, second = (a.name, a.name) if b is None else (a.name, b.name) if a.name != b.name else (str(a), str(b))
    if len(npu) == 2:
        return f"{first} on {Path(npu[0]).stem}", f"{second} on {Path(npu[1]).stem}"
    return first, second


def _table(contents: Mapping[str, Any]) -> str:
    """Format a comparison as text: totals, kernels, and the number of nodes that different kernels compute."""
    from npu_compiler.program.describe import format_bytes, format_flops

    formats: dict[str, Callable[[float], str]] = {
        "bytes": lambda value: format_bytes(int(value)),
        "flops": lambda value: format_flops(int(value)),
        "seconds": lambda value: f"{1e3 * value:.3f} ms",
        "joules": lambda value: f"{1e3 * value:.3f} mJ",
        "share": lambda value: f"{value:.1%}",
        "count": str,
    }
    lines = [f"a: {contents['labels'][0]}", f"b: {contents['labels'][1]}", ""]
    lines.append(f"{'':34} {'a':>14} {'b':>14} {'change':>9}")
    for row in contents["totals"]:
        show = formats[row["unit"]]
        lines.append(f"{row['name']:34} {show(row['a']):>14} {show(row['b']):>14} {_change(row['a'], row['b']):>9}")
    unit = "seconds" if contents["is_measured"] or contents["is_simulated"] else "bytes"
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
