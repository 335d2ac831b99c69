"""`bench` and `doctor`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from npu_sim.commands.programs import AsJSON
from npu_sim.console import print_json, step


def bench(
    suite: Annotated[str, typer.Argument(help="A module of benchmarks/: cpu, cuda, ...")] = "cpu",
    arguments: Annotated[list[str] | None, typer.Argument(help="Handed to it; put -- before options.")] = None,
) -> None:
    """Run a suite of the source tree's benchmarks/ folder."""
    from npu_compiler.errors import InputError

    root = Path(__file__).resolve().parents[2]
    folder = root / "benchmarks"
    suites = sorted(path.stem for path in folder.glob("*.py") if "def main(" in path.read_text("utf-8"))
    if not suites:
        raise InputError("there is no benchmarks/ folder here: run this from a checkout of the source")
    if suite not in suites:
        raise InputError(f"no benchmark suite '{suite}'; there are {', '.join(suites)}")
    finished = subprocess.run([sys.executable, "-m", f"benchmarks.{suite}", *(arguments or ())], cwd=root, check=False)
    raise typer.Exit(finished.returncode)


def doctor(json: AsJSON = False) -> None:
    """Show what this machine offers: devices, native kernels, packages, the cache; and why something is missing."""
    from npu_sim.doctor import examine, report

    with step("looking around"):
        facts = examine()
    if json:
        print_json(facts)
    else:
        typer.echo(report(facts))
