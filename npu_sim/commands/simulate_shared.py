"""The option `simulate --with`: models that share a chip, each compared with its run alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from npu_sim.commands.completion import models
from npu_sim.commands.console import print_json, progress, step
from npu_sim.commands.units import format_time

if TYPE_CHECKING:
    from npu_compiler import CompiledProgram
    from npu_model import Chip
    from npu_model.analysis.tenants import SharedRun, Sharing

_WAYS = ("time", "cores")


@dataclass(frozen=True)
class Neighbours:
    """The other models that share the chip, and how the chip is divided."""

    others: Annotated[
        list[str] | None,
        typer.Option(
            "--with",
            metavar="MODEL",
            autocompletion=models,
            help="Another model that shares the chip and begins at the same time; may be given several times.",
        ),
    ] = None
    share: Annotated[
        str | None,
        typer.Option(
            metavar="|".join(_WAYS),
            help="How models share the chip: calls in turn (time), or some of its cores each (cores). Default: cores "
            "if there are enough, else time.",
        ),
    ] = None

    def __post_init__(self) -> None:
        """Raise `InputError` if `--share` is unknown, or is given without another model."""
        from npu_compiler.errors import InputError

        if self.share is not None and self.share not in _WAYS:
            raise InputError(f"--share is '{self.share}'; choose one of {', '.join(_WAYS)}")
        if self.share is not None and not self.others:
            raise InputError("--share is for models that share a chip; name the other one by --with")

    def sharing(self, chip: Chip, count: int) -> Sharing:
        """Return how `count` models share the chip. Raises `InputError` if the chip has too few resources for them."""
        from npu_model.analysis.tenants import Sharing, shares_of

        way = Sharing(self.share or ("cores" if chip.core_count >= count else "time"))
        shares_of(chip, count, way)
        return way


def simulate_shared(
    names: list[str],
    compiled: Callable[[str], CompiledProgram],
    chip: Chip,
    sharing: Sharing,
    *,
    trace: Path | None,
    as_json: bool,
) -> None:
    """Simulate models running together on one chip, and print each one's time beside that of its run alone.

    Args:
        compiled: Compiles the named model to a program of ops, not yet lowered to a chip.
        sharing: Whether models take turns in time or get cores of their own.
        trace: File for a timeline. None: no timeline is written.
    """
    from npu_model.analysis.tenants import share
    from npu_model.analysis.trace import shared_timeline

    with step(f"preparing {', '.join(names)}"):
        programs = [compiled(name) for name in names]
    with progress("simulating"):
        run = share(programs, chip, sharing, spans=trace is not None)
    if trace is not None:
        shared_timeline(run).save(trace)
    if as_json:
        print_json(run.to_dict())
        return
    typer.echo("\n".join(shared_lines(run)))


def shared_lines(run: SharedRun) -> list[str]:
    """Format a shared run as text: a summary and a line for each program."""
    from npu_compiler.program.describe import format_bytes

    together = sum(tenant.alone.seconds for tenant in run.tenants)
    return [
        f"{len(run.tenants)} programs share {run.chip.name} by {run.sharing.value}: all have ended after "
        f"{format_time(run.seconds)}; one after the other they take {format_time(together)}",
        f"  {'alone':>10} {'shared':>10} {'slower':>7}  {'DRAM alone':>10} {'shared':>10}  program, its share",
        *(
            f"  {format_time(tenant.alone.seconds):>10} {format_time(tenant.shared.seconds):>10} "
            f"{tenant.slowdown:6.2f}×  {format_bytes(tenant.alone.dram_bytes):>10} "
            f"{format_bytes(tenant.shared.dram_bytes):>10}  {tenant.alone.program}, {tenant.share}"
            for tenant in run.tenants
        ),
    ]
