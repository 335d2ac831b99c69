"""Changed tile programs are refused, found by the checked machine, or compute something else."""

from __future__ import annotations

from collections import Counter
from functools import cache
from random import Random

import numpy as np
import pytest
from ir_builder import IRBuilder
from on_chips import chip
from tile_mutants import Arrays, Mutant, commute, is_read, judge, mutants, random_arrays, results

import npu_compiler
from npu_model.isa.encoding import decode
from npu_model.isa.instructions import TileProgram
from npu_model.target import NPUTarget


def linear(g: IRBuilder) -> str:
    x = g.input("x", 30, 200)
    for layer, (n, k) in enumerate(((120, 200), (50, 120))):
        x = g("aten.linear.default", x, g.weight(f"w{layer}", n, k), g.weight(f"b{layer}", n))
        x = g("aten.gelu.default", x)
    return x


def convolution(g: IRBuilder) -> str:
    x, w = g.input("x", 1, 8, 40, 40), g.weight("w", 12, 8, 3, 3)
    return g("aten.conv2d.default", x, w, g.weight("b", 12), [1, 1], [1, 1], [1, 1], 1)


def strided(g: IRBuilder) -> str:
    x, w = g.input("x", 1, 8, 41, 41), g.weight("w", 8, 8, 3, 3)
    return g("aten.conv2d.default", x, w, g.weight("b", 8), [2, 2], [1, 1], [1, 1], 1)


def attention(g: IRBuilder) -> str:
    q, k, v = (g.input(name, 1, 2, 48, 16) for name in "qkv")
    return g("aten.scaled_dot_product_attention.default", q, k, v)


def undivided_attention(g: IRBuilder) -> str:
    """Attention whose tiles have no even size, so that they are not halved."""
    q, k, v = (g.input(name, 1, 1, size, 15) for name, size in (("q", 7), ("k", 40), ("v", 40)))
    return g("aten.scaled_dot_product_attention.default", q, k, v)


def softmax(g: IRBuilder) -> str:
    return g("aten.softmax.int", g.input("x", 60, 300), -1)


def chain(g: IRBuilder) -> str:
    x, y = g.input("x", 100, 320), g.input("y", 320)
    return g("aten.mul.Tensor", g("aten.sigmoid.default", g("aten.add.Tensor", x, y)), x)


MODELS = {
    build.__name__: build for build in (linear, convolution, strided, attention, undivided_attention, softmax, chain)
}


@cache
def program(name: str, on: str) -> TileProgram:
    g = IRBuilder()
    g.output(MODELS[name](g))
    return decode(
        npu_compiler.compile(
            g.ir(), NPUTarget(chip(on)), npu_compiler.CompileOptions(compute_dtype="float16")
        ).plan.machine_code
    )


@cache
def reference(name: str, on: str) -> tuple[Arrays, Arrays]:
    """Random buffers, and what they are after a run."""
    arrays = random_arrays(program(name, on), 1)
    return arrays, results(program(name, on), chip(on), arrays)


@cache
def all_mutants() -> list[tuple[str, str, Mutant]]:
    return [(name, on, mutant) for name in MODELS for on in ("edge", "odd") for mutant in mutants(program(name, on))]


def explained(mutant: Mutant, original: TileProgram) -> str | None:
    """The reason why a mutant that has no effect is the same program; None if nobody knows.

    The machine that found no race in it has compared all accesses by what tokens order, not by when they happened.
    """
    if mutant.kind == "wait" and " fence: " in mutant.what:
        return "what a section waits for at its begin, its later waits order before any byte is touched"
    if mutant.kind == "signal":
        return "counts are reached by later signals: what waits for them waits longer"
    if mutant.kind in ("address", "slot") and not is_read(mutant, original):
        return "nothing reads there: values that are carried from round to round, in a single round"
    if mutant.kind == "pad" and mutant.what.startswith("scaled_dot_product_attention: ") and "dma" not in mutant.what:
        return "a further query of one half of a tile lies where the same engine computes the other half afterwards"
    if mutant.kind == "order" and mutant.pair is not None and commute(*mutant.pair, original.sections):
        return "an engine's two instructions touch different bytes"
    return None


def judged(sample: list[tuple[str, str, Mutant]]) -> Counter[tuple[str, str]]:
    """Kind and outcome → number of mutants, of which none has an effect that nobody sees."""
    outcomes: Counter[tuple[str, str]] = Counter()
    for name, on, mutant in sample:
        arrays, expected = reference(name, on)
        outcome = judge(mutant, chip(on), arrays, expected)
        if outcome == "equal":
            reason = explained(mutant, program(name, on))
            assert reason is not None, f"{name} on {on}: nothing tells apart {mutant.kind}: {mutant.what}"
            outcome = f"equal: {reason}"
        outcomes[mutant.kind, outcome] += 1
    return outcomes


def test_a_sample_of_mutants_is_told_apart(seed: int) -> None:
    outcomes = judged(Random(seed).sample(all_mutants(), 40))
    assert outcomes.total() == 40


@pytest.mark.slow
def test_mutants_are_told_apart(seed: int) -> None:
    everything = all_mutants()
    sample = Random(seed).sample(everything, min(800, len(everything)))
    outcomes = judged(sample)
    print(*sorted(outcomes.items()), sep="\n")
    equal = sum(count for (_, outcome), count in outcomes.items() if outcome.startswith("equal"))
    assert outcomes.total() >= 500 and equal <= outcomes.total() // 10
    assert {kind for kind, _ in outcomes} == {"wait", "signal", "address", "box", "pad", "slot", "order"}


def test_a_reordered_pair_that_shares_bytes_does_not_commute() -> None:
    original = program("undivided_attention", "odd")
    orders = [mutant for mutant in mutants(original) if mutant.kind == "order" and mutant.pair is not None]
    assert any(not commute(*mutant.pair, original.sections) for mutant in orders if mutant.pair)


def test_the_reference_is_no_constant() -> None:
    for name in MODELS:
        arrays, expected = reference(name, "edge")
        assert any(not np.array_equal(arrays[buffer], expected[buffer]) for buffer in expected)
