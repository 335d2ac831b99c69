"""The graph after each compiler stage as JSON data: removed and replaced nodes, and repetitions such as layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from npu_compiler.graph.model import IRGraph, OpNode
from npu_compiler.graph.printer import attributes, tensor_type
from npu_compiler.partitioner import PartitionPlan
from npu_compiler.program.repeats import fold

SMALLEST_FOLD = 8  # nodes that a repetition must leave out to be drawn as one box


@dataclass
class StageGraphs:
    """Graphs that share most of their nodes, with each distinct node and type stored once.

    Attributes:
        nodes: Distinct nodes: `[name, op, inputs, outputs, attributes]`.
        types: Distinct tensor types as text.
        graphs: One dict for each stage that changed something, in order: `name`; `stages`, the names of this stage and
            of later ones that changed nothing; `nodes` (numbers of nodes, in order), `inputs`, `outputs`; `weights`
            (tensor → its recipe as text) and `constants` (tensors); `types` (tensor → number of its type, if that
            differs from the graph before); `made` (node → the nodes of the graph before that it replaces); `runs` (see
            `repeats`); and `parts` (for partitions, `[device, nodes]` of each).
    """

    nodes: list[list[Any]] = field(default_factory=list)
    types: list[str] = field(default_factory=list)
    graphs: list[dict[str, Any]] = field(default_factory=list)
    _numbers: dict[Any, int] = field(default_factory=dict)
    _before: IRGraph | None = None

    def add(self, name: str, graph: IRGraph) -> None:
        """Append the graph after a stage. If it equals the graph before, only the stage's name is recorded."""
        types = {tensor: self._type(tensor_type(graph.tensors[tensor])) for tensor in _named(graph)}
        nodes = [self._node(node) for node in graph.nodes]
        latest = self.graphs[-1] if self.graphs else None
        earlier_types = self._known_types()
        changed = {tensor: number for tensor, number in types.items() if earlier_types.get(tensor) != number}
        if latest is not None and nodes == latest["nodes"] and graph.outputs == latest["outputs"] and not changed:
            latest["stages"].append(name)
            return
        self.graphs.append(
            {
                "name": name,
                "stages": [name],
                "nodes": nodes,
                "inputs": graph.inputs,
                "outputs": graph.outputs,
                "weights": {tensor: str(recipe) for tensor, recipe in graph.weights.items()},
                "constants": list(graph.constants),
                "types": changed,
                "made": {} if self._before is None else replaced_nodes(self._before, graph),
                "runs": repeats(graph),
                "parts": [],
            }
        )
        self._before = graph

    def add_partitions(self, plan: PartitionPlan) -> None:
        """Append the normalized graph of a plan, with the device and the nodes of each partition."""
        self.add("partition", plan.graph)
        parts = [[part.device, [node.name for node in part.graph.nodes]] for part in plan.partitions]
        if self.graphs[-1]["name"] == "partition":
            self.graphs[-1]["parts"] = parts
        else:  # normalizing changed nothing
            self.graphs[-1]["stages"].pop()
            again = {"name": "partition", "stages": ["partition"], "types": {}, "made": {}, "parts": parts}
            self.graphs.append({**self.graphs[-1], **again})

    def to_dict(self) -> dict[str, Any]:
        """Return the graphs as JSON data for the page."""
        return {"nodes": self.nodes, "types": self.types, "graphs": self.graphs}

    def _known_types(self) -> dict[str, int]:
        types: dict[str, int] = {}
        for graph in self.graphs:
            types.update(graph["types"])
        return types

    def _node(self, node: OpNode) -> int:
        row = [node.name, node.base, list(node.inputs), list(node.outputs), attributes(node)]
        return self._number((node.name, node.base, node.inputs, node.outputs, row[4]), row, self.nodes)

    def _type(self, text: str) -> int:
        return self._number(text, text, self.types)

    def _number(self, key: Any, value: Any, table: list[Any]) -> int:
        if key not in self._numbers:
            self._numbers[key] = len(table)
            table.append(value)
        return self._numbers[key]


def stage_graphs(stages: Iterable[tuple[str, IRGraph]]) -> StageGraphs:
    """Collect the graphs that `npu_compiler.trace_stages` yields."""
    collected = StageGraphs()
    for name, graph in stages:
        collected.add(name, graph)
    return collected


def _named(graph: IRGraph) -> dict[str, None]:
    """Return the names of the tensors that inputs, nodes and outputs mention, each once and in order."""
    mentioned = (name for node in graph.nodes for name in (*node.inputs, *node.outputs))
    return dict.fromkeys((*graph.inputs, *mentioned, *graph.outputs))


def replaced_nodes(before: IRGraph, after: IRGraph) -> dict[str, list[str]]:
    """Return node of `after` → the nodes of `before` that it replaces, for each node that is new or was changed.

    They are found by following `before` from the node's outputs, which stages do not rename, back to the node's inputs
    and to nodes that `after` still has.
    """
    same = {node.name for node in after.nodes}
    producers = before.producers()
    old = {node.name: node for node in before.nodes}
    order = {node.name: index for index, node in enumerate(before.nodes)}
    regions: dict[str, list[str]] = {}
    for node in after.nodes:
        previous = old.get(node.name)
        if previous is not None and (previous.op_type, previous.inputs) == (node.op_type, node.inputs):
            continue
        region: set[str] = set()
        frontier = [name for name in node.outputs if name in producers]
        while frontier:
            producer = producers[frontier.pop()]
            if producer.name in region or (producer.name in same and producer.name != node.name):
                continue
            region.add(producer.name)
            frontier += [name for name in producer.inputs if name in producers and name not in node.inputs]
        if region - {node.name}:
            regions[node.name] = sorted(region, key=order.__getitem__)
    return regions


def repeats(graph: IRGraph) -> list[list[Any]]:
    """Return the repetitions in a graph's list of nodes, such as layers.

    Each is `[start, period, count, labels]`, with a label for each repetition.
    """
    tensors = graph.tensors
    keys = [
        (node.base, len(node.inputs), tuple((tensors[x].shape, tensors[x].dtype) for x in node.outputs))
        for node in graph.nodes
    ]
    rows = []
    for run in fold(keys):
        if (run.count - 1) * run.period >= SMALLEST_FOLD:
            starts = range(run.start, run.stop, run.period)
            labels = [_label(graph, graph.nodes[start : start + run.period]) for start in starts]
            rows.append([run.start, run.period, run.count, labels if any(labels) else []])
    return rows


def _label(graph: IRGraph, nodes: Iterable[OpNode]) -> str:
    """Return the module whose weights most of these nodes read, up to the last number in its name; empty if none."""
    counts: Counter[str] = Counter()
    for node in nodes:
        for name in node.inputs:
            recipe = graph.weights.get(name)
            for key in recipe.keys() if recipe is not None else ():
                parts = key.split(".")
                last = max((index for index, part in enumerate(parts) if part.isdigit()), default=None)
                if last is not None:
                    counts[".".join(parts[: last + 1])] += 1
    return counts.most_common(1)[0][0] if counts else ""
