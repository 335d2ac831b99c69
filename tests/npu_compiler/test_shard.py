"""Graphs that are divided among ranks: as text, and as what all ranks together compute."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from textwrap import dedent

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ir_builder import IRBuilder, Tensor
from ranks import run_ranks

from npu_compiler import CompiledProgram, CompileOptions, InputError, compile, print_graph, read_ir
from npu_compiler.graph.mesh import Mesh
from npu_compiler.graph.quantization import QuantizedFormat
from npu_compiler.graph.weight_recipe import from_key, pieces_read, shard_recipe
from npu_compiler.passes.dead_code import eliminate_dead_code
from npu_compiler.passes.shard import find_sharding, shard
from npu_runtime import CPUBackend, Executor, load_weights

TOKENS, CACHE, HEAD = 3, 8, 4


def divided(g: IRBuilder, ranks: int, least_table: int = 2**20) -> str:
    """The printed graph of each rank, without its first line."""
    graph = eliminate_dead_code(shard(read_ir(g.ir()), Mesh(ranks, least_table)))
    return print_graph(graph, types=False).split("\n", 1)[1]


def check(g: IRBuilder, ranks: int, expected: str, least_table: int = 2**20) -> None:
    assert dedent(divided(g, ranks, least_table)) == dedent(expected).strip("\n")


def test_columns_of_one_product_meet_rows_of_the_next() -> None:
    g = IRBuilder()
    hidden = g("aten.linear.default", g.input("x", 1, 8), g.weight("up", 6, 8), g.weight("a", 6))
    out = g("aten.linear.default", g("aten.relu.default", hidden), g.weight("down", 8, 6), g.weight("b", 8))
    check(
        g.output(out),
        2,
        """
          weight %p_up.shard = shard(up, axis=0, parts=2, ranks=2)
          weight %p_a.shard = shard(a, axis=0, parts=2, ranks=2)
          weight %p_down.shard = shard(down, axis=1, parts=2, ranks=2)
          weight %p_b.shard = on_first_rank(b)
          %linear = aten.linear(%x, %p_up.shard, %p_a.shard)
          %relu = aten.relu(%linear)
          %linear_1.part = aten.linear(%relu, %p_down.shard, %p_b.shard)
          %linear_1 = npu.all_reduce(%linear_1.part) {ranks=2}
          return %linear_1
        """,
    )


def test_parts_of_a_result_are_gathered() -> None:
    g = IRBuilder()
    logits = g("aten.linear.default", g.input("x", 1, 8), g.weight("head", 6, 8))
    check(
        g.output(logits, g("aten.argmax.default", logits, -1)),
        2,
        """
          weight %p_head.shard = shard(head, axis=0, parts=2, ranks=2)
          %linear.part = aten.linear(%x, %p_head.shard)
          %linear = npu.all_gather(%linear.part) {ranks=2}
          %argmax = aten.argmax(%linear) {dim=-1}
          return %linear, %argmax
        """,
    )


def test_what_an_op_needs_whole_stays_whole() -> None:
    g = IRBuilder()
    routed = g("aten.softmax.int", g("aten.linear.default", g.input("x", 1, 8), g.weight("router", 4, 8)), -1)
    assert "shard" not in divided(g.output(g("aten.sum.dim_IntList", routed, [-1])), 2)


def test_large_tables_are_divided_by_rows() -> None:
    g = IRBuilder()
    g.output(g("aten.embedding.default", g.weight("table", 10, 4), g.input("ids", 2, dtype="int64")))
    assert "shard" not in divided(g, 2)
    check(
        g,
        2,
        """
          weight %p_table.shard = shard(table, axis=0, parts=2, ranks=2)
          weight %first_row = rank_start(size=5)
          %embedding.place = aten.sub(%ids, %first_row)
          %embedding.above = aten.ge(%embedding.place) {other=0}
          %embedding.below = aten.lt(%embedding.place) {other=5}
          %embedding.inside = aten.logical_and(%embedding.above, %embedding.below)
          %embedding.index = aten.where(%embedding.inside, %embedding.place) {other=0}
          %embedding.row = aten.embedding(%p_table.shard, %embedding.index)
          %embedding.column = aten.unsqueeze(%embedding.inside) {dim=1}
          %embedding.part = aten.where(%embedding.column, %embedding.row) {other=0.0}
          %embedding = npu.all_reduce(%embedding.part) {ranks=2}
          return %embedding
        """,
        least_table=40,
    )


def transformer(heads: int, shared: int, width: int, inner: int, vocabulary: int, biased: bool) -> IRBuilder:
    """A layer with a KV cache, and embedding and logits around it."""
    g = IRBuilder()
    ids, positions = (g.input(name, TOKENS, dtype="int64") for name in ("ids", "positions"))
    caches = [g.input(name, 1, shared, CACHE, HEAD) for name in ("k", "v")]
    x = g("aten.unsqueeze.default", g("aten.embedding.default", g.weight("table", vocabulary, width), ids), 0)

    def linear(x: Tensor, name: str, rows: int, columns: int) -> Tensor:
        bias = [g.weight(f"{name}.bias", rows)] if biased else []
        made: Tensor = g("aten.linear.default", x, g.weight(name, rows, columns), *bias)
        return made

    def by_head(name: str, count: int) -> Tensor:
        rows = g("aten.view.default", linear(x, name, count * HEAD, width), [1, TOKENS, -1, HEAD])
        turned: Tensor = g("aten.transpose.int", rows, 1, 2)
        return turned

    query = by_head("q", heads)
    updated = [
        g("aten.index_copy.default", cache, 2, positions, by_head(name, shared))
        for cache, name in zip(caches, ("keys", "values"), strict=True)
    ]
    repeated = []
    for cache in updated:
        groups = g(
            "aten.expand.default", g("aten.unsqueeze.default", cache, 2), [1, shared, heads // shared, CACHE, HEAD]
        )
        repeated.append(g("aten.reshape.default", groups, [1, heads, CACHE, HEAD]))
    attended = g("aten.scaled_dot_product_attention.default", query, *repeated)
    joined = g("aten.reshape.default", g("aten.transpose.int", attended, 1, 2), [1, TOKENS, heads * HEAD])
    x = g("aten.add.Tensor", x, linear(joined, "o", width, heads * HEAD))
    gate, up = linear(x, "gate", inner, width), linear(x, "up", inner, width)
    x = g("aten.add.Tensor", x, linear(g("aten.mul.Tensor", g("aten.silu.default", gate), up), "down", width, inner))
    return g.output(g("aten.linear.default", x, g.weight("head", vocabulary, width)), *updated)


def random_weights(program: CompiledProgram, rng: np.random.Generator) -> dict[str, np.ndarray]:
    shapes = {key: shape for weight in program.weight_specs.values() for key, shape in weight.source_shapes.items()}
    return {key: (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32) for key, shape in shapes.items()}


def part(whole: np.ndarray, shape: tuple[int, ...], rank: int, ranks: int) -> np.ndarray:
    """A rank's part along dimension 1."""
    pieces = whole.shape[1] // shape[1]
    return np.split(whole, pieces, axis=1)[rank * pieces // ranks]


def compare(g: IRBuilder, ranks: int, rng: np.random.Generator, inputs: Mapping[str, np.ndarray]) -> None:
    """All ranks together compute in float32 what one device does, but for the order of sums."""
    ir = g.ir()
    whole = compile(ir, options=CompileOptions(compute_dtype="float32"))
    parts = compile(ir, options=CompileOptions(compute_dtype="float32", mesh=Mesh(ranks, least_table=1)))
    parts = CompiledProgram.from_bytes(parts.to_bytes())
    weights, backend = random_weights(whole, rng), CPUBackend(tune=False)
    results = Executor(whole, backend).run(dict(inputs), load_weights(weights, whole, backend))
    expected = {spec.name: results[spec.name].to_numpy() for spec in whole.output_specs}
    shapes = {spec.name: spec.shape for spec in parts.input_specs}
    given = [
        {name: x if x.shape == shapes[name] else part(x, shapes[name], rank, ranks) for name, x in inputs.items()}
        for rank in range(ranks)
    ]
    for rank, outputs in enumerate(run_ranks(parts, ranks, weights, given)):
        for name, found in outputs.items():
            want = expected[name]
            want = want if want.shape == found.shape else part(want, found.shape, rank, ranks)
            np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-4, err_msg=f"{name} of rank {rank}")


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    ranks=st.sampled_from([2, 3, 4]),
    per_rank=st.integers(1, 2),
    shared=st.sampled_from(["one", "fewer", "equal"]),
    inner=st.integers(1, 3),
    vocabulary=st.integers(5, 20),
    biased=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_ranks_together_compute_what_one_device_does(
    ranks: int, per_rank: int, shared: str, inner: int, vocabulary: int, biased: bool, seed: int
) -> None:
    """The cases include fewer KV heads than ranks, and a vocabulary that is no multiple of the ranks."""
    heads = ranks * per_rank
    kv_heads = {"one": 1, "fewer": 2 if ranks == 4 else ranks, "equal": heads}[shared]
    rng = np.random.default_rng(seed)
    g = transformer(heads, kv_heads, 8, inner * ranks, vocabulary, biased)
    inputs = {
        "ids": rng.integers(0, vocabulary, TOKENS),
        "positions": np.arange(2, 2 + TOKENS),
        **{name: rng.standard_normal((1, kv_heads, CACHE, HEAD)).astype(np.float32) for name in ("k", "v")},
    }
    compare(g, ranks, rng, inputs)


