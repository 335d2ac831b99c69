"""Computes element-wise groups in the softmax or norm next to them, as its prologue or its epilogue.

Given:  (t = x * scale; s = t + y);  n = layernorm(s);  …  z = s + m
Result: n = layernorm(s = x * scale + y), which stores s too;  …  z = s + m

Given:  n = layernorm(y);  (t = n * scale; s = x + t);  …  z = s + m
Result: s = x + layernorm(y) * scale;  …  z = s + m

Between two norms, a group is the epilogue of the first if nothing else reads that one's result, so that it need not be
stored; else the prologue of the second.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import chain

from cuda_compiler.elementwise.grouping import (
    MAX_READS,
    Group,
    place_of,
    readers_and_writers_of,
    walks_side_by_side,
)
from cuda_compiler.rules.columns import is_by_columns
from cuda_compiler.rules.fused_rows import holds_rows
from cuda_compiler.rules.norms import ROW_KERNELS
from npu_compiler.graph.dtypes import is_float
from npu_compiler.program.views import View

_REACH = 48  # groups between a call over rows and its epilogue


def join_around_rows(groups: Sequence[Group], private: Collection[str]) -> list[Group]:
    """The groups, with those before and behind a call over rows as its prologue and epilogue.

    Args:
        private: The buffers that nothing but these groups reads.
    """
    readers = Counter(chain.from_iterable(group.read_buffers for group in groups))
    inner, read_once = ({name for name in private if readers[name] == count} for count in (0, 1))
    joined = _join_prologues(_join_epilogues(groups, inner, read_once), inner, private)
    return _join_epilogues(joined, inner, {view.buffer for group in joined for view in group.writes})


def _join_prologues(groups: Sequence[Group], inner: Collection[str], private: Collection[str]) -> list[Group]:
    """The groups, with those that precede a call over rows as its prologue.

    Args:
        inner: The buffers that are accessed within one group only.
        private: As in `join_around_rows`.
    """
    left: list[Group | None] = list(groups)
    _, writers = readers_and_writers_of(groups)
    for index, group in enumerate(groups):
        if not _is_over_rows(group) or not holds_rows(group.calls[0], has_prologue=True):
            continue
        x = group.calls[0].inputs[0]
        at = writers.get(x.buffer, [])
        before = left[at[0]] if len(at) == 1 and at[0] < index and x.buffer in private else None
        if before is None or not _takes(group, before) or not _stores_floats(before, inner):
            continue
        if all(other is None or not before.conflicts(other) for other in left[at[0] + 1 : index]):
            left[at[0]], left[index] = None, _with(group, before, group.epilogue)
    return [group for group in left if group is not None]


def _join_epilogues(groups: Sequence[Group], inner: Collection[str], results: Collection[str]) -> list[Group]:
    """The groups, with those that follow a call over rows as its epilogue.

    Args:
        inner: As in `_join_prologues`.
        results: The buffers of the results of calls over rows that may have one.
    """
    left: list[Group | None] = list(groups)
    for index, group in enumerate(groups):
        out = group.calls[0].outputs[0]
        if not _is_over_rows(group) or group.epilogue is not None or out.buffer not in results:
            continue
        if not holds_rows(group.calls[0], group.prologue is not None):  # a longer one is work for more than one block
            continue
        for at in range(index + 1, min(index + 1 + _REACH, len(left))):
            after = left[at]
            if after is None or out.buffer not in after.read_buffers:
                continue
            after = _in_order_of(out, after)
            if not _gives(group, after):
                continue
            moves = not any(other is not None and after.conflicts(other) for other in left[index + 1 : at])
            if moves and _stores_floats(after, inner):
                reads = [view for view in after.reads if view.buffer != out.buffer]
                epilogue = Group(after.calls, reads, after.writes, after.inlined)
                left[index], left[at] = _with(group, group.prologue, epilogue), None
                break
    return [group for group in left if group is not None]


def _is_over_rows(group: Group) -> bool:
    """Whether a group is a softmax or norm of rows, not columns, that no rule has made a kernel of yet."""
    call = group.calls[0]
    return call.kernel in ROW_KERNELS and not call.source and not is_by_columns(call)


def _with(rows: Group, before: Group | None, after: Group | None) -> Group:
    """A call over rows with a prologue and an epilogue, either of which may be None."""
    (call,) = rows.calls
    own = call.inputs if before is None else call.inputs[1:]
    sides = [group for group in (before, after) if group is not None]
    reads = dict.fromkeys(chain(own, *(group.loads for group in sides)))
    return Group([call], list(reads), [*call.outputs, *(x for group in sides for x in group.writes)], {}, before, after)


def _takes(rows: Group, before: Group) -> bool:
    """Whether the call over rows can compute the group: its first operand, in row-major order, is the last result."""
    x, *others = rows.calls[0].inputs
    if not before.is_elementwise or x.numel != before.numel or not is_float(x.dtype):
        return False
    apart = rows.written_buffers.isdisjoint(before.read_buffers | before.written_buffers)
    apart = apart and before.written_buffers.isdisjoint(view.buffer for view in others)
    last = place_of(before.calls[-1].outputs[0])
    fits = last == place_of(x) and len(before.loads) + len(rows.loads) - 1 <= MAX_READS
    return apart and fits and (rows.epilogue is None or _reads_own_elements(rows.epilogue, before))


def _in_order_of(x: View, group: Group) -> Group:
    """A group that walks its elements in the order of `x`, where it reads that in another one, as a copy does.

    It is the group itself if it is in that order already or cannot be.
    """
    views = [view for call in group.calls for view in (*call.inputs, *call.outputs)]
    read = next((view for view in group.reads if view.buffer == x.buffer), x)
    order = sorted(range(read.rank), key=lambda dim: -read.strides[dim])
    if not group.is_elementwise or group.inlined or order == [*range(read.rank)]:
        return group
    if any(view.shape != read.shape for view in views) or place_of(read.permute(order)) != place_of(x):
        return group
    calls = [
        replace(
            call,
            inputs=tuple(view.permute(order) for view in call.inputs),
            outputs=tuple(view.permute(order) for view in call.outputs),
        )
        for call in group.calls
    ]
    reads, writes = ([view.permute(order) for view in side] for side in (group.reads, group.writes))
    return Group(calls, reads, writes)


def _gives(rows: Group, after: Group) -> bool:
    """Whether the call over rows can compute the group, which reads its result by elements in row-major order."""
    out = rows.calls[0].outputs[0]
    own = [view for view in after.reads if view.buffer == out.buffer]
    if [place_of(view) for view in own] != [place_of(out)] or after.numel != out.numel or after.inlined:
        return False
    apart = after.written_buffers.isdisjoint(rows.read_buffers | rows.written_buffers)
    fits = walks_side_by_side(after) and len(rows.loads) + len(after.loads) - 1 <= MAX_READS
    return apart and fits and (rows.prologue is None or _reads_own_elements(after, rows.prologue))


def _reads_own_elements(after: Group, before: Group) -> bool:
    """Whether a thread of an epilogue reads, of what the prologue writes, only elements that it has written itself."""
    written = {place_of(view) for view in before.writes}
    return all(view.buffer not in before.written_buffers or place_of(view) in written for view in after.loads)


def _stores_floats(group: Group, inner: Collection[str]) -> bool:
    """Whether nothing but floats of a group's results goes to memory; `inner` as in `_join_prologues`.

    Paged attention relies on it: see `rotary_updates.py`.
    """
    return all(is_float(view.dtype) for view in group.writes if view.buffer not in inner)
