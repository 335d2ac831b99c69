"""Groups of element-wise calls, each of which becomes one kernel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import gcd
from typing import NamedTuple

from cuda_compiler.op_classify import is_elementwise
from npu_compiler.program.kernels import KernelCall
from npu_compiler.program.views import Shape, View, collapse

MAX_CALLS = 64
MAX_READS = 24
MAX_LOADS = 64  # with those of parts, of which each thread loads one
_WINDOW = 48  # calls to search backwards for a group to fuse with


class Place(NamedTuple):
    """A view's addressing in normal form: equal for views of the same elements in the same row-major order."""

    buffer: str
    dtype: str
    offset: int
    sizes: Shape
    strides: Shape

    @property
    def end(self) -> int:
        return self.offset + sum((size - 1) * stride for size, stride in zip(self.sizes, self.strides, strict=True)) + 1


@lru_cache(maxsize=16384)
def place_of(view: View) -> Place:
    """A view's normal form: dimensions of size 1 dropped, adjacent dimensions merged where one stride covers both."""
    sizes, (strides,) = collapse(view.shape, view.strides)
    return Place(view.buffer, view.dtype, view.offset, tuple(sizes), tuple(strides))


@dataclass(frozen=True)
class Rows:
    """The rows over which a group's reductions go: which elements, by their numbers in the group's order, form each.

    Attributes:
        kept: A view of no buffer, whose element of a row-major number is the number of that row's first element.
        reduced: One whose elements are the distances from there to each element of a row.
        operands: The operand of each reduction in order, as a view by the elements' numbers.
    """

    kept: View
    reduced: View
    operands: tuple[View, ...]


@dataclass(eq=False)
class Group:
    """Calls that one kernel runs in order; one neither element-wise nor a reduction with such is a group of its own.

    Attributes:
        reads: The views that the calls read, each `Place` once; the group's own results stay in registers.
        writes: The views that the kernel writes, each `Place` once.
        prologue: The group whose last result a call over rows takes as its first operand, without reading it from
            memory; None where every operand is read.
        epilogue: The group that takes the result of a call over rows, without reading it from memory, before anything
            is stored; None where only that result is.
        rows: The rows of the reductions among the calls, whose other calls are element-wise; None without any such.
        inlined: Buffer that no kernel writes → the parts that compute its elements where the calls read them.
        kept: The last call's result if the kernel that computes the group as a part stores it too; else None.
        beside: The groups that one launch computes, each by blocks of its own; empty for a group as such.
    """

    calls: list[KernelCall]
    reads: list[View] = field(default_factory=list)
    writes: list[View] = field(default_factory=list)
    inlined: Mapping[str, Sequence[Part]] = field(default_factory=dict)
    prologue: Group | None = None
    epilogue: Group | None = None
    rows: Rows | None = None
    kept: View | None = None
    beside: Sequence[Group] = ()

    def __post_init__(self) -> None:
        self.inner_loads = [
            view
            for name in dict.fromkeys(view.buffer for view in self.reads)
            for part in self.inlined.get(name, ())
            for view in part.group.loads
        ]
        self.read_buffers = {view.buffer for view in self.loads}
        self.written_buffers = {view.buffer for view in self.writes}
        self.is_elementwise = self.rows is None and not self.beside and all(map(is_elementwise, self.calls[:1]))
        self.numel = next((call.outputs[0].numel for call in self.calls), 0)

    @property
    def loads(self) -> list[View]:
        """The views that the kernel loads from memory, those of inlined parts included."""
        own = [view for view in self.reads if view.buffer not in self.inlined]
        return list(dict.fromkeys([*own, *self.inner_loads]))

    def conflicts(self, other: Group) -> bool:
        """Whether two groups must keep their order: one writes a buffer that the other reads or writes."""
        return not (
            self.written_buffers.isdisjoint(other.read_buffers)
            and self.written_buffers.isdisjoint(other.written_buffers)
            and self.read_buffers.isdisjoint(other.written_buffers)
        )

    def is_related(self, earlier: Group) -> bool:
        """Whether fusing two groups saves memory traffic: one reads the other's result, or both read the same value."""
        if not self.read_buffers.isdisjoint(earlier.written_buffers):
            return True
        shared = self.read_buffers & earlier.read_buffers
        return bool(shared) and not {place_of(view) for view in self.reads if view.buffer in shared}.isdisjoint(
            place_of(view) for view in earlier.reads if view.buffer in shared
        )


@dataclass(frozen=True)
class Part:
    """A group that computes the elements of a buffer whose coordinate along one dimension lies in an interval.

    The buffer is [outer, size, inner] in row-major order, and `group`'s result [outer, high - low, inner].
    """

    group: Group
    size: int
    inner: int
    low: int
    high: int


def readers_and_writers_of(groups: Sequence[Group]) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
    """Buffer → the indices of the groups that read it, and buffer → those of the groups that write it."""
    readers: dict[str, list[int]] = {}
    writers: dict[str, list[int]] = {}
    for index, group in enumerate(groups):
        for names, touching in ((group.read_buffers, readers), (group.written_buffers, writers)):
            for name in names:
                touching.setdefault(name, []).append(index)
    return readers, writers


