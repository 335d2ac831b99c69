"""Views of what a buffer's elements were computed from: the steps that they take there, dimension by dimension.

Given:   s: [2, 4] with strides [4, 1];  t[2, 4, 3] computed from s[:, :, None];  a view [2, 12] of t
Result:  the view takes the steps [(2, 4)] and [(4, 1), (3, 0)] through s, so that as [2, 4, 3] it has strides [4, 1, 0]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from npu_compiler.program.views import View, collapse

Steps = list[tuple[int, int]]
"""(size, stride) of each part of a divided dimension, outermost first."""


@dataclass(frozen=True)
class Located:
    """Elements of a view's buffer in the shape of another view.

    Attributes:
        view: The view whose buffer has the elements.
        offset: Place of the first element.
        steps: The steps from one element to the next, for each dimension.
    """

    view: View
    offset: int
    steps: tuple[Steps, ...]

    @staticmethod
    def of(view: View) -> Located:
        """A view's own elements."""
        return Located(view, view.offset, tuple([each] for each in zip(view.shape, view.strides, strict=True)))

    @property
    def undivided(self) -> View | None:
        """The elements as a view, whose dimensions need not be divided; None if they must be."""
        if any(len(steps) > 1 for steps in self.steps):
            return None
        shape, strides = zip(*(steps[0] for steps in self.steps), strict=True) if self.steps else ((), ())
        return replace(self.view, shape=shape, strides=strides, offset=self.offset)


def through(view: View, target: View, source: View) -> Located | None:
    """The source's elements that a view's are computed from, if each of `target` is computed from the same of `source`.

    Args:
        view: A view of the target's buffer.
        target: A view without repeated elements; `source` has its shape.

    Returns:
        None if the view has other elements than the target's, or if a dimension cannot be divided so that each part of
        it steps through one dimension of the target.
    """
    dims = sorted((dim for dim in range(target.rank) if target.shape[dim] > 1), key=lambda dim: target.strides[dim])
    reach, rest, offset = {}, view.offset - target.offset, source.offset
    for dim in reversed(dims):
        reach[dim], rest = divmod(rest, target.strides[dim])
        offset += reach[dim] * source.strides[dim]
    if rest or any(first < 0 for first in reach.values()):
        return None
    found = []
    for size, stride in zip(view.shape, view.strides, strict=True):
        steps: Steps = []
        left, step = size, stride
        for dim in dims if stride else ():
            extent, inner = target.shape[dim], target.strides[dim]
            if left == 1 or step >= extent * inner:
                continue
            every, rest = divmod(step, inner)
            if rest or (every * (left - 1) >= extent and (extent % every or left % (extent // every))):
                return None
            count = left if every * (left - 1) < extent else extent // every
            steps.append((count, every * source.strides[dim]))
            reach[dim] += every * (count - 1)
            left, step = left // count, extent * inner
        if left > 1 and stride:
            return None
        found.append(merged(steps[::-1] if stride else [(size, 0)]))
    if any(reach[dim] >= target.shape[dim] for dim in dims):
        return None
    return Located(source, offset, tuple(found))


def merged(steps: Steps) -> Steps:
    """The steps with those joined that go on where the next one ends."""
    sizes, (strides,) = collapse([size for size, _ in steps], [stride for _, stride in steps])
    return list(zip(sizes, strides, strict=True)) or [(1, 0)]


def divided(elements: Sequence[Located]) -> list[View] | None:
    """Elements of one shape as views, whose dimensions are divided where one of them needs it; None if that fails."""
    cuts = [
        sorted({1, *(count for each in elements for count in _cuts(each.steps[dim]))})
        for dim in range(len(elements[0].steps))
    ]
    views = []
    for each in elements:
        parts = [_cut(steps, bounds) for steps, bounds in zip(each.steps, cuts, strict=True)]
        known = [part for part in parts if part is not None]
        if len(known) < len(parts):
            return None
        shape = tuple(size for part in known for size, _ in part)
        strides = tuple(stride for part in known for _, stride in part)
        views.append(replace(each.view, shape=shape, strides=strides, offset=each.offset))
    return views


def _cuts(steps: Steps) -> list[int]:
    """The numbers of a dimension's elements after which its parts begin anew."""
    counts = [1]
    for size, _ in reversed(steps):
        counts.append(counts[-1] * size)
    return counts


def _cut(steps: Steps, bounds: Sequence[int]) -> Steps | None:
    """The steps of a dimension, divided after given numbers of its elements; None if these do not divide each other."""
    parts: Steps = []
    for low, high in zip(bounds, bounds[1:], strict=False):
        if high % low:
            return None
        inner = 1
        for size, stride in reversed(steps):
            if low < inner * size:
                if low % inner:
                    return None
                parts.append((high // low, stride * (low // inner)))
                break
            inner *= size
    return parts[::-1] or [(1, 0)]
