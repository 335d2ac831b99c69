"""The data of a whole report page, in the form that `assets/app.js` reads."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from npu_compiler.compiled_program import CompiledProgram
from npu_compiler.partitioner import PartitionPlan
from npu_compiler.version import __version__
from npu_sim.report.compare import compare_programs
from npu_sim.report.facts import program_facts
from npu_sim.report.measure import Measurement, Roof
from npu_sim.report.stages import StageGraphs

if TYPE_CHECKING:
    from npu_sim.verify import Culprit, VerifyReport  # it imports torch


def report_contents(  # noqa: PLR0913 -- each part of a report is optional
    title: str,
    programs: Sequence[CompiledProgram],
    *,
    measurement: Measurement | None = None,
    simulations: Sequence[Mapping[str, Any]] = (),
    stages: StageGraphs | None = None,
    partitions: PartitionPlan | None = None,
    roof: Roof | None = None,
    numerics: dict[str, Any] | None = None,
    sweep: Mapping[str, Any] | None = None,
    notes: Sequence[str] = (),
) -> dict[str, Any]:
    """Return a report on one program, or on those of a partitioned model, as JSON data.

    Args:
        title: Title of the page.
        programs: The compiled programs: one, or those of the device partitions.
        measurement: Measurement of the program, if there is only one program. None: not measured.
        simulations: Result of `simulated_facts` for each program; empty if none was simulated.
        stages: The graph after each compiler stage. None: the program was compiled before.
        partitions: The plan that contains the programs. None: the device runs the whole model.
        roof: Peak rates for the roofline. Default: the highest rates that were measured, if any were.
        numerics: Result of `numerics_contents`. None: not verified.
        sweep: Result of `sweep_facts`. None: no sweep.
        notes: Sentences for the first page.
    """
    plan = {} if partitions is None else partition_contents(partitions)
    return {
        "kind": "report",
        "title": title,
        "made_by": f"npu-simulation {__version__}",
        "notes": list(notes),
        "stages": None if stages is None else stages.to_dict(),
        "partition": plan.get("partition"),
        "reasons": plan.get("reasons", {}),
        "programs": [
            {**_measured_facts(program, measurement), "simulated": simulation}
            for program, simulation in itertools.zip_longest(programs, simulations)
        ],
        "roof": None if roof is None else asdict(roof),
        "numerics": numerics,
        "sweep": sweep,
    }


def numerics_contents(report: VerifyReport, kernels: Sequence[Culprit], seed: int | None) -> dict[str, Any]:
    """Return the result of a verification as JSON data; an error that is not finite becomes None.

    Args:
        kernels: Results of `verify_kernels` for the same inputs.
        seed: Seed of random inputs. None: the inputs came from files.
    """
    return {
        "passed": report.passed,
        "dtype": report.compute_dtype,
        "seed": seed,
        "outputs": [
            {
                "name": output.name,
                "pearson": _finite(output.pearson),
                "rms_error": _finite(output.rms_error),
                "reference_error": _finite(output.reference_error),
                "problems": output.problems,
            }
            for output in report.outputs
        ],
        "kernels": [
            {"kernel": culprit.kernel, "node": culprit.node, "nodes": culprit.nodes, "error": _finite(culprit.error)}
            for culprit in kernels
        ],
    }


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def partition_contents(plan: PartitionPlan) -> dict[str, Any]:
    """Return the partitions of a plan, and the reason for each node that runs on the CPU."""
    parts = [
        {
            "device": "npu" if part.device == "npu" else "CPU",
            "nodes": len(part.graph.nodes),
            "bytes_in": sum(transfer.bytes for transfer in part.transfers),
        }
        for part in plan.partitions
    ]
    return {"partition": parts, "reasons": dict(plan.reasons)}


def diff_contents(
    labels: Sequence[str],
    programs: Sequence[CompiledProgram],
    measurements: Sequence[Measurement | None] = (None, None),
    simulations: Sequence[Mapping[str, Any] | None] = (None, None),
) -> dict[str, Any]:
    """Return a comparison of two programs, or of one program on two chips, as JSON data.

    Args:
        labels: Name of each program.
        measurements: Measurement of each program, or None.
        simulations: Result of `simulated_facts` for each program, or None.
    """
    a, b = (
        {**_measured_facts(program, measurement), "simulated": simulation}
        for program, measurement, simulation in zip(programs, measurements, simulations, strict=True)
    )
    return {
        "kind": "diff",
        "title": f"{labels[0]} and {labels[1]}",
        "made_by": f"npu-simulation {__version__}",
        "labels": list(labels),
        "notes": [],
        "stages": None,
        "reasons": {},
        "programs": [a, b],
        **compare_programs(a, b),
    }


def _measured_facts(program: CompiledProgram, measurement: Measurement | None) -> dict[str, Any]:
    measured = None
    if measurement is not None:
        measured = {"device": measurement.device, "runs": measurement.runs, "run": measurement.run}
    calls = None if measurement is None else measurement.calls
    return {**program_facts(program, calls), "measured": measured}
