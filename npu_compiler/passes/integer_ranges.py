"""Keeps integer arithmetic within the 32 bits that devices compute with.

PyTorch's int64 is stored as int32. From the possible values of inputs, weights and constants, the op table computes the
range of each int64 result in exact arithmetic. If that may exceed 32 bits, the inputs that the result depends on get
bounds, as wide as possible without a result exceeding 32 bits, and are checked against them when they are written:

    def main(x: int64[3], y: int64[3]):        x and y with bounds -46340..46340
        %mul = aten.mul(x, y)

Where even small inputs would not do, nodes are refused: they run on the CPU, in 64 bits.

A float may be cast to int64 on the device only if ops show that it is small enough (see `ops/float_ranges.py`); else
the casting node runs on the CPU. Infinities and NaN do not count: PyTorch does not say what they become.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from npu_compiler.graph.dtypes import INT32_MAX, INT32_MIN, is_float, is_int
from npu_compiler.graph.model import IRGraph, OpNode, TensorSpec
from npu_compiler.ops.float_ranges import Interval, as_integers, interval_of, of_dtype
from npu_compiler.ops.ranges import moved
from npu_compiler.ops.registry import Range, find_op, well_formed

INT32_RANGE = (INT32_MIN, INT32_MAX)
SMALLEST_LIMIT = 255  # inputs are not held to less than what a byte holds


@dataclass(frozen=True)
class IntegerRanges:
    """The ranges of a graph's integers.

    Attributes:
        ranges: Each tensor's lowest and highest value; for a float, those of the integer that it may be cast to.
        bounds: Tensor (an input, a weight or a result of the CPU) → the bounds it must be checked against for `ranges`
            to hold.
        overflows: Node name → why the device cannot run it.
    """

    ranges: dict[str, Range]
    bounds: dict[str, Range] = field(default_factory=dict)
    overflows: dict[str, str] = field(default_factory=dict)


def find_integer_ranges(graph: IRGraph, on_cpu: Collection[str] = ()) -> IntegerRanges:
    """The ranges of a graph whose nodes run on the device, except those named in `on_cpu`.

    Raises:
        IRError: a node lacks an argument.
    """
    refused = _readers_of_wide_constants(graph)
    walk = _Walk(graph, {*on_cpu, *refused})
    ranges, overflowing = walk({})
    bounds = {name: limits for group in walk.groups_of(overflowing) for name, limits in _widest(walk, group).items()}
    if bounds:
        ranges, overflowing = walk(bounds)
    refused |= {node.name: "its int64 result may not fit in 32 bits" for node in overflowing}
    return IntegerRanges(ranges, bounds, refused)


def _widest(walk: _Walk, sources: set[str]) -> dict[str, Range]:
    """The widest bounds, equal for all `sources`, with which no more nodes overflow than with the narrowest bounds.

    Sources of nodes that overflow even with the narrowest bounds are left out.
    """

    def overflowing(limit: int) -> list[OpNode]:
        return walk(dict.fromkeys(sources, (-limit, limit)))[1]

    sources = sources - walk.sources_of(overflowing(SMALLEST_LIMIT))  # for the others, bounds are of no use
    if not sources:
        return {}
    fewest, limits = len(overflowing(SMALLEST_LIMIT)), range(INT32_MAX + 1)
    too_wide = bisect_left(limits, True, lo=SMALLEST_LIMIT, key=lambda limit: len(overflowing(limit)) > fewest)
    return dict.fromkeys(sources, (1 - too_wide, too_wide - 1))


def _readers_of_wide_constants(graph: IRGraph) -> dict[str, str]:
    """Node → the reason why it must run on the CPU: it reads a constant that does not fit in 32 bits."""
    consumers = graph.consumers()
    return {
        node.name: f"constant '{name}' holds integers that do not fit in 32 bits"
        for name, value in graph.constants.items()
        if is_int(graph.tensors[name].dtype) and value.size and not _fits(_extremes(value))
        for node in consumers.get(name, [])
    }


def bound_integers(graph: IRGraph) -> IRGraph:
    """The graph with bounds on inputs and weights, so that no int64 result exceeds 32 bits."""
    return with_bounds(graph, find_integer_ranges(graph).bounds)


def with_bounds(graph: IRGraph, bounds: Mapping[str, Range]) -> IRGraph:
    return graph.with_nodes(graph.nodes, {x: replace(graph.tensors[x], bounds=limits) for x, limits in bounds.items()})


def index_bounds(graph: IRGraph, on_cpu: Collection[str] = ()) -> dict[str, Range]:
    """Index tensor → the range of values that all ops on the device that read it as an index allow."""
    bounds: dict[str, Range] = {}
    for node in graph.nodes:
        op = find_op(node.op_type)
        if op is None or op.index_bound is None or node.name in on_cpu:
            continue
        with well_formed(node):
            allowed = op.index_bound(node, graph)
        for name, (least, most) in allowed.items():
            low, high = bounds.get(name) or graph.tensors[name].bounds or INT32_RANGE
            high = min(high, most)
            bounds[name] = (max(min(low, high), least), high)
    return bounds


class _Walk:
    """A function of bounds of sources: the range of every tensor, and the nodes whose result may overflow.

    A source is a tensor whose values are only known when the program runs: an input, a weight, a result of the CPU.
    """

    def __init__(self, graph: IRGraph, on_cpu: Collection[str]) -> None:
        self.graph = graph
        self.limits = {name: spec.bounds or _range_of_dtype(spec) for name, spec in graph.tensors.items()}
        constants = ((name, value) for name, value in graph.constants.items() if is_int(graph.tensors[name].dtype))
        self.limits |= {name: _extremes(value) for name, value in constants if value.size}
        self.intervals: dict[str, Interval] = {
            name: _finite_extremes(value)
            for name, value in graph.constants.items()
            if is_float(graph.tensors[name].dtype)
        }
        computed = [out for node in graph.nodes if node.name in on_cpu for out in node.outputs]
        checked = (*graph.inputs, *computed)
        self.limits |= {name: limits for name, limits in index_bounds(graph, on_cpu).items() if name in checked}
        self.sources = {name for name in (*checked, *graph.weights) if self.limits[name] == INT32_RANGE}
        self.limits |= {name: as_integers(limits) for name, limits in self.intervals.items()}
        device = [node for node in graph.nodes if node.name not in on_cpu]
        self.nodes = [node for node in device if any(is_int(graph.tensors[out].dtype) for out in node.outputs)]
        made_of_floats = [node for node in self({})[1] if any(is_float(graph.tensors[x].dtype) for x in node.inputs)]
        if made_of_floats:
            wanted = _ancestors(made_of_floats, device)
            names = {node.name for node in self.nodes} | wanted
            self.nodes = [node for node in device if node.name in names]

    def __call__(self, bounds: Mapping[str, Range]) -> tuple[dict[str, Range], list[OpNode]]:
        ranges, intervals, overflowing = {**self.limits, **bounds}, {**self.intervals}, []
        for node in self.nodes:
            if is_float(self.graph.tensors[node.outputs[0]].dtype):
                operands = {name: intervals.get(name, ranges[name]) for name in node.inputs}
                with well_formed(node):
                    intervals[node.outputs[0]] = interval_of(node, self.graph, operands)
                ranges[node.outputs[0]] = as_integers(intervals[node.outputs[0]])
            if not any(is_int(self.graph.tensors[out].dtype) for out in node.outputs):
                continue
            for out, limits in zip(node.outputs, _results(node, self.graph, ranges), strict=False):
                spec = self.graph.tensors[out]
                if not is_int(spec.dtype):
                    continue
                ranges[out] = limits if _fits(limits) else INT32_RANGE
                if not _fits(limits) and spec.dtype == "int64":
                    overflowing.append(node)
        return ranges, overflowing

    def groups_of(self, overflowing: Collection[OpNode]) -> list[set[str]]:
        """The sources of these nodes, in disjoint groups; sources that influence one node are in one group."""
        groups: list[set[str]] = []
        for node in overflowing:
            sources = self.sources_of([node])
            joined = [group for group in groups if group & sources]
            groups = [group for group in groups if not group & sources] + [sources.union(*joined)]
        return groups

    @cached_property
    def _bounded(self) -> set[str]:
        """The tensors whose range depends on the bounds of sources."""
        widest, _ = self({})
        narrowest, _ = self(dict.fromkeys(self.sources, (-SMALLEST_LIMIT, SMALLEST_LIMIT)))
        return {name for name, limits in widest.items() if narrowest[name] != limits}

    def sources_of(self, overflowing: Collection[OpNode]) -> set[str]:
        """The sources whose bounds influence the operands of these nodes."""
        producers = {out: node for node in self.nodes for out in node.outputs}
        pending = [name for node in overflowing for name in node.inputs]
        seen: set[str] = set()
        while pending:
            name = pending.pop()
            if name not in seen and name in self._bounded:
                seen.add(name)
                pending += producers[name].inputs if name in producers else ()
        return seen & self.sources


def _range_of_dtype(spec: TensorSpec) -> Range:
    if spec.dtype == "bool":
        return 0, 1
    if not is_int(spec.dtype):
        return of_dtype(spec.dtype)
    info = np.iinfo(spec.dtype if spec.dtype != "int64" else "int32")
    return int(info.min), int(info.max)


def _extremes(value: np.ndarray) -> Range:
    return int(value.min()), int(value.max())


def _finite_extremes(value: np.ndarray) -> Interval:
    finite = value[np.isfinite(value.astype(np.float64))].astype(np.float64)
    return (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)


def _ancestors(nodes: Collection[OpNode], among: Collection[OpNode]) -> set[str]:
    """The names of the nodes in `among` on whose results `nodes` depend."""
    producers = {out: node for node in among for out in node.outputs}
    pending, seen = [name for node in nodes for name in node.inputs], set()
    while pending:
        node = producers.get(pending.pop())
        if node is not None and node.name not in seen:
            seen.add(node.name)
            pending += node.inputs
    return seen


def _fits(limits: Range) -> bool:
    return limits[0] >= INT32_MIN and limits[1] <= INT32_MAX


def _results(node: OpNode, graph: IRGraph, ranges: dict[str, Range]) -> tuple[Range, ...]:
    """The range of each output of a node; that of its dtype if there is no rule for the op."""
    op = find_op(node.op_type)
    rule = (op.integer_range or (moved if op.moves else None)) if op is not None else None
    if rule is None:
        return tuple(_range_of_dtype(graph.tensors[out]) for out in node.outputs)
    with well_formed(node):
        limits = rule(node, graph, ranges)
        return limits if isinstance(limits[0], tuple) else (limits,) * len(node.outputs)
