"""The command `simulate`: what a model would take on a chip that is described in a file."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from npu_sim.commands.checks import check_file, check_not_overwritten, check_output
from npu_sim.commands.completion import chips, models
from npu_sim.commands.console import concerning, note, print_json, progress, step
from npu_sim.commands.options import AsJSON, Dtype, Trace, WeightFormat

if TYPE_CHECKING:
    from npu_compiler import CodegenTarget, CompiledProgram, IRGraph
    from npu_model import CallResult, Chip, PlanResult, Result

PROMPT = 512
_ROWS = 12  # of the table of calls


def simulate(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            autocompletion=models,
            help="Compiled program (.npubin), IR file (.json), vision model by name, or a language model: Hugging Face "
            "id, folder (a config.json is enough), .gguf file or smollm2.",
        ),
    ],
    npu: Annotated[
        str,
        typer.Option(
            "--npu", metavar="NAME|FILE.toml", autocompletion=chips, help="Chip: edge, phone, datacenter, … or a file."
        ),
    ],
    dtype: Dtype = None,
    quantization: WeightFormat = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            "--tokens",
            min=2,
            metavar="INTEGER",
            help=f"Prompt length of a language model. Default: {PROMPT}, or less if the cache is small.",
        ),
    ] = None,
    cache_length: Annotated[
        int | None,
        typer.Option(
            "--cache-length", min=1, metavar="INTEGER", help="Capacity of its KV cache in tokens. Default: 2048."
        ),
    ] = None,
    trace: Trace = None,
    picture: Annotated[
        Path | None,
        typer.Option(
            "--picture",
            metavar="FILE.png",
            callback=check_output,
            help="Draw utilization over time and the roofline; with --sweep, latency against area.",
        ),
    ] = None,
    sweep: Annotated[
        str | None,
        typer.Option(
            "--sweep", metavar="RANGES", help="Simulate many chips, such as sram=256K..8M,arrays=1..8 (each doubling)."
        ),
    ] = None,
    csv: Annotated[
        Path | None,
        typer.Option("--csv", metavar="FILE.csv", callback=check_output, help="Write the sweep's table."),
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Show every kernel call by itself, in order.")] = False,
    json: AsJSON = False,
) -> None:
    """Simulate a model on a chip: latency, utilization, stalls, traffic and energy.

    Where the chip lacks some ops, its host runs these, and the time includes host and transfers.

    Of a language model, the prefill of a prompt and a decode step are simulated; --trace, --picture and --sweep are of
    the decode step.
    """
    from npu_compiler import partition
    from npu_compiler.errors import ConstraintError, InputError
    from npu_model import ChipOpsTarget, NPUTarget, load_chip, simulate_plan
    from npu_model.analysis.sweep import parse_sweep

    if csv is not None and sweep is None:
        raise InputError("--csv is for --sweep")
    if sweep is not None and (trace is not None or full):
        raise InputError("--trace and --full are for one chip; leave out --sweep")
    check_not_overwritten(trace, [Path(model), Path(npu)])
    check_not_overwritten(picture, [Path(model), Path(npu), trace])
    check_not_overwritten(csv, [Path(model), Path(npu), picture])
    kind = _check_model(model, dtype, quantization, tokens, cache_length)
    with concerning("--npu"):
        chip = load_chip(npu)
    swept = None if sweep is None else parse_sweep(sweep, chip)
    if picture is not None:
        from npu_model.analysis.picture import check_picture

        check_picture(picture)
    with step(f"preparing {model}"):
        target = NPUTarget(chip) if swept is None else ChipOpsTarget(chip)
        plan = None
        try:
            programs, count = _programs(kind, model, target, dtype, quantization, tokens, cache_length)
        except ConstraintError:
            if swept is not None or picture is not None or kind in ("program", "language"):
                raise
            plan = partition(_graph(kind, model), npu=chip, compute_dtype=dtype, quantization=quantization)
    if kind == "program":
        check_ops(programs, chip)
    if plan is not None:
        _show_plan(simulate_plan(plan, chip, spans=trace is not None), trace, full, json)
    elif swept is not None:
        _sweep(programs[-1], swept, picture, csv, json)
    else:
        _show(programs, count, chip, trace, picture, full, json)


def _show(
    programs: Sequence[CompiledProgram],
    count: int | None,
    chip: Chip,
    trace: Path | None,
    picture: Path | None,
    full: bool,
    json: bool,
) -> None:
    """Simulate programs, one after the other, and show the results; those of a language model come with its prompt."""
    from npu_model import simulate as simulate_program

    results = []
    with progress("simulating") as report:
        for program in programs:
            results.append(simulate_program(program, chip, spans=trace is not None or picture is not None))
            report(len(results), len(programs))
    if trace is not None:
        from npu_model.analysis.trace import timeline

        timeline(results[-1]).save(trace)
    if picture is not None:
        from npu_model.analysis.picture import draw_run

        draw_run(results[-1], picture)
    if json:
        print_json(_as_json(results, chip, count))
        return
    for result in results:
        typer.echo("\n".join(_lines(result, full)))
    if count is not None:
        prefill, decode = results
        typer.echo(
            f"time to first token: {_time(prefill.seconds)} for a prompt of {count} tokens; "
            f"then {1 / decode.seconds:.1f} tokens per second"
        )


def check_ops(programs: Iterable[CompiledProgram], chip: Chip) -> None:
    """Refuse a program in which a chip's `[ops]` were not asked for. Raises `InputError`."""
    from npu_compiler.errors import InputError
    from npu_model.chip import Ops

    for program in programs:
        if chip.ops != Ops() and not program.target.startswith("npu:"):
            raise InputError(
                f"'{program.name}' was compiled without the [ops] of chip '{chip.name}'; compile it with "
                "--target npu:CHIP, or give its IR file"
            )


