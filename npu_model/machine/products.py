"""Products of the matrix engine in NumPy: floats summed in float32, integers exactly, both by BLAS.

float32 represents every integer up to 2²⁴, float64 up to 2⁵³. So integer products are summed in float32 by BLAS over as
many terms as stay below 2²⁴, and these partial sums are added in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from npu_model.isa.instructions import Multiply, Role
from npu_model.machine.memory import MachineError, Memories, Part, Ranges

_EXACT = 2**24  # float32 holds any integer up to here
_INT32 = 2**31
_FEWEST_TERMS = 64  # with fewer at a time, sums in float64 are faster

Work: TypeAlias = Callable[[Sequence[int]], None]
"""A function that executes an instruction in the iteration with the given loop counters."""


def product(instruction: Multiply, ranges: Ranges, memories: Memories) -> Work:
    """Build a function of the loop counters that executes a product on the elements inside its tensors."""
    is_integer = instruction.left.dtype in ("int8", "uint8")
    work = (_integers if is_integer else _floats)(instruction, ranges, memories)
    return work if instruction.sparsity is None else _sparse(instruction, instruction.sparsity, ranges, memories, work)


def _sparse(instruction: Multiply, sparsity: tuple[int, int], ranges: Ranges, memories: Memories, work: Work) -> Work:
    """A product whose right operand is checked first: the engine would leave out elements beyond its pattern."""
    right, (kept, of) = Part(instruction.right, ranges, memories), sparsity
    axis = instruction.roles.index(Role.SUM)

    def checked(counters: Sequence[int]) -> None:
        groups = np.moveaxis(right.read(counters), axis, -1)
        groups = groups.reshape(*groups.shape[:-1], -1, of)
        if np.count_nonzero(groups, axis=-1).max() > kept:
            raise MachineError(
                f"of {of} elements more than {kept} are not zero, where zeros of {kept}:{of} are skipped"
            )
        work(counters)

    return checked


class _Axes:
    """The axes of a product grouped by role, and their sizes."""

    def __init__(self, instruction: Multiply, ranges: Ranges) -> None:
        self.sizes = [end - first for first, end in ranges]
        self.batch, self.rows, self.columns = (
            self._of(instruction, role) for role in (Role.BATCH, Role.ROW, Role.COLUMN)
        )
        self.summed = self._of(instruction, Role.WINDOW) + self._of(instruction, Role.SUM)

    def _of(self, instruction: Multiply, role: Role) -> list[int]:
        return [axis for axis, own in enumerate(instruction.roles) if own is role]

    def count(self, axes: Sequence[int]) -> int:
        """Number of elements along these axes, the product of their sizes."""
        return math.prod(self.sizes[axis] for axis in axes)


def _floats(instruction: Multiply, ranges: Ranges, memories: Memories) -> Work:
    left, right, sums = (
        Part(tile, ranges, memories) for tile in (instruction.left, instruction.right, instruction.sums)
    )
    axes = _Axes(instruction, ranges)
    order = [*axes.batch, *axes.rows, *axes.columns, *axes.summed]
    back = np.argsort(order)
    b, m, n, k = map(axes.count, (axes.batch, axes.rows, axes.columns, axes.summed))

    def full(*absent: int) -> tuple[int, ...]:
        return tuple(1 if axis in absent else axes.sizes[axis] for axis in order)

    left_shape, right_shape, shape = full(*axes.columns), full(*axes.rows), full(*axes.summed)

    def work(counters: Sequence[int]) -> None:
        x, w = (part.read(counters).transpose(order).astype(np.float32) for part in (left, right))
        x = (x if x.shape == left_shape else np.broadcast_to(x, left_shape)).reshape(b, m, k)
        w = (w if w.shape == right_shape else np.broadcast_to(w, right_shape)).reshape(b, n, k)
        result = (x @ w.swapaxes(1, 2)).reshape(shape).transpose(back)
        if instruction.starts(counters):
            sums.write(counters)[...] = result
        else:
            total = sums.read(counters)
            total += result

    return work


def _integers(instruction: Multiply, ranges: Ranges, memories: Memories) -> Work:
    left, right, sums = (
        Part(tile, ranges, memories) for tile in (instruction.left, instruction.right, instruction.sums)
    )
    zeros = None if instruction.right_zeros is None else Part(instruction.right_zeros, ranges, memories)
    axes = _Axes(instruction, ranges)
    b, m, n, k = map(axes.count, (axes.batch, axes.rows, axes.columns, axes.summed))
    # Axes are in the order in which they lie in memory, so that copies are of long runs.
    batch, rows, columns = (_outermost_first(each, sums) for each in (axes.batch, axes.rows, axes.columns))
    summed = _outermost_first(axes.summed, right)
    x_matrix = _matrix(axes, left, batch, rows, summed, columns)
    w_matrix = _matrix(axes, right, batch, columns, summed, rows)
    is_by_row = _outermost_first([*rows, *columns], sums)[-1:] == columns[-1:]
    order = [*batch, *rows, *columns, *summed] if is_by_row else [*batch, *columns, *rows, *summed]
    shape = [1 if axis in summed else axes.sizes[axis] for axis in order]
    zero = instruction.left_zero
    most_left, most_right = _most(left.dtype, zero), _most(right.dtype, 0)

    def work(counters: Sequence[int]) -> None:
        most = most_right
        subtracted = None if zeros is None else zeros.read(counters)
        if subtracted is not None:
            most += int(np.abs(subtracted.astype(np.int64)).max())
        terms = _EXACT // max(1, most_left * most)
        kind = np.float32 if terms >= min(k, _FEWEST_TERMS) else np.float64
        x, w = x_matrix(left.read(counters), kind, zero), w_matrix(right.read(counters), kind, subtracted)
        step = terms if kind is np.float32 else k
        result = _product(x, w, step, is_by_row).reshape(shape)
        is_fresh = instruction.starts(counters)
        target = (sums.write if is_fresh else sums.read)(counters).transpose(order)
        if not is_fresh:
            result = result + target
        if (not is_fresh or k * most_left * most >= _INT32) and (result.max() >= _INT32 or result.min() < -_INT32):
            raise MachineError("a sum in the accumulators leaves the range of int32")
        target[...] = result

    return work


def _most(dtype: np.dtype, zero: int) -> int:
    """The greatest absolute difference between an integer of a dtype and a zero point."""
    limits = np.iinfo(dtype)
    return max(abs(int(limits.min) - zero), abs(int(limits.max) - zero))


def _outermost_first(axes: Sequence[int], part: Part) -> list[int]:
    """Axes in descending order of an operand's strides."""
    return sorted(axes, key=lambda axis: -abs(part.strides[axis]))


