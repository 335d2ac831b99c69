"""Mailboxes: memory by which a step of a resident kernel receives the previous step's result before the grid barrier.

The numbers I6, I11, … are those of the invariants at the top of the files in `templates/resident`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cuda_compiler.resident.phases import BACKOFF_NS, Phase, is_long
from cuda_compiler.specialization.sizes import groups
from npu_compiler.graph.dtypes import HALF_DTYPES
from npu_compiler.program.views import View

MAILBOXES = 5  # as in `grid.cuh` (I13)
_GRID_BYTES = 128  # before the mailboxes
_ALIGNMENT = 64  # values of a mailbox, in a line of the L2 cache


def memory_words(mailbox_size: int) -> int:
    """Number of 32-bit words of the memory that holds the grid barrier's counter and the mailboxes."""
    return (_GRID_BYTES + 2 * MAILBOXES * mailbox_size) // 4


def connect_mailboxes(phases: Sequence[Phase]) -> tuple[list[Phase], int]:
    """The phases, with mailboxes between neighbours where possible, and the most values that one mailbox holds."""
    result, size = list(phases), 0
    for index, after in enumerate(phases[1:], 1):
        before = result[index - 1]
        if not _can_connect(before, after):
            continue
        out = before.outputs["out"]
        assert out is not None
        inputs = after.inputs if after.stream else {**after.inputs, "message": out}
        result[index - 1] = replace(before, constants={**before.constants, "to_mailbox": True})
        constants = {**after.constants, "rated_by_mailbox" if after.choices else "from_mailbox": True}
        if before.stream and after.stream and is_long(before.stream.weight_bytes):
            constants["backoff_ns"] = BACKOFF_NS
        result[index] = replace(after, inputs=inputs, constants=constants)
        size = max(size, out.numel)
    return result, groups(size, _ALIGNMENT) * _ALIGNMENT


def _can_connect(before: Phase, after: Phase) -> bool:
    """Whether phase `after` may read the result of `before` from a mailbox, without the barrier between them (I11)."""
    out = before.outputs["out"]
    assert out is not None
    names = _received_operands(after)
    received = [view for name in names if (view := after.inputs[name]) is not None]
    if not _fits_mailbox(out) or not all(_is_part(view, out) for view in received):
        return False
    if after.stream:
        (x,) = received
        if not x.is_contiguous or (x.numel, x.offset) != (out.numel, out.offset):
            return False
    # The other operands are read without that barrier.
    written = {view.buffer for view in before.outputs.values() if view is not None}
    if any(view is not None and view.buffer in written for name, view in after.inputs.items() if name not in names):
        return False
    # So are results and tagged sums written (I17).
    updated = {view.buffer for view in after.outputs.values() if view is not None}
    used = {view.buffer for view in before.operands.values()}
    return updated.isdisjoint(used) and not (before.partials and after.partials)


def _received_operands(phase: Phase) -> tuple[str, ...]:
    """Names of the operands that a phase reads from the mailbox, if it is connected with the phase before it."""
    if phase.stream is None:
        return ("unrotated", "key_source", "value_source")
    return ("ratings",) if phase.choices else ("x",)


def _fits_mailbox(out: View) -> bool:
    """Whether a result can be sent through a mailbox: 16-bit elements, contiguous in some order of dimensions."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(out.strides, out.shape, strict=True) if size > 1):
        if stride != expected:
            return False
        expected *= size
    return out.dtype in HALF_DTYPES and out.strides[-1] == 1


def _is_part(view: View, out: View) -> bool:
    """Whether a view covers a part of `out` that can be read eight aligned values at a time."""
    eight = all(size == 1 or stride % 8 == 0 for size, stride in zip(view.shape[:-1], view.strides, strict=False))
    return (
        (view.buffer, view.dtype) == (out.buffer, out.dtype)
        and eight
        and view.strides[-1] == 1
        and view.shape[-1] % 16 == 0
        and (view.offset - out.offset) % 8 == 0
    )
