"""Splits a graph into partitions for the device and for the CPU, with the transfers between them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

from npu_compiler.compiled_program import CompiledProgram
from npu_compiler.compiler import compile, normalize, trace_stages
from npu_compiler.constraint_checker import target_reason
from npu_compiler.errors import ConstraintError
from npu_compiler.graph.composites import as_written, closed_composites
from npu_compiler.graph.dtypes import is_int, itemsize
from npu_compiler.graph.model import IRGraph, OpNode, TensorSpec
from npu_compiler.graph.quantization import QuantizedFormat
from npu_compiler.graph.reader import read_ir
from npu_compiler.graph.writer import graph_to_dict
from npu_compiler.op_support import given_attrs, is_op_supported, supports_node
from npu_compiler.ops.registry import unsupported_reason
from npu_compiler.options import CompileOptions
from npu_compiler.partitioning.prices import Prices, priced_target
from npu_compiler.partitioning.pricing import Made, PlanPrice, on_host, price_graph, replaced
from npu_compiler.passes.integer_ranges import INT32_RANGE, find_integer_ranges, with_bounds
from npu_compiler.passes.precision import assign_storage, choose_compute_dtype, native_dtype
from npu_compiler.passes.quantize import Quantization, find_formats
from npu_compiler.program.target import CodegenTarget

DeviceKind: TypeAlias = Literal["npu", "cpu"]
SupportFn: TypeAlias = Callable[..., bool]


@dataclass(frozen=True)
class TransferOp:
    """A tensor that crosses between devices, with its size in bytes as stored."""

    tensor: str
    source: DeviceKind
    target: DeviceKind
    bytes: int


@dataclass(frozen=True)
class Partition:
    """A run of nodes for one device.

    Attributes:
        graph: The nodes as a graph of their own; its inputs are tensors from outside, except weights.
        transfers: Tensors that must be transferred to this device before it runs.
    """

    index: int
    device: DeviceKind
    graph: IRGraph
    transfers: tuple[TransferOp, ...]

    @property
    def ir_dict(self) -> dict[str, Any]:
        """The partition as IR, in the form that `compile()` reads."""
        return graph_to_dict(self.graph)


@dataclass(frozen=True)
class PartitionPlan:
    """Partitions in execution order.

    Attributes:
        compute_dtype: Storage dtype of activations on the device.
        output_transfers: Graph outputs that must be transferred back from the device.
        reasons: Node name → why it is on the CPU.
        formats: `state_dict` key → format in which the device stores a quantized weight.
        price: The times by which the graph was divided; None if it was divided without.
        source: The graph that was given, from which `graph` was normalized; None if it is unknown.
    """

    graph: IRGraph
    partitions: tuple[Partition, ...]
    compute_dtype: str
    output_transfers: tuple[TransferOp, ...] = ()
    reasons: Mapping[str, str] = field(default_factory=dict)
    formats: Mapping[str, QuantizedFormat] = field(default_factory=dict)
    price: PlanPrice | None = None
    source: IRGraph | None = None

    @property
    def is_open(self) -> bool:
        """Whether prices may lead to another plan: some nodes run in PyTorch, or some ops were decomposed."""
        return bool(self.reasons) or (self.source is not None and bool(closed_composites(self.source)))

    def programs(self, target: CodegenTarget) -> list[CompiledProgram]:
        """Compile the plan's partitions for the device; returns their programs in order."""
        return [self.compile(part, target) for part in self.partitions if part.device == "npu"]

    @property
    def on_device(self) -> set[str]:
        """The names of the nodes on the device."""
        return {node.name for part in self.partitions if part.device == "npu" for node in part.graph.nodes}

    def compile(self, part: Partition, target: CodegenTarget) -> CompiledProgram:
        """Compile one of the plan's partitions for the device."""
        return compile(part.graph, target, CompileOptions(compute_dtype=self.compute_dtype, quantization=self.formats))

    @property
    def transfers(self) -> list[TransferOp]:
        """Tensors that are transferred between partitions, or to the caller."""
        return [*(t for p in self.partitions for t in p.transfers), *self.output_transfers]

    @property
    def device_share(self) -> float:
        """Fraction of nodes on the device."""
        nodes = sum(len(p.graph.nodes) for p in self.partitions)
        on_device = sum(len(p.graph.nodes) for p in self.partitions if p.device == "npu")
        return on_device / nodes if nodes else 1.0

    def __str__(self) -> str:
        """A table with a row per partition: its device, number of nodes, and bytes that are transferred to it."""
        lines = [f"{'#':>3}  {'device':6}  {'nodes':>6}  {'bytes in':>12}  first … last node"]
        for p in self.partitions:
            crossing = sum(t.bytes for t in p.transfers)
            names = f"{p.graph.nodes[0].name} … {p.graph.nodes[-1].name}"
            lines.append(f"{p.index:3}  {p.device:6}  {len(p.graph.nodes):6}  {crossing:12}  {names}")
        total = sum(t.bytes for t in self.transfers)
        lines.append(
            f"{self.device_share:.1%} of nodes on the device; {total} bytes cross in {len(self.transfers)} transfers"
        )
        return "\n".join(lines)

    def to_mermaid(self) -> str:
        """The plan as a Mermaid flow chart."""
        lines = ["graph TD", "    inputs([inputs])"]
        maker = dict.fromkeys(self.graph.inputs, "inputs")
        sizes = crossing_bytes(self.graph, self.compute_dtype)
        for p in self.partitions:
            shape = ("[", "]") if p.device == "npu" else ("[[", "]]")
            label = f'"{p.device.upper()} {p.index}: {len(p.graph.nodes)} nodes"'
            lines.append(f"    p{p.index}{shape[0]}{label}{shape[1]}")
            edges: dict[str, int] = {}
            for name in p.graph.inputs:
                edges[maker[name]] = edges.get(maker[name], 0) + sizes[name]
            lines += [f"    {source} -->|{size} B| p{p.index}" for source, size in edges.items()]
            maker.update(dict.fromkeys(p.graph.outputs, f"p{p.index}"))
        lines.append("    outputs([outputs])")
        lines += [
            f"    {source} --> outputs" for source in dict.fromkeys(maker.get(x, "inputs") for x in self.graph.outputs)
        ]
        return "\n".join(lines)


