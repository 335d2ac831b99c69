"""`View`: a strided view of a buffer. Slices, transposes and broadcasts of a view are views too, and move no data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

Shape = tuple[int, ...]
MAX_RANK = 8  # of a tensor, and of what a kernel walks


@dataclass(frozen=True)
class View:
    """A strided view of a buffer: element (i, j, …) is at `offset + i·strides[0] + j·strides[1] + …`.

    Attributes:
        buffer: Name of the buffer; several views may share one.
        shape, strides, offset: In elements of `dtype`. A stride of 0 repeats (broadcasts) a dimension.
        dtype: Storage dtype.
    """

    buffer: str
    shape: Shape
    strides: Shape
    offset: int
    dtype: str

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def numel(self) -> int:
        return numel(self.shape)

    @property
    def span(self) -> int:
        """Distance from the first element to the last, in elements; of an empty view, along its other dimensions."""
        return sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True) if size)

    @property
    def is_contiguous(self) -> bool:
        """Whether the view is row-major without gaps; strides of dimensions of size 1 do not matter."""
        return is_contiguous(self.shape, self.strides)

    @property
    def is_dense(self) -> bool:
        """Whether the elements fill one stretch of memory without gaps, with the dimensions in any order."""
        order = self.order_in_memory
        return is_contiguous(tuple(self.shape[dim] for dim in order), tuple(self.strides[dim] for dim in order))

    @property
    def order_in_memory(self) -> list[int]:
        """The dimensions from the largest stride to the smallest."""
        return sorted(range(self.rank), key=lambda dim: -self.strides[dim])

    def dim(self, index: int) -> int:
        """A dimension number, from 0 on; negative ones count from the end."""
        return index + self.rank if index < 0 else index

    def _existing_dim(self, index: int) -> int:
        if not -self.rank <= index < self.rank:
            raise IndexError(f"there is no dimension {index} in {list(self.shape)}")
        return self.dim(index)

    def permute(self, order: Sequence[int]) -> View:
        dims = [self._existing_dim(d) for d in order]
        return self._with(tuple(self.shape[d] for d in dims), tuple(self.strides[d] for d in dims))

    def transpose(self, first: int, second: int) -> View:
        order = list(range(self.rank))
        if order:
            first, second = self._existing_dim(first), self._existing_dim(second)
            order[first], order[second] = order[second], order[first]
        return self.permute(order)

    def slice(self, dim: int, start: int, stop: int, step: int = 1) -> View:
        """The elements start, start+step, … below stop of one dimension; bounds are already clamped."""
        dim = self._existing_dim(dim)
        if start < 0 or stop > self.shape[dim] or step < 1:
            raise ValueError(f"no slice {start}:{stop}:{step} of dimension {dim} of {list(self.shape)}")
        length = max(0, -(-(stop - start) // step))
        shape = (*self.shape[:dim], length, *self.shape[dim + 1 :])
        strides = (*self.strides[:dim], self.strides[dim] * step, *self.strides[dim + 1 :])
        return self._with(shape, strides, self.offset + start * self.strides[dim])

    def select(self, dim: int, index: int) -> View:
        dim = self._existing_dim(dim)
        if not -self.shape[dim] <= index < self.shape[dim]:
            raise IndexError(f"there is no index {index} in dimension {dim} of {list(self.shape)}")
        index = index + self.shape[dim] if index < 0 else index
        shape = self.shape[:dim] + self.shape[dim + 1 :]
        strides = self.strides[:dim] + self.strides[dim + 1 :]
        return self._with(shape, strides, self.offset + index * self.strides[dim])

    def unsqueeze(self, dim: int) -> View:
        dim = dim + self.rank + 1 if dim < 0 else dim
        stride = self.shape[dim] * self.strides[dim] if dim < self.rank else 1
        return self._with((*self.shape[:dim], 1, *self.shape[dim:]), (*self.strides[:dim], stride, *self.strides[dim:]))

    def squeeze(self, dim: int) -> View:
        """Drop a dimension if its size is 1."""
        if self.rank == 0 or self.shape[self._existing_dim(dim)] != 1:
            return self
        return self.select(dim, 0)

    def expand(self, shape: Sequence[int]) -> View:
        """Broadcast to a shape, aligning trailing dimensions; -1 keeps a size.

        Raises:
            ValueError: a size is neither 1 nor the requested one.
        """
        lead = len(shape) - self.rank
        new_shape, strides = [], []
        for index, size in enumerate(shape):
            old = self.shape[index - lead] if index >= lead else 1
            size = old if size == -1 else size
            if lead < 0 or old not in (1, size):
                raise ValueError(f"{list(self.shape)} does not broadcast to {list(shape)}")
            stride = self.strides[index - lead] if index >= lead else 0
            new_shape.append(size)
            strides.append(0 if old == 1 and size != 1 else stride)
        return self._with(tuple(new_shape), tuple(strides))

    def reshape(self, shape: Shape) -> View | None:
        """The view with its elements, in order, in another shape; None if no strides express that."""
        strides = reshape_strides(self.shape, self.strides, shape) if numel(shape) == self.numel else None
        return None if strides is None else self._with(tuple(shape), strides)

    def _with(self, shape: Shape, strides: Shape, offset: int | None = None) -> View:
        return replace(self, shape=shape, strides=strides, offset=self.offset if offset is None else offset)


def numel(shape: Sequence[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def contiguous_strides(shape: Sequence[int]) -> Shape:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def is_contiguous(shape: Shape, strides: Shape) -> bool:
    if 0 in shape:
        return True
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def collapse(size: Sequence[int], *strides: Sequence[int]) -> tuple[list[int], list[list[int]]]:
    """Sizes and strides without dimensions of size 1, with neighbours merged if every operand's strides allow it."""
    merged: list[int] = []
    merged_strides: list[list[int]] = [[] for _ in strides]
    for dim, length in enumerate(size):
        if length == 1:
            continue
        step = [stride[dim] for stride in strides]
        if merged and all(own[-1] == length * inner for own, inner in zip(merged_strides, step, strict=True)):
            merged[-1] *= length
            for own, inner in zip(merged_strides, step, strict=True):
                own[-1] = inner
            continue
        merged.append(length)
        for own, inner in zip(merged_strides, step, strict=True):
            own.append(inner)
    return merged, merged_strides