def test_attention_is_divided_by_heads_and_keys_with_their_queries() -> None:
    graph = read_ir(transformer(8, 2, 8, 8, 16, biased=False).ir())
    plan = find_sharding(graph, Mesh(4))
    assert plan.splits["scaled_dot_product_attention"] == ((1, 4),)
    assert plan.splits["k"] == plan.splits["index_copy"] == ((1, 2),)  # each head of two ranks
    assert plan.gathered == {graph.outputs[0]}


@settings(max_examples=12, deadline=None)
@given(ranks=st.sampled_from([2, 4]), kv_heads=st.sampled_from([1, 2, 4]), seed=st.integers(0, 2**16))
def test_sinks_of_paged_attention_are_divided_with_the_heads(ranks: int, kv_heads: int, seed: int) -> None:
    heads, width, rng = 8, 8, np.random.default_rng(seed)
    g = IRBuilder()
    x, pools = g.input("x", TOKENS, width), [g.input(name, 16, kv_heads, HEAD) for name in ("k", "v")]
    sizes = {"tables": (1, 4), "sequences": (TOKENS,), "positions": (TOKENS,), "index": (TOKENS,)}
    *where, index = [g.input(name, *shape, dtype="int64") for name, shape in sizes.items()]

    def by_head(name: str, count: int) -> Tensor:
        rows = g("aten.linear.default", x, g.weight(name, count * HEAD, width))
        view: Tensor = g("aten.view.default", rows, [TOKENS, -1, HEAD])
        return view

    q = by_head("q", heads)
    pools = [
        g("aten.index_copy.default", pool, 0, index, by_head(name, kv_heads))
        for pool, name in zip(pools, ("keys", "values"), strict=True)
    ]
    shape, params = ((TOKENS, heads, HEAD), "float32"), {"block_size": 4, "scale": 0.5, "window": 3, "soft_cap": 0.0}
    attended = g("npu.paged_attention.default", q, *pools, *where, g.weight("sinks", heads), out=shape, **params)
    joined = g("aten.reshape.default", attended, [TOKENS, heads * HEAD])
    g.output(g("aten.linear.default", joined, g.weight("o", width, heads * HEAD)), *pools)
    assert f"weight %p_sinks.shard = shard(sinks, axis=0, parts={ranks}, ranks={ranks})" in divided(g, ranks)
    inputs = {
        "x": rng.standard_normal((TOKENS, width)).astype(np.float32),
        **{name: rng.standard_normal((16, kv_heads, HEAD)).astype(np.float32) for name in ("k", "v")},
        "tables": rng.permutation(4)[None],
        "sequences": np.zeros(TOKENS, np.int64),
        "positions": np.arange(5, 5 + TOKENS),
        "index": rng.permutation(16)[:TOKENS],
    }
    compare(g, ranks, rng, inputs)


