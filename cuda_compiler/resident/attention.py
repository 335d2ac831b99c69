"""The attention phase: which calls are rotary embedding, update of the KV cache and attention of a few queries."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from cuda_compiler.resident.layout import WARPS, whole_lines
from cuda_compiler.resident.phases import BACKOFF_NS, Phase
from cuda_compiler.rules.attention import BLOCK_KEYS, BLOCK_ROWS, found_memory, suits_tensor_cores
from cuda_compiler.rules.rotary import shown_heads
from cuda_compiler.specialization.gpu import MULTIPROCESSORS
from cuda_compiler.specialization.sizes import groups
from npu_compiler.graph.dtypes import itemsize
from npu_compiler.program.kernels import KERNELS, KernelCall
from npu_compiler.program.views import View

_FEW_QUERIES = 8
_MIN_TILES = 4  # of keys that a split has, as more splits have more partial sums to exchange
_PREFETCHED = ("k", "v", "mask", "index", "cos", "sin")


@dataclass(frozen=True)
class AttentionMatch:
    """Attention with what precedes it.

    Attributes:
        taken: How many calls it stands for.
        call: The attention call.
        q, k, v: Queries as they are read, the caches.
        inputs, outputs: Operands of the phase, by name.
    """

    taken: int
    call: KernelCall
    q: View
    k: View
    v: View
    inputs: dict[str, View | None]
    outputs: dict[str, View | None]


def attention_phase(match: AttentionMatch) -> Phase:
    """The phase for calls that were found to be one; each KV head's keys are divided into splits of whole tiles."""
    batch, heads, queries, _ = match.q.shape
    kv_heads, keys = match.k.shape[1], match.k.shape[2]
    rows = queries * (heads // kv_heads)
    items = batch * kv_heads * groups(rows, BLOCK_ROWS)
    splits = min(groups(keys, _MIN_TILES * BLOCK_KEYS), groups(MULTIPROCESSORS, items))
    return Phase(
        match.call,
        "resident/attention.cu",
        "attend_keys",
        {**match.inputs, "message": None},
        {**match.outputs, "out": match.call.outputs[0]},
        {"splits": splits, "from_mailbox": False, "to_mailbox": False, "backoff_ns": BACKOFF_NS},
        whole_lines(_scratch_bytes(match)),
        _PREFETCHED,
        _prefetched_bytes(match),
        partials=batch * kv_heads * rows * splits * (2 + match.v.shape[3]),
    )


def _prefetched_bytes(match: AttentionMatch) -> int:
    """Bytes of `Prefetched` in `attention.cu`."""
    cos = match.inputs["cos"]
    angles = 2 * match.q.shape[3] * (match.q.shape[2] * itemsize(cos.dtype) if cos is not None else 4)
    return angles + 4 * _tokens(match) + 24 * WARPS + 16


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
    """The attention that begins with the first of up to three calls.

    The rotated queries and keys must be read by nobody else, since they are not stored.
    """
    kernels = [call.kernel for call in calls]
    if kernels[:1] == ["attention_kernel"]:
        return _match(None, None, calls[0], readers)
    if kernels[:2] == ["index_copy_pair_kernel", "attention_kernel"]:
        return _match(None, calls[0], calls[1], readers)
    if kernels == ["rope_kernel", "index_copy_pair_kernel", "attention_kernel"]:
        return _match(calls[0], calls[1], calls[2], readers)
    return None


def _match(
    rope: KernelCall | None, update: KernelCall | None, call: KernelCall, readers: Counter[str]
) -> AttentionMatch | None:
    q, k, v, mask, out = KERNELS[call.kernel].bind(call)
    assert q is not None and k is not None and v is not None and out is not None
    heads, kv_heads, width = q.shape[1], k.shape[1], q.shape[3]
    if q.shape[2] > _FEW_QUERIES or not suits_tensor_cores(q, k, v) or heads % kv_heads:
        return None
    inputs: dict[str, View | None] = {
        "unrotated": q,
        "cos": None,
        "sin": None,
        "index": None,
        "key_source": None,
        "value_source": None,
        "mask": mask,
    }
    if update is not None:
        index, keys, values = update.inputs
        if update.outputs != (k, v) or update.params["dim"] != 2 or not _alike(keys, k) or not _alike(values, v):
            return None
        inputs |= {"index": index, "key_source": keys, "value_source": values}
    if rope is not None:
        x, cos, sin = rope.inputs
        turned = rope.outputs[0]
        new_keys = inputs["key_source"]
        before = [_before(view, turned, x) for view in (q, new_keys) if view is not None]
        if (
            readers[turned.buffer] != 2
            or rope.params["rotary_dim"] != width
            or any(view is None for view in before)
            or cos.strides[1]
            or sin.strides[1]
            or cos.strides[3] != 1
            or sin.strides[3] != 1
        ):
            return None
        inputs |= {"unrotated": before[0], "key_source": before[1], "cos": cos, "sin": sin}
    caches: dict[str, View | None] = {"k": k, "v": v}
    taken = 1 + (update is not None) + (rope is not None)
    if update is None:
        return AttentionMatch(taken, call, q, k, v, {**inputs, **caches}, {})
    return AttentionMatch(taken, call, q, k, v, inputs, caches)


def _alike(source: View, cache: View) -> bool:
    """Whether rows of a source replace rows of a cache, without a change of type."""
    return (
        source.dtype == cache.dtype
        and source.shape[2] <= _FEW_QUERIES
        and (*source.shape[:2], source.shape[3]) == (*cache.shape[:2], cache.shape[3])
        and source.strides[3] == 1
    )


def _before(view: View, turned: View, x: View) -> View | None:
    """Where what `view` shows of a rotation's result was before; None where it does not show whole heads."""
    heads = shown_heads(view, turned)
    if heads is None or x.strides[3] != 1:
        return None
    return replace(x, shape=view.shape, offset=x.offset + heads.start * x.strides[1])
