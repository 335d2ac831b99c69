"""`ChipPrices`: estimated times of nodes on a simulated chip and on the CPU beside it, for partitioning."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from npu_compiler.compiled_program import CompiledProgram
from npu_compiler.errors import InputError
from npu_compiler.graph.dtypes import COMPUTE_DTYPES, itemsize
from npu_compiler.graph.model import IRGraph, OpNode
from npu_compiler.ops.registry import find_op
from npu_compiler.partitioning.lone_nodes import LoneNodes
from npu_compiler.partitioning.prices import Estimate, Link, Prices
from npu_compiler.passes.precision import native_dtype, storage_dtype
from npu_compiler.program.plan import ExecutionPlan
from npu_model.analysis.simulation import simulate
from npu_model.chip import Chip, Host, HostLink
from npu_model.lowering.families import CannotLower
from npu_model.lowering.mapper import Mapper


class ChipPrices(Prices):
    """Times of nodes on a chip by simulation, and on its host by a roofline.

    Args:
        chip: The chip.
        mapper: Mapper of the chip.
        lone: Cached plans of single nodes.

    Raises:
        InputError: the chip's file has no host or no link.
    """

    def __init__(self, chip: Chip, mapper: Mapper, lone: LoneNodes) -> None:
        self.chip, self._mapper, self._lone = chip, mapper, lone
        self.device = f"chip {chip.name}"
        self._host, own = _host_and_link(chip)
        ways = (math.inf, 0.0) if chip.dram is None else (1e9 * own.bandwidth_gb_s, 1e-6 * own.latency_us)
        self.link = Link(*ways, 1e-6 * own.launch_us)  # what comes to a chip without DRAM is a part of its runs

    def calls(self, program: CompiledProgram) -> Sequence[float]:
        if not program.kernels:
            return []
        return [self.chip.seconds(call.cycles) for call in simulate(program, self.chip).calls]

    def if_supported(self, node: OpNode, graph: IRGraph, compute_dtype: str) -> Estimate:
        plan = self._lone.plan(node, graph, compute_dtype)
        try:
            if plan is not None:
                room = self.chip.sram.size
                cycles = sum(self._mapper.choices(call).estimate(frozenset(), room) for call in plan.calls)
                return Estimate(self.chip.seconds(cycles), False)
        except CannotLower:
            pass
        return Estimate(self.chip.seconds(self._least_cycles(node, graph, compute_dtype)), True)

    def _least_cycles(self, node: OpNode, graph: IRGraph, compute_dtype: str) -> float:
        """Lower bound of a node's cycles: each tensor is moved once, and a lane does one operation for each element."""
        vector, specs = self.chip.vector, [graph.tensors[name] for name in (*node.inputs, *node.outputs)]
        size = sum(spec.numel * itemsize(storage_dtype(spec.dtype, compute_dtype)) for spec in specs)
        rate = vector.rates.get(compute_dtype, min(vector.rates.values()))
        operations = max((spec.numel for spec in specs), default=0) / (vector.lanes * rate)
        return max(size / self.chip.dram_bytes_per_cycle, operations) + self.chip.dram_latency_cycles

    def host(self, node: OpNode, graph: IRGraph) -> float:
        op = find_op(node.op_type)
        if node.base == "getitem" or (op is not None and op.view is not None):
            return 0.0
        plan = self._host_plan(node, graph)
        if plan is not None:
            flops = sum(call.flops for call in plan.calls)
            moved = sum(call.bytes_moved for call in plan.calls)
        else:
            specs = [graph.tensors[name] for name in (*node.inputs, *node.outputs)]
            flops = self._flops_of_parts(node, graph) or max((spec.numel for spec in specs), default=0)
            moved = sum(spec.numel * itemsize(spec.dtype) for spec in specs)
        host = self._host
        work = max(1e-9 * flops / host.gflops, 1e-9 * moved / host.bandwidth_gb_s)
        return work + 1e-6 * host.overhead_us

    def _flops_of_parts(self, node: OpNode, graph: IRGraph) -> int:
        """The operations of the decomposed nodes by which the device computes an op; 0 if the op was not decomposed."""
        parts = next((c.parts for c in graph.composites if c.node.name == node.name), None)
        if parts is None:
            return 0
        own = replace(parts, native_dtype=native_dtype(graph))
        plans = [self._host_plan(part, own) for part in parts.nodes]
        return sum(call.flops for plan in plans if plan is not None for call in plan.calls)

    def _host_plan(self, node: OpNode, graph: IRGraph) -> ExecutionPlan | None:
        own = native_dtype(graph)
        return self._lone.plan(node, graph, own if own in COMPUTE_DTYPES else "float32")


def _host_and_link(chip: Chip) -> tuple[Host, HostLink]:
    if chip.host is None or chip.link is None:
        lacking = "host" if chip.host is None else "link"
        raise InputError(
            f"chip '{chip.name}' has no [{lacking}], so nothing can be priced; its file needs [host] and [link]"
        )
    return chip.host, chip.link


__all__ = ["ChipPrices"]
