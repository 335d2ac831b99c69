"""Sampling: what remains after penalties and filters is what transformers' logits processors leave."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_llms import save_tiny

from npu_compiler.errors import InputError, NPUError
from npu_sim.llm import load_checkpoint
from npu_sim.llm.engine.choosing import choose_token
from npu_sim.llm.sampling import (
    SamplingSettings,
    adjusted,
    check_sampling,
    choose,
    choose_filtered,
    kept_tokens,
)
from npu_sim.serving.engine import Engine
from npu_sim.serving.paged_model import PagedModel
from npu_sim.serving.request import Request

processors = pytest.importorskip("transformers.generation.logits_process")
SEEDS = st.integers(0, 2**32 - 1)


def drawn_settings(draw: np.random.Generator, vocabulary: int) -> SamplingSettings:
    def maybe(value: Any) -> Any:
        return value if draw.random() < 0.6 else None

    return SamplingSettings(
        temperature=float(draw.uniform(0.2, 2)),
        top_k=maybe(int(draw.integers(1, vocabulary + 5))),
        top_p=maybe(float(draw.uniform(0.05, 1))),
        min_p=maybe(float(draw.uniform(0, 1))),
        typical_p=maybe(float(draw.uniform(0.05, 0.99))),
    )


def left_by_transformers(logits: np.ndarray, sampling: SamplingSettings) -> torch.Tensor:
    """Probabilities [vocab] after the warpers, in the order of `GenerationMixin`."""
    warpers = [processors.TemperatureLogitsWarper(sampling.temperature)]
    if sampling.top_k is not None:
        warpers.append(processors.TopKLogitsWarper(sampling.top_k))
    if sampling.top_p is not None:
        warpers.append(processors.TopPLogitsWarper(sampling.top_p))
    if sampling.min_p is not None:
        warpers.append(processors.MinPLogitsWarper(sampling.min_p))
    if sampling.typical_p is not None:
        warpers.append(processors.TypicalLogitsWarper(sampling.typical_p))
    scores = torch.from_numpy(logits.astype(np.float64))[None]
    for warper in warpers:
        scores = warper(torch.zeros(1, 1, dtype=torch.long), scores)
    return scores[0].softmax(-1)


@settings(max_examples=150)
@given(seed=SEEDS)
def test_filters_keep_what_transformers_keeps(seed: int) -> None:
    draw = np.random.default_rng(seed)
    logits = draw.normal(0, draw.uniform(0.5, 6), int(draw.integers(2, 60))).astype(np.float32)
    sampling = drawn_settings(draw, len(logits))
    ids, probabilities = kept_tokens(logits, sampling)
    found = np.zeros(len(logits))
    found[ids] = probabilities
    np.testing.assert_allclose(found, left_by_transformers(logits, sampling).numpy(), atol=1e-9, err_msg=str(sampling))


@settings(max_examples=100)
@given(seed=SEEDS)
def test_without_filters_the_same_token_is_chosen_as_on_the_device(seed: int) -> None:
    draw = np.random.default_rng(seed)
    logits = draw.normal(0, 3, 200).astype(np.float32)
    sampling = SamplingSettings(0.7, int(draw.integers(1, 40)), float(draw.uniform(0.1, 0.99)))
    uniform = float(draw.random())
    wanted = choose(logits, uniform, 0.7, top_k=sampling.top_k, top_p=sampling.top_p)
    assert choose_filtered(logits, uniform, sampling) == wanted


@settings(max_examples=100)
@given(seed=SEEDS)
def test_presence_and_frequency_count_new_tokens_only(seed: int) -> None:
    draw = np.random.default_rng(seed)
    logits = draw.normal(0, 3, 20).astype(np.float32)
    prompt, new = (draw.integers(0, 20, int(draw.integers(1, 15))).tolist() for _ in range(2))
    sampling = SamplingSettings(
        presence_penalty=float(draw.uniform(-2, 2)),
        frequency_penalty=float(draw.uniform(-2, 2)),
        logit_bias=((3, 5.0),),
    )
    wanted = logits.astype(np.float64)
    for token in range(20):
        occurred = new.count(token)
        wanted[token] -= sampling.frequency_penalty * occurred + sampling.presence_penalty * (occurred > 0)
    wanted[3] += 5
    before = logits.copy()
    np.testing.assert_allclose(adjusted(logits, sampling, [*prompt, *new], len(prompt)), wanted, atol=1e-5)
    np.testing.assert_array_equal(logits, before)


def test_banned_tokens_are_chosen_only_where_nothing_else_is_allowed() -> None:
    class Only:
        def allowed(self) -> np.ndarray:
            return np.array([False, True, False])

    logits = np.array([1.0, 5.0, 2.0], np.float32)
    assert choose_token(logits, None, SamplingSettings(), 0.0) == 1
    assert choose_token(logits, None, SamplingSettings(), 0.0, banned={1}) == 2
    assert choose_token(logits, Only(), SamplingSettings(), 0.0, banned={1}) == 1  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_filters_refuse_logits_that_are_not_finite(value: float) -> None:
    with pytest.raises(NPUError, match="not finite"):
        kept_tokens(np.array([0, value, 1], np.float32), SamplingSettings(1.0, min_p=0.1))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"presence_penalty": 2.5}, "presence_penalty must be from -2 to 2, not 2.5"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty must be from -2 to 2, not nan"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be a finite number above 0, not 0.0"),
        ({"min_p": 1.5}, "min_p must be from 0 to 1, not 1.5"),
        ({"typical_p": 0.0}, "typical_p must be above 0 and at most 1, not 0.0"),
        ({"min_tokens": -1}, "min_tokens must be at least 0, not -1"),
        ({"logit_bias": ((7, 1.0),)}, "logit_bias names token 7, but the vocabulary is 0 to 6"),
        ({"logit_bias": ((1, 101.0),)}, "logit_bias of token 1 must be from -100 to 100, not 101.0"),
    ],
)
def test_settings_out_of_range_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_sampling(SamplingSettings(**fields), 7)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = save_tiny(tmp_path_factory.mktemp("llama"), "llama", "float32")
    model = PagedModel(load_checkpoint(folder, "float32"), context_length=64, max_sequences=2, device="cpu")
    model.checkpoint.load_tokenizer = lambda: SimpleNamespace(eos_token_id=None, decode=lambda ids, **_: "")
    with Engine(model, model.checkpoint) as running:
        yield running


PROMPT = (5, 9, 77, 31)
LENGTH = 12


def tokens_of(engine: Engine, sampling: SamplingSettings = SamplingSettings(), **fields: Any) -> list[int]:
    (update,) = engine.generate([Request(PROMPT, LENGTH, sampling, **{"stop_ids": frozenset(), **fields})])
    assert update.error is None
    return list(update.tokens)


@pytest.mark.usefixtures("shared_programs")
def test_a_sequence_ends_where_its_request_says(engine: Engine) -> None:
    whole = tokens_of(engine)
    assert len(whole) == LENGTH
    end = whole[3]
    first = whole.index(end)
    assert tokens_of(engine, stop_ids=frozenset({end})) == whole[:first]
    assert tokens_of(engine, stop_ids=frozenset({end}), ignore_eos=True) == whole
    assert tokens_of(engine, stop_token_ids=frozenset({end}), ignore_eos=True) == whole[:first]
    late = tokens_of(engine, SamplingSettings(min_tokens=first + 2), stop_ids=frozenset({end}))
    assert late[:first] == whole[:first]
    assert len(late) >= first + 2
    assert end not in late[: first + 2]


@pytest.mark.usefixtures("shared_programs")
def test_penalties_and_biases_change_what_is_chosen(engine: Engine) -> None:
    whole = tokens_of(engine)
    assert whole[0] not in tokens_of(engine, SamplingSettings(logit_bias=((whole[0], -100.0),)))
    assert set(tokens_of(engine, SamplingSettings(logit_bias=((7, 100.0),)))) == {7}
    shared = SamplingSettings(logit_bias=((7, 100.0), (8, 100.0)), frequency_penalty=2.0)
    assert set(tokens_of(engine, shared)) == {7, 8}
    assert tokens_of(engine, SamplingSettings(0.8, seed=3, min_p=1.0)) == whole
    with pytest.raises(InputError, match="logit_bias names token 999"):
        tokens_of(engine, SamplingSettings(logit_bias=((999, 1.0),)))
    with pytest.raises(InputError, match="stop_token_ids names token 999"):
        tokens_of(engine, stop_token_ids=frozenset({999}))
