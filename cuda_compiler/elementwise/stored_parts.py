"""Computes a part of a concatenation where an element-wise kernel first reads it; that kernel stores it for others too.

Given:  a = b + c;  u = relu(a or d, by the last coordinate);  v = a * e
Result: u = relu(a = b + c or d, by the last coordinate), which stores a too;  v = a * e

Given:  t[:, 8:] = copy(b);  u = relu(a or t, by the last coordinate);  v = t * e
Result: u = relu(a or t[:, :8] or b, by the last coordinate), which stores b in t[:, 8:];  v = t * e
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from cuda_compiler.elementwise.grouping import (
    MAX_CALLS,
    MAX_LOADS,
    Group,
    Part,
    may_overlap,
    place_of,
    readers_and_writers_of,
)
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
        for name in group.inlined:
            for part in list(group.inlined[name]):
                reader, source = left[index], _copied(part)
                if reader is None or source is None or source.buffer not in private:
                    continue
                at = max((each for each in writers.get(source.buffer, ()) if each < index), default=index)
                maker = left[at] if is_near([at], index) else None
                result = only_result(maker, readers, private) if maker is not None and maker.is_elementwise else None
                if maker is None or result is None or any(at < each < index for each in readers[source.buffer]):
                    continue
                parts = _divided(part, source, replace(maker, kept=result)) if may_move([at], index, left) else None
                joined = _with_parts(reader, name, part, parts, result) if parts is not None else None
                if joined is not None:
                    left[index], left[at] = joined, None
                    writers[source.buffer] = [index if each == at else each for each in writers[source.buffer]]
                    for buffer in maker.read_buffers:
                        readers[buffer] = [index if each == at else each for each in readers[buffer]]
    return [group for group in left if group is not None]


def _copied(part: Part) -> View | None:
    """The view of floats that a part copies from memory; None if it does anything else."""
    calls, reads = part.group.calls, part.group.reads
    if len(calls) != 1 or not is_copy(calls[0]) or part.group.inlined or part.group.kept is not None:
        return None
    (source,) = reads
    return source if is_float(source.dtype) and source.dtype == calls[0].outputs[0].dtype else None


def _divided(part: Part, source: View, maker: Group) -> list[Part] | None:
    """A part copied from `source` as what lies before the last result of `maker` there, if anything, and that itself.

    None if the result is not the end of the source.
    """
    result = maker.kept
    assert result is not None
    if place_of(result) == place_of(source):
        return [replace(part, group=maker)] if place_of(source).strides == (1,) else None
    own, before = result.shape[-1], source.shape[-1] - result.shape[-1]
    fits = result.rank == source.rank and result.shape[:-1] == source.shape[:-1] and before > 0 < own
    if not fits or part.inner != 1 or part.high - part.low != source.shape[-1]:
        return None
    if place_of(source.slice(source.rank - 1, before, before + own)) != place_of(result):
        return None
    (call,) = part.group.calls
    (out,) = call.outputs
    if out.shape != source.shape:
        return None
    first, target = (view.slice(view.rank - 1, 0, before) for view in (source, out))
    copying = replace(
        part.group, calls=[replace(call, inputs=(first,), outputs=(target,))], reads=[first], writes=[target]
    )
    middle = part.low + before
    return [replace(part, group=copying, high=middle), replace(part, group=maker, low=middle)]


def _with_parts(reader: Group, name: str, part: Part, parts: list[Part], result: View) -> Group | None:
    """The reader with some parts in place of one, which stores their `result`.

    None if its kernel would exceed the limits, or reads that result in another way too.
    """
    all_parts = [each for old in reader.inlined[name] for each in (parts if old is part else [old])]
    joined = Group(reader.calls, reader.reads, [*reader.writes, result], {**reader.inlined, name: all_parts})
    too_many = len(joined.loads) > MAX_LOADS or len(all_calls(joined)) > MAX_CALLS
    meets = any(may_overlap(place_of(view), place_of(result)) for view in joined.loads)
    return None if too_many or meets else joined
