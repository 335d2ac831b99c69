"""Fuses KV cache updates with the rotary embedding of keys, and lets paged attention start before the update."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from cuda_compiler.elementwise.picks import is_pick
from cuda_compiler.rules.attention import paged_attention
from cuda_compiler.rules.rotary import by_heads, rotary_kernel, shown_heads
from cuda_compiler.specialization.specializer import Specializer
from npu_compiler.program.elementwise import elementwise_kernel
from npu_compiler.program.kernels import KernelCall, distinct_bytes
from npu_compiler.program.plan import ExecutionPlan
from npu_compiler.program.views import View

ROTARY_UPDATE = "rotary_update"
# Rank of a cache, [images, heads, rows, width], or of a pool, [rows, heads, width] → its dimension of rows.
_ROWS_OF = {4: 2, 3: 0}


def join_rotary_updates(plan: ExecutionPlan, make: Specializer) -> ExecutionPlan:
    """The plan with each rotary embedding and the KV cache update that follows it as one call.

    Given:  rope; index_copy_pair; attention
    Result: rotary_update; attention

    The rotated keys must have no other reader, since only the cache receives them.

    Given:  rope; index_copy_pair; paged attention
    Result: rotary_update; paged_shared, which is told the rows that the update writes

    Paged attention can then read all other rows while the update runs, or even the call before it.
    """
    readers: dict[str, list[View]] = {}
    for view in (*(view for call in plan.calls for view in call.inputs), *plan.output_views.values()):
        readers.setdefault(view.buffer, []).append(view)
    result: list[KernelCall] = []
    calls = deque(plan.calls)
    while calls:
        call = calls.popleft()
        if call.kernel != "index_copy_pair_kernel":
            result.append(call)
            continue
        attention = calls[0] if calls and _reads_pool_of(calls[0], call) else None
        starts_next = attention is not None and _may_start_before(
            attention, call, result[-2] if len(result) > 1 else None
        )
        joined = _join(result[-1], call, readers, starts_next, make) if result else None
        if joined is None:
            result.append(call)
        else:
            result[-1] = joined
        if attention is not None and not _read_early(attention, call) & _written(result[-1]):
            result += paged_attention(make, calls.popleft(), written=call.inputs[0])
    return replace(plan, calls=result)


def _reads_pool_of(attention: KernelCall, update: KernelCall) -> bool:
    """Whether a call is paged attention over the pool of keys and values that `update` writes rows of."""
    if attention.kernel != "paged_attention_kernel":
        return False
    return attention.inputs[1:3] == update.outputs and update.params["dim"] == 0


def _may_start_before(attention: KernelCall, update: KernelCall, runs: KernelCall | None) -> bool:
    """Whether attention may start while `runs`, the call before the rotary embedding, still runs.

    `runs` must be neither element-wise nor a call that picks elements, since such a call may still be fused with
    another one, so what runs then is not known. Any other call is still directly before the update in the end: later
    passes replace it by kernels at its place, which write floats besides if a prologue or an epilogue is joined.
    """
    if runs is None or elementwise_kernel(runs) is not None or is_pick(runs):
        return False
    return not (_read_early(attention, update) | _written(update)) & _written(runs)


def _read_early(attention: KernelCall, update: KernelCall) -> set[str]:
    """Buffers that paged attention reads before the update has ended.

    These are its tables and positions, and the update's indices, which tell which rows of the pool will be written.
    """
    return {view.buffer for view in (*attention.inputs[3:], update.inputs[0])}


def _written(call: KernelCall) -> set[str]:
    return {view.buffer for view in call.outputs}


def _join(
    rope: KernelCall, update: KernelCall, readers: dict[str, list[View]], starts_next: bool, make: Specializer
) -> KernelCall | None:
    """The fused call of a rotary embedding and a cache update.

    None if the update does not store a range of heads of the embedding's result, or if other calls read these heads.

    Args:
        starts_next: Let the next kernel start while the one before still runs.
    """
    if (rope.kernel, update.kernel) != ("rope_kernel", "index_copy_pair_kernel"):
        return None
    x, cos, sin = rope.inputs
    (turned,) = rope.outputs
    index, *rest = update.inputs
    if update.params["dim"] != _ROWS_OF.get(rest[0].rank):
        return None
    new_keys, source, keys, values = map(by_heads, (*rest, *update.outputs))
    stored = shown_heads(new_keys, turned)
    read = map(by_heads, readers[turned.buffer])
    others = [shown_heads(view, turned) for view in read if view != new_keys]
    if (
        stored is None
        or len(others) + 1 != len(readers[turned.buffer])
        or any(heads is None or set(heads) & set(stored) for heads in others)
        or source.shape != new_keys.shape
        or source.buffer == turned.buffer
        or keys.dtype != turned.dtype
        or {keys.buffer, values.buffer} & {view.buffer for view in (*rope.inputs, *update.inputs, turned)}
    ):
        return None
    inputs = {"x": x, "cos": cos, "sin": sin, "index": index, "source": source}
    outputs = {"out": turned, "keys": keys, "values": values}
    call = replace(
        update,
        flops=rope.flops,
        bytes_moved=rope.bytes_moved + distinct_bytes(index) + 2 * distinct_bytes(source),
    )
    constants = {"first_key": stored.start, "starts_next": starts_next}
    return rotary_kernel(make, call, ROTARY_UPDATE, inputs, outputs, constants)
