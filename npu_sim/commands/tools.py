"""The commands about this installation: `bench` and `doctor`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from npu_sim.commands.console import print_json, step
from npu_sim.commands.options import AsJSON


def bench(
    suite: Annotated[str, typer.Argument(metavar="SUITE", help="Module in benchmarks/: cpu, cuda, ...")] = "cpu",
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="ARGUMENTS", help="Arguments of the suite; put -- before options.")
    ] = None,
) -> None:
    """Run a benchmark suite from a checkout of the source."""
    from npu_compiler.errors import InputError

    root = Path(__file__).resolve().parents[2]
    folder = root / "benchmarks"
    suites = sorted(path.stem for path in folder.glob("*.py") if "def main(" in path.read_text("utf-8"))
    if not suites:
        raise InputError("there is no benchmarks/ folder: this command needs a checkout of the source")
    if suite not in suites:
        raise InputError(f"no benchmark suite '{suite}'; choose one of {', '.join(suites)}")
    finished = subprocess.run([sys.executable, "-m", f"benchmarks.{suite}", *(arguments or ())], cwd=root, check=False)
    raise typer.Exit(finished.returncode)


def doctor(json: AsJSON = False) -> None:
    """Show which devices and packages work here, and why others do not."""
    from npu_sim.commands.doctor import examine, report

    with step("checking this machine"):
        facts = examine()
    if json:
        print_json(facts)
    else:
        typer.echo(report(facts))
