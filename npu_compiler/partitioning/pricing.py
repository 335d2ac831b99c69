"""`PlanPrice`: the time of a plan node by node, why each node runs on its side, and the gain from supporting more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from npu_compiler.compiled_program import CompiledProgram
from npu_compiler.graph.composites import as_written, closed_composites
from npu_compiler.graph.model import IRGraph, OpNode
from npu_compiler.ops.registry import find_op
from npu_compiler.partitioning.cut import Problem, Unit, Value, divide
from npu_compiler.partitioning.prices import Estimate, Prices

_TICKS = 1e15  # of a second: prices are whole femtoseconds, so that sums are exact
Made = tuple[CompiledProgram, Mapping[str, Collection[str]]]
"""A compiled program of the device, and for each node that its calls name, the graph's nodes it was compiled from."""


@dataclass(frozen=True)
class UnitPrice:
    """The price of nodes that run on one side together: one node, or several that become one kernel on the device.

    Attributes:
        ops: Ops of its nodes in order, without views unless it has nothing else; a composite (decomposed op) counts as
            one.
        device: Seconds on the device; None if it cannot run there.
        host: Seconds on the host.
        if_supported: Time on the device if that supported the op as it was written; None if it does.
        reason: Why the device cannot run it, else why it is on the host; empty on the device.
    """

    nodes: tuple[str, ...]
    ops: tuple[str, ...]
    device: float | None
    host: float
    if_supported: Estimate | None
    on_device: bool
    reason: str

    @property
    def name(self) -> str:
        """The ops joined by " + ", each mentioned once."""
        return " + ".join(dict.fromkeys(self.ops))


@dataclass(frozen=True)
class Gain:
    """The time that would be saved if the device supported an op that it lacks.

    Attributes:
        count: Number of nodes with this op that the host runs.
        seconds: Time of the model that support would save.
        is_assumed: Whether no kernel exists for the op yet (see `Estimate`).
    """

    op: str
    count: int
    seconds: float
    is_assumed: bool


@dataclass(frozen=True)
class PlanPrice:
    """The price of a plan, in seconds.

    Attributes:
        device, host, transfers: Time on the device, on its host, and of transfers between them.
        runs, launches: Number of runs of the device, and the time of launching them.
        host_alone: Time of the whole graph on the host.
        bound: A lower bound on the time of every division of these units.
    """

    units: tuple[UnitPrice, ...]
    device: float
    host: float
    transfers: float
    runs: int
    launches: float
    host_alone: float
    bound: float
    problem: Problem

    @property
    def seconds(self) -> float:
        """Total time of the plan, whose parts run one after the other."""
        return self.device + self.host + self.transfers + self.launches

    @property
    def beside_device(self) -> float:
        """Time of everything but the work on the device."""
        return self.host + self.transfers + self.launches

    def with_ops(self, ops: Iterable[str]) -> PlanPrice:
        """The price if the device supported these ops too; they are named without overload."""
        wanted = set(ops)
        units = [
            replace(unit, device=_least(unit.device, unit.if_supported.seconds), if_supported=None, reason="")
            if unit.if_supported is not None and wanted & set(unit.ops)
            else unit
            for unit in self.units
        ]
        problem = replace(self.problem, units=[_ticks_of(unit) for unit in units])
        division = divide(problem)
        chosen = min((division.on_device, self.on_device), key=problem.price)
        return _price(units, problem, chosen, min(division.bound, division.price))

    @property
    def on_device(self) -> tuple[bool, ...]:
        """Whether each unit runs on the device, in the order of `units`."""
        return tuple(unit.on_device for unit in self.units)

    def gains(self) -> tuple[Gain, ...]:
        """The ops that the device lacks here, the one whose support would save the most time first.

        Fusions that support would allow are not counted; see `what_if`.
        """
        counts: Counter[str] = Counter()
        assumed: set[str] = set()
        for unit in self.units:
            if unit.if_supported is not None and not unit.on_device:
                counts[unit.ops[0]] += 1
                assumed |= {unit.ops[0]} if unit.if_supported.is_assumed else set()
        gains = [
            Gain(op, count, max(0.0, self.seconds - self.with_ops([op]).seconds), op in assumed)
            for op, count in counts.items()
        ]
        return tuple(sorted(gains, key=lambda gain: (-gain.seconds, gain.op)))

    def to_dict(self) -> dict[str, Any]:
        """The price as JSON data, with times in microseconds."""
        totals = ("seconds", "device", "host", "transfers", "launches", "host_alone", "bound")
        return {
            **{f"{name.replace('seconds', 'total')}_us": 1e6 * getattr(self, name) for name in totals},
            "runs": self.runs,
            "units": [
                {
                    "nodes": list(unit.nodes),
                    "ops": list(unit.ops),
                    "device": "npu" if unit.on_device else "cpu",
                    "npu_us": None if unit.device is None else 1e6 * unit.device,
                    "host_us": 1e6 * unit.host,
                    "if_supported_us": None if unit.if_supported is None else 1e6 * unit.if_supported.seconds,
                    "reason": unit.reason,
                }
                for unit in self.units
            ],
        }


