"""`Region`: the elements of a buffer that a view shows, whatever the order of its dimensions."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from npu_compiler.graph.dtypes import itemsize
from npu_compiler.program.views import View, contiguous_strides


@dataclass(frozen=True)
class Region:
    """Elements of a buffer.

    Attributes:
        walk: (stride, size) of what is walked, ascending, those that are one walk joined.
    """

    offset: int
    walk: tuple[tuple[int, int], ...]
    dtype: str

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(size for _, size in self.walk)

    @property
    def bytes(self) -> tuple[int, int] | None:
        """The first of its bytes and the one behind the last; None where others lie between."""
        if not (len(self.walk) == 1 and self.walk[0][0] == 1):
            return None
        each = itemsize(self.dtype)
        return self.offset * each, (self.offset + self.size) * each

    def view(self, buffer: str) -> View:
        """The region as a view."""
        strides, sizes = zip(*reversed(self.walk), strict=True) if self.walk else ((1,), (1,))
        return View(buffer, sizes, strides, self.offset, self.dtype)

    def packed(self, view: View, name: str) -> View | None:
        """A view of this region in a buffer that has nothing else; None where it is walked in no such way."""
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
    """The region that a view shows."""
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
    """The smallest part of a view with all elements that another view of its buffer shows too; None without any."""
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
    """The number of elements of a buffer up to the last one of a view."""
    return view.offset + sum(stride * (size - 1) for stride, size in zip(view.strides, view.shape, strict=True)) + 1


def _shown(flags: np.ndarray, view: View) -> np.ndarray:
    """The flags of a view's elements."""
    return np.ndarray(view.shape, np.bool_, flags.data, view.offset, view.strides)


__all__ = ["Region", "common", "region_of"]
