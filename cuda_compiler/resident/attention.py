"""The attention phase: which calls are norm, rotary embedding, cache update and attention of a few queries."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from cuda_compiler.resident.layout import WARPS, whole_lines
from cuda_compiler.resident.origins import Origin, find_origin
from cuda_compiler.resident.phases import BACKOFF_NS, Phase
from cuda_compiler.rules.attention import BLOCK_KEYS, BLOCK_ROWS, found_memory, suits_tensor_cores
from cuda_compiler.specialization.gpu import MULTIPROCESSORS
from cuda_compiler.specialization.sizes import groups
from npu_compiler.graph.dtypes import itemsize
from npu_compiler.program.kernels import KERNELS, KernelCall
from npu_compiler.program.views import View

_FEW_QUERIES = 8
_MIN_TILES = 4  # of keys that a split has, as more splits have more partial sums to exchange
MOST_CALLS = 8  # a copy, an RMSNorm and a rotary embedding of queries and of keys, a cache update, attention
_ANGLES_AND_GAINS = ("cos", "sin", "query_gain", "key_gain")
_INPUTS = ("unrotated", *_ANGLES_AND_GAINS, "index", "key_source", "value_source", "mask")
_PREFETCHED = ("k", "v", "mask", "index", *_ANGLES_AND_GAINS)
_NOT_NORMED: dict[str, bool | float] = {"normed": False, "norm_eps": 0.0, "gain_offset": 0.0}


@dataclass(frozen=True)
class AttentionMatch:
    """Attention with what precedes it.

    Attributes:
        taken: How many calls it stands for.
        call: The attention call.
        q, k, v: Queries as they are read, the caches.
        inputs, outputs: Operands of the phase, by name.
        norm: Constants of the RMSNorm of queries and new keys.
    """

    taken: int
    call: KernelCall
    q: View
    k: View
    v: View
    inputs: dict[str, View | None]
    outputs: dict[str, View | None]
    norm: dict[str, bool | float]


def attention_phase(match: AttentionMatch) -> Phase:
    """The phase for calls that were found to be one; each KV head's keys are divided into splits of whole tiles."""
    batch, heads, queries, _ = match.q.shape
    kv_heads, keys = match.k.shape[1], match.k.shape[2]
    rows = queries * (heads // kv_heads)
    items = batch * kv_heads * groups(rows, BLOCK_ROWS)
    # One more split would give some blocks two items, and the others wait for them.
    splits = min(groups(keys, _MIN_TILES * BLOCK_KEYS), max(MULTIPROCESSORS // items, 1))
    return Phase(
        match.call,
        "resident/attention.cu",
        "attend_keys",
        {**match.inputs, "message": None},
        {**match.outputs, "out": match.call.outputs[0]},
        {**match.norm, "splits": splits, "from_mailbox": False, "to_mailbox": False, "backoff_ns": BACKOFF_NS},
        whole_lines(_scratch_bytes(match)),
        _PREFETCHED,
        _prefetched_bytes(match),
        partials=batch * kv_heads * rows * splits * (2 + match.v.shape[3]),
    )


def _prefetched_bytes(match: AttentionMatch) -> int:
    """Bytes of `Prefetched` in `attention.cu`."""
    cos = match.inputs["cos"]
    angles = 2 * match.q.shape[3] * (match.q.shape[2] * itemsize(cos.dtype) if cos is not None else 4)
    gains = 4 * (2 * match.q.shape[3] if match.norm["normed"] else 4)
    return angles + gains + 4 * _tokens(match) + 24 * WARPS + 16


def _scratch_bytes(match: AttentionMatch) -> int:
    """Bytes of `Scratch` there."""
    rows = min(match.q.shape[2] * (match.q.shape[1] // match.k.shape[1]), BLOCK_ROWS)
    width, value_width = match.q.shape[3], match.v.shape[3]
    staged = (rows * (width + 32) + _tokens(match) * (width + value_width)) * itemsize(match.q.dtype)
    return staged + WARPS * found_memory(rows, value_width) + 48


def _tokens(match: AttentionMatch) -> int:
    keys = match.inputs["key_source"]
    return keys.shape[2] if keys is not None else 1


def match_attention(calls: Sequence[KernelCall], readers: Counter[str]) -> AttentionMatch | None:
    """The attention that the first of some calls begins, if all of these up to the attention itself belong to it.

    What is made on the way must be read by nobody else, since it is not stored.

    Args:
        calls: Up to `MOST_CALLS`.
        readers: Buffer → how many calls and program outputs read it.
    """
    end = next((at for at, call in enumerate(calls) if call.kernel == "attention_kernel"), None)
    if end is None:
        return None
    before, call = calls[:end], calls[end]
    q, k, v, mask, out = KERNELS[call.kernel].bind(call)
    assert q is not None and k is not None and v is not None and out is not None
    if q.shape[2] > _FEW_QUERIES or not suits_tensor_cores(q, k, v) or q.shape[1] % k.shape[1]:
        return None
    inputs: dict[str, View | None] = dict.fromkeys(_INPUTS)
    inputs["mask"] = mask
    outputs: dict[str, View | None] = {}
    steps = list(before)
    new_keys = None
    if steps and steps[-1].kernel == "index_copy_pair_kernel":
        update = steps.pop()
        inputs["index"], new_keys, values = update.inputs
        if update.outputs != (k, v) or update.params["dim"] != 2 or not _alike(new_keys, k) or not _alike(values, v):
            return None
        inputs["value_source"] = values
        outputs = {"k": k, "v": v}
    else:
        inputs |= {"k": k, "v": v}
    makers = {view.buffer: step for step in steps for view in step.outputs}
    origins = [find_origin(view, makers) for view in (q, new_keys) if view is not None]
    found = [origin for origin in origins if origin is not None]
    if len(found) < len(origins) or not _turned_alike(found) or not _normed_alike(found):
        return None
    for origin, source, gain in zip(found, ("unrotated", "key_source"), ("query_gain", "key_gain"), strict=False):
        inputs[source] = origin.view
        if origin.norm is not None:
            inputs[gain] = KERNELS[origin.norm.kernel].bind(origin.norm)[1]
    rope, norm = found[0].rope, found[0].norm
    if rope is not None:
        _, inputs["cos"], inputs["sin"] = rope.inputs
    constants = dict(_NOT_NORMED)
    if norm is not None:
        constants = {"normed": True, "norm_eps": norm.params["eps"], "gain_offset": norm.params["weight_offset"]}
    used = [step for origin in found for step in origin.calls]
    read = Counter(view.buffer for step in (*before, call) for view in step.inputs)
    if (
        any(all(step is not other for other in used) for step in steps)
        or any(readers[name] != read[name] for name in makers)
        or any(view is not None and view.buffer in makers for view in inputs.values())
    ):
        return None
    return AttentionMatch(end + 1, call, q, k, v, inputs, outputs, constants)


def _turned_alike(origins: Sequence[Origin]) -> bool:
    """Whether none is rotated, or all are by the same angles, which all heads share."""
    angles = [_angles(origin) for origin in origins]
    return len(set(angles)) == 1 and all(strides[1] == 0 and strides[3] == 1 for _, _, strides in angles[0])


def _angles(origin: Origin) -> tuple[tuple[str, int, tuple[int, ...]], ...]:
    """Where the cosines and sines of its rotary embedding are: buffer, offset, strides; nothing where there is none."""
    views = origin.rope.inputs[1:] if origin.rope is not None else ()
    return tuple((view.buffer, view.offset, _strides(view)) for view in views)


def _strides(view: View) -> tuple[int, ...]:
    """Its strides, 0 in dimensions of one element."""
    return tuple(stride if size > 1 else 0 for size, stride in zip(view.shape, view.strides, strict=True))


def _normed_alike(origins: Sequence[Origin]) -> bool:
    """Whether none is normalized, or all are but for their gains."""
    norms = [origin.norm.params if origin.norm is not None else None for origin in origins]
    return len({(norm["eps"], norm["weight_offset"]) if norm is not None else None for norm in norms}) == 1


def _alike(source: View, cache: View) -> bool:
    """Whether rows of a source replace rows of a cache, without a change of type."""
    return (
        source.dtype == cache.dtype
        and source.shape[2] <= _FEW_QUERIES
        and (*source.shape[:2], source.shape[3]) == (*cache.shape[:2], cache.shape[3])
        and source.strides[3] == 1
    )
