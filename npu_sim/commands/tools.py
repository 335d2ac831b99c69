"""The commands `bench`, which runs benchmarks, and `doctor`, which checks the installation."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from json import loads
from pathlib import Path
from typing import Annotated

import typer

from npu_sim.commands.completion import beginning
from npu_sim.commands.console import print_json, step
from npu_sim.commands.options import AsJSON

ROOT = Path(__file__).resolve().parents[2]
STDERR = 2  # file descriptor


def benchmark_suites(option: str = "") -> list[str]:
    """Return the names of the runnable modules in benchmarks/; empty outside a checkout of the source.

    Args:
        option: Only modules that have this command-line option. Empty: all.
    """
    if not (ROOT / "pyproject.toml").is_file():  # a wheel's folder, where another package may have benchmarks
        return []
    folder = ROOT / "benchmarks"
    sources = {
        ".".join(path.relative_to(folder).with_suffix("").parts).removesuffix(".__main__"): path.read_text("utf-8")
        for path in folder.rglob("*.py")
    }
    declared = f'("{option}"' if option else ""
    return sorted(name for name, source in sources.items() if "def main(" in source and declared in source)


def _suites(incomplete: str) -> list[str]:
    return beginning(incomplete, benchmark_suites())


def bench(
    suite: Annotated[
        str,
        typer.Argument(metavar="SUITE", autocompletion=_suites, help="Module in benchmarks/: cpu, cuda, ..."),
    ] = "cpu",
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="ARGUMENTS", help="Arguments of the suite; put -- before options.")
    ] = None,
    json: AsJSON = False,
) -> None:
    """Run a benchmark suite from a checkout of the source.

    With --json, what the suite prints goes to standard error, and its results to standard output.
    """
    from npu_compiler.errors import InputError

    suites = benchmark_suites()
    if not suites:
        raise InputError(f"benchmarks run in a checkout of the source; npu-sim is installed in '{ROOT}' without them")
    if suite not in suites:
        raise InputError(f"no benchmark suite '{suite}'; choose one of {', '.join(suites)}")
    command = [sys.executable, "-m", f"benchmarks.{suite}", *(arguments or ())]
    if not json:
        raise typer.Exit(subprocess.run(command, cwd=ROOT, check=False).returncode)
    if suite not in (able := benchmark_suites("--json")):
        raise InputError(f"the benchmark suite '{suite}' writes no JSON; those that do are {', '.join(able)}")
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.json"
        finished = subprocess.run([*command, "--json", str(results)], cwd=ROOT, check=False, stdout=STDERR)
        if results.exists():
            print_json(loads(results.read_text("utf-8")))
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
