"""`app`: the `npu-sim` command line. Each command imports what it needs only when it runs."""

from __future__ import annotations

from typing import Annotated

import typer

from npu_sim.commands import (
    diff,
    embed,
    graphs,
    keys,
    models,
    partitioning,
    profiling,
    programs,
    quantize,
    report,
    serve,
    simulate,
    tools,
)
from npu_sim.commands.console import ErrorReporting
from npu_sim.commands.settings import with_settings

app = typer.Typer(
    cls=ErrorReporting,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Compile PyTorch graphs ahead of time and run them on a simulated NPU: Metal, CUDA or any CPU.",
    epilog="Exit codes: 0 success, 1 verify found a difference, 2 error, 130 interrupted.",
)
for command in (
    graphs.extract,
    programs.compile,
    programs.describe,
    programs.run,
    partitioning.partition,
    partitioning.ops,
    graphs.verify,
    profiling.profile,
    simulate.simulate,
    report.report,
    diff.diff,
    keys.sign,
    keys.keygen,
    keys.trust,
    models.generate,
    models.models,
    embed.embed,
    serve.serve,
    models.classify,
    quantize.quantize,
    quantize.quantize_network,
    tools.bench,
    tools.doctor,
):
    app.command()(with_settings(command))


def _show_version(wanted: bool) -> None:
    if wanted:
        from npu_compiler.version import __version__

        typer.echo(f"npu-sim {__version__}")
        raise typer.Exit()


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error; may also follow the command.")
    ] = False,
) -> None:
    """Take the options that come before the command."""
