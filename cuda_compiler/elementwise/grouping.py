"""Groups of element-wise calls, and of gathers beside them, each of which becomes one kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import gcd
from typing import NamedTuple

from cuda_compiler.op_classify import is_elementwise
from npu_compiler.program.kernels import KernelCall
from npu_compiler.program.views import Shape, View, collapse

MAX_CALLS = 64
MAX_READS = 24
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


def is_gather(call: KernelCall) -> bool:
    """Whether each output element is one of the first input's, which the index's element of the same number chooses."""
    return call.kernel == "gather_kernel"


@dataclass(eq=False)
class Group:
    """Calls that one kernel runs in order; a call that is neither element-wise nor a gather is a group of its own.

    Attributes:
        reads: The views that the kernel loads from memory, each `Place` once; its own results stay in registers.
        writes: The views that the kernel writes, each `Place` once.
        sources: The views in which gathers pick elements.
    """

    calls: list[KernelCall]
    reads: list[View] = field(default_factory=list)
    writes: list[View] = field(default_factory=list)
    sources: list[View] = field(default_factory=list)

    @classmethod
    def of(cls, call: KernelCall) -> Group:
        """A group of one call."""
        reads, sources = (call.inputs[1:], call.inputs[:1]) if is_gather(call) else (call.inputs, ())
        return cls([call], list(dict.fromkeys(reads)), list(call.outputs), list(sources))

    def __post_init__(self) -> None:
        self.read_buffers = {view.buffer for view in self.loads}
        self.written_buffers = {view.buffer for view in self.writes}
        self.fuses = is_elementwise(self.calls[0]) or is_gather(self.calls[0])
        self.numel = self.calls[0].outputs[0].numel

    @property
    def is_elementwise(self) -> bool:
        """Whether a generated kernel computes the group; a gather alone has a kernel of its own."""
        return self.fuses and (len(self.calls) > 1 or not is_gather(self.calls[0]))

    @property
    def loads(self) -> list[View]:
        """All views that the kernel loads from memory."""
        return [*self.reads, *self.sources]

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


def find_groups(calls: Sequence[KernelCall]) -> list[Group]:
    """Fuse greedily: each element-wise call joins the nearest earlier group that it shares a value with.

    Given:  t = a * b;  m = x @ w;  u = t + m;  v = gelu(u)
    Result: m = x @ w;  (t = a * b; u = t + m; v = gelu(u))

    The call moves up to the group, or the group down to the call, if nothing between them touches the same buffers in a
    way whose order matters; buffers are compared by name. A group is one loop over its elements, so its calls all have
    the same number of elements, and a value that they share has the same `Place` in each. A gather goes through its
    elements in the order in which its reader does.
    """
    groups: list[Group] = []
    for call in _in_readers_order(calls):
        groups.append(Group.of(call))
        if groups[-1].fuses:
            _absorb(groups, len(groups) - 1)
    return groups


def _in_readers_order(calls: Sequence[KernelCall]) -> list[KernelCall]:
    """The calls, where a gather whose result is read transposed has its operands transposed alike."""
    readers: dict[str, set[View]] = {}
    for call in calls:
        for view in call.inputs:
            readers.setdefault(view.buffer, set()).add(view)
    result = []
    for call in calls:
        read = readers.get(call.outputs[0].buffer, set()) if is_gather(call) and call.outputs[0].rank else set()
        order = _order(call.outputs[0], next(iter(read))) if len(read) == 1 else None
        if order is not None:
            call = replace(
                call,
                inputs=tuple(view.permute(order) for view in call.inputs),
                outputs=tuple(view.permute(order) for view in call.outputs),
                params={**call.params, "dim": order.index(call.params["dim"])},
            )
        result.append(call)
    return result


def _order(view: View, other: View) -> list[int] | None:
    """The order of a view's dimensions in which it is another view of the same elements; None if there is none."""
    dims = list(range(view.rank))
    order = sorted(dims, key=lambda dim: (view.strides[dim], view.shape[dim]), reverse=True)
    wanted = [dim for dim, size in enumerate(other.shape) if size > 1]
    places = sorted(wanted, key=lambda dim: (other.strides[dim], other.shape[dim]), reverse=True)
    large = [dim for dim in order if view.shape[dim] > 1]
    if len(large) != len(wanted):
        return None
    by_place = dict(zip(places, large, strict=True))
    chosen = [*(dim for dim in dims if view.shape[dim] == 1), *(by_place[dim] for dim in wanted)]
    return chosen if chosen != dims and place_of(view.permute(chosen)) == place_of(other) else None


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
        fits = other.fuses and other.numel == group.numel and group.is_related(other)
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
    if len(calls) > MAX_CALLS:
        return None
    sources = list(dict.fromkeys((*first.sources, *second.sources)))
    reads: dict[Place, View] = {}
    writes: dict[Place, View] = {}
    for call in calls:
        for view in Group.of(call).reads:
            place = place_of(view)
            if any(_overlap(place, written) for written in writes if written != place):
                return None
            if place not in writes:
                reads[place] = view
        for view in call.outputs:
            place = place_of(view)
            if any(_overlap(place, other) for other in (*writes, *reads) if other != place):
                return None
            writes[place] = view
    if len(reads) + len(sources) > MAX_READS or any(view.buffer in {x.buffer for x in writes} for view in sources):
        return None
    return Group(calls, list(reads.values()), list(writes.values()), sources)


def _overlap(a: Place, b: Place) -> bool:
    """Whether two places in one buffer may overlap.

    They are taken to if their dtypes differ; else if their ranges from first to last element intersect, unless all
    their strides are multiples of a number by which their offsets differ, as those of even and odd columns.
    """
    if a.buffer != b.buffer or a.dtype == b.dtype and (a.offset >= b.end or b.offset >= a.end):
        return False
    return a.dtype != b.dtype or (b.offset - a.offset) % max(gcd(*a.strides, *b.strides), 1) == 0
