"""Sizes of launches and of vector accesses."""

from __future__ import annotations

from typing import TypeAlias

from cuda_compiler.specialization.gpu import MAX_GRID
from npu_compiler.errors import NPUError
from npu_compiler.program.kernels import KernelCall
from npu_compiler.program.views import View

Size3: TypeAlias = tuple[int, int, int]

WIDEST_VECTOR = 16  # elements


def groups(count: int, size: int) -> int:
    """Number of groups of `size` that hold `count` items: the quotient rounded up, at least one."""
    return max(1, -(-count // size))


def check_grid(grid: Size3, call: KernelCall) -> Size3:
    """A grid with at least one block in each direction.

    Raises:
        NPUError: it exceeds CUDA's limits.
    """
    if any(size > most for size, most in zip(grid, MAX_GRID, strict=True)):
        raise NPUError(f"kernel '{call.kernel}' (node '{call.node}') would need a grid of {list(grid)} blocks")
    x, y, z = (max(1, size) for size in grid)
    return x, y, z


def vector_width(view: View) -> int:
    """The widest aligned vector access along the last dimension, in elements: 1, 2, 4, 8 or 16."""
    steps = [(dim, stride) for dim, (size, stride) in enumerate(zip(view.shape, view.strides, strict=True)) if size > 1]
    if steps and steps[-1][0] == view.rank - 1:
        if steps.pop()[1] != 1:
            return 1
    elif view.rank:
        return 1
    width = WIDEST_VECTOR
    while width > 1 and (view.offset % width or any(stride % width for _, stride in steps)):
        width //= 2
    return width