def partition(
    ir: str | Path | Mapping[str, Any] | IRGraph | Any,
    is_supported_fn: SupportFn = is_op_supported,
    *,
    target: CodegenTarget | None = None,
    compute_dtype: str | None = None,
    quantization: Quantization | None = None,
    npu: object | None = None,
    prices: Prices | None = None,
) -> PartitionPlan:
    """Group a graph's nodes by device.

    A node goes to the device if `is_supported_fn(op_type, attrs)` (or `is_supported_fn(op_type)`) says so, the op
    table can lower it, and the target supports it or the op it is fused into; all others go to the CPU. Nodes are
    scheduled so that each partition takes every node that is ready, which gathers independent CPU nodes instead of
    splitting a device run around each.

    With prices, nodes that the device could run also go to the CPU if that takes less time: the plan is the division
    with the lowest total price.

    Args:
        target: Target of the device that will run the plan. None means one that supports the whole op table.
        compute_dtype, quantization: As for `compile`; partitions on the CPU read weights in PyTorch's dtypes.
        npu: A chip (`npu_model.Chip`), which determines target and prices; None for none.
        prices: Times of nodes and transfers on the target's device; None to divide without.

    Raises:
        IRError: the IR is malformed.
        NPUError: unknown compute dtype.
        InputError: the quantization is unknown, or a weight cannot be stored so; or `npu` says too little for prices.
    """
    if npu is not None:
        target, prices = priced_target(npu)
    source = read_ir(ir)
    graph = normalize(source)
    formats = find_formats(graph, quantization) if quantization else {}
    dtype = choose_compute_dtype(graph, compute_dtype)
    divider = _Divider(source, graph, is_supported_fn, target, dtype, formats)
    plan = divider.plan({})
    if prices is None or target is None:
        return plan
    priced = divider.price(plan, target, prices)
    plan = divider.plan(_reasons(priced))
    price = replaced(priced, plan.on_device, plan.graph)
    measured = sum(time for part in plan.programs(target) for time in prices.calls(part)) - price.device
    if price.seconds + measured > price.host_alone:
        plan = divider.plan(_reasons(on_host(priced)))
        price = replaced(priced, (), plan.graph)
    return replace(plan, price=price)