def _matrix(
    axes: _Axes, part: Part, batch: list[int], kept: list[int], summed: list[int], absent: list[int]
) -> Callable[[np.ndarray, type, Any], np.ndarray]:
    """A function that copies an operand into float matrices [batch, kept, summed] and subtracts a zero point."""
    is_by_kept = _outermost_first([*summed, *kept], part)[-1:] == summed[-1:] or not kept
    order = [*batch, *kept, *summed] if is_by_kept else [*batch, *summed, *kept]
    sizes = [axes.sizes[axis] for axis in order]
    b, rows, k = axes.count(batch), axes.count(kept), axes.count(summed)

    def without_absent(array: np.ndarray) -> np.ndarray:
        array = array.transpose([*order, *absent])
        return array.reshape(array.shape[: len(order)])

    def matrix(array: np.ndarray, kind: type, zero: np.ndarray | int | None) -> np.ndarray:
        result: np.ndarray = np.empty(sizes, kind)
        result[...] = without_absent(array)
        if zero is not None:
            result -= without_absent(zero) if isinstance(zero, np.ndarray) else zero
        return result.reshape(b, rows, k) if is_by_kept else result.reshape(b, k, rows).swapaxes(1, 2)

    return matrix


def _product(x: np.ndarray, w: np.ndarray, step: int, is_by_row: bool) -> np.ndarray:
    """Batched product [batch, rows, columns], or transposed [batch, columns, rows].

    `step` terms are summed at a time.
    """
    left, right = (x, w.swapaxes(1, 2)) if is_by_row else (w, x.swapaxes(1, 2))
    k = x.shape[2]
    if k <= step:
        whole: np.ndarray = left @ right
        return whole
    total: np.ndarray = np.zeros((*left.shape[:2], right.shape[2]))
    for first in range(0, k, step):
        total += left[:, :, first : first + step] @ right[:, first : first + step]
    return total


__all__ = ["Work", "product"]
