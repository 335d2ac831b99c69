"""Bounds of the finite elements of float tensors, by which casts to integers are known to fit in 32 bits.

An interval is (lowest, highest) in exact arithmetic. NaN and infinities are not covered: PyTorch does not promise which
integer they become.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TypeAlias

from npu_compiler.graph.dtypes import FLOAT_MAX
from npu_compiler.graph.model import IRGraph, OpNode
from npu_compiler.ops import ranges
from npu_compiler.ops.registry import Args, Range, find_op

Interval: TypeAlias = tuple[float, float]

UNBOUNDED: Range = (-(2**128), 2**128)
_LEAST_LOG = -150.0  # of a denormal, to the base 2
_ROUNDING = 2.0**-6  # more than what the 16-bit floats of a chain of ops add to its result


def of_dtype(dtype: str) -> Range:
    """The range of the finite values of a float dtype, as integers; `UNBOUNDED` for all but float16."""
    largest = math.ceil(FLOAT_MAX.get(dtype, FLOAT_MAX["float32"]))
    return (-largest, largest) if dtype == "float16" else UNBOUNDED


def as_integers(interval: Interval) -> Range:
    """The range of integers to which elements of an interval may be cast, allowing for their rounding as floats."""
    low, high = interval
    if max(abs(low), abs(high)) >= UNBOUNDED[1]:
        return UNBOUNDED
    return math.floor(low - abs(low) * _ROUNDING), math.ceil(high + abs(high) * _ROUNDING)


def interval_of(node: OpNode, graph: IRGraph, intervals: Mapping[str, Interval]) -> Interval:
    """The interval of the elements of a node's float result; unbounded if there is no rule for its op."""
    low, high = _exact(node, graph, intervals)
    return max(low, UNBOUNDED[0]), min(high, UNBOUNDED[1])


def _exact(node: OpNode, graph: IRGraph, intervals: Mapping[str, Interval]) -> Interval:
    op = find_op(node.op_type)
    if op is None:
        return UNBOUNDED
    function = _BY_OPERANDS.get(op.name)
    if function is not None:
        args = Args(node)
        values = [_interval(args, name, intervals) for name in op.tensors]
        result = UNBOUNDED if values[0] is None else function(*values, *_factor(args, function))
        return (math.floor(result[0]), math.ceil(result[1])) if args.attr("rounding_mode") else result
    if op.name in _CONSTANTS and op.integer_range is not None:
        low, high = op.integer_range(node, graph, {})
        assert not isinstance(low, tuple) and not isinstance(high, tuple)  # they have one result
        return low, high
    elements = intervals[node.inputs[0]] if node.inputs else UNBOUNDED
    if op.name in _SUMS:
        terms = graph.tensors[node.inputs[0]].numel
        terms //= max(graph.tensors[node.outputs[0]].numel, 1) if op.name == "aten.sum" else 1
        return min(elements[0], elements[0] * terms), max(elements[1], elements[1] * terms)
    if op.name in _AMONG_ELEMENTS:
        return elements
    if op.moves and op.integer_range is None:
        joins = op.tensors[0].startswith("*") or "src" in op.tensors
        moved = [intervals[name] for name in (node.inputs if joins else node.inputs[:1])]
        return min(low for low, _ in moved), max(high for _, high in moved)
    return UNBOUNDED


def _interval(args: Args, name: str, intervals: Mapping[str, Interval]) -> Interval | None:
    tensor, value = args.tensor(name), args.attr(name)
    if tensor is not None:
        return intervals[tensor]
    if not isinstance(value, (int, float)):
        return None
    return (float(value), float(value)) if math.isfinite(value) else UNBOUNDED


def _factor(args: Args, function: Callable[..., object]) -> list[Interval]:
    """The interval of the attribute `alpha`, as a list; empty for an op without it."""
    alpha = args.attr("alpha", 1)
    return [(alpha, alpha)] if function in (ranges.add, ranges.sub, ranges.rsub) else []


def _monotone(function: Callable[[float], float]) -> Callable[[Interval], Interval]:
    return lambda a: (function(a[0]), function(a[1]))


def _within(low: float, high: float) -> Callable[[Interval], Interval]:
    return lambda a: (low, high)


def _log(base: float, shift: float = 0.0) -> Callable[[Interval], Interval]:
    def rule(a: Interval) -> Interval:
        low, high = (math.log2(x + shift) if x + shift > 0 else _LEAST_LOG for x in a)
        return low / math.log2(base), high / math.log2(base)

    return rule


def _exp(a: Interval) -> Interval:
    return 0.0, math.exp(min(a[1], 88.8))


def _divide(a: Interval, b: Interval) -> Interval:
    if b[0] <= 0 <= b[1]:
        return UNBOUNDED
    quotients = [x / y for x in a for y in b]
    return min(quotients), max(quotients)


def _sqrt(a: Interval) -> Interval:
    return 0.0, math.sqrt(max(a[1], 0.0))


# Of ops whose result depends on their operands alone, by row: what their operands' intervals give.
_BY_OPERANDS: dict[str, Callable[..., Interval]] = {
    "aten.add": ranges.add,
    "aten.sub": ranges.sub,
    "aten.subtract": ranges.sub,
    "aten.rsub": ranges.rsub,
    "aten.mul": ranges.mul,
    "aten.multiply": ranges.mul,
    "aten.neg": ranges.neg,
    "aten.abs": ranges.absolute,
    "aten.square": ranges.square,
    "aten.sign": ranges.sign,
    "aten.ceil": _monotone(math.ceil),
    "aten.floor": _monotone(math.floor),
    "aten.round": _monotone(round),
    "aten.trunc": _monotone(math.trunc),
    "aten.relu": ranges.relu,
    "aten.relu6": ranges.relu6,
    "aten.maximum": ranges.maximum,
    "aten.minimum": ranges.minimum,
    "aten.clamp": ranges.clamp,
    "aten.clip": ranges.clamp,
    "aten.clamp_min": ranges.maximum,
    "aten.clamp_max": ranges.minimum,
    "aten.where": ranges.where,
    "aten.masked_fill": ranges.masked_fill,
    "aten.true_divide": _divide,
    "aten.div": _divide,
    "aten.divide": _divide,
    "aten.log": _log(math.e),
    "aten.log2": _log(2.0),
    "aten.log10": _log(10.0),
    "aten.log1p": _log(math.e, 1.0),
    "aten.exp": _exp,
    "aten.sqrt": _sqrt,
    "aten.sigmoid": _within(0.0, 1.0),
    "aten.hardsigmoid": _within(0.0, 1.0),
    "aten.softmax": _within(0.0, 1.0),
    "aten._softmax": _within(0.0, 1.0),
    "aten.tanh": _within(-1.0, 1.0),
    "aten.erf": _within(-1.0, 1.0),
    "aten.sin": _within(-1.0, 1.0),
    "aten.cos": _within(-1.0, 1.0),
}
_CONSTANTS = frozenset({"aten.zeros", "aten.ones", "aten.full", "aten.arange"})  # rows whose results no operand changes
_SUMS = frozenset({"aten.sum", "aten.cumsum"})
_AMONG_ELEMENTS = frozenset(
    "aten.mean aten.amax aten.amin aten.max.default aten.min.default aten.max.dim aten.min.dim".split()
)