def _reasons(price: PlanPrice) -> dict[str, str]:
    """Node → the reason why it is on the host, for every node that the priced division puts there."""
    return {name: unit.reason for unit in price.units if not unit.on_device for name in unit.nodes}


@dataclass(frozen=True)
class _Divider:
    """A graph as given and as normalized, and the support function, target and formats that decide its division.

    Attributes:
        whole: Composite (an op that was decomposed) that is kept as one node → the reason.
    """

    source: IRGraph
    graph: IRGraph
    is_supported_fn: SupportFn
    target: CodegenTarget | None
    dtype: str
    formats: Mapping[str, QuantizedFormat]
    whole: Mapping[str, str] = field(default_factory=dict)

    def plan(self, kept: Mapping[str, str]) -> PartitionPlan:
        """The plan with all nodes on the device except those in `kept` (node → reason) and those that cannot run there.

        A composite with parts on the CPU is put back as one node, and runs there.
        """
        plan = self._plan(kept)
        broken = {}
        for composite in closed_composites(self.source):
            lost = [node.name for node in composite.parts.nodes if node.name in plan.reasons]
            if lost:
                reason = plan.reasons[lost[0]]
                broken[composite.node.name] = reason if lost[0] in kept else f"its part '{lost[0]}': {reason}"
        if not broken:
            return replace(plan, source=self.source)
        whole = {**self.whole, **broken}
        graph = normalize(as_written(self.source, whole))
        return replace(self, graph=graph, whole=whole).plan(kept)

    def _plan(self, kept: Mapping[str, str]) -> PartitionPlan:
        """The plan with all possible nodes of `self.graph` on the device; composites stay decomposed.

        Args:
            kept: Node → the reason why it must run on the CPU, for nodes that the device could run.
        """
        graph, target, dtype, formats = self.graph, self.target, self.dtype, self.formats
        lacking = dict(kept)
        while True:
            reasons = self._cpu_reasons(lacking)
            integers = find_integer_ranges(graph, on_cpu=reasons)
            reasons |= integers.overflows
            bounded = with_bounds(graph, integers.bounds)
            devices: dict[str, DeviceKind] = {
                node.name: "cpu" if node.name in reasons else "npu" for node in graph.nodes
            }
            groups = min((_schedule(bounded, devices, first) for first in ("npu", "cpu")), key=_runs_and_length)
            partitions = _build_partitions(bounded, groups, dtype, integers.ranges)
            more = {} if target is None or target.supports_all else _lacking(partitions, target, dtype, formats)
            if not more and target is not None and target.assembles:
                more = _refused(partitions, target, dtype, formats)
            if not more:
                break
            lacking |= more  # which divides the graph in another way, so that other nodes may meet in a fusion or not
        crossed = {transfer.tensor for part in partitions for transfer in part.transfers if transfer.target == "cpu"}
        on_device = {name for p in partitions if p.device == "npu" for name in p.graph.outputs} - crossed
        sizes = crossing_bytes(bounded, dtype)
        back = tuple(
            TransferOp(name, "npu", "cpu", sizes[name]) for name in dict.fromkeys(bounded.outputs) if name in on_device
        )
        return PartitionPlan(bounded, partitions, dtype, back, reasons, formats)

    def price(self, plan: PartitionPlan, target: CodegenTarget, prices: Prices) -> PlanPrice:
        """The prices of the graph in its cheapest division.

        Args:
            plan: A plan with every node on the device that can run there.
        """
        made = [_with_origins(part, plan, target) for part in plan.partitions if part.device == "npu"]
        sizes = crossing_bytes(plan.graph, self.dtype)
        return price_graph(plan.graph, plan.reasons, made, prices, self.dtype, sizes, self.source)

    def _cpu_reasons(self, lacking: Mapping[str, str]) -> dict[str, str]:
        graph, takes_attrs = self.graph, _takes_attrs(self.is_supported_fn)
        producers = graph.producers()
        reasons: dict[str, str] = {}
        for node in graph.nodes:
            given = (node.op_type, given_attrs(node)) if takes_attrs else (node.op_type,)
            supported = self.is_supported_fn(*given)
            reason = self.whole.get(node.name) or unsupported_reason(node, graph)
            if reason is None and not supported:
                reason = "the given support function rejects the op"
            if reason is None and self.target is not None:
                reason = self.target.refusal(node, graph, self.dtype)
            reason = reason or lacking.get(node.name)
            source = producers.get(node.inputs[0]) if node.base == "getitem" else None
            if source is not None:
                reason = f"its producer '{source.name}' is on the CPU" if source.name in reasons else None
            if reason is not None:
                reasons[node.name] = reason
        return reasons


