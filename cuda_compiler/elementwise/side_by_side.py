"""Launches small element-wise groups together that do not depend on each other, each with blocks of its own.

Given:  t[:, 1:] = rotate(q);  y = x @ w;  t[:, :1] = copy(q[:, :1])
Result: (t[:, 1:] = rotate(q)  |  t[:, :1] = copy(q[:, :1]));  y = x @ w

A launch takes a microsecond or more, whatever little it does. Groups of as many elements as each other become one loop
instead, where that saves memory traffic (`grouping.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

from cuda_compiler.elementwise.grouping import MAX_CALLS, MAX_LOADS, Group, may_overlap, place_of
from cuda_compiler.elementwise.inlining import all_calls, is_transposing_copy, loaded_bytes
from npu_compiler.program.kernels import distinct_bytes
from npu_compiler.program.views import View

_REACH = 24  # groups between two that are launched together
_MEMBERS = 8
_LITTLE = 2**20  # bytes that all but one of them access; more is worth a launch


def place_side_by_side(groups: Sequence[Group]) -> list[Group]:
    """The groups, those that may be launched together as one."""
    left: list[Group | None] = list(groups)
    for index, group in enumerate(groups):
        found = _partner(left, index) if _may_join(group) else None
        if found is not None:
            at, moves_up, joined = found
            left[at], left[index] = (joined, None) if moves_up else (None, joined)
    return [group for group in left if group is not None]


def _partner(left: Sequence[Group | None], index: int) -> tuple[int, bool, Group] | None:
    """The nearest earlier group to launch a group with: its index, whether it stays there, and both as one."""
    group = left[index]
    assert group is not None
    between: list[Group] = []
    may_move_up = True
    for at in range(index - 1, max(-1, index - 1 - _REACH), -1):
        other = left[at]
        if other is None:
            continue
        apart = not _depend(other, group)
        if apart and (may_move_up or not any(_depend(other, each) for each in between)):
            joined = _together(other, group)
            if joined is not None:
                return at, may_move_up, joined
        may_move_up = may_move_up and apart
        between.append(other)
    return None


def _may_join(group: Group) -> bool:
    """Whether a group is element-wise, and no copy that goes by square tiles."""
    return group.is_elementwise and not is_transposing_copy(group)


def _together(first: Group, second: Group) -> Group | None:
    """Two groups as one that a launch computes; None if the first is not element-wise, or that is too much."""
    if not (first.beside or _may_join(first)):
        return None
    members = (*(first.beside or (first,)), second)
    calls = [call for member in members for call in member.calls]
    loads = list(dict.fromkeys(view for member in members for view in member.loads))
    sizes = sorted(_bytes(member) for member in members)
    if len(members) > _MEMBERS or len(loads) > MAX_LOADS or sum(sizes[:-1]) > _LITTLE:
        return None
    if sum(len(all_calls(member)) for member in members) > MAX_CALLS:
        return None
    return Group(calls, loads, [view for member in members for view in member.writes], beside=members)


def _bytes(group: Group) -> int:
    return loaded_bytes(group) + sum(distinct_bytes(view) for view in group.writes)


def _depend(first: Group, second: Group) -> bool:
    """Whether two groups must keep their order: one writes elements that the other reads or writes."""
    if not first.conflicts(second):
        return False
    return _meet(first.writes, chain(second.loads, second.writes)) or _meet(first.loads, second.writes)


def _meet(first: Iterable[View], second: Iterable[View]) -> bool:
    places = list(map(place_of, second))
    return any(may_overlap(place_of(view), place) for view in first for place in places)
