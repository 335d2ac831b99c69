"""Reads the pieces of a concatenation where they were copied from, if one element-wise call reads all of it.

Given:   t[:, :8] = copy(a);  t[:, 8:] = copy(b);  u = relu(t);  v = t[:, :8] + c;  w[:, 8:] = copy(t[:, 8:])
Result:  t[:, :8] = copy(a);  t[:, 8:] = copy(b);  u = relu(t);  v = a + c;  w[:, 8:] = copy(b)

Then nothing else reads t, and the call that reads all of it reads the pieces instead (`inline_reads`). The blocks of
dual path networks form a chain of these: each adds to some channels of the concatenation before and appends others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from math import prod

from cuda_compiler.op_classify import is_elementwise
from npu_compiler.program.kernels import KernelCall, readers_and_writers
from npu_compiler.program.placement import Takes, are_apart, is_as_wide, is_copy, moved_view, other_dims
from npu_compiler.program.plan import ExecutionPlan
from npu_compiler.program.views import View

_MOST_PIECES = 48  # that one kernel reads


def read_pieces(plan: ExecutionPlan, takes: Takes) -> tuple[ExecutionPlan, set[str]]:
    """The plan in which other readers of such concatenations read the pieces, and the names of these concatenations.

    Args:
        takes: Whether a kernel can compute a call, given first as it was and then with other views.
    """
    reading = _Reading(plan, takes)
    first = {view.buffer: index for index, call in reversed(list(enumerate(plan.calls))) for view in call.outputs}
    apart = {name for name in sorted(first, key=first.__getitem__) if reading.leave_one_reader(name)}
    return replace(plan, calls=[call for slot in reading.slots for call in slot]), apart


class _Reading:
    """A plan under construction.

    Attributes:
        slots: For each call of the plan, the calls that replace it.
    """

    def __init__(self, plan: ExecutionPlan, takes: Takes) -> None:
        self.slots: list[list[KernelCall]] = [[call] for call in plan.calls]
        self._plan, self._takes = plan, takes
        kept = {view.buffer for view in plan.output_views.values()}
        self._movable = {name for name, buffer in plan.buffers.items() if buffer.kind == "arena" and name not in kept}
        self._reads, self._writes = readers_and_writers(plan.calls)

    def leave_one_reader(self, name: str) -> bool:
        """Let all readers of a concatenation but the one of all its elements read its pieces; whether that was done."""
        readers, writers = self._reads.get(name, set()), self._writes[name]
        if name not in self._movable or len(readers) < 2 or max(writers) > min(readers):
            return False
        pieces = [(slot, call) for slot in sorted(writers) for call in self.slots[slot]]
        if not 1 < len(pieces) <= _MOST_PIECES or not all(is_copy(call) for _, call in pieces):
            return False
        total = prod(self._plan.buffers[name].alloc_shape)
        whole = {slot for slot in readers if self._reads_all(slot, name, total)}
        targets = [call.outputs[0] for _, call in pieces]
        if len(whole) != 1 or sum(target.numel for target in targets) != total:
            return False
        if not all(are_apart(one, other) for one, other in combinations(targets, 2)):
            return False
        changed: dict[int, list[KernelCall]] = {}
        for slot in readers - whole:
            own = [pair for pair in pieces if self._keeps(pair[1].inputs[0].buffer, pair[0], slot)]
            read = [self._reading(call, name, [copy for _, copy in own]) for call in self.slots[slot]]
            changed[slot] = [call for calls in read if calls is not None for call in calls]
            if None in read:
                return False
        for slot, calls in changed.items():
            self.slots[slot] = calls
            for call in calls:
                for view in call.inputs:
                    self._reads.setdefault(view.buffer, set()).add(slot)
        self._reads[name] = whole
        return True

    def _reads_all(self, slot: int, name: str, total: int) -> bool:
        """Whether a single element-wise call reads all elements of a buffer of `total` elements, by one view."""
        calls = self.slots[slot]
        views = [view for call in calls for view in call.inputs if view.buffer == name]
        return len(calls) == 1 and is_elementwise(calls[0]) and [view.numel for view in views] == [total]

    def _keeps(self, source: str, since: int, until: int) -> bool:
        """Whether no call writes a buffer after the one at `since`, up to the one at `until`."""
        return not any(since < slot <= until for slot in self._writes.get(source, ()))

    def _reading(self, call: KernelCall, name: str, pieces: Sequence[KernelCall]) -> list[KernelCall] | None:
        """The call, or copies instead of it, reading what the pieces were copied from; None if that is impossible."""
        if all(view.buffer != name for view in call.inputs):
            return [call]
        inputs = [self._moved(view, pieces) if view.buffer == name else view for view in call.inputs]
        if None not in inputs:
            placed = replace(call, inputs=tuple(view for view in inputs if view is not None))
            wide = all(is_as_wide(new, old) for new, old in zip(placed.inputs, call.inputs, strict=True))
            return [placed] if is_elementwise(call) or wide and self._takes(call, placed) else None
        return _cut(call, pieces) if is_copy(call) else None

    @staticmethod
    def _moved(view: View, pieces: Sequence[KernelCall]) -> View | None:
        """The view of a piece's source with the same elements; None if they are not all in one piece."""
        found = (moved_view(view, piece.outputs[0], piece.inputs[0]) for piece in pieces)
        return next((each for each in found if each is not None), None)


def _cut(copy: KernelCall, pieces: Sequence[KernelCall]) -> list[KernelCall] | None:
    """Copies of the pieces, or of parts of them, that together are a copy of the concatenation; None if none are."""
    (view,), (target,) = copy.inputs, copy.outputs
    for dim in range(view.rank):
        found = [each for piece in pieces for each in _overlap(view, piece, dim)]
        found.sort(key=lambda each: each[0])
        ends = [0, *(high for _, high, _ in found)]
        if [low for low, _, _ in found] == ends[:-1] and ends[-1] == view.shape[dim]:
            return [
                replace(
                    copy,
                    inputs=(source,),
                    outputs=(target.slice(dim, low, high),),
                    flops=copy.flops * (high - low) // view.shape[dim],
                    bytes_moved=copy.bytes_moved * (high - low) // view.shape[dim],
                )
                for low, high, source in found
            ]
    return None


def _overlap(view: View, piece: KernelCall, dim: int) -> Iterator[tuple[int, int, View]]:
    """The interval of a view's dimension in which a piece lies, with what these elements were copied from, if any."""
    (source,), (target,) = piece.inputs, piece.outputs
    if other_dims(view, dim) != other_dims(target, dim) or source.shape != target.shape or view.dtype != source.dtype:
        return
    step = view.strides[dim]
    distance = target.offset - view.offset
    if step < 1 or target.strides[dim] != step or distance % step:
        return
    begin = distance // step
    low, high = max(0, begin), min(view.shape[dim], begin + target.shape[dim])
    if low < high:
        yield low, high, source.slice(dim, low - begin, high - begin)
