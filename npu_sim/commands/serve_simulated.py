"""The options `serve --simulate` and `simulate --trace FILE.csv`: simulated serving of requests on a chip."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from npu_sim.commands.checks import check_file, check_not_overwritten, check_output
from npu_sim.commands.completion import chips
from npu_sim.commands.console import concerning, print_json, progress, step
from npu_sim.commands.options import AsJSON, Seed, count_option
from npu_sim.commands.units import format_time

if TYPE_CHECKING:
    from npu_sim.llm.simulated import PoolSettings, Quantiles, ServingResult, TimedRequest

_PROMPTS, _REPLIES = "512", "128"
_MOST_WORKERS = 8  # processes; about so many programs are simulated at once


def _trace_file(path: Path | None) -> Path | None:
    return None if path is None else check_file(path, "trace")


@dataclass(frozen=True)
class SimulationSettings:
    """The simulated chip, the requests that arrive at it, and the files for the result."""

    simulate: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE.toml",
            autocompletion=chips,
            help="Serve no one: simulate how this chip would serve the requests of --trace, or random ones at --rate.",
        ),
    ] = None
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.csv",
            callback=_trace_file,
            help="With --simulate: requests, each a line of arrival_seconds, prompt_tokens and new_tokens.",
        ),
    ] = None
    rate: Annotated[
        float | None,
        typer.Option(metavar="FLOAT", help="With --simulate: random requests a second (a Poisson process)."),
    ] = None
    requests: Annotated[int | None, count_option("With --rate: number of requests. Default: 1000.", most=1_000_000)] = (
        None
    )
    prompt_lengths: Annotated[
        str | None,
        typer.Option(metavar="N|LOW..HIGH", help=f"With --rate: tokens of a prompt, uniform. Default: {_PROMPTS}."),
    ] = None
    new_lengths: Annotated[
        str | None,
        typer.Option(metavar="N|LOW..HIGH", help=f"With --rate: tokens of a reply, uniform. Default: {_REPLIES}."),
    ] = None
    seed: Seed = None
    csv: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.csv", callback=check_output, help="With --simulate: write the queue over time to this file."
        ),
    ] = None
    json: AsJSON = False

    def check(self, unfit: dict[str, bool]) -> None:
        """Raise `InputError` if these options contradict each other, or others cannot be used with a simulated chip.

        Args:
            unfit: Options that have no meaning on a simulated chip → whether they were given.
        """
        from npu_compiler.errors import InputError

        random = ("requests", "prompt_lengths", "new_lengths", "seed")
        given = [name for name, value in vars(self).items() if value not in (None, False) and name != "simulate"]
        if self.simulate is None:
            if given:
                raise InputError(f"--{given[0].replace('_', '-')} is for a simulated chip; add --simulate CHIP")
            return
        if others := [name for name, is_given in unfit.items() if is_given]:
            raise InputError(f"{others[0]} means nothing on a simulated chip; leave it out, or --simulate")
        if (self.trace is None) == (self.rate is None):
            raise InputError("--simulate needs requests: those of --trace FILE.csv, or random ones at --rate")
        if self.trace is not None and (named := [name for name in random if name in given]):
            raise InputError(f"--{named[0].replace('_', '-')} is for random requests; leave it out, or --trace")
        check_not_overwritten(self.csv, [self.trace])

    def read_requests(self) -> list[TimedRequest]:
        """Read the requests from the trace, or draw random ones.

        Raises `InputError` if the trace or a length is malformed.
        """
        from npu_sim.llm.simulated import poisson_requests, read_requests
        from npu_sim.llm.simulated.requests import parse_lengths

        if self.trace is not None:
            return read_requests(self.trace)
        assert self.rate is not None
        with concerning("--prompt-lengths"):
            prompts = parse_lengths(self.prompt_lengths or _PROMPTS)
        with concerning("--new-lengths"):
            replies = parse_lengths(self.new_lengths or _REPLIES)
        with concerning("--rate"):
            return poisson_requests(self.requests or 1000, self.rate, prompts, replies, self.seed or 0)


@dataclass(frozen=True)
class SimulatedModel:
    """A model's name, compute dtype and weight format, as for `npu_sim.llm.load_architecture`.

    Attributes:
        dtype: None means the checkpoint's own dtype.
    """

    name: str
    dtype: str | None = None
    quantization: str = "checkpoint"


def serve_on_chip(
    model: SimulatedModel,
    chip_name: str,
    requests: list[TimedRequest],
    settings: dict[str, Any],
    *,
    option: str,
    csv: Path | None,
    json: bool,
) -> None:
    """Simulate a server on a chip and print latencies and throughput.

    Args:
        settings: Fields of `PoolSettings`; the context length may be None, for the model's own.
        option: The command-line option that names the chip, for error messages.
        csv: File for the length of the queue over time. None: no file is written.

    Raises:
        InputError: there is no such chip or model, the chip cannot run it, or a prompt is too long.
    """
    from npu_model import load_chip
    from npu_model.collection import seldom_collected
    from npu_runtime.cpu.native.threads import usable_threads
    from npu_sim.llm import cache_capacity, load_architecture
    from npu_sim.llm.simulated import PoolSettings, SimulatedPrograms, StepPrices, likely_programs, serve_requests

    with concerning(option):
        chip = load_chip(chip_name)
    with step(f"opening {model.name}"), seldom_collected():
        checkpoint = load_architecture(model.name, model.dtype, model.quantization)
    with concerning("the context"):
        context = cache_capacity(checkpoint, settings["context_length"])
    pool = PoolSettings(**{**settings, "context_length": settings["context_length"] or context})
    likely = partial(likely_programs, requests, pool)
    programs = SimulatedPrograms(checkpoint, chip, min(usable_threads(), _MOST_WORKERS), likely)
    prices = StepPrices(programs, pool.max_batch, pool.max_tokens, pool.context_length)
    with closing(programs), progress(f"serving {checkpoint.name} on {chip.name}") as report, seldom_collected():
        result = serve_requests(requests, prices, pool, static_watts=chip.energy.static_watts, progress=report)
    if csv is not None:
        result.write_queue(csv)
    if json:
        print_json(
            {
                "model": checkpoint.name,
                "dtype": checkpoint.dtype,
                "chip": chip.name,
                **vars(pool),
                **result.to_dict(),
                "simulated_programs": len(programs.used),
            }
        )
        return
    _print(result, f"{checkpoint.name} ({checkpoint.dtype}) on {chip.name}", pool, len(programs.used))


def _print(result: ServingResult, title: str, pool: PoolSettings, programs: int) -> None:
    from rich.console import Console
    from rich.table import Table

    energy, facts = result.joules_per_token, result.to_dict()
    refused, cut = facts["refused"], facts["cut_short"]
    lines = [
        f"{title}: {facts['finished']} of {facts['requests']} requests served in {format_time(result.seconds)}, "
        f"{result.tokens_per_second:.4g} new tokens a second"
        + (f", {1e3 * energy:.4g} mJ a token" if energy is not None else ""),
        f"  chip     busy {result.busy_seconds / result.seconds if result.seconds else 0.0:.1%}; {result.steps} steps "
        f"of {facts['rows_per_step']:.1f} tokens, priced from {programs} simulated programs",
        f"  queue    {result.mean_waiting:.3g} requests on average, {facts['most_waiting']} at most; "
        f"{result.preemptions} lost their KV blocks to earlier ones",
    ]
    if refused:
        lines.append(f"  refused  {refused} requests, which came while {pool.max_requests} were there")
    if cut:
        lines.append(f"  cut      {cut} replies, at the end of their context of {pool.context_length} tokens")
    typer.echo("\n".join(lines))
    table = Table()
    table.add_column("time")
    for name in ("median", "p90", "p99", "longest"):
        table.add_column(name, justify="right")
    for name, times in result.times.items():
        table.add_row(name.replace("_", " "), *_cells(times))
    Console().print(table)


def _cells(times: Quantiles | None) -> list[str]:
    return ["-"] * 4 if times is None else [format_time(value) for value in vars(times).values()]
