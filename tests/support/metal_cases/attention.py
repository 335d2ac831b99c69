"""Attention: single queries, tiles of queries and wide heads; masks, causality, shared KV heads, any strides."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import inf

import numpy as np
from metal_harness import Case, T


def attention(
    name: str,
    queries: int,
    keys: int,
    width: int,
    *,
    batch: int = 1,
    heads: tuple[int, int] = (2, 2),
    value_width: int | None = None,
    mask: T | None = None,
    causal: bool = False,
    dtype: str = "compute",
    inputs: tuple[T, T, T] | None = None,
    scale: float | None = None,
    soft_cap: float = 0.0,
    sinks: str | None = None,
    atol: float = 1e-4,
) -> Case:
    """`heads`: of queries, of keys and values; `sinks`: their dtype. The output lies as [batch, query, head, width]."""
    values = width if value_width is None else value_width
    own, shared = heads
    q, k, v = inputs or (
        T((batch, own, queries, width), dtype),
        T((batch, shared, keys, width), dtype),
        T((batch, shared, keys, values), dtype),
    )
    out = T((batch, own, queries, values), strides=(queries * own * values, values, own * values, 1))
    params = {"scale": scale or width**-0.5, "causal": int(causal), "soft_cap": soft_cap}
    params |= {"has_mask": int(mask is not None), "has_sinks": int(sinks is not None)}
    others = [mask] if mask else []
    if sinks:
        others.append(T((own,), sinks, values=np.random.default_rng(own * keys).normal(2.0, 2.0, own)))
    return Case("attention_kernel", name, [q, k, v, *others], [out], params, atol=atol)


def mask(batch: int, heads: int, queries: int, keys: int, dtype: str, values: object = None) -> T:
    """A mask that all heads share."""
    return T((batch, heads, queries, keys), dtype, (queries * keys, 0, keys, 1), values=values)


def lower_triangle(queries: int, keys: int, dtype: str, start: int = 0) -> T:
    """Causality as a mask, the first query at position `start`."""
    allowed = np.arange(keys) <= np.arange(queries)[:, None] + start
    return mask(1, 2, queries, keys, dtype, allowed if dtype == "bool" else np.where(allowed, 0.0, -inf))


def some_rows_empty(queries: int, keys: int, dtype: str) -> T:
    """Every third query attends to nothing, the others to every second key."""
    allowed = (np.arange(queries)[:, None] % 3 != 1) & (np.arange(keys) % 2 == 0)
    return mask(1, 2, queries, keys, dtype, allowed if dtype == "bool" else np.where(allowed, 0.0, -inf))


LOWEST = {"float16": -65504.0, "bfloat16": -(2.0**128 - 2.0**120), "float32": -(2.0**128 - 2.0**104)}


def lowest_tail(queries: int, keys: int, dtype: str, start: int = 0) -> np.ndarray:
    """Causality as Hugging Face spells it: the dtype's lowest value, which leaves a key no weight."""
    return np.where(np.arange(keys) <= np.arange(queries)[:, None] + start, 0.0, LOWEST[dtype])


def some_rows_lowest(queries: int, keys: int, dtype: str) -> np.ndarray:
    """Every third query has the lowest value for all keys: what it gets is a softmax still."""
    return np.where(np.arange(queries)[:, None] % 3 == 1, LOWEST[dtype], lowest_tail(queries, keys, dtype, 2))


