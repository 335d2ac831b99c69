"""The attention phase of a resident kernel: attention of a few queries, fused with the calls that precede it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cuda_compiler.resident.layout import WARPS, whole_lines
from cuda_compiler.resident.origins import HeadOrigin, find_origin
from cuda_compiler.resident.phases import BACKOFF_NS, Phase
from cuda_compiler.rules.attention import (
    BLOCK_KEYS,
    BLOCK_ROWS,
    found_memory,
    heads_together,
    keys_of_tile,
    suits_tensor_cores,
    team_memory,
    without_absent_features,
)
from cuda_compiler.rules.rotary import by_heads
from cuda_compiler.specialization.gpu import MULTIPROCESSORS
from cuda_compiler.specialization.sizes import groups
from npu_compiler.graph.dtypes import itemsize
from npu_compiler.program.kernels import KERNELS, KernelCall
from npu_compiler.program.views import View

_FEW_QUERIES = 8
_WIDEST = 512  # head dimension whose pairs of packs the lanes of one warp have, to normalize them
_MIN_TILES = 4  # of keys that a split has, as more splits have more partial sums to exchange
MOST_CALLS = 8  # a copy, an RMSNorm and a rotary embedding of queries and of keys, a cache update, attention
_ANGLES_AND_GAINS = ("cos", "sin", "query_gain", "key_gain")
_INPUTS = ("unrotated", *_ANGLES_AND_GAINS, "index", "key_source", "value_source")


@dataclass(frozen=True)
class AttentionMatch:
    """Attention and the calls before it that one phase can compute: RMSNorm, rotary embedding and cache update.

    Attributes:
        taken: Number of calls that the phase replaces.
        call: The attention call.
        q, k, v: Queries as the attention call reads them, and the caches.
        where: The operands that say which keys count: a mask; or, if `k` and `v` are pools, block tables, sequences and
            positions.
        inputs, outputs: Operands of the phase, by name.
        norm: Constants of the RMSNorm of queries and new keys.
    """

    taken: int
    call: KernelCall
    q: View
    k: View
    v: View
    where: tuple[str, ...]
    inputs: dict[str, View | None]
    outputs: dict[str, View | None]
    norm: dict[str, bool | float]

    @property
    def is_paged(self) -> bool:
        return _is_paged(self.call)

    @property
    def tokens(self) -> int:
        """Number of new tokens, whose keys and values enter the cache."""
        keys = self.inputs["key_source"]
        return 0 if keys is None else keys.shape[0] if self.is_paged else keys.shape[2]


def _is_paged(call: KernelCall) -> bool:
    return call.kernel == "paged_attention_kernel"


def attention_phase(match: AttentionMatch) -> Phase:
    """The phase that computes the matched calls; the keys of each problem are divided into splits of whole tiles.

    A problem is all queries that attend to the keys of one KV head: those of a batch or, with a paged pool, of one
    token.
    """
    constants: dict[str, bool | int | float] = dict(match.norm)
    if match.is_paged:
        tokens, heads, _ = match.q.shape
        rows = constants["sharing"] = heads_together(heads, match.k.shape[1])
        problems, angles, first_tile = tokens * heads // rows, tokens, 8
        keys = keys_of_tile(match.call, 1)
        file, function = "resident/paged_attention.cu", "attend_pool"
    else:
        batch, heads, angles, _ = match.q.shape
        kv_heads, keys = match.k.shape[1], match.k.shape[2]
        rows = angles * (heads // kv_heads)
        problems, first_tile = batch * kv_heads, 24
        file, function = "resident/attention.cu", "attend_keys"
    # One more split would give some blocks two items, and the others wait for them.
    items = problems * groups(rows, BLOCK_ROWS)
    splits = min(groups(keys, _MIN_TILES * BLOCK_KEYS), max(MULTIPROCESSORS // items, 1))
    constants |= {"splits": splits, "from_mailbox": False, "to_mailbox": False, "backoff_ns": BACKOFF_NS}
    return Phase(
        without_absent_features(match.call),
        file,
        function,
        {**match.inputs, "message": None},
        {**match.outputs, "out": match.call.outputs[0]},
        constants,
        whole_lines(_scratch_bytes(match, rows)),
        ("k", "v", *match.where, "index", *_ANGLES_AND_GAINS),
        _prefetched_bytes(match, angles) + first_tile * WARPS,
        partials=problems * rows * splits * (2 + match.v.shape[-1]),
    )


def _prefetched_bytes(match: AttentionMatch, angles: int) -> int:
    """The size in bytes of the C struct `SmallOperands` in `new_rows.cuh`."""
    width, cos = match.q.shape[-1], match.inputs["cos"]
    angle_bytes = 2 * width * (angles * itemsize(cos.dtype) if cos is not None else 4)
    gains = 4 * (2 * width if match.norm["normed"] else 4)
    return angle_bytes + gains + 4 * max(match.tokens, 1) + 16


def _scratch_bytes(match: AttentionMatch, rows: int) -> int:
    """The size in bytes of the C struct `Scratch` of the attention phase."""
    rows, tokens = min(rows, BLOCK_ROWS), max(match.tokens, 1)
    width, value_width = match.q.shape[-1], match.v.shape[-1]
    staged = (rows * (width + 32) + tokens * (width + value_width)) * itemsize(match.q.dtype)
    found = found_memory(rows, width, value_width) + team_memory(rows, width, value_width)
    return staged + WARPS * found + 48


def match_attention(calls: Sequence[KernelCall], readers: Counter[str]) -> AttentionMatch | None:
    """The attention that the first of `calls` begins, if one phase can compute it with the calls before it; else None.

    Every call before the attention must belong to it, and its results must have no other readers, since they are not
    stored.

    Args:
        calls: Calls in order, up to `MOST_CALLS`.
        readers: Buffer → number of operands of calls and program outputs that read it.
    """
    end = next((at for at, call in enumerate(calls) if call.kernel == "attention_kernel" or _is_paged(call)), None)
    if end is None:
        return None
    steps, call = list(calls[:end]), calls[end]
    update = steps.pop() if steps and steps[-1].kernel == "index_copy_pair_kernel" else None
    where = KERNELS[call.kernel].inputs_of(call)
    q, k, v = (where.pop(name) for name in "qkv")
    sinks = where.pop("sinks", None)
    assert q is not None and k is not None and v is not None
    if update is not None and not _updates(update, k, v, 0 if _is_paged(call) else 2):
        return None
    new_keys = update.inputs[1] if update is not None else None
    if not _suits_phase(call, q, k, v, new_keys):
        return None
    makers = {view.buffer: step for step in steps for view in step.outputs}
    origins = _find_origins([view for view in (q, new_keys) if view is not None], makers)
    if origins is None:
        return None
    inputs: dict[str, View | None] = {**dict.fromkeys(_INPUTS), **where, **_origin_operands(origins, _is_paged(call))}
    if sinks is not None:  # a source without any does not mention them
        inputs["sinks"] = sinks
    outputs: dict[str, View | None] = {}
    if update is None:
        inputs |= {"k": k, "v": v}
    else:
        inputs["index"], _, inputs["value_source"] = update.inputs
        outputs = {"k": k, "v": v}
    own = [step for origin in origins for step in origin.calls]
    if any(all(step is not other for other in own) for step in steps):
        return None
    if not _stays_inside(calls[: end + 1], makers, inputs, readers):
        return None
    return AttentionMatch(end + 1, call, q, k, v, tuple(where), inputs, outputs, _norm_constants(origins[0].norm))


def _updates(update: KernelCall, k: View, v: View, rows: int) -> bool:
    """Whether a call replaces a few rows of the caches `k` and `v`; `rows` is the number of their row dimension."""
    _, keys, values = update.inputs
    return (
        update.outputs == (k, v) and update.params["dim"] == rows and _alike(keys, k, rows) and _alike(values, v, rows)
    )


def _suits_phase(call: KernelCall, q: View, k: View, v: View, new_keys: View | None) -> bool:
    """Whether the phase can compute an attention: few queries, in a dtype and a width of tensor cores."""
    few = _suits_paged(call, q, new_keys) if _is_paged(call) else q.shape[2] <= _FEW_QUERIES
    fits = max(q.shape[-1], v.shape[-1]) <= _WIDEST
    return few and fits and suits_tensor_cores(q, k, v) and q.shape[1] % k.shape[1] == 0


def _find_origins(views: Sequence[View], makers: Mapping[str, KernelCall]) -> list[HeadOrigin] | None:
    """The origins of queries and new keys; None if one has none, or if they are rotated or normalized differently."""
    origins = [origin for view in views if (origin := find_origin(by_heads(view), makers)) is not None]
    alike = len(origins) == len(views) and _turned_alike(origins) and _normed_alike(origins)
    return origins if alike else None


def _origin_operands(origins: Sequence[HeadOrigin], paged: bool) -> dict[str, View | None]:
    """Operands of the phase by name: queries and new keys before rotation, the gains of their norms, the angles.

    Args:
        origins: The origins of the queries and, if the phase computes them, of the new keys.
        paged: Whether the attention is paged: its operands are [tokens, heads, D], the views [1, heads, tokens, D].
    """
    operands: dict[str, View | None] = {}
    for origin, source, gain in zip(origins, ("unrotated", "key_source"), ("query_gain", "key_gain"), strict=False):
        operands[source] = origin.view.squeeze(0).transpose(0, 1) if paged else origin.view
        if origin.norm is not None:
            operands[gain] = KERNELS[origin.norm.kernel].bind(origin.norm)[1]
    if (rope := origins[0].rope) is not None:
        _, operands["cos"], operands["sin"] = rope.inputs
    return operands


def _norm_constants(norm: KernelCall | None) -> dict[str, bool | float]:
    if norm is None:
        return {"normed": False, "norm_eps": 0.0, "gain_offset": 0.0}
    return {"normed": True, "norm_eps": norm.params["eps"], "gain_offset": norm.params["weight_offset"]}


def _stays_inside(
    calls: Sequence[KernelCall],
    makers: Mapping[str, KernelCall],
    inputs: Mapping[str, View | None],
    readers: Counter[str],
) -> bool:
    """Whether only `calls` read the results of `makers`, and none of these results is an input of the phase."""
    read = Counter(view.buffer for call in calls for view in call.inputs)
    alone = all(readers[name] == read[name] for name in makers)
    return alone and not any(view is not None and view.buffer in makers for view in inputs.values())


def _suits_paged(call: KernelCall, q: View, new_keys: View | None) -> bool:
    """Whether the phase can compute paged attention: a few tokens, one new row each, and blocks of whole key tiles."""
    tokens = q.shape[0]
    whole_tiles = call.params["block_size"] % BLOCK_KEYS == 0
    return tokens <= _FEW_QUERIES and whole_tiles and new_keys is not None and new_keys.shape[0] == tokens


def _turned_alike(origins: Sequence[HeadOrigin]) -> bool:
    """Whether no origin is rotated, or all are by the same angles, which all heads share."""
    angles = [_angles(origin) for origin in origins]
    return len(set(angles)) == 1 and all(strides[1] == 0 and strides[3] == 1 for _, _, strides in angles[0])


def _angles(origin: HeadOrigin) -> tuple[tuple[str, int, tuple[int, ...]], ...]:
    """The buffer, offset and strides of the cosines and sines of an origin's rotary embedding; empty without one."""
    views = origin.rope.inputs[1:] if origin.rope is not None else ()
    return tuple((view.buffer, view.offset, _strides(view)) for view in views)


def _strides(view: View) -> tuple[int, ...]:
    """The view's strides, with 0 for dimensions of size 1."""
    return tuple(stride if size > 1 else 0 for size, stride in zip(view.shape, view.strides, strict=True))


def _normed_alike(origins: Sequence[HeadOrigin]) -> bool:
    """Whether no origin is normalized, or all are with the same parameters; the gains may differ."""
    norms = [origin.norm.params if origin.norm is not None else None for origin in origins]
    return len({(norm["eps"], norm["weight_offset"]) if norm is not None else None for norm in norms}) == 1


def _alike(source: View, cache: View, rows: int) -> bool:
    """Whether the few rows of `source` fit the cache: same dtype, and same sizes except for dimension `rows`."""

    def other_sizes(view: View) -> tuple[int, ...]:
        return (*view.shape[:rows], *view.shape[rows + 1 :])

    few = source.shape[rows] <= _FEW_QUERIES
    return few and (source.dtype, other_sizes(source)) == (cache.dtype, other_sizes(cache)) and source.strides[-1] == 1
