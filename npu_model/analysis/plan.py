"""`simulate_plan`: simulates a model that is divided between a chip and its host, on one timeline."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias

from npu_compiler.errors import InputError
from npu_compiler.graph.model import base_op
from npu_compiler.op_support import is_op_supported
from npu_compiler.partitioner import Partition, PartitionPlan, TransferOp, partition
from npu_compiler.partitioning.pricing import Gain, PlanPrice, duration
from npu_compiler.timeline import Timeline
from npu_model.analysis.result import Result
from npu_model.analysis.simulation import simulate
from npu_model.analysis.trace import add_run
from npu_model.capabilities import short_name, with_ops
from npu_model.chip import Chip
from npu_model.target import NPUTarget

Support: TypeAlias = Callable[[str, Mapping[str, Any]], bool]
"""A function from an op's name and attributes to whether the device supports it, as `partition` takes it."""


@dataclass(frozen=True)
class Stage:
    """A partition of a plan (consecutive nodes on one device) in a simulated run; times are in seconds.

    Attributes:
        part: The partition.
        start: Time at which its transfers begin.
        transfers: The transfers that it waits for, and the duration of each.
        launch: Duration of the launch on the chip; 0 on the host.
        result: The run on the chip; None on the host, or if the partition has no kernels, only views.
        host: Node → its duration on the host; empty on the chip.
    """

    part: Partition
    start: float
    transfers: tuple[tuple[TransferOp, float], ...]
    launch: float
    result: Result | None
    host: Mapping[str, float]

    @property
    def work(self) -> float:
        """Duration of the partition's computation, without transfers and launch."""
        return sum(self.host.values()) if self.result is None else self.result.seconds

    @property
    def end(self) -> float:
        """Time at which the partition's computation has ended."""
        return self.start + sum(seconds for _, seconds in self.transfers) + self.launch + self.work


@dataclass(frozen=True)
class PlanResult:
    """The simulated run of a partitioned plan: its stages run one after the other, then results are copied to the host.

    Attributes:
        back: The transfers of results, and the duration of each in seconds.
    """

    plan: PartitionPlan
    chip: Chip
    stages: tuple[Stage, ...]
    back: tuple[tuple[TransferOp, float], ...]

    @property
    def results(self) -> tuple[Result, ...]:
        """The runs on the chip, one for each partition with kernels."""
        return tuple(stage.result for stage in self.stages if stage.result is not None)

    @property
    def device(self) -> float:
        """Seconds of computation on the chip."""
        return sum(result.seconds for result in self.results)

    @property
    def host(self) -> float:
        """Seconds of computation on the host."""
        return sum(sum(stage.host.values()) for stage in self.stages)

    @property
    def transfers(self) -> float:
        """Seconds of all transfers between chip and host."""
        return sum(seconds for each in (*(stage.transfers for stage in self.stages), self.back) for _, seconds in each)

    @property
    def launches(self) -> float:
        """Seconds of all launches on the chip."""
        return sum(stage.launch for stage in self.stages)

    @property
    def seconds(self) -> float:
        """Total time of the run, in seconds."""
        return self.device + self.host + self.transfers + self.launches

    @cached_property
    def price(self) -> PlanPrice:
        """The cost estimates by which the plan was partitioned."""
        assert self.plan.price is not None
        return self.plan.price

    def summary(self) -> str:
        """Total time and its parts, in one line."""
        parts = {"chip": self.device, "host": self.host, "transfers": self.transfers, "launches": self.launches}
        listed = ", ".join(f"{name} {duration(seconds)}" for name, seconds in parts.items())
        return (
            f"{self.plan.graph.name} on chip {self.chip.name} and its host: {duration(self.seconds)} ({listed}); "
            f"{duration(self.price.host_alone)} on the host alone"
        )

    def to_dict(self) -> dict[str, Any]:
        """The run as JSON data; times in microseconds."""
        names = ("device", "host", "transfers", "launches")
        return {
            "program": self.plan.graph.name,
            "chip": self.chip.name,
            "latency_us": 1e6 * self.seconds,
            **{f"{name}_us": 1e6 * getattr(self, name) for name in names},
            "host_alone_us": 1e6 * self.price.host_alone,
            "energy_uj": 1e6 * sum(result.energy.total for result in self.results),
            "transfer_bytes": sum(transfer.bytes for transfer in self.plan.transfers),
            "stages": [
                {
                    "device": stage.part.device,
                    "start_us": 1e6 * stage.start,
                    "end_us": 1e6 * stage.end,
                    "nodes": [node.name for node in stage.part.graph.nodes],
                    "transfers": [
                        {"tensor": transfer.tensor, "to": transfer.target, "bytes": transfer.bytes, "us": 1e6 * seconds}
                        for transfer, seconds in stage.transfers
                    ],
                    **({} if stage.result is None else {"simulated": stage.result.to_dict()}),
                }
                for stage in self.stages
            ],
            "price": self.price.to_dict(),
        }

    def timeline(self) -> Timeline:
        """The run as a trace, with a track for the host, one for the link, and one for each engine of the chip."""
        trace = Timeline({"program": self.plan.graph.name, "chip": self.chip.name, "latency_us": 1e6 * self.seconds})
        host, link = trace.track("host", "ops"), trace.track("link", "transfers and launches")
        now = 0.0
        for stage in self.stages:
            now = _add_transfers(trace, stage.transfers, 1e6 * stage.start)
            if stage.launch:
                trace.slice(link, f"launch of partition {stage.part.index}", now, 1e6 * stage.launch)
                now += 1e6 * stage.launch
            for node in stage.part.graph.nodes:
                if seconds := stage.host.get(node.name):
                    trace.slice(host, f"{node.base} {node.name}", now, 1e6 * seconds)
                    now += 1e6 * seconds
            if stage.result is not None:
                add_run(trace, stage.result, now)
                now += 1e6 * stage.result.seconds
        _add_transfers(trace, self.back, now)
        return trace


