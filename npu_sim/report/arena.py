"""A map of the arena, the memory block that a program's buffers share: positions, lifetimes, and causes of the peak."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from npu_compiler.program.plan import BufferAllocation, ExecutionPlan


def arena_map(plan: ExecutionPlan) -> dict[str, Any]:
    """Return the arena's buffers over the calls of a run, as JSON data.

    Returns:
        `bytes`: the arena's size. `live`: bytes in use during each call. `peak`: the call at which they are the most,
            and `peak_bytes`. `buffers`: for each, `name`, `offset`, `size`, `first` and `last` call, and `uses`, the
            calls that touch it. `holders`: the buffers in use at the peak, largest first; see `_holders`.
    """
    buffers = [buffer for buffer in plan.buffers.values() if buffer.kind == "arena" and buffer.first_use >= 0]
    uses = _uses(plan)
    live = live_bytes(buffers, len(plan.calls))
    peak = int(live.argmax()) if live.size else 0
    return {
        "bytes": plan.arena_bytes,
        "live": live.tolist(),
        "peak": peak,
        "peak_bytes": int(live[peak]) if live.size else 0,
        "buffers": [
            {
                "name": buffer.name,
                "offset": buffer.offset,
                "size": buffer.size_bytes,
                "first": buffer.first_use,
                "last": buffer.last_use,
                "uses": uses[buffer.name],
            }
            for buffer in sorted(buffers, key=lambda buffer: (buffer.first_use, buffer.offset))
        ],
        "holders": _holders(buffers, live, peak, uses),
    }


def live_bytes(buffers: Sequence[BufferAllocation], calls: int) -> np.ndarray:
    """Return the bytes of the arena in use during each call; int64 of shape [calls].

    An element-wise call may overwrite an input that no later call reads: the bytes that input and output share count
    once.
    """
    change = np.zeros(calls + 1, np.int64)
    ending = {(buffer.offset, buffer.last_use): buffer for buffer in buffers}
    for buffer in buffers:
        change[buffer.first_use] += buffer.size_bytes
        change[buffer.last_use + 1] -= buffer.size_bytes
        before = ending.get((buffer.offset, buffer.first_use))
        if before is not None and before is not buffer and before.first_use < buffer.first_use:
            shared = min(before.size_bytes, buffer.size_bytes)
            change[buffer.first_use] -= shared
            change[buffer.first_use + 1] += shared
    return np.cumsum(change)[:calls]


def _uses(plan: ExecutionPlan) -> dict[str, list[int]]:
    uses: dict[str, list[int]] = defaultdict(list)
    for index, call in enumerate(plan.calls):
        for name in dict.fromkeys(view.buffer for view in (*call.inputs, *call.outputs)):
            uses[name].append(index)
    return uses


def _holders(
    buffers: list[BufferAllocation], live: np.ndarray, peak: int, uses: dict[str, list[int]]
) -> list[dict[str, Any]]:
    """Return the buffers in use at the peak, and the peak of live bytes that would remain without each of them.

    A buffer that the peak call does not touch, but calls before and after it do, is `idle` in between: recomputing it,
    moving its reader forward or storing it elsewhere would take it out of the peak. Avoiding any other buffer means
    fusing the kernels that write and read it, or computing it in parts. `remaining` is the highest value of `live` over
    all calls without the buffer, either while it is idle or in all of them. It is a lower bound, since the planner's
    offsets may waste some memory.
    """
    holders = []
    for buffer in buffers:
        if not buffer.first_use <= peak <= buffer.last_use:
            continue
        before = [call for call in uses[buffer.name] if call < peak]
        after = [call for call in uses[buffer.name] if call > peak]
        is_idle = peak not in uses[buffer.name] and bool(before) and bool(after)
        if is_idle:
            without = live.copy()
            without[before[-1] + 1 : after[0]] -= buffer.size_bytes
        else:
            without = live_bytes([other for other in buffers if other is not buffer], len(live))
        holders.append(
            {
                "name": buffer.name,
                "size": buffer.size_bytes,
                "first": buffer.first_use,
                "last": buffer.last_use,
                "idle": [before[-1] + 1, after[0] - 1] if is_idle else None,
                "remaining": int(without.max()),
                "next_peak": int(without.argmax()),
            }
        )
    return sorted(holders, key=lambda holder: (-holder["size"], holder["first"]))