def _with_origins(part: Partition, plan: PartitionPlan, target: CodegenTarget) -> Made:
    """A partition's program, and for each node that its calls name, the graph's nodes it was compiled from."""
    options = CompileOptions(compute_dtype=plan.compute_dtype, quantization=plan.formats)
    *_, (_, final) = trace_stages(part.graph, target, options)
    program = plan.compile(part, target)
    readers = final.consumers()
    origins: dict[str, set[str]] = {}
    for node in reversed(final.nodes):  # what the compiler adds, such as a cast, belongs to what reads it
        own = _made_into(node, part.graph, final)
        origins[node.name] = own or set().union(*(origins[r.name] for x in node.outputs for r in readers.get(x, ())))
    everything = {node.name for node in part.graph.nodes}  # for a target that makes one call of nodes of its choice
    return program, {call.node: origins.get(call.node) or everything for call in program.kernels}


def _lacking(
    partitions: Sequence[Partition], target: CodegenTarget, dtype: str, formats: Mapping[str, QuantizedFormat]
) -> dict[str, str]:
    """Node → the reason why it must run on the CPU: the target lacks an op that the compiler turns it into."""
    reason, found = target_reason(target), {}
    for part in partitions:
        if part.device == "npu":
            options = CompileOptions(compute_dtype=dtype, quantization=formats)
            *_, (_, final) = trace_stages(part.graph, target, options)
            for node in final.nodes:
                if not supports_node(target, node):
                    found.update(dict.fromkeys(_made_into(node, part.graph, final), reason))
    return found


def _refused(
    partitions: Sequence[Partition], target: CodegenTarget, dtype: str, formats: Mapping[str, QuantizedFormat]
) -> dict[str, str]:
    """Node → the reason why it must run on the CPU: the target cannot generate machine code for its calls."""
    found: dict[str, str] = {}
    options = CompileOptions(compute_dtype=dtype, quantization=formats)
    for part in partitions:
        if part.device == "npu":
            try:
                compile(part.graph, target, options)
            except ConstraintError as error:
                if not error.nodes:
                    raise
                *_, (_, final) = trace_stages(part.graph, target, options)
                for node in final.nodes:
                    if node.name in error.nodes:
                        found.update(dict.fromkeys(_made_into(node, part.graph, final), error.nodes[node.name]))
    return found


def _made_into(node: OpNode, graph: IRGraph, final: IRGraph) -> set[str]:
    """The names of the nodes in `graph` from which the compiler made `node` of the graph `final`."""
    before, after = graph.producers(), final.producers()
    names, wanted = set(), list(node.outputs)
    while wanted:
        source = before.get(wanted.pop())
        if source is not None and source.name not in names:
            names.add(source.name)
            wanted += [name for name in source.inputs if name not in after]
    return names


def _takes_attrs(function: SupportFn) -> bool:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return len(positional) >= 2 or any(p.kind == p.VAR_POSITIONAL for p in parameters)


