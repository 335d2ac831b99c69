"""Computes picked and concatenated elements where an element-wise kernel reads them, instead of storing them first.

Given:  g = gather(x, dim=-1, index);  (u = g / s; v = u + y)
Result: (u = x[…, index] / s; v = u + y)

Given:  t[..., 0] = neg(b);  t[..., 1] = copy(a);  (u = t * s; v = u + y)
Result: (u = (neg(b) or a, by the last coordinate) * s; v = u + y)

Given:  (a = b + c; t[:, :8] = copy(a));  t[:, 8:] = copy(d);  u = relu(t);  v = a * e
Result: a = b + c;  u = relu(a or d, by the last coordinate);  v = a * e
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence

from cuda_compiler.elementwise.grouping import (
    MAX_CALLS,
    MAX_LOADS,
    Group,
    Part,
    merge,
    place_of,
    readers_and_writers_of,
)
from cuda_compiler.elementwise.picks import Pick, is_pick, pick_of
from cuda_compiler.rules.movement import is_transposing
from npu_compiler.program.elementwise import elementwise_kernel
from npu_compiler.program.kernels import KernelCall, distinct_bytes
from npu_compiler.program.placement import is_copy
from npu_compiler.program.views import View, numel

_REACH = 48  # groups between a part and its reader


def inline_reads(groups: Sequence[Group], private: Collection[str]) -> list[Group]:
    """The groups, those without that compute parts of a buffer which a single element-wise group reads.

    Args:
        private: The buffers that nothing but these groups reads.
    """
    groups, origins = _copying_apart(groups, private)
    left: list[Group | None] = list(groups)
    readers, writers = readers_and_writers_of(groups)
    for index, group in enumerate(groups):
        if not group.is_elementwise:
            continue
        parts: dict[str, list[Part]] = {}
        for view in group.reads:
            name, at = view.buffer, writers.get(view.buffer, [])
            if name not in private or readers[name] != [index] or not at or not is_near(at, index):
                continue
            found = _parts(name, [left[each] for each in at], readers, private) if _reads_once(group, view) else []
            tiled = _picks(found) and is_transposing_copy(group)
            if found and not tiled and may_move(at, index, left):
                parts[name] = found
        reader = left[index]
        assert reader is not None
        left[index] = joined = _inlined(reader, parts)
        for name in joined.inlined.keys() & parts.keys():
            for each in writers[name]:
                left[each] = None
    _rejoin(left, origins)
    return [group for group in left if group is not None]


def _copying_apart(groups: Sequence[Group], private: Collection[str]) -> tuple[list[Group], dict[int, int]]:
    """The groups, with copies into a buffer that one element-wise group reads as groups right before that one.

    Only copies of what is in memory anyway, since the rest of the group loads it or another group reads it too, and
    what nothing writes until it is read.

    Returns:
        The groups, and the index of each such copy → that of the rest of its group.
    """
    readers, writers = readers_and_writers_of(groups)
    rests, before = list(groups), defaultdict[int, list[tuple[Group, int]]](list)
    for index, group in enumerate(groups):
        rest = group.calls
        for call in group.calls if group.is_elementwise and len(group.calls) > 1 else ():
            others = [each for each in rest if each is not call]
            reading = readers.get(call.outputs[0].buffer, [])
            single = call.outputs[0].buffer in private and [groups[each].is_elementwise for each in reading] == [True]
            if not (single and others and is_copy(call) and _can_do_without(others, call, readers, private)):
                continue
            if not any(index < writer < reading[0] for writer in writers.get(call.inputs[0].buffer, ())):
                rest = others
                before[reading[0]].append((_group_of([call], group), index))
        if rest is not group.calls:
            rests[index] = _group_of(rest, group)
    parted: list[Group] = []
    origins: dict[int, int] = {}
    moved_to: list[int] = []
    for index, group in enumerate(rests):
        for copying, origin in before[index]:
            origins[len(parted)] = moved_to[origin]
            parted.append(copying)
        moved_to.append(len(parted))
        parted.append(group)
    return parted, origins


def _rejoin(left: list[Group | None], origins: Mapping[int, int]) -> None:
    """Put copies that no group has taken back into the groups that they come from."""
    for index, origin in origins.items():
        before, copying = left[origin], left[index]
        joined = merge(before, copying) if before is not None and copying is not None else None
        if joined is not None:
            left[origin], left[index] = joined, None


def _can_do_without(
    calls: Sequence[KernelCall], copy: KernelCall, readers: Collection[str], private: Collection[str]
) -> bool:
    """Whether the other calls of a group neither touch a copy's result nor leave its source in registers."""
    source, target = place_of(copy.inputs[0]), copy.outputs[0].buffer
    if any(view.buffer == target for call in calls for view in (*call.inputs, *call.outputs)):
        return False
    written = any(place_of(view) == source for call in calls for view in call.outputs)
    if written:
        return source.buffer in readers or source.buffer not in private
    return any(place_of(view) == source for call in calls for view in call.inputs)