def price_graph(
    graph: IRGraph,
    reasons: Mapping[str, str],
    programs: Sequence[Made],
    prices: Prices,
    compute_dtype: str,
    sizes: Mapping[str, int],
    source: IRGraph,
) -> PlanPrice:
    """The price of the cheapest division of a graph.

    Args:
        graph: A normalized graph.
        reasons: Node → why it cannot run on the device.
        programs: Programs of all nodes that can, as they run on the device together.
        sizes: Tensor → the bytes of its transfer; weights and constants are never transferred.
        source: The graph before it was normalized. Its composites (decomposed ops) are on the device in parts, or on
            the host as single ops.
    """
    groups = _Groups(node.name for node in graph.nodes)
    producers = graph.producers()
    written = _Written(source, {node.name for node in graph.nodes})
    for parts in written.parts.values():
        groups.join(*parts)
    for node in graph.nodes:
        if node.base == "getitem":
            groups.join(node.name, producers[node.inputs[0]].name)
    seconds: Counter[str] = Counter()
    for program, made_of in programs:
        for call, time in zip(program.kernels, prices.calls(program), strict=True):
            nodes = sorted(made_of[call.node])
            groups.join(*nodes)
            seconds[nodes[0]] += time  # type: ignore[assignment]
    members: dict[str, list[OpNode]] = {}
    for node in graph.nodes:
        members.setdefault(groups.head(node.name), []).append(node)
    units = [_unit(nodes, graph, reasons, seconds, prices, compute_dtype, written) for nodes in members.values()]
    problem = _problem(graph, units, prices, sizes)
    division = divide(problem)
    return _price(units, problem, division.on_device, division.bound)


def replaced(price: PlanPrice, on_device: Collection[str], graph: IRGraph) -> PlanPrice:
    """The price with exactly these nodes of a graph on the device.

    Args:
        graph: The graph of the price, in which some composites may be single nodes.
    """
    names = {node.name for node in graph.nodes}
    of_part = {
        part.name: composite.node.name
        for composite in graph.composites
        if composite.node.name in names
        for part in composite.parts.nodes
    }
    units = []
    for unit in price.units:
        nodes = tuple(dict.fromkeys(of_part.get(name, name) for name in unit.nodes))
        units.append(replace(unit, nodes=tuple(name for name in nodes if name in names) or nodes))
    sides = tuple(unit.device is not None and set(unit.nodes) <= set(on_device) for unit in units)
    return _price(units, price.problem, sides, round(price.bound * _TICKS))


def on_host(price: PlanPrice) -> PlanPrice:
    """The price with all nodes on the host."""
    return _price(price.units, price.problem, (False,) * len(price.units), round(price.bound * _TICKS))


class _Written:
    """The composites (decomposed ops) whose parts are in a graph, and that graph with the composites as single ops."""

    def __init__(self, source: IRGraph, names: Collection[str]) -> None:
        closed = closed_composites(source)
        self.graph = as_written(source, [composite.node.name for composite in closed])
        self.parts = {
            composite.node.name: parts
            for composite in closed
            if (parts := [node.name for node in composite.parts.nodes if node.name in names])
        }
        self._nodes = {composite.node.name: composite.node for composite in closed}

    def ops(self, nodes: Sequence[OpNode]) -> list[tuple[OpNode, list[OpNode]]]:
        """The original ops that `nodes` belong to, each with those of the nodes that are its parts."""
        of_part = {part: name for name, parts in self.parts.items() for part in parts}
        grouped: dict[str, list[OpNode]] = {}
        for node in nodes:
            grouped.setdefault(of_part.get(node.name, node.name), []).append(node)
        return [(self._nodes[name] if name in self.parts else parts[0], parts) for name, parts in grouped.items()]

    def host(self, op: OpNode, parts: Sequence[OpNode], graph: IRGraph, prices: Prices) -> float:
        """Time of an op on the host; if the host's time of a composite is unknown, the sum of its parts."""
        own = prices.host(op, self.graph) if op.name in self.parts else 0.0
        return own or sum(prices.host(part, graph) for part in parts)


class _Groups:
    """Disjoint sets of names that are merged step by step (union-find)."""

    def __init__(self, names: Iterable[str]) -> None:
        self._above = {name: name for name in names}

    def head(self, name: str) -> str:
        while self._above[name] != name:
            self._above[name] = self._above[self._above[name]]
            name = self._above[name]
        return name

    def join(self, *names: str) -> None:
        for name in names[1:]:
            self._above[self.head(name)] = self.head(names[0])