def _add_transfers(trace: Timeline, transfers: tuple[tuple[TransferOp, float], ...], now: float) -> float:
    """Add transfers to a trace from the time `now` on, in microseconds; return the time at which they have ended."""
    track = trace.track("link", "transfers and launches")
    for transfer, seconds in transfers:
        trace.slice(track, f"{transfer.tensor} → {transfer.target}", now, 1e6 * seconds, {"bytes": transfer.bytes})
        now += 1e6 * seconds
    return now


def simulate_plan(plan: PartitionPlan, chip: Chip, *, spans: bool = False) -> PlanResult:
    """Simulate a run of a plan that was made by `partition(ir, npu=chip)`.

    Args:
        spans: Whether to record the time span of each instruction.

    Raises:
        InputError: the plan has no cost estimates, or the chip's file has no host or no link.
    """
    if plan.price is None:
        raise InputError(f"the plan of '{plan.graph.name}' has no prices; make it with partition(ir, npu=chip)")
    target = NPUTarget(chip)
    prices, stages, now = target.prices, list[Stage](), 0.0
    for part in plan.partitions:
        transfers = tuple((transfer, prices.link.seconds(transfer.bytes)) for transfer in part.transfers)
        if part.device == "npu":
            program = plan.compile(part, target)
            result = simulate(program, chip, spans=spans) if program.kernels else None
            stages.append(Stage(part, now, transfers, prices.link.launch, result, {}))
        else:
            host = {node.name: prices.host(node, plan.graph) for node in part.graph.nodes}
            stages.append(Stage(part, now, transfers, 0.0, None, host))
        now = stages[-1].end
    back = tuple((transfer, prices.link.seconds(transfer.bytes)) for transfer in plan.output_transfers)
    return PlanResult(plan, chip, tuple(stages), back)


def what_if(
    plan: PartitionPlan, chip: Chip, ops: Iterable[str], is_supported_fn: Support = is_op_supported
) -> PlanPrice:
    """Estimated cost of a plan's graph if the chip also supported these ops, named without overload.

    Ops that no kernel computes, or that the chip's engines cannot run, are given an estimate of their time on the chip.

    Args:
        plan: A plan that was made by `partition(ir, is_supported_fn, npu=chip)`.
    """
    names = list(ops)
    own = partition(
        plan.source or plan.graph,
        lambda op, attrs: base_op(op) in names or is_supported_fn(op, attrs),
        npu=with_ops(chip, map(short_name, names)),
        compute_dtype=plan.compute_dtype,
        quantization=plan.formats or None,
    ).price
    assert own is not None
    return own.with_ops(names)


def find_gains(
    plan: PartitionPlan,
    chip: Chip,
    is_supported_fn: Support = is_op_supported,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Gain]:
    """The ops of a plan that the chip lacks, and the time that each would save if it were supported, the largest first.

    Args:
        plan: A plan that was made by `partition(ir, is_supported_fn, npu=chip)`.
        progress: Called with (ops done, total).
    """
    assert plan.price is not None
    estimates, gains = plan.price.gains(), []
    for gain in estimates:
        saved = plan.price.seconds - what_if(plan, chip, [gain.op], is_supported_fn).seconds
        gains.append(replace(gain, seconds=max(0.0, gain.seconds, saved)))
        progress(len(gains), len(estimates))
    return sorted(gains, key=lambda gain: (-gain.seconds, gain.op))


__all__ = ["PlanResult", "Stage", "find_gains", "simulate_plan", "what_if"]