def _group_of(calls: list[KernelCall], whole: Group) -> Group:
    """Some calls of a group as a group."""
    written = {place_of(view) for call in calls for view in call.outputs}
    reads = {place_of(view): view for call in calls for view in call.inputs if place_of(view) not in written}
    writes = {place_of(view): view for call in calls for view in call.outputs}
    return Group(calls, list(reads.values()), list(writes.values()), whole.inlined)


def is_near(writers: Sequence[int], reader: int) -> bool:
    """Whether the groups at the indices `writers` precede the one at `reader`, none by too many groups."""
    return all(0 < reader - each <= _REACH for each in writers)


def _parts(
    buffer: str, groups: Sequence[Group | None], readers: dict[str, list[int]], private: Collection[str]
) -> list[Part]:
    """The groups as the parts of a buffer that they compute; empty if they do anything else or do not cover it."""
    results: list[tuple[Group, View]] = []
    for group in groups:
        if group is None or not (group.is_elementwise or _is_readable_pick(group.calls[0])):
            return []
        result = only_result(group, readers, private)
        if result is None or result.buffer != buffer:
            return []
        results.append((group, result))
    if len(results) > 1:
        return _split(results)
    ((group, view),) = results
    if not is_pick(group.calls[0]):
        return []
    out = pick_of(group.calls[0]).out
    return [Part(group, 1, view.numel, 0, 1)] if out.is_contiguous and out.offset == 0 else []


def only_result(group: Group, readers: Collection[str], private: Collection[str]) -> View | None:
    """The result of a group's last call if nothing else of the group is read by others, else None."""
    stored = [view for view in group.writes if view.buffer not in private or view.buffer in readers]
    return stored[0] if stored == [group.calls[-1].outputs[0]] else None


def _is_readable_pick(call: KernelCall) -> bool:
    """Whether a call picks elements of a table that has some, and so can be read at any coordinate 0."""
    return is_pick(call) and call.inputs[0].numel > 0