def _unit(
    nodes: Sequence[OpNode],
    graph: IRGraph,
    reasons: Mapping[str, str],
    seconds: Mapping[str, float],
    prices: Prices,
    compute_dtype: str,
    written: _Written,
) -> UnitPrice:
    refused = next((node for node in nodes if node.name in reasons), None)
    device = None if refused is not None else sum(seconds[node.name] for node in nodes)
    wholes = written.ops(nodes)
    host = sum(written.host(op, parts, graph, prices) for op, parts in wholes)
    estimate = None if refused is None else prices.if_supported(refused, graph, compute_dtype)
    if len(wholes) == 1 and wholes[0][0].name in written.parts:
        estimate = prices.if_supported(wholes[0][0], written.graph, compute_dtype)
    reason = "" if refused is None else reasons[refused.name]
    computing = [op for op, _ in wholes if not _is_view(op)] or list(nodes)
    ops = tuple(node.base for node in computing)
    return UnitPrice(tuple(node.name for node in nodes), ops, device, host, estimate, False, reason)


def _is_view(node: OpNode) -> bool:
    op = find_op(node.op_type)
    return node.base == "getitem" or (op is not None and op.view is not None)


def _problem(graph: IRGraph, units: Sequence[UnitPrice], prices: Prices, sizes: Mapping[str, int]) -> Problem:
    owner = {name: index for index, unit in enumerate(units) for name in unit.nodes}
    place = {node.name: index for index, node in enumerate(graph.nodes)}
    producers, readers = graph.producers(), graph.consumers()
    values = []
    for name, size in sizes.items():
        maker = producers.get(name)
        unit = None if maker is None else owner[maker.name]
        others = frozenset(owner[node.name] for node in readers.get(name, ())) - {unit}
        values.append(Value(unit, others, name in graph.outputs, _ticks(prices.link.seconds(size))))
    steps = [
        (owner[node.name], [place[producers[x].name] for x in dict.fromkeys(node.inputs) if x in producers])
        for node in graph.nodes
    ]
    return Problem([_ticks_of(unit) for unit in units], values, steps, _ticks(prices.link.launch))


def _ticks_of(unit: UnitPrice) -> Unit:
    return Unit(None if unit.device is None else _ticks(unit.device), _ticks(unit.host))


def _least(seconds: float | None, other: float) -> float:
    return other if seconds is None else min(seconds, other)


def _ticks(seconds: float) -> int:
    return round(seconds * _TICKS)


def _price(units: Sequence[UnitPrice], problem: Problem, on_device: Sequence[bool], bound: int) -> PlanPrice:
    """The price of a division, in which each unit on the host has a reason for being there.

    Args:
        on_device: For each unit, whether it is on the device.
        bound: A lower bound on the price of every division, in the units of `problem`.
    """
    islands = _islands(problem, on_device)
    decided = []
    for index, (unit, there) in enumerate(zip(units, on_device, strict=True)):
        reason = "" if there else islands.get(index, unit.reason)
        decided.append(replace(unit, on_device=there, reason=reason))
    crossing = sum(value.price * problem.crossings(value, on_device) for value in problem.values)
    runs = problem.runs(on_device)
    return PlanPrice(
        units=tuple(decided),
        device=sum(unit.device for unit in decided if unit.on_device and unit.device is not None),
        host=sum(unit.host for unit in decided if not unit.on_device),
        transfers=crossing / _TICKS,
        runs=runs,
        launches=runs * problem.launch / _TICKS,
        host_alone=sum(unit.host for unit in units),
        bound=bound / _TICKS,
        problem=problem,
    )


def _islands(problem: Problem, on_device: Sequence[bool]) -> dict[int, str]:
    """The reason, in words, why the host runs each unit that the device could run.

    The reason compares the times of the unit's island on both sides: the connected units of this kind around it.
    """
    open_units = [index for index, unit in enumerate(problem.units) if unit.device is not None and not on_device[index]]
    is_open, groups = set(open_units), _Groups(map(str, open_units))
    for value in problem.values:
        groups.join(*(str(unit) for unit in (value.maker, *value.readers) if unit in is_open))
    islands: dict[str, list[int]] = {}
    for index in open_units:
        islands.setdefault(groups.head(str(index)), []).append(index)
    reasons = {}
    now = problem.price(on_device)
    for island in islands.values():
        there = problem.price([side or index in island for index, side in enumerate(on_device)])
        host = sum(problem.units[index].host for index in island)
        device = sum(problem.units[index].device or 0 for index in island)
        besides = (there - now + host - device) / _TICKS
        text = (
            f"it does not pay: {duration(host / _TICKS)} on the host, {duration(device / _TICKS)} on the device and "
            f"{duration(abs(besides))} {'less' if besides < 0 else 'more'} for transfers and launches"
        )
        if len(island) > 1:
            text += f", for the {len(island)} neighbours together"
        if not host:
            text = "it computes nothing, and goes with its neighbours on the host"
        reasons.update(dict.fromkeys(island, text))
    return reasons


def duration(seconds: float) -> str:
    """A time as text in a suitable unit: 0.0123 as "12.3 ms"."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if abs(seconds) >= size:
            return f"{seconds / size:.4g} {unit}"
    return f"{1e6 * seconds:.4g} µs"


__all__ = ["Gain", "PlanPrice", "UnitPrice", "duration", "on_host", "price_graph", "replaced"]
