"""`Region`: the set of elements of a buffer that a view accesses, whatever the order of its dimensions."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from npu_compiler.graph.dtypes import itemsize
from npu_compiler.program.views import View, contiguous_strides


@dataclass(frozen=True)
class Region:
    """A strided set of elements of a buffer.

    Attributes:
        offset: Number of the first element.
        walk: (stride, size) of each dimension in ascending order, with contiguous dimensions merged.
    """

    offset: int
    walk: tuple[tuple[int, int], ...]
    dtype: str

    @property
    def size(self) -> int:
        """Number of elements of the region."""
        return math.prod(size for _, size in self.walk)

    @property
    def bytes(self) -> tuple[int, int] | None:
        """The region's first byte and one past its last; None if it is not contiguous."""
        if not (len(self.walk) == 1 and self.walk[0][0] == 1):
            return None
        each = itemsize(self.dtype)
        return self.offset * each, (self.offset + self.size) * each

    def view(self, buffer: str) -> View:
        """The region as a view of a buffer, with the largest stride first."""
        strides, sizes = zip(*reversed(self.walk), strict=True) if self.walk else ((1,), (1,))
        return View(buffer, sizes, strides, self.offset, self.dtype)

    def packed(self, view: View, name: str) -> View | None:
        """A view of this region as it would be if a buffer held the region alone, packed.

        None if its strides do not allow it.
        """
        own = tuple(reversed(contiguous_strides([size for _, size in reversed(self.walk)])))
        strides = []
        for stride, size in zip(view.strides, view.shape, strict=True):
            if size == 1 or stride == 0:
                strides.append(min(stride, 1))
                continue
            places = [
                step * (stride // first)
                for (first, length), step in zip(self.walk, own, strict=True)
                if stride % first == 0 and stride // first * (size - 1) < length
            ]
            if not places:
                return None
            strides.append(places[-1])
        return replace(view, buffer=name, strides=tuple(strides), offset=0)


def region_of(view: View) -> Region:
    """The region of elements that a view accesses."""
    walk: list[tuple[int, int]] = []
    for stride, size in sorted(zip(view.strides, view.shape, strict=True)):
        if size == 1 or stride == 0:
            continue
        if walk and stride == walk[-1][0] * walk[-1][1]:
            walk[-1] = walk[-1][0], walk[-1][1] * size
        else:
            walk.append((stride, size))
    return Region(view.offset, tuple(walk), view.dtype)


def common(first: View, second: View) -> View | None:
    """The smallest slice of a view that contains all elements which another view of the same buffer accesses too.

    None if they have no element in common; the whole view if their dtypes are different.
    """
    if first.dtype != second.dtype:
        return first
    flags = np.zeros(max(map(_end, (first, second))), np.bool_)
    _shown(flags, second)[...] = True
    shared = _shown(flags, first)
    if not shared.any():
        return None
    for dim in range(first.rank):
        others = tuple(other for other in range(first.rank) if other != dim)
        places = np.flatnonzero(shared.any(axis=others))
        first = first.slice(dim, int(places[0]), int(places[-1]) + 1)
    return first


def _end(view: View) -> int:
    """One past the number of the last element that a view accesses in its buffer."""
    return view.offset + sum(stride * (size - 1) for stride, size in zip(view.strides, view.shape, strict=True)) + 1


def _shown(flags: np.ndarray, view: View) -> np.ndarray:
    """The flags, one for each element of the buffer, of the elements of a view."""
    return np.ndarray(view.shape, np.bool_, flags.data, view.offset, view.strides)


__all__ = ["Region", "common", "region_of"]