@settings(max_examples=12, deadline=None)
@given(ranks=st.sampled_from([2, 4]), kv_heads=st.sampled_from([1, 2, 4]), seed=st.integers(0, 2**16))
def test_sinks_of_attention_are_divided_with_the_heads(ranks: int, kv_heads: int, seed: int) -> None:
    heads, width, rng = 8, 8, np.random.default_rng(seed)
    g = IRBuilder()
    x, mask = g.input("x", 1, TOKENS, width), g.input("mask", 1, 1, TOKENS, CACHE, dtype="bool")
    caches, index = [g.input(name, 1, kv_heads, CACHE, HEAD) for name in "kv"], g.input("index", TOKENS, dtype="int64")

    def by_head(name: str, count: int) -> Tensor:
        rows = g("aten.linear.default", x, g.weight(name, count * HEAD, width))
        turned: Tensor = g("aten.transpose.int", g("aten.view.default", rows, [1, TOKENS, -1, HEAD]), 1, 2)
        return turned

    q = by_head("q", heads)
    caches = [
        g("aten.index_copy.default", cache, 2, index, by_head(name, kv_heads))
        for cache, name in zip(caches, ("keys", "values"), strict=True)
    ]
    out = ((1, heads, TOKENS, HEAD), "float32")
    attended = g("npu.attention.default", q, *caches, mask, g.weight("sinks", heads), out=out, scale=0.5)
    joined = g("aten.reshape.default", g("aten.transpose.int", attended, 1, 2), [1, TOKENS, heads * HEAD])
    g.output(g("aten.linear.default", joined, g.weight("o", width, heads * HEAD)), *caches)
    assert f"weight %p_sinks.shard = shard(sinks, axis=0, parts={ranks}, ranks={ranks})" in divided(g, ranks)
    inputs = {
        "x": rng.standard_normal((1, TOKENS, width)).astype(np.float32),
        **{name: rng.standard_normal((1, kv_heads, CACHE, HEAD)).astype(np.float32) for name in "kv"},
        "mask": rng.random((1, 1, TOKENS, CACHE)) < 0.7,
        "index": rng.permutation(CACHE)[:TOKENS],
    }
    compare(g, ranks, rng, inputs)