def _check_model(
    model: str, dtype: str | None, quantization: str | None, tokens: int | None, cache_length: int | None
) -> str:
    """Return the kind of model, as far as its name tells; refuse options that it does not take."""
    from npu_compiler.errors import InputError
    from npu_sim.llm.loading import find_checkpoint
    from npu_sim.vision.models import MODELS, quantized_files

    path = Path(model)
    if path.suffix == ".npubin":
        check_file(path, "program")
        if dtype is not None or quantization is not None:
            raise InputError("--dtype and --quantization are chosen when a program is compiled")
        kind = "program"
    elif path.suffix == ".json":
        check_file(path, "IR file")
        kind = "ir"
    elif model in MODELS:
        kind = "vision"
    elif path.is_dir() and quantized_files(path) is not None:
        kind = "quantized"
    else:
        find_checkpoint(model)
        return "language"
    if tokens is not None or cache_length is not None:
        raise InputError("--tokens and --cache-length are for language models")
    return kind


def _programs(
    kind: str,
    model: str,
    target: CodegenTarget,
    dtype: str | None,
    quantization: str | None,
    tokens: int | None,
    cache_length: int | None,
) -> tuple[list[CompiledProgram], int | None]:
    """The model's programs; of a language model, prefill and decode, and the length of the prompt."""
    from npu_compiler import CompiledProgram, CompileOptions
    from npu_compiler import compile as compile_ir

    if kind == "program":
        return [CompiledProgram.load(model)], None
    if kind == "language":
        return _language_programs(model, target, dtype, quantization, tokens, cache_length)
    options = CompileOptions(compute_dtype=dtype, quantization=quantization)
    return [compile_ir(_graph(kind, model), target, options)], None


def _graph(kind: str, model: str) -> IRGraph:
    """The graph of an IR file, a vision model or a quantized network."""
    from npu_compiler import read_ir
    from npu_sim.vision.models import extract_model_ir, find_model, quantized_files

    if kind == "ir":
        return read_ir(Path(model))
    quantized = quantized_files(Path(model)) if kind == "quantized" else None
    return read_ir(extract_model_ir(find_model(model)) if quantized is None else quantized[0])


def _language_programs(
    model: str,
    target: CodegenTarget,
    dtype: str | None,
    quantization: str | None,
    tokens: int | None,
    cache_length: int | None,
) -> tuple[list[CompiledProgram], int]:
    from npu_compiler.errors import InputError
    from npu_sim.llm import cache_capacity, compile_decode_loop, compile_prefill, load_architecture
    from npu_sim.llm.loading import STORED

    checkpoint = load_architecture(model, dtype, quantization or STORED)
    with concerning("--cache-length"):
        capacity = cache_capacity(checkpoint, cache_length)
    tokens = min(PROMPT, capacity) if tokens is None else tokens
    if tokens > capacity:
        raise InputError(f"a prompt of {tokens} tokens (--tokens) does not fit a KV cache of {capacity}")
    programs = [
        compile_prefill(checkpoint, tokens, capacity, target),
        compile_decode_loop(checkpoint, capacity, target),
    ]
    return programs, tokens


def _show_plan(result: PlanResult, trace: Path | None, full: bool, json: bool) -> None:
    """Show a model that the chip and its host run in turns."""
    if trace is not None:
        result.timeline().save(trace)
    if json:
        print_json(result.to_dict())
        return
    typer.echo(result.summary())
    typer.echo(f"  {'start':>10} {'time':>10} {'transfers':>10}  {'nodes':>5}  where, first … last node")
    stages = result.stages
    for stage in stages if full else stages[:_ROWS]:
        nodes = stage.part.graph.nodes
        crossing = sum(seconds for _, seconds in stage.transfers)
        where = "host" if stage.part.device == "cpu" else "chip"
        typer.echo(
            f"  {_time(stage.start):>10} {_time(stage.work):>10} {_time(crossing):>10}  {len(nodes):5}  "
            f"{where}, {nodes[0].name} … {nodes[-1].name}"
        )
    if not full and len(stages) > _ROWS:
        typer.echo(f"  … and {len(stages) - _ROWS} more partitions (--full)")
    note("some nodes run on the host; `npu-sim partition --npu` says why, and what their support would gain")


