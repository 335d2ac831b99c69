"""Reports of a compiled module: the nodes that run on the device, and why others do not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from npu_compiler.graph.model import OpNode
    from npu_compiler.partitioner import PartitionPlan


@dataclass(frozen=True)
class OffDevice:
    """A node that the device does not run."""

    node: str
    op: str
    reason: str


@dataclass(frozen=True)
class ProgramReport:
    """One program of a module: the sizes that it is for, and where its nodes run.

    Attributes:
        partitions: The number of nodes of each partition, with the device: `npu`, or `cpu` for PyTorch.
        narrowed: The number of nodes whose float64 arithmetic the device does in float32.
    """

    sizes: dict[str, int]
    compute_dtype: str
    nodes: int
    partitions: tuple[tuple[str, int], ...]
    off_device: tuple[OffDevice, ...]
    narrowed: int = 0

    @property
    def device_share(self) -> float:
        """Fraction of the nodes that run on the device."""
        return 1 - len(self.off_device) / self.nodes if self.nodes else 1.0


@dataclass(frozen=True)
class Report:
    """Report of a compiled module: the nodes that run on the device, and why others do not.

    Attributes:
        device: The device that runs the programs, in words.
        tensors: The torch device of arguments, results, and of what PyTorch runs.
        graph_breaks: For each graph break, the reason why PyTorch could not trace beyond it.
        simulated_seconds: Time of all runs of the device so far by its simulated clock, if it has one.
    """

    name: str
    device: str
    tensors: str
    programs: tuple[ProgramReport, ...]
    graph_breaks: tuple[str, ...] = ()
    simulated_seconds: float | None = None

    @property
    def device_share(self) -> float:
        """Fraction of the nodes of all programs that run on the device."""
        nodes = sum(program.nodes for program in self.programs)
        return 1 - sum(len(program.off_device) for program in self.programs) / nodes if nodes else 1.0

    def __str__(self) -> str:
        lines = [f"{self.name} on {self.device} (tensors on {self.tensors})"]
        for program in self.programs:
            sizes = ", ".join(f"{name}={size}" for name, size in program.sizes.items())
            lines.append(
                f"  {f'program for {sizes}' if sizes else 'program'}: {program.compute_dtype}, "
                f"{program.nodes} nodes in {len(program.partitions)} partitions, "
                f"{program.device_share:.1%} on the device"
            )
            if program.narrowed:
                lines.append(f"    in float32 instead of float64: {program.narrowed} nodes")
            reasons = Counter((node.op, node.reason) for node in program.off_device)
            for (op, reason), count in reasons.most_common():
                lines.append(f"    in PyTorch on {self.tensors}: {op}{f' x {count}' if count > 1 else ''}: {reason}")
        for index, reason in enumerate(self.graph_breaks, 1):
            lines.append(f"  graph break {index}: {reason}")
        if self.simulated_seconds is not None:
            lines.append(f"  simulated: {1e3 * self.simulated_seconds:.4g} ms in all runs so far")
        return "\n".join(lines)


def _moves(node: OpNode) -> bool:
    from npu_compiler.ops.registry import find_op

    op = find_op(node.op_type)
    return op is not None and op.moves


def narrowed_nodes(plan: PartitionPlan) -> list[OpNode]:
    """The nodes on the device that compute a float64 in PyTorch."""
    tensors = plan.graph.tensors
    return [
        node
        for part in plan.partitions
        if part.device == "npu"
        for node in part.graph.nodes
        if any(tensors[name].dtype == "float64" for name in node.outputs) and not _moves(node)
    ]


def program_reports(
    symbols: Sequence[str], plans: Mapping[tuple[int, ...], PartitionPlan]
) -> tuple[ProgramReport, ...]:
    """The reports of a module's programs, which are for these values of its symbols."""
    programs = []
    for key, plan in plans.items():
        nodes = [node for part in plan.partitions for node in part.graph.nodes]
        reasons = plan.reasons
        off = [OffDevice(node.name, node.op_type, reasons[node.name]) for node in nodes if node.name in reasons]
        sizes = dict(zip(symbols, key, strict=True))
        parts = tuple((part.device, len(part.graph.nodes)) for part in plan.partitions)
        narrowed = len(narrowed_nodes(plan))
        programs.append(ProgramReport(sizes, plan.compute_dtype, len(nodes), parts, tuple(off), narrowed))
    return tuple(programs)
