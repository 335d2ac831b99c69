"""Attention over a paged KV cache: each implementation against float64 NumPy, token by token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from drawn import drawn
from hypothesis import given, settings
from hypothesis import strategies as st
from ir_builder import IRBuilder

from npu_compiler import CompileOptions, compile
from npu_compiler.errors import ConstraintError
from npu_runtime import Device, Executor, NPUBuffer
from npu_runtime.cpu import native
from npu_runtime.cpu.arrays import BFLOAT16
from npu_runtime.cpu.kernels import CPU_KERNELS
from npu_runtime.cpu.torch_kernels.attention import paged_attention
from npu_runtime.torch_arrays import numpy_to_tensor

DTYPES = [np.dtype(np.float32), np.dtype(np.float16), BFLOAT16]
SCALE = 0.3
LIBRARIES = (
    "torch",
    "numpy",
    pytest.param(
        "native", marks=pytest.mark.skipif(not native.available(), reason=f"no kernels: {native.failure_reason()}")
    ),
)


@dataclass(frozen=True)
class Pool:
    """Operands of the kernel, in order, and its block size, window and soft cap. The seventh operand is the sinks."""

    operands: tuple[np.ndarray, ...]
    block_size: int
    window: int = 0
    soft_cap: float = 0.0

    @property
    def params(self) -> dict[str, Any]:
        return {"scale": SCALE, "block_size": self.block_size, "window": self.window, "soft_cap": self.soft_cap}

    @property
    def sinks(self) -> np.ndarray | None:
        return self.operands[6] if len(self.operands) > 6 else None

    def expected(self) -> np.ndarray:
        """[N, H, E], float64."""
        q, k, v, tables, sequences, positions, *_ = self.operands
        sinks = np.full(q.shape[1], -np.inf) if self.sinks is None else self.sinks.astype(np.float64)
        shared = q.shape[1] // k.shape[1]
        out = np.empty((*q.shape[:2], v.shape[2]))
        for n in range(len(q)):
            places = np.arange(max(0, positions[n] + 1 - self.window) if self.window else 0, positions[n] + 1)
            rows = tables[sequences[n], places // self.block_size] * self.block_size + places % self.block_size
            for head in range(q.shape[1]):
                keys, values = (x[rows, head // shared].astype(np.float64) for x in (k, v))
                scores = SCALE * keys @ q[n, head].astype(np.float64)
                scores = self.soft_cap * np.tanh(scores / self.soft_cap) if self.soft_cap else scores
                highest = max(scores.max(), sinks[head])
                weights = np.exp(scores - highest)
                out[n, head] = weights @ values / (weights.sum() + np.exp(sinks[head] - highest))
        return out


def make_pool(
    seed: int,
    lengths: list[tuple[int, int]],
    *,
    block_size: int = 4,
    heads: tuple[int, int] = (4, 2),
    width: int = 16,
    dtype: np.dtype = DTYPES[0],
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: float | None = None,
) -> Pool:
    """Sequences whose blocks lie in the pool in any order; all rows that no token may attend to are NaN.

    Blocks before the window of a sequence's first token are released: their entries in the table are any numbers.

    Args:
        lengths: Numbers of tokens of each sequence: in the cache, and in this step.
        heads: Numbers of heads of queries and of keys.
        sinks: Mean of the heads' sinks, whose standard deviation is 2; None: no sinks.
    """
    random = np.random.default_rng(seed)
    firsts = [max(0, known + 1 - window) if window else 0 for known, _ in lengths]
    counts = [-(-(known + new) // block_size) for known, new in lengths]
    blocks = random.permutation(sum(counts) + 2).astype(np.int32)
    k, v = (np.full((len(blocks) * block_size, heads[1], width), np.nan, np.float32) for _ in "kv")
    tables = random.integers(-(2**31), 2**31, (len(lengths) + 1, max(counts) + 1)).astype(np.int32)
    sequences: list[int] = []
    positions: list[int] = []
    for sequence, (known, new) in enumerate(lengths):
        tables[sequence, : counts[sequence]], blocks = np.split(blocks, [counts[sequence]])
        places = np.arange(firsts[sequence], known + new)
        rows = tables[sequence, places // block_size] * block_size + places % block_size
        for pool in (k, v):
            pool[rows] = random.standard_normal((len(rows), *pool.shape[1:]))
        released = firsts[sequence] // block_size
        tables[sequence, :released] = random.integers(-(2**31), 2**31, released)
        sequences += [sequence] * new
        positions += range(known, known + new)
    q = random.standard_normal((len(positions), heads[0], width))
    floats = (x.astype(dtype) for x in (q, k, v))
    where = (tables, np.array(sequences, np.int32), np.array(positions, np.int32))
    scores = [] if sinks is None else [random.normal(sinks, 2.0, heads[0]).astype(dtype)]
    return Pool((*floats, *where, *scores), block_size, window, soft_cap)


def check(library: str, pool: Pool) -> None:
    out = np.empty(pool.operands[0].shape, np.float32)
    run(library, pool, out)
    # Where the machine multiplies bfloat16 in pairs, the weights of larger groups are rounded to it.
    rounding = 2**-8 if library == "native" and pool.operands[0].dtype == BFLOAT16 else 1e-5
    np.testing.assert_allclose(out, pool.expected(), rtol=1e-4, atol=4 * rounding)


LENGTHS = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9)), min_size=1, max_size=5)


def run(library: str, pool: Pool, out: np.ndarray) -> None:
    if library == "native":
        sizes = (pool.block_size, SCALE, out, pool.window, pool.soft_cap)
        launch = native.paged_attention(*pool.operands[:6], *sizes, pool.sinks)
        assert launch is not None
        launch()
    elif library == "numpy":
        CPU_KERNELS["paged_attention_kernel"](pool.operands, [out], pool.params)
    else:
        tensors = [numpy_to_tensor(x) for x in pool.operands]
        sizes = (pool.block_size, SCALE, pool.window, pool.soft_cap)
        out[...] = paged_attention(*tensors[:6], *sizes, *tensors[6:]).numpy()


@pytest.mark.parametrize("library", LIBRARIES)
@settings(deadline=None)
@given(
    seed=st.integers(0, 2**32),
    lengths=LENGTHS,
    block_size=st.sampled_from([1, 4, 16]),
    heads=st.sampled_from([(1, 1), (4, 2), (6, 2)]),
    dtype=st.sampled_from(DTYPES),
    window=st.sampled_from([0, 1, 2, 7, 16, 17, 33]),
    soft_cap=st.sampled_from([0.0, 0.5, 3.0, 50.0]),
    sinks=st.sampled_from([None, -3.0, 0.0, 4.0]),
)
def test_every_token_attends_to_its_own_sequence_up_to_itself(
    library: str,
    seed: int,
    lengths: list[tuple[int, int]],
    block_size: int,
    heads: tuple[int, int],
    dtype: np.dtype,
    window: int,
    soft_cap: float,
    sinks: float | None,
) -> None:
    sizes: dict[str, Any] = {"block_size": block_size, "heads": heads, "window": window}
    check(library, make_pool(seed, lengths, **sizes, dtype=dtype, soft_cap=soft_cap, sinks=sinks))


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize(
    "case",
    drawn(
        [
            (24, 0, None),
            (64, 0, None),
            (128, 0, None),
            (24, 130, None),
            (64, 37, None),
            (128, 512, None),
            (24, 0, 2.0),
            (64, 37, 6.0),
        ],
        1 / 2,
    ),
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_long_contexts_and_long_pieces(
    library: str, case: tuple[int, int, float | None], dtype: np.dtype, seed: int
) -> None:
    """Contexts that several threads divide, pieces of prompts of many tiles, and more rows than pass together."""
    width, window, sinks = case
    lengths = [(700, 1), (1, 3), (0, 150), (350, 2), (300, 70), (1600, 4)]
    sizes: dict[str, Any] = {"block_size": 16, "heads": (6, 1), "width": width, "window": window}
    check(library, make_pool(seed, lengths, **sizes, dtype=dtype, sinks=sinks))


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("dtype", [np.dtype(np.float32), BFLOAT16], ids=str)
def test_a_sink_far_above_or_below_all_scores(library: str, dtype: np.dtype, seed: int) -> None:
    """One takes nearly all the weight, and one none; the sinks need not have the dtype of the queries."""
    pool = make_pool(seed, [(40, 1), (9, 30), (700, 2)], block_size=16, dtype=dtype)
    sinks = np.array([1000.0, -1000.0, 60.0, -np.inf], np.float32)
    check(library, Pool((*pool.operands, sinks), 16))


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_cap_bounds_scores_that_would_overflow_the_softmax(library: str, seed: int) -> None:
    pool = make_pool(seed, [(40, 1), (9, 30)], block_size=16, soft_cap=2.0)
    q, *rest = pool.operands
    check(library, Pool((q * np.float32(1e30), *rest), 16, 0, 2.0))


@pytest.mark.parametrize("new", (1, 4))
@pytest.mark.parametrize("library", LIBRARIES)
def test_a_context_just_too_long_for_its_ranges_of_keys(library: str, new: int, seed: int) -> None:
    """Ranges are rounded up to whole blocks of keys, which leaves none to the last of them."""
    for keys in (257, 385, 513, 577, 641, 769, 1025):
        check(library, make_pool(seed, [(keys - new, new)], block_size=16, heads=(3, 3), width=64))


@pytest.mark.parametrize("library", LIBRARIES)
def test_what_is_out_of_range_is_the_nearest_that_exists(library: str) -> None:
    pool = make_pool(3, [(0, 1), (30, 9)], block_size=8)
    q, k, v, tables, sequences, positions = pool.operands
    k, v = (np.nan_to_num(x) for x in (k, v))
    near = tables.clip(0, len(k) // 8 - 1)
    wide = tables.astype(np.int64)
    wild = np.where(near == 0, -7, np.where(near == near.max(), 2**30, wide)).astype(np.int32)
    last = tables.shape[1] * 8 - 1
    for sequence, position, nearest in ((-1, 3, (0, 3)), (9, 3, (2, 3)), (1, -5, (1, 0)), (1, 2**31 - 1, (1, last))):
        places = [np.full(len(q), number, np.int32) for number in (sequence, position, *nearest)]
        found, wanted = np.empty(q.shape, np.float32), Pool((q, k, v, near, places[2], places[3]), 8).expected()
        run(library, Pool((q, k, v, wild, places[0], places[1]), 8), found)
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


def graph(pool: Pool, **changed: Any) -> IRBuilder:
    """A graph that attends over a pool's shapes, with other attributes if some are given."""
    g = IRBuilder()
    names = ("query", "keys", "values", "tables", "sequences", "positions", "sinks")
    kinds = ["float32"] * 3 + ["int64"] * 3 + ["float32"]
    inputs = [g.input(n, *x.shape, dtype=kind) for n, x, kind in zip(names, pool.operands, kinds, strict=False)]
    shape = (*pool.operands[0].shape[:2], pool.operands[2].shape[2])
    g.output(g("npu.paged_attention.default", *inputs, out=(shape, "float32"), **{**pool.params, **changed}))
    return g


