"""Range rules of the op table: the integers that an op may return, computed from the ranges of its operands.

A range is (lowest, highest), both included, in Python's unbounded integers: the result in exact arithmetic. Booleans
are 0 and 1; `float_ranges.py` says which integers a float may become.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TypeAlias

from npu_compiler.graph.dtypes import as_int32
from npu_compiler.graph.model import IRGraph, OpNode
from npu_compiler.ops.registry import Args, Range, RangeFn, find_op

Ranges: TypeAlias = Mapping[str, Range]

_MOST_FACTORS = 64  # two to this power is beyond int64, and so is every higher power


def hull(*ranges: Range) -> Range:
    """The smallest range that holds all of these."""
    return min(low for low, _ in ranges), max(high for _, high in ranges)


def of_scalar(value: float) -> Range:
    """The range between the integers below and above a number."""
    if not math.isfinite(value):
        return as_int32(value), as_int32(value)
    return math.floor(value), math.ceil(value)


def by_operands(function: Callable[..., Range], *factors: str) -> RangeFn:
    """The range rule of an op whose result depends only on its operands.

    Args:
        function: Takes the range of each argument in the schema's order, tensor or number (None if it is omitted), then
            the ranges of `factors`.
        factors: Names of attributes that are 1 unless given.
    """

    def rule(node: OpNode, graph: IRGraph, ranges: Ranges) -> Range:
        args = Args(node)
        return function(*args.ranges(ranges, of_scalar), *(of_scalar(args.attr(name, 1)) for name in factors))

    return rule


def moved(node: OpNode, graph: IRGraph, ranges: Ranges) -> Range:
    """The range of an op that moves elements: that of its first input, or of all inputs if it joins several."""
    op = find_op(node.op_type)
    assert op is not None, node.op_type
    joins = op.tensors[0].startswith("*") or "src" in op.tensors
    return hull(*(ranges[name] for name in (node.inputs if joins else node.inputs[:1])))


def each(node: OpNode, graph: IRGraph, ranges: Ranges) -> tuple[Range, ...]:
    """The ranges of an op that has one output for each input."""
    return tuple(ranges[name] for name in node.inputs)


def constant(value: int) -> RangeFn:
    return lambda node, graph, ranges: (value, value)


def add(a: Range, b: Range, factor: Range = (1, 1)) -> Range:
    """The range of a + factor · b."""
    low, high = mul(factor, b)
    return a[0] + low, a[1] + high


def sub(a: Range, b: Range, factor: Range = (1, 1)) -> Range:
    """The range of a - factor · b."""
    return add(a, neg(b), factor)


def rsub(a: Range, b: Range, factor: Range = (1, 1)) -> Range:
    """The range of b - factor · a."""
    return sub(b, a, factor)


def neg(a: Range) -> Range:
    return -a[1], -a[0]


def mul(a: Range, b: Range) -> Range:
    products = [x * y for x in a for y in b]
    return min(products), max(products)


def addcmul(a: Range, b: Range, c: Range, factor: Range) -> Range:
    """The range of a + factor · b · c."""
    return add(a, mul(b, c), factor)


def absolute(a: Range) -> Range:
    return max(a[0], -a[1], 0), max(abs(a[0]), abs(a[1]))


def square(a: Range) -> Range:
    low, high = absolute(a)
    return low * low, high * high


def sign(a: Range) -> Range:
    return (a[0] > 0) - (a[0] < 0), (a[1] > 0) - (a[1] < 0)


def same(a: Range) -> Range:
    return a


def maximum(a: Range, b: Range) -> Range:
    return max(a[0], b[0]), max(a[1], b[1])


def minimum(a: Range, b: Range) -> Range:
    return min(a[0], b[0]), min(a[1], b[1])


def clamp(a: Range, low: Range | None = None, high: Range | None = None) -> Range:
    """The range of torch.clamp, whose upper bound takes precedence over the lower."""
    raised = a if low is None else maximum(a, low)
    return raised if high is None else minimum(raised, high)


def relu(a: Range) -> Range:
    return maximum(a, (0, 0))


def relu6(a: Range) -> Range:
    return clamp(a, (0, 0), (6, 6))


def where(condition: Range, a: Range, b: Range) -> Range:
    return hull(a, b)


def masked_fill(a: Range, mask: Range, value: Range) -> Range:
    return hull(a, value)


def second(a: Range, b: Range) -> Range:
    return b


def power(base: Range, exponent: Range) -> Range:
    """The range of PyTorch's integer power, in which a negative exponent gives 1, -1 or 0."""
    low, high = (min(max(x, 0), _MOST_FACTORS) for x in exponent)
    exponents = {low, min(low + 1, high), max(high - 1, low), high}
    bases = {*base, *(x for x in (-1, 0, 1) if base[0] <= x <= base[1])}
    powers = [x**y for x in bases for y in exponents]
    whole = min(powers), max(powers)
    return hull(whole, (-1, 1)) if exponent[0] < 0 else whole


def _quotients(a: Range, b: Range) -> list[tuple[int, int]]:
    """Pairs of dividend and divisor between whose quotients all quotients lie.

    Divisors of 0, which raise, are left out.
    """
    divisors = {x for x in (*b, -1, 1) if x and b[0] <= x <= b[1]}
    return [(x, y) for x in {*a, *((0,) if a[0] <= 0 <= a[1] else ())} for y in divisors]


def floor_divide(a: Range, b: Range) -> Range:
    quotients = [x // y for x, y in _quotients(a, b)] or [0]
    return min(quotients), max(quotients)


def trunc_divide(a: Range, b: Range) -> Range:
    quotients = [abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1) for x, y in _quotients(a, b)] or [0]
    return min(quotients), max(quotients)


def remainder(a: Range, b: Range) -> Range:
    """The range of a remainder with the divisor's sign; for non-negative operands it is at most the dividend."""
    high = max(b[1] - 1, 0)
    if a[0] >= 0 and b[0] >= 0:
        high = min(high, a[1])
    return min(b[0] + 1, 0), high


def fmod(a: Range, b: Range) -> Range:
    """The range of a remainder with the dividend's sign."""
    most = max(absolute(b)[1] - 1, 0)
    return max(min(a[0], 0), -most), min(max(a[1], 0), most)


def bitwise(a: Range, b: Range) -> Range:
    """The range of any bitwise combination of two numbers, which has no more bits than the longer one."""
    bits = max(x.bit_length() if x >= 0 else (~x).bit_length() for x in (*a, *b))
    return (0 if min(a[0], b[0]) >= 0 else -(1 << bits)), (1 << bits) - 1


def bitwise_and(a: Range, b: Range) -> Range:
    """The range of a bitwise AND, which is at most any operand that is never negative."""
    high = [x[1] for x in (a, b) if x[0] >= 0]
    return (0, min(high)) if high else bitwise(a, b)


def bitwise_not(a: Range) -> Range:
    return ~a[1], ~a[0]


def total(a: Range, count: int) -> Range:
    """The range of the sum of `count` numbers."""
    return a[0] * count, a[1] * count


def product(a: Range, count: int) -> Range:
    """The range of the product of `count` numbers."""
    count = min(count, _MOST_FACTORS)
    most = absolute(a)[1] ** count
    return (a[0] ** count if a[0] >= 0 else -most), most


def along(shape: tuple[int, ...], dim: int | None) -> int:
    """The number of elements along a dimension of a shape; None means all elements."""
    return math.prod(shape) if dim is None else shape[dim] if shape else 1


def index_below(size: int) -> Range:
    return 0, max(size - 1, 0)
