"""Cases of CUDA templates that need larger operands than the cases that all devices share."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

import numpy as np
import torch
from metal_cases import attention as attention_cases
from metal_cases import experts as expert_cases
from metal_cases import matmul as matmul_cases
from metal_cases import norms as norm_cases
from metal_cases import quantized as quantized_cases
from metal_cases import recurrent as recurrent_cases
from metal_cases import reduce as reduce_cases
from metal_cases import softmax as softmax_cases
from metal_cases import sort as sort_cases
from metal_harness import Case, T

from npu_compiler.program.views import contiguous_strides


def linear(m: int, n: int, k: int, **options: object) -> Case:
    kernel = str(options.pop("kernel", "matmul_vec_kernel" if m == 1 else "matmul_kernel"))
    name = "-".join(str(part) for part in (m, n, k, *options.items())).translate(str.maketrans("", "", "()', "))
    return matmul_cases.linear(kernel, name, m, n, k, **options)  # type: ignore[arg-type]


def cached(queries: int, keys: int, attended: int, *, heads: int = 12, width: int = 128, dtype: str = "bool") -> Case:
    """Grouped-query attention to the first keys of a cache, under a mask that all heads share."""
    allowed = np.arange(keys) < attended
    row = allowed if dtype == "bool" else np.where(allowed, 0.0, -math.inf)
    values = np.broadcast_to(row, (1, heads, queries, keys))
    mask = T((1, heads, queries, keys), dtype, (queries * keys, 0, keys, 1), values=values)
    return attention_cases.attention(
        f"cache-{queries}-{attended}-of-{keys}-{dtype}", queries, keys, width, heads=(heads, heads // 6), mask=mask
    )


def holes(queries: int, keys: int, hole: int) -> Case:
    """Attention that leaves out every second run of `hole` keys."""
    values = np.broadcast_to(np.where(np.arange(keys) // hole % 2, 0.0, -math.inf), (1, 4, queries, keys))
    mask = T((1, 4, queries, keys), "float32", (queries * keys, 0, keys, 1), values=values)
    return attention_cases.attention(f"holes-{queries}-{keys}", queries, keys, 64, heads=(4, 2), mask=mask)


def _with(places: dict[int, float], dtype: str = "compute") -> np.ndarray:
    """Two rows of 20,000 ones, with other values at some places of both."""
    values = np.ones((2, 20_000), np.int32 if dtype == "int32" else np.float32)
    for place, value in places.items():
        values[:, place] = value
    return values


# What a serving step has: decoding only, prompts' pieces only, and both, with heads that share keys in all ways.
PAGED = [
    attention_cases.paged("long-decode", [(700, 1), (33, 1), (1200, 1)], 128, heads=(12, 2)),
    attention_cases.paged("drafts", [(700, 8), (90, 8)], 64, heads=(9, 3)),
    attention_cases.paged("many-heads", [(300, 2), (5, 1)], 64, heads=(40, 1)),
    attention_cases.paged("prompt", [(0, 300)], 128, heads=(12, 2), atol=1e-3),
    attention_cases.paged("prompt-piece", [(517, 256)], 64, heads=(9, 3), atol=1e-3),
    attention_cases.paged(
        "prompt-and-decode", [(n * 13, 1) for n in range(40)] + [(100, 230)], 128, heads=(8, 2), atol=1e-3
    ),
    attention_cases.paged("prompt-in-blocks-of-eight", [(70, 260)], 64, heads=(4, 4), block_size=8, atol=1e-3),
    attention_cases.paged("decode-256", [(700, 1), (33, 1), (1200, 1)], 256, heads=(8, 4)),
    attention_cases.paged("decode-512", [(700, 1), (33, 1)], 512, heads=(8, 1)),
    attention_cases.paged("drafts-192", [(700, 8), (90, 8)], 192, heads=(9, 3), value_width=128),
    attention_cases.paged("prompt-256", [(0, 300)], 256, heads=(8, 4), atol=1e-3),
    attention_cases.paged("prompt-piece-320", [(517, 256)], 320, heads=(4, 2), atol=1e-3),
    attention_cases.paged("prompt-and-padding", [(0, 200)], 96, heads=(4, 1), spare=60, atol=1e-3),
]


def tiled(name: str, queries: int, keys: int, width: int, **options: Any) -> Case:
    """Attention of many queries by so many heads that tiles fill the GPU; its weights are rounded to 16 bits."""
    options = {"heads": (192, 96), "atol": 4e-3, **options}
    return attention_cases.attention(f"many-{name}", queries, keys, width, **options)


def shared_mask(queries: int, keys: int, dtype: str, values: object, heads: int = 192) -> T:
    return T((1, heads, queries, keys), dtype, (queries * keys, 0, keys, 1), values=values)


def own_biases(batch: int, heads: int, queries: int, keys: int) -> T:
    """A bias of each head's own, which leaves some queries none of the first keys, or only if there were no others."""
    values = np.random.default_rng(keys).standard_normal((batch, heads, queries, keys)).astype(np.float32)
    values[..., ::3, : keys * 2 // 3] = -math.inf
    values[..., 1::3, : keys // 2] = -65504.0
    return T(values.shape, "compute", values=values)


TILED_ATTENTION = [
    tiled("own-biases", 66, 140, 32, heads=(96, 96), mask=own_biases(1, 96, 66, 140)),
    tiled("windows-of-two-tiles", 49, 121, 24, heads=(4, 4), batch=40, value_width=72, mask=own_biases(40, 4, 49, 121)),
    tiled("queries", 70, 150, 64),
    tiled("bool-mask", 70, 150, 64, mask=shared_mask(70, 150, "bool", None)),
    tiled("own-masks", 66, 133, 32, heads=(96, 48), batch=2, mask=T((2, 96, 66, 133), "bool")),
    tiled(
        "padded-batches",
        70,
        136,
        64,
        heads=(2, 2),
        batch=50,
        mask=T((50, 2, 70, 136), "bool", (136, 0, 0, 1), values=np.tri(50, 136, 20, dtype=bool)[:, None, None]),
    ),
    tiled("wide-blocks", 66, 100, 24, heads=(528, 264), mask=shared_mask(66, 100, "bool", None, 528)),
    tiled("wide-causal-blocks", 130, 130, 128, heads=(264, 264), causal=True),
    tiled("causal", 150, 150, 80, heads=(96, 96), causal=True),
    tiled("causal-fewer-keys", 150, 90, 128, heads=(192, 48), causal=True),
    tiled("width-40", 70, 150, 40),
    tiled("width-48-bool-mask", 70, 150, 48, mask=shared_mask(70, 150, "bool", None)),
    tiled("width-80", 150, 150, 80),
    tiled("width-96-masked", 130, 200, 96, mask=shared_mask(130, 200, "compute", (-1.0, 1.0))),
    tiled("narrow", 70, 33, 24, value_width=40),
    tiled("negative-scale", 70, 150, 64, scale=-0.2),
    tiled("added-mask", 70, 200, 128, mask=shared_mask(70, 200, "float32", "normal")),
    tiled(
        "nothing-attended",
        70,
        100,
        64,
        mask=shared_mask(70, 100, "bool", (np.arange(70)[:, None] % 3 != 1) & (np.arange(100) % 2 == 0)),
    ),
    tiled(
        "special-queries",
        66,
        150,
        16,
        heads=(96, 96),
        inputs=(
            T((1, 96, 66, 16), values=attention_cases.with_special_rows(66, 16)),
            T((1, 96, 150, 16)),
            T((1, 96, 150, 16)),
        ),
    ),
    tiled(
        "cache",
        66,
        200,
        32,
        heads=(96, 96),
        mask=shared_mask(66, 200, "bool", np.tri(66, 200, dtype=bool), 96),
        inputs=(
            T((1, 96, 66, 32), strides=(0, 32, 100 * 32, 1), offset=8),
            *(T((1, 96, 200, 32), strides=(0, 205 * 32, 32, 1)) for _ in range(2)),
        ),
    ),
    *(
        tiled(
            f"{values.__name__.replace('_', '-')}-{dtype}",
            70,
            300,
            64,
            atol=8e-3,
            mask=shared_mask(70, 300, dtype, partial(values, 70, 300)),
        )
        for dtype in ("compute", "float32")
        for values in attention_cases.LOWEST_MASKS
    ),
]


# Heads that are too wide for warpgroups, and for tiles on GPUs with little shared memory.
WIDE_ATTENTION = [
    tiled("width-256", 70, 150, 256, mask=shared_mask(70, 150, "bool", None)),
    tiled("width-256-causal", 150, 150, 256, heads=(96, 48), causal=True),
    tiled("width-192-values-128", 70, 150, 192, value_width=128),
    tiled("width-512", 66, 100, 512, heads=(96, 24), causal=True),
    tiled("values-wider-than-a-tile", 66, 100, 40, heads=(96, 96), value_width=328),
]


# Where there is a warpgroup for each 64 rows: widths 64 and 128 of equal queries and values.
WARPGROUP_ATTENTION = [
    tiled("own-biases-of-warpgroups", 64, 300, 64, heads=(96, 96), mask=own_biases(1, 96, 64, 300)),
    tiled("rounds-of-the-ring", 70, 1000, 64, mask=shared_mask(70, 1000, "bool", None)),
    tiled("rounds-of-the-ring-128", 22, 900, 128, heads=(192, 32), mask=shared_mask(22, 900, "compute", "normal")),
    tiled(
        "holes-in-the-ring",
        70,
        1200,
        128,
        mask=shared_mask(70, 1200, "bool", np.broadcast_to(np.arange(1200) // 200 % 2 == 1, (70, 1200))),
    ),
    tiled("small-blocks", 64, 520, 128, heads=(96, 48), causal=True),
    tiled("small-blocks-mask", 64, 520, 64, heads=(96, 48), mask=shared_mask(64, 520, "bool", None, 96)),
    tiled("shared-causal", 100, 700, 128, heads=(120, 20), causal=True),
    tiled("no-mask", 130, 257, 64, heads=(96, 96)),
    tiled("one-tile", 130, 128, 128, heads=(96, 96)),
    tiled(
        "apart",
        64,
        300,
        64,
        heads=(96, 96),
        inputs=(
            T((1, 96, 64, 64), strides=(0, 64, 100 * 64, 1), offset=8),
            *(T((1, 96, 300, 64), strides=(0, 72, 96 * 72, 1), offset=16) for _ in range(2)),
        ),
    ),
]


def first_keys(keys: int, attended: int, dtype: str) -> np.ndarray:
    allowed = np.arange(keys) < attended
    return allowed if dtype == "bool" else np.where(allowed, 0.0, attention_cases.LOWEST[dtype])


def known_to_first(shape: tuple[int, ...], attended: int, dtype: str) -> np.ndarray:
    """A cache [1, heads, keys, width] whose keys behind the attended ones are NaN."""
    cache = np.cos(np.arange(math.prod(shape), dtype=np.float64) ** 2).reshape(shape)
    cache[:, :, attended:] = np.nan
    return cache


def unread(queries: int, keys: int, attended: int, dtype: str, heads: tuple[int, int]) -> Case:
    """Attention to the first keys of a cache whose other keys and values are NaN, under a mask that excludes them."""
    shape = (1, heads[1], keys, 64)
    cache = partial(known_to_first, shape, attended)
    case = attention_cases.attention(
        f"unread-{queries}-{dtype}",
        queries,
        keys,
        64,
        heads=heads,
        atol=4e-3,
        inputs=(T((1, heads[0], queries, 64)), T(shape, values=cache), T(shape, values=cache)),
        mask=shared_mask(queries, keys, dtype, partial(first_keys, keys, attended), heads[0]),
    )
    return replace(case, reference=lambda inputs, outputs, params: attend_to_first(inputs, outputs, params, attended))


def attend_to_first(
    inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], params: Mapping[str, Any], attended: int
) -> None:
    q, k, v = (tensor.float() for tensor in inputs[:3])
    result = torch.nn.functional.scaled_dot_product_attention(
        q, k[:, :, :attended], v[:, :, :attended], scale=params["scale"], enable_gqa=True
    )
    outputs[0].copy_(result)


UNREAD = [
    unread(queries, 1000, 128, dtype, heads)
    for queries, heads in ((1, (12, 2)), (3, (4, 2)), (20, (160, 80)), (70, (192, 96)))
    for dtype in ("bool", "compute", "float32")
]

MANY_ROWS = [
    linear(33, n, 40, **options)
    for n in (70, 72)
    for options in (
        {"bias": "compute"},
        {"residual": "compute"},
        {"bias": "float32"},
        {"activation": "silu"},
        {"bias": "compute", "residual": "compute"},
        {"bias": "compute", "residual": "compute", "row": 80},
        {"residual": "compute", "out": "float32"},
        {"residual": "float32", "out": "float32"},
        {"bias": "float32", "out": "float32"},
        {"bias": "float32", "out": "float32", "activation": "relu"},
        {"bias": "compute", "activation": "relu"},
        {"activation": "relu", "values": "special"},
        {"bias": "compute", "activation": "gelu_tanh"},
        {"bias": "compute", "activation": "gelu"},
        {"bias": "compute", "residual": "compute", "activation": "relu"},
        {"bias": "compute", "residual": "compute", "kernel": "matmul_notrans_kernel"},
    )
]

LONG_ROWS = [
    *(reduce_cases.reduction(op, "long", T((40_007,))) for op in ("max", "min", "argmax", "argmin")),
    reduce_cases.reduction("argmax", "vocabulary", T((1, 151_936), "float32")),
    reduce_cases.reduction("argmin", "long-gap", T((3, 20_001), strides=(20_003, 1), offset=1)),
    *(
        reduce_cases.reduction(op, f"long-{name}", T((2, 20_000), dtype, values=_with(row, dtype)))
        for op in ("max", "argmax", "argmin")
        for dtype in ("compute", "int32")
        for name, row in (("ties", {19_999: 9, 7_001: 9, 7_000: 9, 12: -9, 15_000: -9}), ("equal", {}))
    ),
    reduce_cases.reduction("argmax", "long-nan", T((2, 20_000), values=_with({700: math.inf, 19_000: math.nan}))),
    reduce_cases.reduction("max", "long-minus-infinity", T((1, 20_000), values=np.full((1, 20_000), -math.inf))),
]

# Softmaxes over rows that lie as columns: heads of an odd width in a wider matrix, vectors, classes of images, others.
COLUMNS = [
    case
    for name, x, out in (
        (
            "heads",
            T((2, 4, 19, 301), strides=(68628, 19, 1, 228), offset=76),
            T((2, 4, 19, 301), strides=(22876, 5719, 1, 19)),
        ),
        ("vectors", T((2, 16, 1030), strides=(16480, 1, 16)), T((2, 16, 1030), strides=(16480, 1, 16))),
        ("classes", T((2, 20, 30, 21), strides=(12600, 30, 1, 600)), T((2, 20, 30, 21), strides=(12600, 30, 1, 600))),
        ("many", T((50_000, 2), strides=(1, 50_000)), T((50_000, 2), strides=(1, 50_000))),
        ("single", T((1, 24, 40), strides=(0, 1, 24)), T((1, 24, 40), "float32", strides=(960, 1, 25))),
        ("odd", T((8, 150), strides=(1, 8), values=softmax_cases.ODD_ROWS), T((8, 150), strides=(1, 8))),
        ("float32", T((3, 12, 140), "float32", strides=(1680, 1, 12)), T((3, 12, 140), strides=(2100, 1, 15))),
    )
    for case in softmax_cases.plain(f"columns-{name}", x, out, 0.7)
]

# Rows whose order a radix sort finds.
LONG_ORDERS = [
    Case("argsort_kernel", f"long-{name}-{'down' if descending else 'up'}", [x], [order], {"descending": descending})
    for name, x, order in (
        ("rows", T((2, 5000)), T((2, 5000), "int32")),
        ("strided", T((3, 4100), "float32", strides=(1, 4)), T((3, 4100), "int32", strides=(1, 3))),
        ("equals", T((2, 9001), values="small"), T((2, 9001), "int32")),
        ("special", T((2, 6000), values="special"), T((2, 6000), "int32")),
        ("nan", T((2, 5005), values=np.tile(sort_cases.NAN, 143)), T((2, 5005), "int32")),
        ("integers", T((2, 2, 5000), "int32", values=(-(2**31), 2**31)), T((2, 2, 5000), "int32")),
        ("bools", T((2, 5000), "bool"), T((2, 5000), "int32")),
        ("vocabulary", T((151_936,), "float32"), T((151_936,), "int32")),
    )
    for descending in (False, True)
]

# What the cases that all devices share are too small for; for the device at hand, in `test_cuda_kernels.py`.


def pixels_last(shape: tuple[int, ...], **options: Any) -> T:
    """[N, C, …] with its channels side by side."""
    steps = contiguous_strides((shape[0], *shape[2:], shape[1]))
    return T(shape, strides=(steps[0], steps[-1], *steps[1:-1]), **options)


def group_norm(name: str, shape: tuple[int, ...], groups: int, affine: bool = True, **options: Any) -> Case:
    """Case of a group norm over channels-last images."""
    parts = {"weight": T((shape[1],)), "bias": T((shape[1],))} if affine else {}
    return norm_cases.group(f"last-{name}", pixels_last(shape, **options), groups, pixels_last(shape), **parts)


# Weights in registers, in shared memory, and read anew at each step; rows in several groups, and in several launches.
RECURRENT = [
    recurrent_cases.recurrent("lstm", 20, 8, 64, 512, both=True),
    recurrent_cases.recurrent("lstm", 6, 70, 40, 256, both=True, batch_first=True),
    recurrent_cases.recurrent("gru", 6, 40, 64, 1280, both=True),
    recurrent_cases.recurrent("lstm", 4, 2, 32, 2048, both=True),
    recurrent_cases.recurrent("gru", 4, 33, 32, 1022),
    recurrent_cases.recurrent("tanh", 5, 300, 24, 96),
    recurrent_cases.recurrent("relu", 3, 9000, 8, 40, both=True),
]
# By tensor cores: rows with experts of their own, several of one, more than a block holds, or looks through, at a time.
EXPERTS = [
    expert_cases.dense("decode", 1, 8, 16, 40, 2048),
    expert_cases.dense("decode-second", 8, 1, 16, 72, 768, bias="compute"),
    expert_cases.dense("few-tokens", 6, 2, 8, 33, 64, bias="float32"),
    expert_cases.dense("several-rows", 24, 2, 8, 50, 96),
    expert_cases.dense("many-rows-of-each", 90, 4, 5, 50, 104, bias="compute"),
    expert_cases.dense("long-list", 1100, 2, 3, 16, 32),
    *(
        expert_cases.quantized(f"tiles-{name}", tokens, choices, count, n, k, group, format, bias=bias)
        for format in quantized_cases.FORMATS
        for name, tokens, choices, count, n, k, group, bias in (
            ("decode", 1, 4, 32, 40, 2880, 32, "compute"),
            ("several-rows", 40, 2, 8, 33, 192, 64, None),
            ("long-list", 1100, 2, 3, 16, 64, 64, "float32"),
        )
    ),
    *(
        expert_cases.quantized("tiles-small-groups", tokens, 2, 8, 40, 320, group, format)
        for tokens, group in ((1, 16), (20, 8))
        for format in quantized_cases.FORMATS[-2:]
    ),
]
CASES = [
    *EXPERTS,
    *RECURRENT,
    group_norm("straddling", (2, 40, 9, 7), 4),
    group_norm("plain", (1, 32, 5, 5), 8, affine=False),
    group_norm("many-pixels", (1, 320, 40, 41), 32),
    group_norm("many-groups", (3, 1280, 8, 8), 320),
    group_norm("many-channels", (1, 4104, 3, 3), 3),
    group_norm("line", (2, 64, 100), 1),
    group_norm("far-from-zero", (2, 16, 30, 20), 2, values=(1000.0, 1010.0)),
    cached(1, 600, 530),
    cached(1, 700, 3, heads=6, width=64),
    cached(4, 300, 290, heads=6, width=64, dtype="compute"),
    cached(2, 300, 0),
    cached(1, 700, 640, width=256),
    cached(1, 300, 3, heads=6, width=256, dtype="compute"),
    cached(1, 90, 80, heads=390, width=192),
    cached(4, 700, 640, width=256),
    cached(1, 700, 640, heads=8, width=512),
    cached(3, 300, 290, heads=16, width=136, dtype="compute"),
    attention_cases.attention("latent", 1, 300, 576, heads=(16, 1), value_width=512),
    attention_cases.attention("narrow-queries", 2, 300, 64, heads=(6, 3), value_width=256),
    attention_cases.attention("batches-of-few-wide-queries", 1, 200, 256, heads=(8, 2), batch=40),
    cached(40, 200, 110, heads=6),
    holes(20, 300, 70),
    holes(2, 2100, 70),
    *TILED_ATTENTION,
    *WIDE_ATTENTION,
    *WARPGROUP_ATTENTION,
    *UNREAD,
    *(
        attention_cases.attention(
            f"long-{values.__name__.replace('_', '-')}-{queries}",
            queries,
            5000,
            64,
            heads=(12, 2),
            atol=5e-3,
            mask=shared_mask(queries, 5000, "compute", partial(values, queries, 5000), 12),
        )
        for values in attention_cases.LOWEST_MASKS
        for queries in (1, 3)
    ),
    *PAGED,
    attention_cases.attention("batches-of-few-queries", 1, 200, 128, heads=(8, 2), batch=3),
    attention_cases.attention("causal-eight", 8, 200, 96, heads=(4, 2), causal=True),
    attention_cases.attention("causal-shared-heads", 70, 70, 80, heads=(6, 2), causal=True, batch=2),
    attention_cases.attention(
        "special-many-keys",
        1,
        140,
        64,
        inputs=(T((1, 2, 1, 64)), T((1, 2, 140, 64)), T((1, 2, 140, 64), values="special")),
    ),
    *(linear(m, 70, 1100, bias="compute", residual="compute", activation="silu") for m in range(2, 10)),
    *(linear(m, 72, 300, kernel="matmul_notrans_kernel", bias="float32") for m in (2, 8, 9)),
    linear(1, 37, 4104, kernel="gated_matmul_vec_kernel", bias="compute", activation="gelu_tanh"),
    linear(1, 40000, 64, bias="compute"),
    *MANY_ROWS,
    *LONG_ROWS,
    *COLUMNS,
    *LONG_ORDERS,
    *(
        Case("cumsum_kernel", f"long-{name}", [x], [out], {}, atol=1e-3)
        for name, x, out in (
            ("rows", T((2, 20_001), values=(0.0, 1.0)), T((2, 20_001), "float32")),
            (
                "strided",
                T((2, 17_000), strides=(1, 3), values=(0.0, 1.0)),
                T((2, 17_000), "float32", strides=(17_500, 1)),
            ),
            ("integers", T((300_000,), "int32", values=(-(2**31), 2**31)), T((300_000,), "int32")),
            ("bools", T((2, 16_384), "bool"), T((2, 16_384), "int32")),
        )
    ),
]


def batched_products(count: int) -> list[Case]:
    """Drawn products of matrices whose dimensions lie in memory in any order, as heads of a projection do."""
    cases = []
    for number in range(count):
        draw = Random(number)
        lead = [draw.choice([1, 2, 3]) for _ in range(draw.randint(1, 2))]
        m, n, k = (draw.choice([1, 7, 14, 27, 32, 48, 65, 96, 130]) for _ in range(3))
        a, b, out = (
            _scattered(draw, (*lead, *matrix), dtype)
            for matrix, dtype in (
                ((m, k), "compute"),
                ((k, n), "compute"),
                ((m, n), draw.choice(["compute", "float32"])),
            )
        )
        scale = draw.choice([1.0, 0.125])
        cases.append(replace(matmul_cases.batched(f"scattered-{number}", a, b, out, scale=scale), atol=2e-2))
    return cases


def _scattered(draw: Random, shape: tuple[int, ...], dtype: str) -> T:
    """A tensor with dimensions in any order in memory, and sometimes with gaps between the rows."""
    order = draw.sample(range(len(shape)), len(shape))
    gap, step, strides = draw.choice([0, 0, 1, 2, 4, 8]), 1, [0] * len(shape)
    for place, dim in enumerate(reversed(order)):
        strides[dim] = step
        step = step * shape[dim] + (gap if place == 0 else 0)
    return T(shape, dtype, tuple(strides), values=(-1.0, 1.0))


BATCHED_PRODUCTS = batched_products(60)
CASES += BATCHED_PRODUCTS

# Of products of many rows, whose weight is widened to 16 bits, as a 16-bit model has it: relative to the largest.
WIDENED = {"float16": 2.0**-8, "bfloat16": 2.0**-5}
# Of products of codes, for which x becomes integers of 15 bits in spans.
IN_SPANS = 2.0**-12


def tolerant(case: Case, dtype: str) -> Case:
    """Return the case with the tolerance that products of codes have on the CUDA device."""
    if case.kernel == "quantized_matmul_kernel" and dtype in WIDENED:
        return replace(case, atol=WIDENED[dtype])
    if case.kernel == "quantized_expert_matmul_kernel" and dtype in WIDENED:
        return replace(case, atol=IN_SPANS)
    return case
