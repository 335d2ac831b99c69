"""Products of integers on the machine: exact for all layouts, zero points and lengths, though floats compute them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_model.isa.instructions import Affine, Axis, Multiply, Role, Space, Tile
from npu_model.machine.execution import Execution
from npu_model.machine.memory import Memory

LIMITS = {"uint8": (0, 255), "int8": (-128, 127)}


def tile(space: Space, dtype: str, sizes: list[int], order: list[int], size: int) -> Tile:
    """A tile that lies densely, its axes in this order; axes that are not in it are absent."""
    strides, step = [0] * len(sizes), size
    for axis in reversed(order):
        strides[axis], step = step, step * sizes[axis]
    return Tile(space, dtype, Affine(), tuple(strides))


def values(draw: st.DrawFn, shape: list[int], dtype: str) -> np.ndarray:
    """Numbers of a dtype: all at one end of its range, or anywhere in it."""
    low, high = LIMITS[dtype]
    end = draw(st.sampled_from([low, high, None]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    return np.full(shape, end, dtype) if end is not None else rng.integers(low, high + 1, shape).astype(dtype)


def in_memory(array: np.ndarray, order: list[int]) -> Memory:
    return Memory("memory", np.ascontiguousarray(array.transpose(order)).reshape(-1).view(np.uint8), False)


@settings(deadline=None)
@given(st.data())
def test_products_of_integers_are_exact(data: st.DataObject) -> None:
    roles = [Role.BATCH, Role.ROW, Role.ROW, Role.COLUMN, Role.WINDOW, Role.SUM]
    longest = {Role.SUM: 1200}
    sizes = [data.draw(st.integers(1, longest.get(role, 3))) for role in roles]
    dtypes = [data.draw(st.sampled_from(list(LIMITS))) for _ in range(2)]
    present = [[i for i, role in enumerate(roles) if role is not absent] for absent in (Role.COLUMN, Role.ROW)]
    present.append([i for i, role in enumerate(roles) if role in (Role.BATCH, Role.ROW, Role.COLUMN)])
    orders = [data.draw(st.permutations(axes)) for axes in present]
    shapes = [[size if i in axes else 1 for i, size in enumerate(sizes)] for axes in present]
    left, right = (data.draw(st.composite(values)(shape, dtype)) for shape, dtype in zip(shapes, dtypes, strict=False))
    zero = data.draw(st.integers(*LIMITS[dtypes[0]]))
    of_columns = st.lists(st.integers(-(2**15), 2**15), min_size=sizes[3], max_size=sizes[3])
    zeros = data.draw(st.none() | of_columns)
    spaces = [Space.SCRATCHPAD, Space.DRAM, Space.ACCUMULATORS]
    tiles = [
        tile(space, dtype, sizes, order, 4 if dtype == "int32" else 1)
        for space, dtype, order in zip(spaces, [*dtypes, "int32"], orders, strict=True)
    ]
    column_zeros = Tile(Space.DRAM, "int32", Affine(), (0, 0, 0, 4, 0, 0), "zeros")
    memory = {
        Space.SCRATCHPAD: in_memory(left, orders[0] + [i for i in range(len(sizes)) if i not in orders[0]]),
        Space.DRAM: in_memory(right, orders[1] + [i for i in range(len(sizes)) if i not in orders[1]]),
        Space.ACCUMULATORS: in_memory(np.full(shapes[2], 7, np.int32), [*orders[2], 4, 5]),
    }
    zeros_memory = Memory("zeros", np.array(zeros or [0], np.int32).view(np.uint8), False)
    begins = data.draw(st.sampled_from([None, ()]))  # sums start at zero, or go on
    product = Multiply(
        engine="matrix",
        box=tuple(map(Axis, sizes)),
        roles=tuple(roles),
        left=tiles[0],
        right=tiles[1],
        sums=tiles[2],
        begins=begins,
        left_zero=zero,
        right_zeros=None if zeros is None else column_zeros,
    )
    weight = right.astype(np.int64) - np.array(zeros or [0], np.int64).reshape(1, 1, 1, -1, 1, 1)
    exact = ((left.astype(np.int64) - zero) * weight).sum(axis=(4, 5), keepdims=True)
    exact = exact + (0 if begins is None else 7)
    execution = Execution(product, (), lambda each: zeros_memory if each.buffer else memory[each.space])
    if exact.max() >= 2**31 or exact.min() < -(2**31):
        with pytest.raises(Exception, match="a sum in the accumulators leaves the range of int32"):
            execution(())
        return
    execution(())
    sums = memory[Space.ACCUMULATORS].data.view(np.int32).reshape([sizes[i] for i in orders[2]] + [1, 1])
    assert np.array_equal(sums, exact.transpose([*orders[2], 4, 5]))