def _split(results: Sequence[tuple[Group, View]]) -> list[Part]:
    """The results as parts of one buffer, each an interval of every dimension; empty if they do not divide it."""
    views = [view for _, view in results]
    first = views[0]
    if any(view.rank != first.rank for view in views):
        return []
    dims = [dim for dim in range(first.rank) if any(view.shape[dim] > 1 for view in views)]
    found = [{view.strides[dim] for view in views if view.shape[dim] > 1} for dim in dims]
    if any(len(each) > 1 for each in found):
        return []
    steps = [step for each in found for step in each]
    steps += [] if steps and steps[-1] == 1 else [1]
    total = sum(view.numel for view in views)
    bounds = [total, *steps]
    if any(step <= 0 or bound % step for bound, step in zip(bounds, steps, strict=False)):
        return []
    extents = [bound // step for bound, step in zip(bounds, steps, strict=False)]
    intervals = []
    for view in views:
        sizes = [view.shape[dim] for dim in dims] + [1] * (len(steps) - len(dims))
        lows = [view.offset % bound // step for bound, step in zip(bounds, steps, strict=False)]
        if any(low + size > extent for low, size, extent in zip(lows, sizes, extents, strict=True)):
            return []
        intervals.append([(low, low + size) for low, size in zip(lows, sizes, strict=True)])
    if any(view.offset >= total for view in views):
        return []
    return _divided([group for group, _ in results], intervals, extents, first.dtype)


def _divided(
    groups: Sequence[Group], intervals: Sequence[Sequence[tuple[int, int]]], extents: Sequence[int], dtype: str
) -> list[Part]:
    """The groups as parts of a buffer; those of a part that is divided along another dimension are inlined in its own.

    Args:
        intervals: The elements along each dimension of the buffer that each group computes.
        extents: The buffer's dimensions.

    Returns:
        Empty if the groups do not divide the buffer.
    """
    for at, extent in enumerate(extents):
        classes = sorted({interval[at] for interval in intervals})
        bounds = [0, *(high for _, high in classes)]
        if len(classes) == 1 or bounds[-1] != extent or [low for low, _ in classes] != bounds[:-1]:
            continue
        parts = []
        for low, high in classes:
            members = [each for each, interval in enumerate(intervals) if interval[at] == (low, high)]
            sizes = [*extents[:at], high - low, *extents[at + 1 :]]
            own = [[*intervals[each][:at], (0, high - low), *intervals[each][at + 1 :]] for each in members]
            whole = all(bound == (0, size) for bound, size in zip(own[0], sizes, strict=True))
            group = groups[members[0]] if len(members) == 1 and whole else None
            if group is None:
                inner = _divided([groups[each] for each in members], own, sizes, dtype)
                group = _reading_all(inner, numel(sizes), dtype) if inner else None
            if group is None:
                break
            parts.append(Part(group, extent, numel(extents[at + 1 :]), low, high))
        else:
            return parts
    return []


def _reading_all(parts: Sequence[Part], count: int, dtype: str) -> Group:
    """A group that computes `count` elements by parts of them."""
    node = parts[0].group.calls[-1].node
    source, result = (View(f"{node}.{name}", (count,), (1,), 0, dtype) for name in ("parts", "part"))
    copy = KernelCall("copy_kernel", "", (source,), (result,), {"scalars": [None]}, node)
    return Group([copy], [source], [result], {source.buffer: parts})


def may_move(at: Sequence[int], index: int, left: Sequence[Group | None]) -> bool:
    """Whether the groups `at` may be computed by group `index`: nothing writes what they read from there to here."""
    return not any(
        group is not None and not group.written_buffers.isdisjoint(moved.read_buffers)
        for each in at
        if (moved := left[each]) is not None
        for group in left[each + 1 : index + 1]
    )


def _picks(parts: Sequence[Part]) -> bool:
    return any(is_pick(part.group.calls[0]) for part in parts)


def is_transposing_copy(group: Group) -> bool:
    """Whether a group is one copy that goes by square tiles, which it reads from memory."""
    decl = elementwise_kernel(group.calls[0])
    return len(group.calls) == 1 and decl is not None and decl.op.name == "copy" and is_transposing(group.calls[0])


def _reads_once(group: Group, view: View) -> bool:
    """Whether a group reads each element of a view's buffer once, and by no other view."""
    places = [place_of(each) for each in group.reads if each.buffer == view.buffer]
    return len(places) == 1 and 0 not in places[0].strides and numel(places[0].sizes) == group.numel


def _inlined(reader: Group, parts: Mapping[str, Sequence[Part]]) -> Group:
    """The reader that computes parts itself: those of all buffers, or if these are too many, of the first that fit."""
    joined = _reading(reader, parts)
    if joined is not None:
        return joined
    for name, each in parts.items():
        reader = _reading(reader, {name: each}) or reader
    return reader


def _reading(reader: Group, parts: Mapping[str, Sequence[Part]]) -> Group | None:
    """The reader that computes parts of some more buffers itself; None if its kernel would exceed the limits."""
    joined = Group(reader.calls, reader.reads, reader.writes, {**reader.inlined, **parts})
    too_many = len(joined.loads) > MAX_LOADS or len(all_calls(joined)) > MAX_CALLS
    return None if too_many else joined


def all_calls(group: Group) -> list[KernelCall]:
    """The element-wise calls of a group and of the parts that it computes."""
    inner = [call for parts in group.inlined.values() for part in parts for call in all_calls(part.group)]
    return [call for call in (*group.calls, *inner) if not is_pick(call)]


def picks_of(group: Group) -> list[Pick]:
    """The picks among the parts that a group computes, and among their own parts."""
    parts = [part.group for parts in group.inlined.values() for part in parts]
    own = [pick_of(each.calls[0]) for each in parts if is_pick(each.calls[0])]
    return [*own, *(pick for each in parts for pick in picks_of(each))]


def loaded_bytes(group: Group) -> int:
    """Bytes that a group loads, of a table no more than what is picked from it."""
    picked: Counter[View] = Counter()
    for pick in picks_of(group):
        picked[pick.table] += distinct_bytes(pick.out)
    sizes = {view: distinct_bytes(view) for view in group.loads}
    return sum(min(size, picked.get(view, size)) for view, size in sizes.items())