@pytest.mark.parametrize(
    ("heads", "inner", "said"),
    [
        (3, 4, r"divided among 2 devices: dimension . of '\w+' \[1, .*3.*\] does not divide into 2 equal parts"),
        (4, 5, r"divided among 2 devices: dimension 2 of 'linear\w*' \[1, 3, 5\] does not divide into 2 equal parts"),
    ],
)
def test_what_does_not_divide_evenly_is_named(heads: int, inner: int, said: str) -> None:
    g = transformer(heads, heads, 8, inner, 16, biased=False)
    with pytest.raises(InputError, match=said):
        compile(g.ir(), options=CompileOptions(mesh=Mesh(2)))


def test_a_mesh_has_ranks() -> None:
    with pytest.raises(InputError, match="among 1 or more devices, not 0"):
        Mesh(0)
    g = transformer(4, 4, 8, 4, 16, biased=False)
    assert shard(graph := read_ir(g.ir()), Mesh(1)) is graph


@pytest.mark.parametrize("quantization", ["int8", QuantizedFormat("int4", 32, "float16", "zero_point")])
def test_weights_in_few_bits_are_divided_as_they_are_stored(quantization: str | QuantizedFormat) -> None:
    """Groups of 32: each rank's columns are whole groups, so no code changes."""
    rng = np.random.default_rng(5)
    g = IRBuilder()
    hidden = g("aten.linear.default", g.input("x", 1, 64), g.weight("up", 64, 64))
    g.output(g("aten.linear.default", g("aten.relu.default", hidden), g.weight("down", 16, 64)))
    ir, x = g.ir(), rng.standard_normal((1, 64)).astype(np.float32)
    options = CompileOptions(compute_dtype="float32", quantization=quantization)
    whole, parts = compile(ir, options=options), compile(ir, options=replace(options, mesh=Mesh(2)))
    weights, backend = random_weights(whole, rng), CPUBackend(tune=False)
    (result,) = Executor(whole, backend).run({"x": x}, load_weights(weights, whole, backend)).values()
    for outputs in run_ranks(parts, 2, weights, [{"x": x}, {"x": x}]):
        (found,) = outputs.values()
        np.testing.assert_allclose(found, result.to_numpy(), rtol=1e-2, atol=1e-2)


def test_a_weight_whose_groups_do_not_divide_is_named() -> None:
    g = IRBuilder()
    hidden = g("aten.linear.default", g.input("x", 1, 32), g.weight("up", 32, 32))
    g.output(g("aten.linear.default", g("aten.relu.default", hidden), g.weight("down", 16, 32)))
    with pytest.raises(InputError, match="a part of 'p_down' cannot be stored as"):
        compile(g.ir(), options=CompileOptions(quantization="int4", mesh=Mesh(2)))


def test_a_rank_reads_its_own_rows_only() -> None:
    recipe = shard_recipe(from_key("w"), 0, 2, 4)
    assert [list(pieces_read(recipe, {"w": (7, 3)}, rank)) for rank in range(4)] == [
        [("w", ((0, 4),))],
        [("w", ((0, 4),))],
        [("w", ((4, 7),))],
        [("w", ((4, 7),))],
    ]
    g = IRBuilder()
    g.output(g("aten.linear.default", g.input("x", 1, 2), g.weight("w", 4, 2)))
    program, backend = (
        compile(g.ir(), options=CompileOptions(compute_dtype="float32", mesh=Mesh(2))),
        CPUBackend(tune=False),
    )
    weight = np.array([[1, 2], [3, 4], [5, np.nan], [7, 8]], np.float32)  # which only rank 1 sees
    (loaded,) = load_weights({"w": weight}, program, backend, rank=0).values()
    assert loaded.to_numpy().tolist() == [[1, 2], [3, 4]]
    with pytest.raises(Exception, match="'w' contains NaN"):
        load_weights({"w": weight}, program, backend, rank=1)


def test_a_part_does_not_run_alone() -> None:
    g = IRBuilder()
    g.output(g("aten.linear.default", g.input("x", 1, 2), g.weight("w", 4, 2)))
    program, backend = compile(g.ir(), options=CompileOptions(mesh=Mesh(2))), CPUBackend(tune=False)
    weights = load_weights({"w": np.ones((4, 2), np.float32)}, program, backend)
    with pytest.raises(Exception, match="divided among 2 devices; run it with that many"):
        Executor(program, backend).run({"x": np.ones((1, 2), np.float32)}, weights)