def lowest_beside_infinity(queries: int, keys: int, dtype: str) -> np.ndarray:
    """Return a mask whose queries have in turn the lowest value behind -inf, -inf alone, a causal mask of both."""
    key, kind = np.arange(keys), np.arange(queries)[:, None] % 3
    behind = np.where(key < keys // 2, -inf, LOWEST[dtype])
    both = np.where(key % 5 == 3, -inf, lowest_tail(queries, keys, dtype, 1))
    return np.select([kind == 0, kind == 1], [behind, -inf], both)


LOWEST_MASKS = [lowest_tail, some_rows_lowest, lowest_beside_infinity]


def cached(queries: int, keys: int, width: int, dtype: str = "compute") -> tuple[T, T, T]:
    """Queries as a slice of a joint product, keys and values in a longer cache."""
    rows = 8 * width
    q = T((1, 4, queries, width), dtype, (queries * rows, width, rows, 1), offset=4)
    k, v = (T((1, 2, keys, width), dtype, ((keys + 5) * 2 * width, (keys + 5) * width, width, 1)) for _ in range(2))
    return q, k, v


def with_special_rows(queries: int, width: int) -> np.ndarray:
    """Queries of which one holds NaN and one scores ±inf."""
    rows = np.cos(np.arange(queries * width)).reshape(queries, width)
    rows[3, 0] = np.nan
    rows[5] = 0.0
    rows[5, 0] = inf
    return rows


def paged(
    name: str,
    lengths: Sequence[tuple[int, int]],
    width: int,
    *,
    heads: tuple[int, int] = (4, 2),
    block_size: int = 16,
    value_width: int | None = None,
    spare: int = 0,
    dtype: str = "compute",
    value_dtype: str | None = None,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: str | None = None,
    atol: float = 1e-4,
) -> Case:
    """Tokens of some sequences, whose blocks lie in a pool in any order; rows that nobody attends to are NaN.

    Blocks before the window of a sequence's first token are released: their entries in the table are any numbers.

    Args:
        lengths: Numbers of tokens of each sequence: in the cache, and in this step.
        sinks: The dtype of the heads' sinks; None: there are none.
        spare: Tokens at the end that are padding: position 0 of sequence 0, which no window may have released.
    """
    random = np.random.default_rng(len(lengths) + width)
    firsts = [max(0, known + 1 - window) if window else 0 for known, _ in lengths]
    counts = [-(-(known + new) // block_size) for known, new in lengths]
    blocks = random.permutation(sum(counts) + 2)
    own, shared = heads
    pools = [np.full((len(blocks) * block_size, shared, size), np.nan) for size in (width, value_width or width)]
    tables = random.integers(-(2**31), 2**31, (len(lengths) + 1, max(counts) + 1))
    sequences: list[int] = []
    positions: list[int] = []
    for sequence, (known, new) in enumerate(lengths):
        tables[sequence, : counts[sequence]], blocks = np.split(blocks, [counts[sequence]])
        places = np.arange(firsts[sequence], known + new)
        rows = tables[sequence, places // block_size] * block_size + places % block_size
        for pool in pools:
            pool[rows] = random.standard_normal((len(rows), *pool.shape[1:]))
        released = firsts[sequence] // block_size
        tables[sequence, :released] = random.integers(-(2**31), 2**31, released)
        sequences += [sequence] * new
        positions += range(known, known + new)
    sequences += [0] * spare
    positions += [0] * spare
    tokens = len(positions)
    return Case(
        "paged_attention_kernel",
        name,
        [
            T((tokens, own, width), dtype),
            T(pools[0].shape, dtype, values=pools[0]),
            T(pools[1].shape, value_dtype or dtype, values=pools[1]),
            T(tables.shape, "int32", values=tables),
            T((tokens,), "int32", values=np.array(sequences)),
            T((tokens,), "int32", values=np.array(positions)),
            *([T((own,), sinks, values=random.normal(2.0, 2.0, own))] if sinks else []),
        ],
        [T((tokens, own, value_width or width), dtype)],
        {
            "scale": width**-0.5,
            "block_size": block_size,
            "window": window,
            "soft_cap": soft_cap,
            "has_sinks": int(sinks is not None),
        },
        atol=atol,
    )


PAGED = [
    paged("one-token", [(0, 1)], 16),
    paged("decode", [(5, 1), (40, 1), (16, 1)], 64, heads=(6, 2)),
    paged("mixed", [(33, 1), (0, 19), (7, 5), (15, 1)], 64),
    paged("blocks-of-four", [(9, 3), (0, 1)], 32, block_size=4),
    paged("blocks-of-one", [(3, 2)], 8, block_size=1),
    paged("padding", [(20, 1), (3, 2)], 128, heads=(3, 1), spare=3),
    paged("odd-width", [(6, 2), (18, 1)], 13, value_width=9),
    paged("wide", [(4, 2)], 160, heads=(2, 1)),
    paged("one-head-each", [(12, 2)], 32, heads=(3, 3)),
    paged("window", [(45, 1), (3, 1), (0, 19), (30, 9)], 64, window=7),
    paged("window-of-one", [(18, 2), (0, 3)], 16, block_size=4, window=1),
    paged("wide-window", [(40, 2)], 160, heads=(2, 1), window=9),
    paged("soft-cap", [(33, 1), (0, 19)], 64, soft_cap=1.5),
    paged("window-and-soft-cap", [(33, 1), (0, 19)], 13, window=16, soft_cap=0.5, dtype="float32"),
    paged("sinks", [(45, 1), (3, 1), (0, 19)], 64, heads=(6, 2), sinks="compute"),
    paged("wide-sinks", [(40, 2)], 160, heads=(2, 1), window=9, sinks="float32"),
    paged("window-soft-cap-and-sinks", [(33, 1), (0, 19)], 13, window=16, soft_cap=0.5, sinks="compute"),
    paged("float32", [(6, 2), (18, 1)], 32, dtype="float32"),
]


CASES = [
    *PAGED,
    attention("one-key", 1, 1, 8),
    attention("keys-of-one-stream", 1, 3, 64),
    attention("several-groups", 1, 37, 64, heads=(4, 2)),
    attention("several-rounds", 1, 70, 16, batch=2, heads=(6, 2)),
    attention("width-128", 1, 33, 128),
    attention("width-96", 2, 21, 96),
    attention("width-80", 1, 9, 80),
    attention("width-20", 3, 18, 20),
    attention("width-not-of-four", 2, 7, 13, value_width=9),
    attention("narrow-values", 2, 11, 32, value_width=8),
    attention("wide-values", 2, 11, 8, value_width=72),
    attention("one-dimension", 2, 5, 1),
    attention("cache", 1, 40, 32, heads=(4, 2), inputs=cached(1, 40, 32)),
    attention(
        "mixed-types", 1, 9, 16, inputs=(T((1, 2, 1, 16), "float32"), T((1, 2, 9, 16)), T((1, 2, 9, 16), "float32"))
    ),
    attention("float32", 2, 40, 32, dtype="float32"),
    attention("scale", 1, 9, 16, scale=0.9),
    attention("causal", 7, 7, 32, causal=True),
    attention("causal-more-keys", 3, 50, 32, causal=True),
    attention("bool-mask", 2, 41, 32, batch=2, mask=mask(2, 2, 2, 41, "bool")),
    attention(
        "bool-mask-of-cache",
        1,
        64,
        32,
        heads=(4, 2),
        inputs=cached(1, 64, 32),
        mask=T((1, 4, 1, 64), "bool", (64, 0, 64, 1), values=np.arange(64) < 30),
    ),
    attention("float-mask", 2, 41, 32, mask=mask(1, 2, 2, 41, "compute")),
    attention("float32-mask", 2, 40, 32, mask=mask(1, 2, 2, 40, "float32")),
    attention("mask-of-minus-infinity", 3, 40, 32, mask=lower_triangle(3, 40, "compute", 7)),
    attention("mask-over-keys", 2, 12, 16, mask=T((1, 2, 2, 12), "bool", (0, 0, 0, 1))),
    attention("mask-of-lowest", 2, 40, 32, mask=mask(1, 2, 2, 40, "float32", float(np.finfo(np.float32).min))),
    attention("nothing-attended", 4, 40, 32, mask=some_rows_empty(4, 40, "bool")),
    attention("nothing-attended-float", 4, 40, 32, mask=some_rows_empty(4, 40, "compute")),
    attention("no-keys", 2, 0, 16),
    attention("tile-no-keys", 9, 0, 16),
    attention(
        "large-scores",
        2,
        40,
        16,
        inputs=(T((1, 2, 2, 16), values=(-40.0, 40.0)), T((1, 2, 40, 16), values=(-40.0, 40.0)), T((1, 2, 40, 16))),
    ),
    attention(
        "special-values", 1, 9, 16, inputs=(T((1, 2, 1, 16)), T((1, 2, 9, 16)), T((1, 2, 9, 16), values="special"))
    ),
    attention("wide", 1, 37, 160, heads=(4, 2)),
    attention("wide-256", 2, 20, 256, mask=mask(1, 2, 2, 20, "bool")),
    attention("wide-values-only", 2, 6, 32, value_width=300),
    attention("wide-queries-only", 9, 6, 132, value_width=16, causal=True),
    attention("wide-not-of-four", 1, 5, 261),
    attention("wide-512", 2, 6, 512, heads=(1, 1)),
    attention("soft-cap", 2, 41, 64, heads=(4, 2), soft_cap=0.5, mask=mask(1, 4, 2, 41, "bool")),
    attention("wide-soft-cap", 1, 37, 160, soft_cap=1.5),
    attention("odd-soft-cap", 2, 20, 13, soft_cap=0.5, mask=mask(1, 2, 2, 20, "float32")),
    attention("tile-soft-cap", 37, 70, 64, heads=(4, 2), soft_cap=0.5, causal=True),
    attention("tile-soft-cap-float-mask", 9, 40, 16, soft_cap=1.5, mask=mask(1, 2, 9, 40, "compute")),
    attention("sinks", 1, 37, 64, heads=(6, 2), sinks="compute"),
    attention("wide-sinks", 2, 20, 256, sinks="float32", mask=mask(1, 2, 2, 20, "bool")),
    attention("odd-sinks", 4, 40, 13, heads=(4, 2), soft_cap=0.5, sinks="compute", causal=True),
    attention("sinks-nothing-attended", 4, 40, 32, sinks="compute", mask=some_rows_empty(4, 40, "bool")),
    attention("sinks-float32", 2, 40, 32, dtype="float32", sinks="float32"),
    attention("tile-sinks", 37, 70, 64, heads=(4, 2), sinks="compute", causal=True),
    attention("tile-sinks-float-mask", 9, 40, 16, soft_cap=1.5, sinks="float32", mask=mask(1, 2, 9, 40, "compute")),
    attention("tile-sinks-nothing-attended", 10, 40, 16, sinks="compute", mask=some_rows_empty(10, 40, "float32")),
    attention("tile", 32, 32, 32),
    attention("tile-begun", 9, 33, 16, mask=mask(1, 2, 9, 33, "bool")),
    attention("tile-float-mask", 9, 40, 16, mask=mask(1, 2, 9, 40, "compute")),
    attention("tile-float32-mask", 10, 37, 24, batch=2, mask=mask(2, 2, 10, 37, "float32")),
    attention("tiles", 37, 70, 64, heads=(4, 2)),
    attention("tile-width-128", 11, 35, 128),
    attention("tile-width-20", 9, 20, 20),
    attention("tile-width-not-of-four", 9, 10, 13, value_width=21),
    attention("tile-narrow-values", 12, 40, 32, value_width=8),
    attention("tile-wide-values", 12, 40, 8, value_width=40),
    attention("tile-causal", 40, 40, 32, causal=True),
    attention("tile-causal-more-keys", 33, 100, 16, causal=True),
    attention("tile-causal-fewer-keys", 40, 9, 16, causal=True),
    attention(
        "tile-of-cache",
        33,
        96,
        32,
        heads=(4, 2),
        inputs=cached(33, 96, 32),
        mask=T((1, 4, 33, 96), "bool", (0, 0, 96, 1), values=np.tri(33, 96, dtype=bool)),
    ),
    attention("tile-mask-of-minus-infinity", 33, 100, 16, mask=lower_triangle(33, 100, "compute")),
    attention("tile-skips-keys", 9, 140, 16, mask=mask(1, 2, 9, 140, "bool", np.arange(140) % 64 >= 50)),
    attention("tile-nothing-attended", 10, 40, 16, mask=some_rows_empty(10, 40, "bool")),
    attention("tile-nothing-attended-float", 10, 40, 16, mask=some_rows_empty(10, 40, "float32")),
    attention("tile-float32", 34, 40, 32, dtype="float32", causal=True),
    attention("tile-mixed-types", 9, 9, 16, inputs=(T((1, 2, 9, 16), "float32"), T((1, 2, 9, 16)), T((1, 2, 9, 16)))),
    attention(
        "tile-large-scores",
        9,
        70,
        16,
        inputs=(T((1, 2, 9, 16), values=(-40.0, 40.0)), T((1, 2, 70, 16), values=(-40.0, 40.0)), T((1, 2, 70, 16))),
    ),
    attention(
        "tile-special-queries",
        9,
        100,
        16,
        inputs=(T((1, 2, 9, 16), values=with_special_rows(9, 16)), T((1, 2, 100, 16)), T((1, 2, 100, 16))),
    ),
    # Near float16's lowest value, float32 has but eight bits for what a score adds to it.
    *(
        attention(
            f"{values.__name__.replace('_', '-')}-{dtype}-{queries}",
            queries,
            150,
            32,
            heads=(4, 2),
            atol=5e-3,
            mask=T((1, 4, queries, 150), dtype, (queries * 150, 0, 150, 1), values=partial(values, queries, 150)),
        )
        for dtype in ("compute", "float32")
        for values in LOWEST_MASKS
        for queries in (4, 11)
    ),
]