def find_groups(calls: Sequence[KernelCall]) -> list[Group]:
    """Fuse greedily: each element-wise call joins the nearest earlier group that it shares a value with.

    Given:  t = a * b;  m = x @ w;  u = t + m;  v = gelu(u)
    Result: m = x @ w;  (t = a * b; u = t + m; v = gelu(u))

    The call moves up to the group, or the group down to the call, if nothing between them touches the same buffers in a
    way whose order matters; buffers are compared by name. A group is one loop over its elements, so its calls all have
    the same number of elements, and a value that they share has the same `Place` in each.
    """
    groups: list[Group] = []
    for call in calls:
        groups.append(Group([call], list(dict.fromkeys(call.inputs)), list(call.outputs)))
        if groups[-1].is_elementwise:
            _absorb(groups, len(groups) - 1)
    return groups


def join_neighbours(groups: Sequence[Group]) -> list[Group]:
    """The groups, with neighbours of equal size that read different elements of a buffer as one, to save a launch.

    Given:  q = copy(x[:, :64]);  k = copy(x[:, 64:128])
    Result: (q = copy(x[:, :64]); k = copy(x[:, 64:128]))
    """
    joined: list[Group] = []
    for group in groups:
        merged = None
        if joined and walks_side_by_side(joined[-1]) and walks_side_by_side(group):
            before = joined[-1]
            related = before.numel == group.numel and not before.read_buffers.isdisjoint(group.read_buffers)
            merged = merge(before, group) if related and before.written_buffers.isdisjoint(group.read_buffers) else None
        if merged is None:
            joined.append(group)
        else:
            joined[-1] = merged
    return joined


def walks_side_by_side(group: Group) -> bool:
    """Whether the group is element-wise and walks consecutive elements of memory, or the same one, everywhere."""
    places = [place_of(view) for view in (*group.loads, *group.writes)]
    return group.is_elementwise and all(place.strides[-1:] <= (1,) for place in places)


def _absorb(groups: list[Group], index: int) -> None:
    """Merge the group at `index` with earlier groups until `_partner` finds none."""
    while (partner := _partner(groups, index)) is not None:
        at, merged, moves_up = partner
        groups[at if moves_up else index] = merged
        del groups[index if moves_up else at]
        index = at if moves_up else index - 1


def _partner(groups: list[Group], index: int) -> tuple[int, Group, bool] | None:
    """The nearest earlier group that the group at `index` can merge with, or None if there is none.

    Returns:
        Its index, the merged group, and whether the merged group stands at that index rather than at `index`.
    """
    group = groups[index]
    may_move_up = True
    for at in range(index - 1, max(-1, index - 1 - _WINDOW), -1):
        other = groups[at]
        fits = other.is_elementwise and other.numel == group.numel and group.is_related(other)
        if fits and (may_move_up or not any(other.conflicts(between) for between in groups[at + 1 : index])):
            merged = merge(other, group)
            if merged is not None:
                return at, merged, may_move_up
        may_move_up = may_move_up and not group.conflicts(other)
    return None


def merge(first: Group, second: Group) -> Group | None:
    """The fusion of two groups, `first` before `second`; None if it is not legal or exceeds the limits of one kernel.

    Each thread reads, computes and writes its own elements only. So once a view is written, the group may access its
    buffer only through the same `Place`, or through a `Place` that does not overlap that view.
    """
    calls = first.calls + second.calls
    inlined = {**first.inlined, **second.inlined}
    inner = {view.buffer for group in (first, second) for view in group.inner_loads}
    if len(calls) > MAX_CALLS or not inner.isdisjoint(first.written_buffers | second.written_buffers):
        return None
    reads: dict[Place, View] = {}
    writes: dict[Place, View] = {}
    for call in calls:
        for view in call.inputs:
            place = place_of(view)
            if any(may_overlap(place, written) for written in writes if written != place):
                return None
            if place not in writes:
                reads[place] = view
        for view in call.outputs:
            place = place_of(view)
            if any(may_overlap(place, other) for other in (*writes, *reads) if other != place):
                return None
            writes[place] = view
    if len(reads) > MAX_READS:
        return None
    return Group(calls, list(reads.values()), list(writes.values()), inlined)


def may_overlap(a: Place, b: Place) -> bool:
    """Whether two places in one buffer may overlap.

    They are taken to if their dtypes differ; else if their ranges from first to last element intersect, unless all
    their strides are multiples of a number by which their offsets differ, as those of even and odd columns, or they are
    different columns of the same rows.
    """
    if a.buffer != b.buffer or a.dtype == b.dtype and (a.offset >= b.end or b.offset >= a.end):
        return False
    if a.dtype != b.dtype:
        return True
    may_meet = (b.offset - a.offset) % max(gcd(*a.strides, *b.strides), 1) == 0
    return may_meet and not any(_are_apart(a, b, row) for row in {*a.strides, *b.strides} if row > 1)


def _are_apart(a: Place, b: Place, row: int) -> bool:
    """Whether two places in rows of `row` elements lie in columns of which one's end before the other's begin."""
    first, second = (_columns(place, row) for place in (a, b))
    return max(first.stop, second.stop) <= row and (first.stop <= second.start or second.stop <= first.start)


def _columns(place: Place, row: int) -> range:
    """The columns from the first to the last of a place in rows of `row` elements; beyond `row` are those of others."""
    steps = ((size - 1) * stride for size, stride in zip(place.sizes, place.strides, strict=True) if stride % row)
    first = place.offset % row
    return range(first, first + sum(steps) + 1)
