"""DRAM and L2 traffic of instructions in bytes, computed from their operands without running them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from npu_compiler.graph.dtypes import itemsize
from npu_model.isa.instructions import Axis, Node, Space, Transfer, instructions


def traffic(nodes: Sequence[Node], space: Space) -> tuple[int, int]:
    """Bytes that instructions in loops read from DRAM or the L2 and write to it, as the machine counts them."""
    read = written = 0
    for instruction, counts in instructions(nodes):
        if isinstance(instruction, Transfer):
            moved = itemsize(instruction.source.dtype) * elements(instruction.box, counts)
            read += moved if instruction.source.space is space else 0
            written += moved if instruction.target.space is space else 0
    return read, written


def elements(box: Sequence[Axis], counts: Sequence[int]) -> int:
    """Number of elements of a box that lie inside the tensor, summed over all iterations of loops of these counts.

    Axes whose starts depend on different loops are independent, so only the iterations of loops that a clipped axis
    depends on are enumerated.
    """
    total = 1
    used: set[int] = set()
    for loops, axes in _groups(box, counts):
        used |= loops
        total *= int(_extents(axes, sorted(loops), counts).sum())
    return total * math.prod(count for depth, count in enumerate(counts) if depth not in used)


def _groups(box: Sequence[Axis], counts: Sequence[int]) -> list[tuple[set[int], list[Axis]]]:
    """Group the axes that depend on a common loop; return for each group its loops and its axes."""
    groups: list[tuple[set[int], list[Axis]]] = []
    for axis in box:
        low, high = axis.start.bounds(counts)
        is_clipped = low < 0 or high + axis.size > axis.total
        loops = {depth for depth, step in enumerate(axis.start.steps[: len(counts)]) if step} if is_clipped else set()
        axes = [axis]
        apart = []
        for group in groups:
            if group[0] & loops:
                loops, axes = loops | group[0], [*group[1], *axes]
            else:
                apart.append(group)
        groups = [*apart, (loops, axes)]
    return groups


def _extents(axes: Sequence[Axis], loops: Sequence[int], counts: Sequence[int]) -> np.ndarray:
    """The number of existing elements (the product of the axes' clipped sizes) in each iteration of these loops."""
    grid = np.meshgrid(*(np.arange(counts[depth]) for depth in loops), indexing="ij", sparse=True)
    product = np.ones([counts[depth] for depth in loops], np.int64)
    for axis in axes:
        start = np.full(product.shape, axis.start.base, np.int64)
        for depth, counter in zip(loops, grid, strict=True):
            start += counter * (axis.start.steps[depth] if depth < len(axis.start.steps) else 0)
        product = product * np.clip(np.minimum(axis.size, axis.total - start) - np.maximum(0, -start), 0, None)
    return product
