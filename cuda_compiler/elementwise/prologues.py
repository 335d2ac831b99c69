"""Computes element-wise groups in the softmax or norm that reads their last result, as its prologue.

Given:  (t = x * scale; s = t + y);  n = layernorm(s);  …  z = s + m
Result: n = layernorm(s = x * scale + y), which stores s too;  …  z = s + m
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from cuda_compiler.elementwise.grouping import MAX_READS, Group, place_of
from cuda_compiler.rules.norms import ROW_KERNELS, holds_rows
from npu_compiler.graph.dtypes import is_float


def join_prologues(groups: Sequence[Group], private: Collection[str]) -> list[Group]:
    """The groups, with those that precede a call over rows as its prologue.

    Args:
        private: The buffers that nothing but these groups reads.
    """
    left: list[Group | None] = list(groups)
    loaded = {name for group in groups for name in group.read_buffers}
    writers: dict[str, list[int]] = {}
    for index, group in enumerate(groups):
        for name in group.written_buffers:
            writers.setdefault(name, []).append(index)
    for index, group in enumerate(groups):
        call = group.calls[0]
        if call.kernel not in ROW_KERNELS or call.source or not holds_rows(call):
            continue
        x = call.inputs[0]
        at = writers.get(x.buffer, [])
        before = left[at[0]] if len(at) == 1 and at[0] < index and x.buffer in private else None
        if before is None or not _takes(group, before):
            continue
        stored = [view for view in before.writes if view.buffer in loaded or view.buffer not in private]
        if not all(is_float(view.dtype) for view in stored):  # paged attention relies on it: see rotary_updates.py
            continue
        if all(other is None or not before.conflicts(other) for other in left[at[0] + 1 : index]):
            reads = [*call.inputs[1:], *before.loads]
            left[at[0]], left[index] = None, Group([call], reads, [*call.outputs, *before.writes], {}, before)
    return [group for group in left if group is not None]


def _takes(rows: Group, before: Group) -> bool:
    """Whether the call over rows can compute the group: its first operand, in row-major order, is the last result."""
    x, *others = rows.calls[0].inputs
    if not before.is_elementwise or x.numel != before.numel or not is_float(x.dtype):
        return False
    apart = rows.written_buffers.isdisjoint(before.read_buffers | before.written_buffers)
    apart = apart and before.written_buffers.isdisjoint(view.buffer for view in others)
    last = place_of(before.calls[-1].outputs[0])
    return apart and last == place_of(x) and len(before.loads) + len(others) <= MAX_READS