def _as_json(results: list[Result], chip: Chip, tokens: int | None) -> dict[str, Any]:
    if tokens is None:
        return results[0].to_dict()
    prefill, decode = results
    return {
        "chip": chip.name,
        "prompt_tokens": tokens,
        "time_to_first_token_us": 1e6 * prefill.seconds,
        "tokens_per_second": 1 / decode.seconds,
        "prefill": prefill.to_dict(),
        "decode": decode.to_dict(),
    }


def _lines(result: Result, full: bool) -> list[str]:
    """A run as text: totals, stalls, energy, and the calls that take the most time."""
    from npu_compiler.program.describe import format_bytes

    chip, seconds = result.chip, result.chip.seconds
    energy = result.energy
    stalls = ", ".join(f"{cause} {cycles / result.cycles:.1%}" for cause, cycles in result.stalls.items())
    busy = ", ".join(f"{engine} {cycles / result.cycles:.1%}" for engine, cycles in result.busy.items())
    kept = f", {format_bytes(result.kept_weight_bytes)} of weights kept in SRAM" if result.kept_weight_bytes else ""
    parts = ", ".join(f"{name} {1e3 * value:.3g}" for name, value in vars(energy).items())
    lines = [
        f"{result.program} on {chip.name}: {_time(result.seconds)}, {result.cycles:.0f} cycles "
        f"(the roofline allows {_time(seconds(result.roofline_cycles))})",
        f"  in use   matrix peak {result.utilization:.1%}, DRAM bandwidth {result.bandwidth_utilization:.1%}",
        f"  busy     {busy}",
        f"  stalls   {stalls}",
        f"  DRAM     {format_bytes(result.dram_bytes)}, at least {format_bytes(result.compulsory_bytes)}{kept}",
        f"  SRAM     {format_bytes(result.sram_bytes)} read and written; a call uses up to "
        f"{format_bytes(result.sram_used)}",
        f"  energy   {1e3 * energy.total:.3g} mJ: {parts}",
    ]
    lines.append(f"  {'time':>10} {'share':>6}  {'calls':>5} {'tiles':>7}  {'tile':20} {'DRAM':>10}  kernel, node")
    groups = [[call] for call in result.calls] if full else _alike(result.calls)
    for calls in groups if full else groups[:_ROWS]:
        first, cycles = calls[0], sum(call.cycles for call in calls)
        lines.append(
            f"  {_time(seconds(cycles)):>10} {cycles / result.cycles:6.1%}  {len(calls):5} {first.tiles:7}  "
            f"{first.tile:20.20} {format_bytes(first.dram_bytes):>10}  {first.kernel}, {first.node}"
        )
    if not full and len(groups) > _ROWS:
        rest = sum(len(calls) for calls in groups[_ROWS:])
        lines.append(f"  … and {rest} more calls (--full)")
    return lines


def _alike(calls: Iterable[CallResult]) -> list[list[CallResult]]:
    """Calls of the same kernel, work and tiles together, those that take the most time in all first."""
    groups: dict[Hashable, list[CallResult]] = {}
    for call in calls:
        key = (call.kernel, call.macs, call.counts.operations, call.tiles, call.tile, call.dram_bytes)
        groups.setdefault(key, []).append(call)
    return sorted(groups.values(), key=lambda group: (-sum(call.cycles for call in group), group[0].index))


def _time(seconds: float) -> str:
    """Seconds in a unit that fits: 0.0123 as "12.3 ms"."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.4g} {unit}"
    return f"{1e6 * seconds:.4g} µs"


def _sweep(
    program: CompiledProgram,
    swept: list[tuple[dict[str, float], Chip]],
    picture: Path | None,
    csv: Path | None,
    json: bool,
) -> None:
    from npu_model.analysis.picture import draw_sweep
    from npu_model.analysis.sweep import as_csv, write_csv
    from npu_model.analysis.sweep import sweep as simulate_all

    with progress(f"simulating {program.name}") as report:
        points = simulate_all(program, swept, report)
    if csv is not None:
        write_csv(points, csv)
    if picture is not None:
        draw_sweep(points, program.name, picture)
    if json:
        print_json({"program": program.name, "chips": [point.to_dict() for point in points]})
        return
    typer.echo(as_csv(points), nl=False)
    failed = sum(bool(point.problem) for point in points)
    if failed:
        note(f"{failed} of {len(points)} chips cannot run the program; their rows say why")
