"""`fastest_plan`: the choice of the fastest division of a module between a device and PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from npu_compiler.partitioner import PartitionPlan, partition
from npu_compiler.partitioning.pricing import duration
from npu_compiler.passes.quantize import Quantization
from npu_runtime.measured_prices import MeasuredPrices, shortest, torch_zeros, wait_for
from npu_sim.module.runner import Loaded, Runner


def fastest_plan(
    plan: PartitionPlan, loaded: Loaded, updated: Sequence[str], quantization: Quantization | None
) -> Runner:
    """Return the fastest of three divisions of a graph, ready to run; each is timed on inputs of zeros.

    They are the given plan, which puts on the device all that it can run; the plan with the least estimated time, from
    measured times of single nodes and transfers; and PyTorch alone, which runs the ops as written. Estimates are
    unreliable if nodes take microseconds, so the plans are run.
    """
    graph, target, dtype = plan.source or plan.graph, loaded.backend.target, plan.compute_dtype
    prices = MeasuredPrices(loaded.backend, loaded.weights, str(loaded.device))
    priced = partition(graph, target=target, compute_dtype=dtype, quantization=quantization, prices=prices)
    alone = partition(graph, lambda op: False, compute_dtype=dtype, quantization=quantization)
    best, times = None, list[float]()
    for candidate in (plan, priced, alone):
        runner = Runner(candidate, loaded, updated)
        times.append(_time(runner, loaded))
        if min(times) == times[-1]:
            best = runner
    assert best is not None
    if best.plan is alone:
        reason = f"PyTorch alone is faster: {duration(times[2])} against {duration(min(times[:2]))}"
        best.plan = replace(alone, reasons=dict.fromkeys(alone.reasons, reason) | dict(plan.reasons))
    return best


def _time(runner: Runner, loaded: Loaded) -> float:
    """Return the seconds of a run on inputs of zeros."""
    inputs = torch_zeros(runner.plan.graph, loaded.device)

    def run() -> None:
        runner(inputs)
        loaded.backend.synchronize()
        wait_for(loaded.device)

    return shortest(run)


__all__ = ["fastest_plan"]
