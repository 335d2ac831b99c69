"""Cache of lowered plans on disk, so that a plan is lowered for a chip once on a machine."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from time import perf_counter

from npu_compiler.program.plan import ExecutionPlan
from npu_model.chip import Chip
from npu_model.lowering.forms import Form
from npu_runtime.cache_folder import cache_folder, keep_entry, read_entry, source_digest

WORTH_KEEPING = 0.1  # seconds of lowering: small plans are lowered sooner than read


def kept_code(
    plan: ExecutionPlan, chip: Chip, lower: Callable[[], ExecutionPlan], forms: Mapping[str, Form]
) -> ExecutionPlan:
    """A plan with its machine code, from the cache folder if it is cached for this chip, else from `lower()`.

    A cache entry has what lowering changes in a plan: the offsets of intermediate values, and the machine code. A
    result is cached if lowering took at least `WORTH_KEEPING` seconds.

    Args:
        forms: Forms of the weights that were measured.
    """
    essence = (
        plan.calls,
        plan.buffers,
        plan.output_views,
        plan.donations,
        plan.arena_bytes,
        chip,
        sorted(forms.items()),
    )
    key = hashlib.sha256(repr((source_digest("npu_compiler", "npu_model"), *essence)).encode()).hexdigest()[:20]
    path = cache_folder() / f"{chip.name}-{key}.tiles"
    entry = read_entry(path) if path.is_file() else None
    if entry is not None:
        header, _, code = entry.partition(b"\n")
        places = json.loads(header)
        buffers = {
            name: replace(buffer, offset=places["offsets"].get(name, buffer.offset))
            for name, buffer in plan.buffers.items()
        }
        return replace(plan, buffers=buffers, arena_bytes=places["arena_bytes"], machine_code=code)
    start = perf_counter()
    lowered = lower()
    if perf_counter() - start >= WORTH_KEEPING:
        offsets = {name: buffer.offset for name, buffer in lowered.buffers.items() if buffer.kind == "arena"}
        header = json.dumps({"arena_bytes": lowered.arena_bytes, "offsets": offsets}).encode()
        keep_entry(path, header + b"\n" + lowered.machine_code)
    return lowered


__all__ = ["WORTH_KEEPING", "kept_code"]
