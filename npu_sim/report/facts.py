"""Facts about a compiled program for a report: totals, kernel calls and their data flow, buffers, padding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from npu_compiler.compiled_program import CompiledProgram
from npu_compiler.graph.model import TensorSpec
from npu_compiler.program.describe import family_name, padding_by_buffer, summary
from npu_compiler.program.kernels import KernelCall
from npu_compiler.program.plan import ExecutionPlan
from npu_compiler.program.repeats import fold
from npu_compiler.program.views import View
from npu_sim.report.arena import arena_map
from npu_sim.report.stages import SMALLEST_FOLD


def program_facts(program: CompiledProgram, seconds: Sequence[float] | None = None) -> dict[str, Any]:
    """Return a program's facts as JSON data.

    Args:
        seconds: The measured time of each call of a run, in order. None: nothing was measured.
    """
    import npu_compiler.ops  # noqa: F401  # it declares the kernels, whose families the calls tell

    plan = program.plan
    return {
        "name": program.name,
        "target": program.target,
        "dtype": program.compute_dtype,
        "compiler": program.compiler_version,
        "totals": summary(plan),
        "inputs": [_spec(spec) for spec in plan.inputs],
        "outputs": [{**_spec(spec), "donor": plan.donations.get(spec.name)} for spec in plan.outputs],
        "calls": [
            {**call_facts(call, None if seconds is None else seconds[i]), "module": _module(call, plan)}
            for i, call in enumerate(plan.calls)
        ],
        "flow": data_flow(plan),
        "runs": _repeats(plan.calls),
        "arena": arena_map(plan),
        "padding": _padding(plan),
        "weights": [
            {"name": name, "type": _type(w.spec), "bytes": plan.buffers[name].size_bytes, "recipe": str(w.recipe)}
            for name, w in plan.weights.items()
        ],
    }


def call_facts(call: KernelCall, seconds: float | None) -> dict[str, Any]:
    """Return a kernel call as JSON data.

    Args:
        seconds: Measured time of the call. None: it was not measured.
    """
    return {
        "kernel": call.kernel,
        "node": call.node,
        "family": family_name(call),
        "in": [_view(view) for view in call.inputs],
        "out": [_view(view) for view in call.outputs],
        "flops": call.flops,
        "bytes": call.bytes_moved,
        "seconds": seconds,
    }


def _module(call: KernelCall, plan: ExecutionPlan) -> str:
    """Return the name of the module that owns the first weight that the call reads; empty if it reads none."""
    for view in call.inputs:
        if view.buffer in plan.weights:
            for key in plan.weights[view.buffer].recipe.keys():
                return key.rpartition(".")[0]
    return ""


def data_flow(plan: ExecutionPlan) -> list[list[int]]:
    """Return for each call the sorted indices of the earlier calls that last wrote the buffers it touches."""
    writer: dict[str, int] = {}
    flow = []
    for index, call in enumerate(plan.calls):
        touched = (view.buffer for view in (*call.inputs, *call.outputs))
        flow.append(sorted({writer[name] for name in touched if name in writer}))
        writer.update(dict.fromkeys((view.buffer for view in call.outputs), index))
    return flow


def _repeats(calls: Sequence[KernelCall]) -> list[list[Any]]:
    keys = [(call.kernel, tuple((view.shape, view.dtype) for view in (*call.inputs, *call.outputs))) for call in calls]
    return [
        [run.start, run.period, run.count, []] for run in fold(keys) if (run.count - 1) * run.period >= SMALLEST_FOLD
    ]


def _padding(plan: ExecutionPlan) -> list[dict[str, Any]]:
    """Return the buffers whose channels are padded, those with the most wasted bytes first."""
    rows = []
    for name, waste in padding_by_buffer(plan).items():
        buffer = plan.buffers[name]
        rows.append(
            {
                "name": name,
                "kind": buffer.kind,
                "type": f"{buffer.dtype}{list(buffer.alloc_shape)}",
                "bytes": buffer.size_bytes,
                "waste": waste,
            }
        )
    return sorted(rows, key=lambda row: -row["waste"])


def _view(view: View) -> str:
    return f"{view.buffer}: {view.dtype}{list(view.shape)}"


def _type(spec: TensorSpec) -> str:
    return f"{spec.storage or spec.dtype}{list(spec.shape)}"


def _spec(spec: TensorSpec) -> dict[str, Any]:
    return {"name": spec.name, "type": _type(spec)}
