"""The commands `partition`, which divides a graph between a chip and its host, and `ops`, which lists a chip's ops."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from npu_sim.commands.checks import check_file, check_not_overwritten, check_output
from npu_sim.commands.completion import chips, ir_and_vision_models, targets
from npu_sim.commands.console import concerning, note, print_json, progress, step
from npu_sim.commands.int8 import for_timing
from npu_sim.commands.options import AsJSON, SimulatedDtype
from npu_sim.commands.targets import find_target

if TYPE_CHECKING:
    from npu_compiler import IRGraph, PartitionPlan
    from npu_compiler.partitioning.pricing import Gain, PlanPrice, UnitPrice
    from npu_model import Chip
    from npu_model.analysis.plan import Support

_ROWS = 25  # of the table of units


def partition(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            autocompletion=ir_and_vision_models,
            help="IR file (JSON), ONNX file, or vision model by name.",
        ),
    ],
    json: AsJSON = False,
    mermaid: Annotated[bool, typer.Option("--mermaid", help="Print a Mermaid flowchart.")] = False,
    cpu: Annotated[
        list[str] | None,
        typer.Option(metavar="OP", help="Run this op, given by its ATen name, on the CPU; repeatable."),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(metavar="NAME", autocompletion=targets, help="Target whose missing ops run on the CPU."),
    ] = None,
    npu: Annotated[
        str | None,
        typer.Option(
            "--npu",
            metavar="NAME|FILE.toml",
            autocompletion=chips,
            help="Chip; the model is divided between it and its host so that it takes the least time.",
        ),
    ] = None,
    what_if: Annotated[
        str | None,
        typer.Option("--what-if", metavar="OP,…", help="With --npu: also show the time if the chip had these ops."),
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="With --npu: show every node by itself, in order.")] = False,
    dtype: SimulatedDtype = None,
) -> None:
    """Show how a graph is partitioned between the device and the CPU, and with --npu what that costs."""
    from npu_compiler import is_op_supported
    from npu_compiler import partition as partition_graph
    from npu_compiler.errors import InputError
    from npu_compiler.graph.model import base_op

    if json and mermaid:
        raise InputError("choose either --json or --mermaid")
    if npu is not None and target is not None:
        raise InputError("--target is for a plan without prices; leave out --target or --npu")
    if npu is None and (what_if is not None or full):
        raise InputError(f"{'--full' if what_if is None else '--what-if'} shows times; give --npu")
    chip = None
    if npu is not None:
        from npu_model import load_chip

        with concerning("--npu"):
            chip = load_chip(npu)
    codegen = find_target(target or "op_level") if chip is None else None
    graph, dtype = for_timing(read_model(model), dtype)
    kept = {base_op(op) for op in cpu or ()}

    def is_supported(op: str, attrs: Mapping[str, Any]) -> bool:
        return base_op(op) not in kept and is_op_supported(op, attrs)

    with step(f"partitioning {model}"):
        plan = partition_graph(
            graph,
            is_supported,
            target=codegen,
            compute_dtype=dtype,
            npu=chip,
        )
    if absent := sorted(kept - {node.base for node in graph}):
        note(f"warning: the graph has no op {', '.join(absent)}")
    if mermaid:
        typer.echo(plan.to_mermaid())
    elif chip is not None:
        _show_price(plan, chip, is_supported, what_if, full, json)
    elif json:
        print_json(_plan_facts(plan))
    else:
        typer.echo(str(plan))
        for node, reason in plan.reasons.items():
            typer.echo(f"  {node} is on the CPU: {reason}")


def _show_price(
    plan: PartitionPlan, chip: Chip, is_supported: Support, wanted: str | None, full: bool, json: bool
) -> None:
    """Show the cost of a divided model and the time that each op missing on the chip would save.

    Args:
        wanted: Names of missing ops, separated by commas, whose saving together is shown too. None: no such line.
        full: Show every node by itself.
    """
    from npu_model.analysis.plan import find_gains, what_if

    price = plan.price
    assert price is not None
    names = None if wanted is None else _lacking_ops(price, wanted)
    with progress("pricing ops that the chip lacks") as report:
        gains = find_gains(plan, chip, is_supported, report)
    other = None if names is None else what_if(plan, chip, names, is_supported)
    if json:
        facts = {"gains": [{"op": each.op, "nodes": each.count, "gain_us": 1e6 * each.seconds} for each in gains]}
        print_json({**_plan_facts(plan), **facts, **({} if other is None else {"what_if": other.to_dict()})})
        return
    typer.echo("\n".join([*_price_lines(plan, price, chip.name, full), *_gain_lines(price, gains)]))
    if other is not None:
        typer.echo(_what_if_line(price, other, str(wanted)))


def read_model(model: str) -> IRGraph:
    """Return the graph of an IR file, an ONNX file or a vision model given by name."""
    from npu_compiler.graph.reader import read_ir
    from npu_sim.vision.models import MODELS, extract_model_ir, find_model

    if model in MODELS:
        with step(f"tracing {model}"):
            return read_ir(extract_model_ir(find_model(model)))
    return read_ir(check_file(Path(model), "IR file"))


def _lacking_ops(price: PlanPrice, text: str) -> list[str]:
    """Parse a list of op names, with or without `aten.`. Raises `InputError` for an op that the chip does not lack."""
    from npu_compiler.errors import InputError

    lacking = {op for unit in price.units if unit.if_supported is not None for op in unit.ops}
    ops = [name if name in lacking else f"aten.{name}" for name in text.split(",")]
    if unknown := [op for op in ops if op not in lacking]:
        listed = ", ".join(sorted(lacking)) or "none"
        raise InputError(f"--what-if: '{unknown[0]}' is no op that the chip lacks in this model; these are {listed}")
    return ops


def _price_lines(plan: PartitionPlan, price: PlanPrice, chip: str, full: bool) -> list[str]:
    """Format the cost of a divided model: totals, nodes grouped by op, device and reason, and ops worth supporting.

    Args:
        chip: Name of the chip.
        full: List every node by itself.
    """
    from npu_compiler.partitioning.pricing import duration
    from npu_compiler.program.describe import format_bytes

    crossing = sum(transfer.bytes for transfer in plan.transfers)
    certain = price.bound >= 0.999 * price.seconds
    proof = "no division takes less" if certain else f"no division takes less than {duration(price.bound)}"
    lines = [
        f"{plan.graph.name} on chip {chip} and its host: {duration(price.seconds)}, {proof}; "
        f"{duration(price.host_alone)} on the host alone",
        f"  chip      {duration(price.device)}, {plan.device_share:.1%} of nodes",
        f"  host      {duration(price.host)}",
        f"  transfers {duration(price.transfers)}, {format_bytes(crossing)} in {len(plan.transfers)}",
        f"  launches  {duration(price.launches)}, {price.runs} runs of the chip",
        f"  {'nodes':>5} {'where':5} {'chip':>10} {'host':>10}  op",
    ]
    groups = [[unit] for unit in price.units] if full else _alike(price.units)
    shown = groups if full else [units for units in groups if _spent(units)][:_ROWS]
    for units in shown:
        first = units[0]
        known = [unit.device for unit in units if unit.device is not None]
        own = duration(sum(known)) if len(known) == len(units) else "–"
        host = duration(sum(unit.host for unit in units))
        name = f"{first.name} ({', '.join(first.nodes)})" if full else first.name
        why = f": {first.reason}" if first.reason else ""
        count = sum(len(unit.ops) for unit in units)
        lines.append(f"  {count:5} {'chip' if first.on_device else 'host':5} {own:>10} {host:>10}  {name}{why}")
    if len(shown) < len(groups):
        rest = sum(len(unit.ops) for units in groups if units not in shown for unit in units)
        lines.append(f"  {rest:5} more, such as views, which take less or no time (--full)")
    return lines


def _gain_lines(price: PlanPrice, gains: Sequence[Gain]) -> list[str]:
    """Format a line for each op that the chip lacks, with the time that supporting this op alone would save."""
    from npu_compiler.partitioning.pricing import duration

    lines = ["  supporting an op alone would gain"] if gains else []
    for gain in gains:
        assumed = ", if it took no longer than to move its tensors" if gain.is_assumed else ""
        lines.append(
            f"  {duration(gain.seconds):>10} {gain.seconds / price.seconds:6.1%}  {gain.op} × {gain.count}{assumed}"
        )
    return lines


def _alike(units: Iterable[UnitPrice]) -> list[list[UnitPrice]]:
    """Group units (nodes placed together) with the same ops on the same side, device or host; costliest group first."""
    groups: dict[tuple[str, bool, bool], list[UnitPrice]] = {}
    for unit in units:
        groups.setdefault((unit.name, unit.on_device, unit.device is None), []).append(unit)
    return sorted(groups.values(), key=lambda group: -_spent(group))


def _spent(units: Iterable[UnitPrice]) -> float:
    """Return the total seconds of units, each on the side, device or host, where it is placed."""
    return sum((unit.device or 0.0) if unit.on_device else unit.host for unit in units)


def _what_if_line(price: PlanPrice, other: PlanPrice, ops: str) -> str:
    from npu_compiler.partitioning.pricing import duration

    saved = price.seconds - other.seconds
    return (
        f"with {ops}: {duration(other.seconds)}, {duration(saved)} less ({saved / price.seconds:.1%}); chip "
        f"{duration(other.device)}, host {duration(other.host)}, transfers {duration(other.transfers)}, "
        f"{other.runs} runs of the chip"
    )


def _plan_facts(plan: PartitionPlan) -> dict[str, Any]:
    """Return a partition plan as JSON data."""
    return {
        "compute_dtype": plan.compute_dtype,
        "device_share": plan.device_share,
        "partitions": [
            {
                "index": p.index,
                "device": p.device,
                "nodes": [node.name for node in p.graph],
                "inputs": p.graph.inputs,
                "outputs": p.graph.outputs,
                "transfers": [
                    {"tensor": t.tensor, "from": t.source, "to": t.target, "bytes": t.bytes} for t in p.transfers
                ],
            }
            for p in plan.partitions
        ],
        "output_transfers": [{"tensor": t.tensor, "bytes": t.bytes} for t in plan.output_transfers],
        "cpu_reasons": dict(plan.reasons),
        **({} if plan.price is None else {"price": plan.price.to_dict()}),
    }


def ops(
    npu: Annotated[
        str,
        typer.Option(
            "--npu", metavar="NAME|FILE.toml", autocompletion=chips, help="Chip: edge, phone, datacenter, … or a file."
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE.md", callback=check_output, help="Write the page to this file."),
    ] = None,
    json: AsJSON = False,
) -> None:
    """Write the page of ops that a chip supports: dtypes, limits, and the reason for each op that it lacks."""
    from npu_compiler.files import write_atomically
    from npu_model import load_chip
    from npu_model.analysis.support import find_support, support_page

    check_not_overwritten(output, [Path(npu)])
    with concerning("--npu"):
        chip = load_chip(npu)
    with progress("probing ops") as report:
        rows = find_support(chip, report)
    page = support_page(chip, rows)
    if output is not None:
        write_atomically(output, page.encode())
    if json:
        print_json({"chip": chip.name, "ops": [row.to_dict() for row in rows]})
    elif output is None:
        typer.echo(page, nl=False)
    else:
        counts = Counter("lacking" if row.reason else "known" for row in rows)
        typer.echo(f"{output}: {counts['known']} ops, {counts['lacking']} that the chip lacks")
