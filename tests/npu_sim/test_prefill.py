"""Prefill in runs of several sizes: how a prompt is divided, and that the division does not matter."""

import os
from dataclasses import replace

import numpy as np
import pytest
from cuda_gpu import DEVICES
from hypothesis import given
from hypothesis import strategies as st
from tiny_llms import VOCAB, save_tiny

from npu_compiler import CompiledProgram
from npu_compiler.errors import NPUError
from npu_sim.llm import Checkpoint, LanguageModel, contiguous_model, greedy, load_checkpoint
from npu_sim.llm.prefill_plan import CPU_CHUNKS, CPU_RUN, GPU_CHUNKS, GPU_RUN, divide
from npu_sim.llm.step_program import ProgramName

CACHE = 24


pytestmark = pytest.mark.usefixtures("shared_programs")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return load_checkpoint(save_tiny(tmp_path_factory.mktemp("llama32"), "llama", "float32"), "float32")


@given(
    st.integers(1, 5000),
    st.sampled_from([(CPU_CHUNKS, CPU_RUN), (GPU_CHUNKS, GPU_RUN)]).flatmap(
        lambda kind: st.tuples(st.just(kind[0]), st.sets(st.sampled_from(kind[0])), st.just(kind[1]))
    ),
)
def test_runs_are_full_but_the_last_and_none_is_needless(
    tokens: int, sizes: tuple[tuple[int, ...], set[int], int]
) -> None:
    chunks, made, run = sizes
    plan = divide(tokens, made, chunks, run)
    assert sum(plan[:-1]) < tokens <= sum(plan)
    assert set(plan) <= {1, *chunks} and len(set(plan) - {1, *made}) <= 1
    cost = sum(plan) + len(plan) * run
    for size in (1, *made):
        runs = -(-tokens // size)
        assert cost <= runs * (size + run)


@pytest.mark.parametrize(
    ("tokens", "made", "expected"),
    [
        (1, CPU_CHUNKS, [1]),
        (2, CPU_CHUNKS, [1, 1]),
        (4, CPU_CHUNKS, [16]),
        (37, CPU_CHUNKS, [16, 16, 16]),
        (130, CPU_CHUNKS, [128, 1, 1]),
        (4, {128}, [1, 1, 1, 1]),
        (4, set(), [1, 1, 1, 1]),
        (37, set(), [16, 16, 16]),
        (1000, {16}, [512, 512]),
        (1000, {16, 128}, 8 * [128]),
    ],
)
def test_a_prompt_takes_runs_that_fit_it(tokens: int, made: set[int], expected: list[int]) -> None:
    assert divide(tokens, made, CPU_CHUNKS, CPU_RUN) == expected


@pytest.mark.parametrize(
    ("tokens", "made", "expected"),
    [
        (12, set(), [16]),
        (37, set(), [64]),
        (37, GPU_CHUNKS, [64]),
        (37, {128}, [128]),
        (65, GPU_CHUNKS, [128]),
        (65, {64}, [64, 1]),
        (200, GPU_CHUNKS, [512]),
        (1000, GPU_CHUNKS, [512, 512]),
    ],
)
def test_a_gpu_takes_few_runs(tokens: int, made: set[int], expected: list[int]) -> None:
    assert divide(tokens, made, GPU_CHUNKS, GPU_RUN) == expected


@pytest.mark.parametrize("device", DEVICES)
def test_the_division_does_not_change_the_logits(
    llama: Checkpoint, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cases include a last run that would pass the end of the cache, and tokens that are cached already."""
    ids = np.random.default_rng(3).integers(0, VOCAB, CACHE).tolist()
    for name in ("CPU_CHUNKS", "GPU_CHUNKS"):
        monkeypatch.setattr(contiguous_model, name, (4, 16))
    model = LanguageModel(llama, cache_length=CACHE, device=device)
    reference = LanguageModel(llama, cache_length=CACHE, chunk=CACHE, device=device)

    def logits(of: LanguageModel, count: int, sizes: list[int] | None = None) -> np.ndarray:
        of.reset()
        if sizes is not None:
            monkeypatch.setattr(of.model, "sizes", lambda _, left=[*sizes]: [left.pop(0)])
        return of.prefill(ids[:count])

    for count, sizes in (
        (3, [4]),
        (4, [4]),
        (9, [4, 4, 1]),
        (15, [16]),
        (21, [16, 4, 1]),
        (22, [16, 16]),
        (23, [4, 4, 4, 16]),
        (24, [16, 4, 4]),
    ):
        np.testing.assert_allclose(logits(model, count, sizes), logits(reference, count), atol=2e-4)
    assert set(model.prefill_programs) == {4, 16}


def test_programs_are_made_when_a_prompt_needs_them(llama: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contiguous_model, "CPU_CHUNKS", (4, 8, 16, 512))
    monkeypatch.setattr(contiguous_model, "has_prompt", lambda *_: True)
    model = LanguageModel(llama, cache_length=CACHE, device="cpu")
    assert not model.prefill_programs
    model.prefill([5])
    assert not model.prefill_programs
    model.prefill([5, 6, 7])
    assert set(model.prefill_programs) == {4}
    model.prepare(greedy, 16)
    assert set(model.prefill_programs) == {4, 16}
    model.reset()
    assert len(list(model.generate(list(range(10, 26)), 3, stop=frozenset()))) == 3
    model.prepare(greedy, 10_000)  # longer than the cache, which the prompt itself will be told
    assert set(model.prefill_programs) == {4, 8, 16}


def test_a_size_that_the_cache_lacks_is_made_only_where_it_pays(
    llama: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NPU_SIM_CACHE", os.environ["NPU_SIM_CACHE"] + "-of-its-own")
    monkeypatch.setattr(contiguous_model, "CPU_CHUNKS", (4, 8))
    model = LanguageModel(llama, cache_length=CACHE, device="cpu")
    model.prefill(list(range(10, 30)))
    assert not model.prefill_programs
    model.model.prefill_program(8)
    model.prefill([7, 8, 9])
    assert set(model.prefill_programs) == {8}
    monkeypatch.setattr(contiguous_model, "CPU_CHUNKS", (8,))
    assert LanguageModel(llama, cache_length=CACHE, device="cpu").model._compiled == {8}


def test_compiling_is_no_part_of_the_prefill_speed(llama: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contiguous_model, "CPU_CHUNKS", (8,))
    monkeypatch.setattr(contiguous_model, "has_prompt", lambda *_: True)
    model = LanguageModel(llama, cache_length=CACHE, device="cpu")
    compile, clock = model.model.compile, [0.0]

    def slowly(name: ProgramName) -> CompiledProgram:
        clock[0] += 1000
        return compile(name)

    def tick() -> float:
        clock[0] += 1
        return clock[0]

    monkeypatch.setattr(model.model, "compile", slowly)
    monkeypatch.setattr(model.device.backend, "clock", tick)
    reply = model.generate([5, 6, 7, 8, 9], 2, stop=frozenset())
    assert len(list(reply)) == 2 and clock[0] > 1000
    assert reply.stats.prefill_seconds < 10 and reply.stats.prompt_tokens == 5 and reply.stats.reused_tokens == 0
    again = model.generate([5, 6, 7, 8, 9, 10], 2, stop=frozenset())
    assert len(list(again)) == 2 and again.stats.reused_tokens == 5


@pytest.mark.parametrize("device", DEVICES)
def test_a_prompts_greedy_token_is_chosen_without_reading_the_logits(
    llama: Checkpoint, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of one piece, of a padded second piece, and of a last piece that begins before the cached tokens end."""
    model = LanguageModel(llama, cache_length=CACHE, chunk=8, device=device)
    ids = np.random.default_rng(4).integers(0, VOCAB, CACHE).tolist()
    expected = []
    for count in (5, 12, CACHE - 1):
        model.reset()
        expected.append(int(model.prefill(ids[:count]).argmax()))
    model.reset()

    def refuse(*_: object) -> None:
        raise AssertionError("the host has read the logits")

    monkeypatch.setattr(contiguous_model, "choose_by", refuse)
    chosen = [next(model.generate(ids[:count], 1, stop=frozenset())) for count in (5, 12, CACHE - 1)]
    assert chosen == expected


def test_a_prompt_whose_logits_are_not_finite_ends_with_an_error(llama: Checkpoint) -> None:
    weights = dict(llama.state)
    weights["model.norm.weight"] = np.full(weights["model.norm.weight"].shape, np.inf, np.float32)
    model = LanguageModel(replace(llama, state=weights), cache_length=CACHE, chunk=8, device="cpu")
    with pytest.raises(NPUError, match="not finite"):
        next(model.generate([5, 6, 7], 2))