def _schedule(
    graph: IRGraph, devices: Mapping[str, DeviceKind], first: DeviceKind
) -> list[tuple[DeviceKind, list[OpNode]]]:
    """Groups of nodes in execution order, alternating between the devices; each group has every node that is ready."""
    producer = {out: node.name for node in graph.nodes for out in node.outputs}
    done: set[str] = set()
    groups: list[tuple[DeviceKind, list[OpNode]]] = []
    pending, device = list(graph.nodes), first
    while pending:
        taken, rest = [], []
        for node in pending:
            ready = all(producer[x] in done for x in node.inputs if x in producer)
            if ready and devices[node.name] == device:
                taken.append(node)
                done.add(node.name)
            else:
                rest.append(node)
        if taken:
            groups.append((device, taken))
        pending, device = rest, "cpu" if device == "npu" else "npu"
    return groups


def _runs_and_length(groups: list[tuple[DeviceKind, list[OpNode]]]) -> tuple[int, int]:
    return sum(device == "npu" for device, _ in groups), len(groups)


def _build_partitions(
    graph: IRGraph,
    groups: list[tuple[DeviceKind, list[OpNode]]],
    compute_dtype: str,
    ranges: Mapping[str, tuple[int, int]],
) -> tuple[Partition, ...]:
    stored = assign_storage(graph, compute_dtype).tensors
    narrow = {
        name: found for name, found in ranges.items() if is_int(graph.tensors[name].dtype) and found != INT32_RANGE
    }
    native = native_dtype(graph)
    sizes, crossed = crossing_bytes(graph, compute_dtype), set[str]()
    readers: dict[str, set[int]] = {}
    home: dict[str, DeviceKind] = dict.fromkeys((*graph.inputs, *graph.constants), "cpu")
    for index, (device, nodes) in enumerate(groups):
        for node in nodes:
            home.update(dict.fromkeys(node.outputs, device))
            for name in node.inputs:
                readers.setdefault(name, set()).add(index)
    partitions = []
    for index, (device, nodes) in enumerate(groups):
        made = {out for node in nodes for out in node.outputs}
        read = dict.fromkeys(name for node in nodes for name in node.inputs)
        inputs = [
            name for name in read if name not in made and name not in graph.weights and name not in graph.constants
        ]
        outputs = [
            name
            for node in nodes
            for name in node.outputs
            if name in graph.outputs or readers.get(name, set()) - {index}
        ]
        tensors = {name: graph.tensors[name] for name in (*read, *made)}
        tensors |= {name: _boundary_spec(graph.tensors[name], stored, narrow) for name in inputs}
        sub = IRGraph(
            name=f"{graph.name}.{device}{index}",
            nodes=nodes,
            tensors=tensors,
            inputs=inputs,
            outputs=outputs,
            output_names=list(outputs),
            weights={name: graph.weights[name] for name in read if name in graph.weights},
            constants={name: graph.constants[name] for name in read if name in graph.constants},
            native_dtype=native,
        )
        crossing = tuple(
            TransferOp(name, home[name], device, sizes[name])
            for name in inputs
            if home[name] != device and name not in crossed  # a value stays where it has been brought
        )
        crossed |= {transfer.tensor for transfer in crossing}
        partitions.append(Partition(index, device, sub, crossing))
    return tuple(partitions)


def _boundary_spec(
    spec: TensorSpec, stored: Mapping[str, TensorSpec], ranges: Mapping[str, tuple[int, int]]
) -> TensorSpec:
    """The spec of a partition's input, with the storage and range that the tensor has in the whole graph.

    The partition alone could not determine them.
    """
    known = stored.get(spec.name)
    storage = spec.storage if known is None else known.storage
    return replace(spec, storage=storage, bounds=ranges.get(spec.name, spec.bounds))


def crossing_bytes(graph: IRGraph, compute_dtype: str) -> dict[str, int]:
    """Tensor → the bytes of its transfer, in the dtype that the device stores.

    Weights and constants are never transferred.
    """
    stored = assign_storage(graph, compute_dtype).tensors
    made = [*graph.inputs, *(name for node in graph.nodes for name in node.outputs)]
    return {name: stored[name].numel * itemsize(stored[name].storage) for name in made}