def reshape_strides(shape: Shape, strides: Shape, new_shape: Sequence[int]) -> Shape | None:
    """Strides by which memory viewed as (shape, strides) has `new_shape`; None if no strides do.

    Old dimensions are merged into the longest runs that are evenly spaced in memory; the new shape must split
    each run without crossing into the next.
    """
    if numel(shape) == 0:
        return contiguous_strides(new_shape)
    runs: list[tuple[int, int]] = []
    for size, stride in zip(shape, strides, strict=True):
        if size == 1:
            continue
        if runs and runs[-1][1] == stride * size:
            runs[-1] = (runs[-1][0] * size, stride)
        else:
            runs.append((size, stride))
    new_strides = [1] * len(new_shape)
    dim = len(new_shape) - 1
    for size, stride in reversed(runs):
        covered = 1
        while covered < size:
            while dim >= 0 and new_shape[dim] == 1:
                dim -= 1
            if dim < 0 or size % (covered * new_shape[dim]):
                return None
            new_strides[dim] = stride * covered
            covered *= new_shape[dim]
            dim -= 1
    for index in range(len(new_shape) - 1, -1, -1):
        if new_shape[index] == 1:
            after = index + 1
            new_strides[index] = new_shape[after] * new_strides[after] if after < len(new_shape) else 1
    return tuple(new_strides)


def broadcast_shapes(*shapes: Sequence[int]) -> Shape:
    """The shape to which shapes broadcast by NumPy's rule; they must be compatible."""
    rank = max((len(shape) for shape in shapes), default=0)
    result = []
    for axis in range(-rank, 0):
        sizes = [shape[axis] for shape in shapes if len(shape) >= -axis]
        result.append(next((size for size in sizes if size != 1), 1))
    return tuple(result)
