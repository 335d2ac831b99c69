"""Reference implementations in NumPy ("twins") of the resident kernel's phases, and a block's order of shared accesses.

Arithmetic is in float32. Where a phase rounds to its 16-bit dtype, so does its twin: after the RMSNorm, after the
rotary embedding, and in the result. Tests compare twins with op-level kernels, and phases with twins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from cuda_compiler.resident.mailboxes import MAILBOXES
from cuda_compiler.rules.attention import BLOCK_KEYS

Array: TypeAlias = NDArray[Any]

_LOWEST = np.float32(-3.402823466e38)
_HIDDEN = np.float32(-np.inf)


def rms_norm(x: Array, gain: Array | None, eps: float, gain_offset: float) -> Array:
    """x / sqrt(mean(x²) + eps) · (gain + gain_offset) over rows, or over heads. Shapes: x [..., K]; gain [K]."""
    wide = x.astype(np.float32)
    result: Array = wide / np.sqrt(np.mean(wide * wide, -1, keepdims=True) + np.float32(eps))
    if gain is not None:
        result *= gain.astype(np.float32) + np.float32(gain_offset)
    return result.astype(x.dtype)


def add_normed(base: Array, x: Array, gain: Array | None, eps: float, gain_offset: float) -> Array:
    """base + RMSNorm(x): the residual after a part of a layer with a norm behind it. Shapes: base, x, result [M, K]."""
    normal = rms_norm(x, gain, eps, gain_offset)
    result: Array = (base.astype(np.float32) + normal.astype(np.float32)).astype(x.dtype)
    return result


def product(
    x: Array,
    weight: Array,
    activate: Callable[[Array], Array],
    bias: Array | None = None,
    residual: Array | None = None,
) -> Array:
    """act(x · weightᵀ + bias) + residual. Shapes: x [M, K]; weight [N, K]; bias [N]; residual and result [M, N]."""
    result = activate(_sums(x, weight, bias))
    if residual is not None:
        result = result + residual.astype(np.float32)
    return result.astype(x.dtype)


def gated_product(x: Array, weight: Array, activate: Callable[[Array], Array], bias: Array | None = None) -> Array:
    """act(gate) · up with [gate, up] = x · weightᵀ + bias.

    Shapes: x [M, K]; weight [2N, K]; bias [2N]; result [M, N].
    """
    gate, up = np.split(_sums(x, weight, bias), 2, -1)
    result: Array = activate(gate) * up
    return result.astype(x.dtype)


def choose_experts(ratings: Array, choices: int, before: bool, after: bool, divides: bool) -> tuple[Array, Array]:
    """The numbers of a row's largest ratings, of equal ones the first, and the factors of their experts' results.

    Shapes: ratings [E]; both results [choices]; the factors are in float32.

    Args:
        before, after: Whether the factors are a softmax of all ratings, or of the chosen ones.
        divides: Whether they are divided by their sum.
    """
    values = _softmax(ratings.astype(np.float32)) if before else ratings.astype(np.float32)
    chosen = np.argsort(-values, kind="stable")[:choices]
    factors: Array = _softmax(values[chosen]) if after else values[chosen]
    return chosen, factors / factors.sum() if divides else factors


def _softmax(x: Array) -> Array:
    weights = np.exp(x - x.max())
    result: Array = weights / weights.sum()
    return result


def expert_sum(
    x: Array,
    up: Array,
    down: Array,
    chosen: Array,
    factors: Array,
    gate: Callable[[Array, Array], Array],
    residual: Array | None = None,
    biases: tuple[Array, Array] | None = None,
) -> Array:
    """The weighted sum of what the chosen experts make of one row: Σ (factor · gate(x · upᵀ)) · downᵀ + residual.

    Shapes: x, result and residual [1, K]; up [E, 2N, K]; down [E, K, N]; biases [E, 2N] and [E, K]; chosen and factors
    [choices].

    Args:
        gate: The function of the first and the second half of a product's columns.
    """
    factors = factors.astype(np.float32)
    scaled, bias = [], None if biases is None else np.zeros(down.shape[1], np.float32)
    for expert, factor in zip(chosen, factors, strict=True):
        sums = _sums(x, up[expert], None if biases is None else biases[0][expert])
        inner = gate(*np.split(sums, 2, -1)).astype(x.dtype).astype(np.float32)
        scaled.append((inner * factor).astype(x.dtype))
        if bias is not None and biases is not None:
            bias += factor * biases[1][expert].astype(np.float32)
    return product(np.concatenate(scaled, 1), np.concatenate(list(down[chosen]), 1), lambda sums: sums, bias, residual)


def span_integers(x: Array, span: int) -> tuple[Array, Array]:
    """x as integers times a power of two per span of `span` elements, such that the integers are at most 2^14.

    Shapes: x [M, K]; integers [M, K]; powers [M, K / span]. Where a span is not finite, its power is NaN.
    """
    spans = x.astype(np.float32).reshape(x.shape[0], -1, span)
    bits = np.abs(spans).view(np.uint32).max(-1)
    exponents = np.maximum(bits >> 23, 14).astype(np.int32)
    powers = np.where(exponents == 255, np.float32(np.nan), np.ldexp(np.float32(1), exponents - 13 - 127))
    whole = np.where(np.isfinite(powers)[..., None], spans / powers[..., None], np.float32(0))
    return np.rint(whole).astype(np.int32).reshape(x.shape), powers


def _sums(x: Array, weight: Array, bias: Array | None) -> Array:
    sums: Array = x.astype(np.float32) @ weight.astype(np.float32).T
    return sums if bias is None else sums + bias.astype(np.float32)


def rotate(x: Array, cos: Array, sin: Array) -> Array:
    """The rotary embedding of x [B, H, T, D] by cosines and sines [B, 1, T, D]."""
    wide = x.astype(np.float32)
    first, second = np.split(wide, 2, -1)
    turned = np.concatenate((-second, first), -1)
    result: Array = wide * cos.astype(np.float32) + turned * sin.astype(np.float32)
    return result.astype(x.dtype)


def update_cache(cache: Array, index: Array, rows: Array) -> Array:
    """The cache [B, KV, S, D] after rows [B, KV, T, D] are stored at positions index [T].

    A row whose position is out of range is dropped.
    """
    result = cache.copy()
    for token, key in enumerate(index):
        if 0 <= key < cache.shape[2]:
            result[:, :, key] = rows[:, :, token]
    return result


def attend_split(
    q: Array, k: Array, v: Array, bias: Array, scale: float, split: int, splits: int, soft_cap: float = 0.0
) -> tuple[Array, Array, Array]:
    """The partial sums of one split of the keys: every `splits`-th tile of them, from tile number `split`.

    Shapes: q [B, H, T, D]; k [B, KV, S, D]; v [B, KV, S, Dv]; bias [B, H, T, S], -inf for a key not attended to.
    A soft cap bounds the scores.

    Returns each row's largest score and the total of its weights [B, H, T, 1], and its weighted values [B, H, T, Dv].
    """
    own = np.arange(k.shape[2]) // BLOCK_KEYS % splits == split
    k, v = (np.repeat(cache[:, :, own].astype(np.float32), q.shape[1] // k.shape[1], 1) for cache in (k, v))
    scores = q.astype(np.float32) @ k.swapaxes(2, 3) * np.float32(scale)
    scores = (soft_cap * np.tanh(scores / soft_cap) if soft_cap else scores) + bias[..., own]
    largest = scores.max(-1, keepdims=True, initial=_LOWEST)
    weights = np.exp(scores - largest)
    return largest, weights.sum(-1, keepdims=True), weights @ v


def combine_partials(largest: Array, total: Array, sums: Array, sinks: Array | None = None) -> Array:
    """The attention result [B, H, T, Dv] from the splits' stacked partial sums; 0 for a row that attends to no key.

    Sinks [H], if there are any, are one more score of each head, which belongs to no key.
    """
    shares = np.where(total == 0, 0, np.exp(largest - largest.max(0)))
    whole: Array = (shares * total).sum(0)
    if sinks is not None:
        whole = whole + np.exp(sinks.astype(np.float32)[:, None, None] - largest.max(0))
    result: Array = (shares * sums).sum(0) / np.where(whole == 0, 1, whole)
    return result


def attend_keys(
    q: Array,
    k: Array,
    v: Array,
    bias: Array,
    scale: float,
    splits: int,
    soft_cap: float = 0.0,
    sinks: Array | None = None,
) -> Array:
    """Attention over splits of the keys; shapes as in `attend_split`, sinks [H], result [B, H, T, Dv]."""
    parts = [attend_split(q, k, v, bias, scale, split, splits, soft_cap) for split in range(splits)]
    largest, total, sums = (np.stack(part) for part in zip(*parts, strict=True))
    return combine_partials(largest, total, sums, sinks).astype(q.dtype)


def update_pool(pool: Array, slots: Array, rows: Array) -> Array:
    """The pool [rows, KV, D] after rows [T, KV, D] are stored at slots [T].

    A row whose slot is out of range is dropped.
    """
    updated: Array = update_cache(pool.swapaxes(0, 1)[None], slots, rows.swapaxes(0, 1)[None])[0].swapaxes(0, 1)
    return updated


def attend_pool(  # noqa: PLR0913 -- operands and parameters of the phase
    q: Array,
    k: Array,
    v: Array,
    tables: Array,
    reached: Sequence[tuple[int, int]],
    block_size: int,
    scale: float,
    splits: int,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: Array | None = None,
) -> Array:
    """Paged attention of tokens of many sequences, each over splits of the keys up to its own position.

    Shapes: q [T, H, D]; k [rows, KV, D]; v [rows, KV, Dv]; tables [S, blocks]; sinks [H]; result [T, H, Dv].

    Args:
        reached: Each token's sequence and position.
        window: Number of last keys that a token attends to, whose splits begin with the block of the pool in which the
            window begins; 0: all.
        soft_cap: Bound of the scores; 0: none.
    """
    results = []
    for query, (sequence, position) in zip(q, reached, strict=True):
        first = max(0, position + 1 - window) if window else 0
        keys = np.arange(first // block_size * block_size, position + 1)
        rows = tables[sequence, keys // block_size] * block_size + keys % block_size
        own_k, own_v = (pool[rows].swapaxes(0, 1)[None] for pool in (k, v))
        bias = np.broadcast_to(np.where(keys < first, _HIDDEN, 0), (1, q.shape[1], 1, len(keys)))
        results.append(attend_keys(query[None, :, None], own_k, own_v, bias, scale, splits, soft_cap, sinks)[0, :, 0])
    return np.stack(results)


def accesses(
    step: int, from_mailbox: bool, to_mailbox: bool, exchanges: bool, mailboxes: int = MAILBOXES
) -> Iterator[tuple[str, int]]:
    """A block's accesses to shared state in one step, in order, as pairs of a kind and a mailbox or step number.

    Args:
        from_mailbox, to_mailbox: Whether a mailbox connects the step with the one before, and with the one after.
        exchanges: Whether the blocks exchange tagged partial sums, as in attention.
    """
    if from_mailbox:
        yield "wait", step - 2
        yield "receive", (step - 1) % mailboxes
    else:
        yield "wait", step - 1
    if exchanges:
        yield "send tagged", step
        yield "receive tagged", step
    if to_mailbox:
        yield "send", step % mailboxes
    yield "empty", (step - 3) % mailboxes
    yield "arrive", step
