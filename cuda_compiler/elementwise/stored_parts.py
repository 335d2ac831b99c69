"""Computes a part of a concatenation where an element-wise kernel first reads it; that kernel stores it for others too.

Given:  a = b + c;  u = relu(a or d, by the last coordinate);  v = a * e
Result: u = relu(a = b + c or d, by the last coordinate), which stores a too;  v = a * e
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from cuda_compiler.elementwise.grouping import MAX_CALLS, MAX_LOADS, Group, Part, place_of, readers_and_writers_of
from cuda_compiler.elementwise.inlining import all_calls, is_near, may_move, only_result
from npu_compiler.graph.dtypes import is_float
from npu_compiler.program.placement import is_copy
from npu_compiler.program.views import View


def store_parts(groups: Sequence[Group], private: Collection[str]) -> list[Group]:
    """The groups, those without that compute what is first read as a part of a buffer that no kernel writes.

    Args:
        private: The buffers that nothing but these groups reads.
    """
    left: list[Group | None] = list(groups)
    readers, writers = readers_and_writers_of(groups)
    for index, group in enumerate(groups):
        if not group.is_elementwise:
            continue
        for name, parts in group.inlined.items():
            for turn, part in enumerate(parts):
                reader = left[index]
                source = _copied_whole(part)
                if reader is None or source is None or source.buffer not in private:
                    continue
                at = writers.get(source.buffer, [])
                maker = left[at[0]] if len(at) == 1 and is_near(at, index) else None
                if maker is None or not _makes(maker, source, readers, private):
                    continue
                if min(readers[source.buffer]) < index or not may_move(at, index, left):
                    continue
                joined = _with_maker(reader, name, turn, maker, source)
                if joined is not None:
                    left[index], left[at[0]], writers[source.buffer] = joined, None, [index]
                    for buffer in maker.read_buffers:
                        readers[buffer] = [index if each == at[0] else each for each in readers[buffer]]
    return [group for group in left if group is not None]


def _copied_whole(part: Part) -> View | None:
    """The view that a part copies, floats that lie in memory in the part's own order; None if it does anything else."""
    calls, reads = part.group.calls, part.group.reads
    if len(calls) != 1 or not is_copy(calls[0]) or part.group.inlined:
        return None
    (source,), place = reads, place_of(reads[0])
    in_order = place.strides == (1,) and place.offset == 0
    return source if in_order and is_float(source.dtype) and source.dtype == calls[0].outputs[0].dtype else None


def _makes(maker: Group, source: View, readers: dict[str, list[int]], private: Collection[str]) -> bool:
    """Whether a group computes just the elements of a view, in the order of memory."""
    result = only_result(maker, readers, private) if maker.is_elementwise else None
    return result is not None and place_of(result) == place_of(source)


def _with_maker(reader: Group, name: str, turn: int, maker: Group, source: View) -> Group | None:
    """The reader that computes a part itself and stores it; None if its kernel would exceed the limits.

    Args:
        name: The buffer whose part of number `turn` it is.
        source: The view that the part is copied from, which the reader must not read in another way.
    """
    parts = [*reader.inlined[name]]
    parts[turn] = replace(parts[turn], group=replace(maker, kept=maker.calls[-1].outputs[0]))
    joined = Group(reader.calls, reader.reads, [*reader.writes, source], {**reader.inlined, name: parts})
    too_many = len(joined.loads) > MAX_LOADS or len(all_calls(joined)) > MAX_CALLS
    return None if too_many or source.buffer in joined.read_buffers else joined