@pytest.mark.parametrize(
    ("window", "soft_cap", "sinks"), [(0, 0.0, None), (5, 0.0, None), (0, 2.0, None), (9, 1.5, None), (9, 0.0, 1.0)]
)
def test_a_program_attends_over_a_pool(window: int, soft_cap: float, sinks: float | None) -> None:
    pool = make_pool(3, [(5, 1), (0, 7), (30, 2)], window=window, soft_cap=soft_cap, sinks=sinks)
    program, device = compile(graph(pool).ir(), options=CompileOptions(compute_dtype="float32")), Device("cpu")
    names = [spec.name for spec in program.input_specs]
    buffers = {
        name: NPUBuffer.from_numpy(x, device, spec)
        for name, x, spec in zip(names, pool.operands, program.input_specs, strict=True)
    }
    (out,) = Executor(program, device).run(buffers, {}).values()
    np.testing.assert_allclose(out.to_numpy(), pool.expected(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("changed", "wrong"),
    [
        ({"window": -1}, "a window of -1"),
        ({"soft_cap": -2.0}, "a soft cap of -2.0"),
        ({"soft_cap": float("inf")}, "a soft cap of inf"),
    ],
)
def test_a_window_or_a_soft_cap_that_says_nothing_is_refused(changed: dict[str, Any], wrong: str) -> None:
    with pytest.raises(ConstraintError, match=wrong):
        compile(graph(make_pool(3, [(5, 1)]), **changed).ir())


@pytest.mark.parametrize("count", [3, 5])
def test_sinks_of_other_heads_than_the_queries_are_refused(count: int) -> None:
    pool = make_pool(3, [(5, 1)], heads=(4, 2))
    with pytest.raises(ConstraintError, match=rf"with sinks \[{count}\]"):
        compile(graph(Pool((*pool.operands, np.zeros(count, np.float32)), 4)).ir())


@pytest.mark.parametrize(("block_size", "wrong"), [(3, "in blocks of 3"), (0, "in blocks of 0")])
def test_a_pool_that_blocks_do_not_fill_is_refused(block_size: int, wrong: str) -> None:
    with pytest.raises(ConstraintError, match=wrong):
        compile(graph(make_pool(3, [(5, 1)]), block_size=block_size).ir())
