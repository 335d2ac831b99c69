"""What stays in SRAM: results that later calls read, and weights between runs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from npu_compiler.program.plan import BufferAllocation, ExecutionPlan
from npu_model.mapper import Demand, Side
from npu_model.work import Access, Role, Work


@dataclass(frozen=True)
class Residency:
    """A division of SRAM.

    Attributes:
        tile_bytes: For the tiles of calls, each twice.
        buffers: The buffers that stay.
        kept_weights: Bytes of weights that stay between runs.
        used: Bytes of intermediate results in SRAM, call by call.
    """

    tile_bytes: int
    buffers: frozenset[str]
    kept_weights: int
    used: tuple[int, ...]


def divide(plan: ExecutionPlan, size: int, tile_bytes: int, keep_weights: bool) -> Residency | None:
    """SRAM of `size` bytes divided between tiles, intermediate results and, if asked for, weights.

    Results stay in the order of their sizes, the smallest first, until one has no room: what stays in less SRAM also
    stays in more. That they may lie in pieces is left out of account.

    Returns:
        None where the weights do not fit.
    """
    touched = {view.buffer for call in plan.calls for view in (*call.inputs, *call.outputs)}
    constants = [buffer for name, buffer in plan.buffers.items() if buffer.is_constant and name in touched]
    kept = sum(buffer.size_bytes for buffer in constants) if keep_weights else 0
    room = size - tile_bytes - kept
    if room < 0:
        return None
    results = sorted(
        (buffer for buffer in plan.buffers.values() if buffer.kind == "arena" and buffer.first_use >= 0),
        key=lambda buffer: (buffer.size_bytes, buffer.first_use, buffer.name),
    )
    least, most = 0, len(results)
    while least < most:
        middle = (least + most + 1) // 2
        if _usage(results[:middle], len(plan.calls)).max(initial=0) <= room:
            least = middle
        else:
            most = middle - 1
    names = {buffer.name for buffer in results[:least]} | {buffer.name for buffer in constants if keep_weights}
    used = _usage(results[:least], len(plan.calls))
    return Residency(tile_bytes, frozenset(names), kept, tuple(used.tolist()))


def _usage(buffers: Sequence[BufferAllocation], calls: int) -> np.ndarray:
    """Bytes in use during each call."""
    changes = np.zeros(calls + 1, np.int64)
    for buffer in buffers:
        changes[buffer.first_use] += buffer.size_bytes
        changes[buffer.last_use + 1] -= buffer.size_bytes
    return np.cumsum(changes[:-1])


def demand_of(work: Work, buffers: Collection[str], constants: Collection[str]) -> Demand:
    """What a call asks of DRAM and SRAM when these buffers are in SRAM.

    Args:
        constants: The buffers that no call of a run writes.
    """

    def side(role: Role) -> Side:
        reads = [access for access in work.reads if access.role is role and access.buffer not in buffers]
        constant = sum(access.bytes for access in reads if access.buffer in constants)
        return Side(constant, sum(access.bytes for access in reads) - constant)

    def kept(accesses: Sequence[Access]) -> int:
        return sum(access.bytes for access in accesses if access.buffer in buffers)

    stored = sum(access.bytes for access in work.writes if access.buffer not in buffers)
    # What arrays read of operands in SRAM is counted with the arrays' accesses.
    reads = [access for access in work.reads if access.role is Role.ELEMENT or not work.operations.products]
    return Demand(
        work.operations,
        left=side(Role.LEFT),
        right=side(Role.RIGHT),
        element=side(Role.ELEMENT),
        stored=stored,
        kept=kept(reads) + kept(work.writes),
    )
