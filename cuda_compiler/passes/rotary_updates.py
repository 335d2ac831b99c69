"""Fuses the rotary embedding of keys with the update of the KV cache behind it: one launch instead of two."""

from __future__ import annotations

from dataclasses import replace

from cuda_compiler.rules.rotary import by_heads, rotary_kernel, shown_heads
from cuda_compiler.specialization.specializer import Specializer
from npu_compiler.program.kernels import KernelCall, distinct_bytes
from npu_compiler.program.plan import ExecutionPlan
from npu_compiler.program.views import View

# Rank of a cache, [images, heads, rows, width], or of a pool, [rows, heads, width] → its dimension of rows.
_ROWS_OF = {4: 2, 3: 0}


def join_rotary_updates(plan: ExecutionPlan, make: Specializer) -> list[KernelCall]:
    """The plan's calls, with each rotary embedding and the cache update behind it as one.

    Given:  rope; index_copy_pair; attention
    Result: rotary_update; attention

    Nothing else may read the rotated keys, since only the cache receives them.
    """
    readers: dict[str, list[View]] = {}
    for view in (*(view for call in plan.calls for view in call.inputs), *plan.output_views.values()):
        readers.setdefault(view.buffer, []).append(view)
    result: list[KernelCall] = []
    for call in plan.calls:
        joined = _join(result[-1], call, readers, make) if result else None
        if joined is None:
            result.append(call)
        else:
            result[-1] = joined
    return result


def _join(rope: KernelCall, update: KernelCall, readers: dict[str, list[View]], make: Specializer) -> KernelCall | None:
    """The fused call; None where the two do not fit together."""
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
    return rotary_kernel(make, call, "rotary_update", inputs, outputs, {"first_key": stored.start})
