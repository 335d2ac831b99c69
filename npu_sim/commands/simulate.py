"""The command `simulate`, which estimates a model's run on a chip that is described in a file."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from npu_sim.commands.checks import check_file, check_not_overwritten, check_output
from npu_sim.commands.completion import chips, models
from npu_sim.commands.console import concerning, note, print_json, progress, step
from npu_sim.commands.int8 import INT8, for_timing
from npu_sim.commands.options import AsJSON, SimulatedDtype, WeightFormat
from npu_sim.commands.serve_simulated import SimulatedModel, serve_on_chip
from npu_sim.commands.simulate_shared import Neighbours, simulate_shared
from npu_sim.commands.simulation_text import as_json, result_lines, slow_dtype
from npu_sim.commands.units import format_time

if TYPE_CHECKING:
    from npu_compiler import CodegenTarget, CompiledProgram, IRGraph
    from npu_model import Chip, PlanResult, Result

# The kind of a model, its name, dtype, quantization, prompt and cache length.
_Wanted: TypeAlias = tuple[str, str, str | None, str | None, int | None, int | None]

PROMPT = 512
_ROWS = 12  # partitions of a plan that are shown


def _is_requests(trace: Path) -> bool:
    """Whether the file of `--trace` lists requests to serve (.csv), rather than being a timeline to write."""
    return trace.suffix == ".csv"


def _trace_file(path: Path | None) -> Path | None:
    return check_file(path, "trace") if path is not None and _is_requests(path) else check_output(path)


@dataclass(frozen=True)
class Outputs:
    """The files that `simulate` reads and writes, and the format of its result."""

    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            callback=_trace_file,
            help="Also write a trace (JSON), which ui.perfetto.dev shows. Or a .csv file: serve its requests, each a "
            "line of arrival_seconds, prompt_tokens and new_tokens, with a language model.",
        ),
    ] = None
    picture: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.png",
            callback=check_output,
            help="Draw utilization over time and the roofline; with --sweep, latency against area.",
        ),
    ] = None
    sweep: Annotated[
        str | None,
        typer.Option(metavar="RANGES", help="Simulate many chips, such as sram=256K..8M,arrays=1..8 (each doubling)."),
    ] = None
    csv: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.csv",
            callback=check_output,
            help="Write the sweep's table; with a --trace of requests, the queue over time.",
        ),
    ] = None
    full: Annotated[bool, typer.Option("--full", help="Show every kernel call by itself, in order.")] = False
    json: AsJSON = False

    @property
    def requests(self) -> Path | None:
        """The file with the requests to serve; None if `--trace` was not given or names a timeline to write."""
        return self.trace if self.trace is not None and _is_requests(self.trace) else None

    @property
    def timeline(self) -> Path | None:
        """The file for a timeline of the run; None if `--trace` was not given or names requests to serve."""
        return None if self.requests is not None else self.trace

    def check(self, inputs: list[Path], is_shared: bool) -> None:
        """Raise `InputError` if the options contradict each other, or a file to write is also one to read.

        Args:
            inputs: The files that the command reads.
            is_shared: Whether several models share the chip.
        """
        from npu_compiler.errors import InputError

        if is_shared and (self.requests or self.picture or self.sweep or self.full):
            raise InputError(
                "--with is for one run of each model; leave out --sweep, --picture, --full and .csv traces"
            )
        if self.csv is not None and self.sweep is None and self.requests is None:
            raise InputError("--csv is for --sweep, or for a --trace of requests")
        if self.sweep is not None and (self.trace is not None or self.full):
            raise InputError("--trace and --full are for one chip; leave out --sweep")
        if self.requests is not None and (self.picture is not None or self.full):
            raise InputError("--picture and --full are for one run of a program; leave out the --trace of requests")
        check_not_overwritten(self.timeline, inputs)
        check_not_overwritten(self.picture, [*inputs, self.trace])
        check_not_overwritten(self.csv, [*inputs, self.trace, self.picture])


def simulate(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            autocompletion=models,
            help="Compiled program (.npubin), IR file (.json), ONNX file, vision model by name, or a language model: "
            "Hugging Face id, folder (a config.json is enough), .gguf file or smollm2.",
        ),
    ],
    npu: Annotated[
        str,
        typer.Option(
            "--npu", metavar="NAME|FILE.toml", autocompletion=chips, help="Chip: edge, phone, datacenter, … or a file."
        ),
    ],
    outputs: Outputs,
    neighbours: Neighbours,
    dtype: SimulatedDtype = None,
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
) -> None:
    """Simulate a model on a chip: latency, utilization, stalls, traffic and energy.

    Where the chip lacks some ops, its host runs these, and the time includes host and transfers.

    Of a language model, the prefill of a prompt and a decode step are simulated; --trace, --picture and --sweep are of
    the decode step. With a --trace of requests (.csv), a server with the model on the chip is simulated instead.

    Models --with which the chip is shared begin at the same time; of each, the latency is shown, and that alone.
    """
    from npu_model import load_chip

    others = neighbours.others or []
    outputs.check([Path(model), Path(npu), *map(Path, others)], is_shared=bool(others))
    kind = _check_model(model, dtype, quantization, tokens, cache_length)
    if outputs.requests is not None:
        described = SimulatedModel(model, dtype, quantization or "checkpoint")
        _serve(kind, described, npu, outputs.requests, tokens, cache_length, outputs)
        return
    with concerning("--npu"):
        chip = load_chip(npu)
    wanted = (kind, model, dtype, quantization, tokens, cache_length)
    if others:
        _share(wanted, chip, neighbours, outputs)
    elif outputs.sweep is not None:
        _sweep(wanted, chip, outputs.sweep, outputs)
    else:
        _run(wanted, chip, outputs)


def _run(wanted: _Wanted, chip: Chip, outputs: Outputs) -> None:
    """Simulate a model on a chip and print the result; ops that the chip lacks run on the host in between."""
    from npu_compiler.errors import ConstraintError
    from npu_model import NPUTarget
    from npu_model import simulate as simulate_program

    if outputs.picture is not None:
        from npu_model.analysis.picture import check_picture

        check_picture(outputs.picture)
    with step(f"preparing {wanted[1]}"):
        plan = None
        try:
            programs, count = _programs(NPUTarget(chip), *wanted)
        except ConstraintError:
            if outputs.picture is not None or wanted[0] in ("program", "language"):
                raise
            plan = _simulated_plan(wanted, chip, outputs)
        else:
            check_ops(programs if wanted[0] == "program" else [], chip)
    if plan is not None:
        _show_plan(plan, outputs)
        return
    results, spans = [], outputs.timeline is not None or outputs.picture is not None
    with progress("simulating") as report:
        for program in programs:
            results.append(simulate_program(program, chip, spans=spans))
            report(len(results), len(programs))
    _save(results[-1], outputs)
    if outputs.json:
        print_json(as_json(results, chip, count))
        return
    for result in results:
        typer.echo("\n".join(result_lines(result, outputs.full)))
    if warning := slow_dtype(results):
        note(f"warning: {warning}")
    if count is not None:
        prefill, decode = results
        typer.echo(
            f"time to first token: {format_time(prefill.seconds)} for a prompt of {count} tokens; "
            f"then {1 / decode.seconds:.1f} tokens per second"
        )


def _share(wanted: _Wanted, chip: Chip, neighbours: Neighbours, outputs: Outputs) -> None:
    """Simulate several models that share a chip; a language model is represented by its decode step."""
    from npu_model import ChipOpsTarget

    kind, model, dtype, quantization, tokens, cache_length = wanted
    kinds = {name: _check_model(name, None, None, None, None) for name in neighbours.others or []} | {model: kind}
    names = [model, *(neighbours.others or [])]
    sharing = neighbours.sharing(chip, len(names))

    def compiled(name: str) -> CompiledProgram:
        lengths = (tokens, cache_length) if kinds[name] == "language" else (None, None)
        return _programs(ChipOpsTarget(chip), kinds[name], name, dtype, quantization, *lengths)[0][-1]

    simulate_shared(names, compiled, chip, sharing, trace=outputs.timeline, as_json=outputs.json)


def _save(result: Result, outputs: Outputs) -> None:
    """Write the timeline and the picture of a run to the files given for them, if any."""
    if outputs.timeline is not None:
        from npu_model.analysis.trace import timeline

        timeline(result).save(outputs.timeline)
    if outputs.picture is not None:
        from npu_model.analysis.picture import draw_run

        draw_run(result, outputs.picture)


def _simulated_plan(wanted: _Wanted, chip: Chip, outputs: Outputs) -> PlanResult:
    from npu_compiler import partition
    from npu_model import simulate_plan

    kind, model, dtype, quantization, *_ = wanted
    graph, dtype = for_timing(_graph(kind, model), dtype)
    plan = partition(graph, npu=chip, compute_dtype=dtype, quantization=quantization)
    return simulate_plan(plan, chip, spans=outputs.timeline is not None)


def _show_plan(result: PlanResult, outputs: Outputs) -> None:
    """Print the result for a model whose partitions run alternately on the chip and on its host."""
    if outputs.timeline is not None:
        result.timeline().save(outputs.timeline)
    if outputs.json:
        print_json(result.to_dict())
        return
    typer.echo(result.summary())
    typer.echo(f"  {'start':>10} {'time':>10} {'transfers':>10}  {'nodes':>5}  where, first … last node")
    stages = result.stages
    for stage in stages if outputs.full else stages[:_ROWS]:
        nodes = stage.part.graph.nodes
        crossing = sum(seconds for _, seconds in stage.transfers)
        where = "host" if stage.part.device == "cpu" else "chip"
        typer.echo(
            f"  {format_time(stage.start):>10} {format_time(stage.work):>10} {format_time(crossing):>10}  "
            f"{len(nodes):5}  {where}, {nodes[0].name} … {nodes[-1].name}"
        )
    if not outputs.full and len(stages) > _ROWS:
        typer.echo(f"  … and {len(stages) - _ROWS} more partitions (--full)")
    note("some nodes run on the host; `npu-sim partition --npu` says why, and what their support would gain")


def _serve(
    kind: str,
    model: SimulatedModel,
    npu: str,
    requests: Path,
    tokens: int | None,
    cache_length: int | None,
    outputs: Outputs,
) -> None:
    """Simulate how a language model on the chip serves a file of requests.

    Raises `InputError` for other kinds of models.
    """
    from npu_compiler.errors import InputError
    from npu_sim.llm.simulated import read_requests

    if kind != "language" or tokens is not None:
        what = "--tokens is the prompt of" if kind == "language" else f"'{model.name}' is no language model but for"
        raise InputError(f"a --trace of requests is served by a language model; {what} a single run")
    settings = {"context_length": cache_length}
    serve_on_chip(model, npu, read_requests(requests), settings, option="--npu", csv=outputs.csv, json=outputs.json)


def check_ops(programs: Iterable[CompiledProgram], chip: Chip | None) -> None:
    """Raise `InputError` if a program was compiled without regard to the list of ops that the chip's file declares.

    Args:
        chip: None: no chip is simulated, and nothing is checked.
    """
    from npu_compiler.errors import InputError
    from npu_model.chip import Ops

    for program in programs:
        if chip is not None and chip.ops != Ops() and not program.target.startswith("npu:"):
            raise InputError(
                f"'{program.name}' was compiled without the [ops] of chip '{chip.name}'; compile it with "
                "--target npu:CHIP, or give its IR file"
            )


def _check_model(
    model: str, dtype: str | None, quantization: str | None, tokens: int | None, cache_length: int | None
) -> str:
    """Return the kind of a model, as far as its name tells, after checking the options given against that kind."""
    from npu_compiler.errors import InputError
    from npu_sim.llm.loading import find_checkpoint
    from npu_sim.vision.models import MODELS, quantized_files

    path = Path(model)
    if path.suffix == ".npubin":
        check_file(path, "program")
        if dtype is not None or quantization is not None:
            raise InputError("--dtype and --quantization are chosen when a program is compiled")
        kind = "program"
    elif path.suffix in (".json", ".onnx"):
        check_file(path, "IR file")
        kind = "ir"
    elif model in MODELS:
        kind = "vision"
    elif path.is_dir() and quantized_files(path) is not None:
        kind = "quantized"
    else:
        find_checkpoint(model)
        if dtype == INT8:
            raise InputError("--dtype int8 is for networks of convolutions; of a language model, --quantization int8")
        return "language"
    if tokens is not None or cache_length is not None:
        raise InputError("--tokens and --cache-length are for language models")
    if dtype == INT8 and kind == "quantized":
        raise InputError(f"'{model}' is quantized already; leave out --dtype int8")
    return kind


def _programs(
    target: CodegenTarget,
    kind: str,
    model: str,
    dtype: str | None,
    quantization: str | None,
    tokens: int | None,
    cache_length: int | None,
) -> tuple[list[CompiledProgram], int | None]:
    """Compile a model's programs: for a language model prefill and decode, else one.

    Args:
        kind: The kind of the model, from `_check_model`.

    Returns:
        The programs, and the length of a language model's prompt (None for other models).
    """
    from npu_compiler import CompiledProgram, CompileOptions
    from npu_compiler import compile as compile_ir

    if kind == "program":
        return [CompiledProgram.load(model)], None
    if kind == "language":
        return language_programs(model, target, dtype, quantization, tokens, cache_length)
    graph, dtype = for_timing(_graph(kind, model), dtype)
    return [compile_ir(graph, target, CompileOptions(compute_dtype=dtype, quantization=quantization))], None


def _graph(kind: str, model: str) -> IRGraph:
    """Read the graph of an IR file, a vision model or a quantized network."""
    from npu_compiler import read_ir
    from npu_sim.vision.models import extract_model_ir, find_model, quantized_files

    if kind == "ir":
        return read_ir(Path(model))
    quantized = quantized_files(Path(model)) if kind == "quantized" else None
    return read_ir(extract_model_ir(find_model(model)) if quantized is None else quantized[0])


def language_programs(
    model: str,
    target: CodegenTarget,
    dtype: str | None,
    quantization: str | None,
    tokens: int | None,
    cache_length: int | None,
) -> tuple[list[CompiledProgram], int]:
    """Compile the prefill and a decode step of a language model; return them with the prompt's length in tokens.

    Args:
        tokens: Length of the prompt. None: 512, or the cache length if that is less.
        cache_length: Capacity of the KV cache in tokens. None: 2048, or the model's maximum if less.
    """
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


def _sweep(wanted: _Wanted, chip: Chip, ranges: str, outputs: Outputs) -> None:
    """Simulate a model on many variants of a chip; a language model is represented by its decode step.

    Args:
        ranges: The variants, such as `sram=256K..8M,arrays=1..8`.
    """
    from npu_model import ChipOpsTarget
    from npu_model.analysis.picture import check_picture, draw_sweep
    from npu_model.analysis.sweep import as_csv, parse_sweep, write_csv
    from npu_model.analysis.sweep import sweep as simulate_all

    swept = parse_sweep(ranges, chip)
    if outputs.picture is not None:
        check_picture(outputs.picture)
    with step(f"preparing {wanted[1]}"):
        program = _programs(ChipOpsTarget(chip), *wanted)[0][-1]
    with progress(f"simulating {program.name}") as report:
        points = simulate_all(program, swept, report)
    if outputs.csv is not None:
        write_csv(points, outputs.csv)
    if outputs.picture is not None:
        draw_sweep(points, program.name, outputs.picture)
    if outputs.json:
        print_json({"program": program.name, "chips": [point.to_dict() for point in points]})
        return
    typer.echo(as_csv(points), nl=False)
    failed = sum(bool(point.problem) for point in points)
    if failed:
        note(f"{failed} of {len(points)} chips cannot run the program; their rows say why")
