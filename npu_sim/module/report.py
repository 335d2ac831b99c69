"""Reports of a compiled module: the nodes that run on the device, and reasons why others do not."""

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
    """A node that the device does not run, with its op and the reason."""

    node: str
    op: str
    reason: str


@dataclass(frozen=True)
class ProgramReport:
    """Report of one program of a module: its sizes, and where its nodes run.

    Attributes:
        sizes: Name of a dynamic size → its value.
        compute_dtype: Compute dtype.
        nodes: Number of nodes.
        partitions: (device, number of nodes) of each partition; the device is `npu`, or `cpu` for PyTorch.
        off_device: The nodes that PyTorch runs.
        narrowed: Number of nodes whose float64 arithmetic the device does in float32.
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
    """Report of a compiled module: the nodes that run on the device, and reasons why others do not.

    Attributes:
        name: Name of the module.
        device: Description of the device that runs the programs.
        tensors: The torch device of arguments and results, on which PyTorch runs the other nodes.
        programs: Report of each program.
        graph_breaks: For each graph break, the reason why PyTorch could not trace beyond it.
        simulated_seconds: Simulated time of all runs on the device so far. None: the device is not simulated.
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
    """Return the nodes on the device whose arithmetic is float64 in PyTorch; nodes that only move data do not count."""
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
    """Return reports of a module's programs.

    Args:
        symbols: Names of the dynamic sizes.
        plans: Values of these sizes → the plan for them.
    """
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
