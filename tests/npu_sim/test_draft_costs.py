"""Gains and bounded costs of drafts on a device that runs ahead, in virtual time."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from recited_texts import Times, seconds

from npu_sim.llm.engine.sequence import Sequence
from npu_sim.llm.speculation.budget import DraftBudget
from npu_sim.llm.speculation.lookup import PromptLookup

PROMPT = 200
TIMES = [Times(), Times(several=0.44), Times(host=0.05, begin=0.02, end=0.02), Times(several=0.9, host=0.2)]


def noise(rng: np.random.Generator, words: int, count: int) -> list[int]:
    """Random tokens; of few words, the same three often follow each other, and then others."""
    tokens: list[int] = rng.integers(0, words, count).tolist()
    return tokens


def gain(text: list[int], monkeypatch: pytest.MonkeyPatch, times: Times) -> float:
    plain = seconds(text, PROMPT, None, monkeypatch, times)
    return plain / seconds(text, PROMPT, PromptLookup(), monkeypatch, times)


@pytest.mark.parametrize("words", [3, 5, 8, 20])
@pytest.mark.parametrize("times", TIMES, ids=str)
def test_drafts_that_fail_cost_an_answer_three_percent_at_most(
    words: int, times: Times, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert gain(noise(rng, words, PROMPT + 400), monkeypatch, times) > 0.97


@pytest.mark.parametrize("piece", [5, 9, 17])
def test_pieces_that_seem_to_come_again_cost_hardly_more(
    piece: int, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = noise(rng, 1000, PROMPT)
    text = list(start)
    while len(text) < PROMPT + 600:  # copies of pieces, each of which ends where a draft begins
        place = int(rng.integers(PROMPT - piece))
        text += [*start[place : place + piece], *noise(rng, 1000, 8)]
    assert gain(text, monkeypatch, Times()) > 0.95


@pytest.mark.parametrize("times", TIMES, ids=str)
def test_repeated_text_is_faster(times: Times, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    start = noise(rng, 1000, PROMPT)
    assert gain([*start, *start], monkeypatch, times) > 1.5


def test_drafts_come_back_after_a_long_match(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    failing, copied = noise(rng, 4, PROMPT), noise(rng, 1000, 300)
    text = [*copied, *failing, *failing[::-1], *copied]
    length = len(copied) + len(failing)
    plain = seconds(text, length, None, monkeypatch)
    drafting = seconds(text, length, PromptLookup(), monkeypatch)
    assert plain / drafting > 1.2


def test_a_model_without_outputs_for_drafts_never_stops_for_them(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = noise(rng, 1000, PROMPT)
    text = [*start, *start]
    plain = seconds(text, PROMPT, None, monkeypatch, max_outputs=1)
    assert seconds(text, PROMPT, PromptLookup(), monkeypatch, max_outputs=1) == pytest.approx(plain, rel=1e-6)


def test_a_slow_step_does_not_end_drafts_for_good(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = [noise(rng, 1000, 6) for _ in range(30)]  # too short for a long match
    text = noise(rng, 1000, PROMPT)
    for _ in range(250):
        text += pieces[int(rng.integers(len(pieces)))]
    slow = seconds(text, PROMPT, PromptLookup(), monkeypatch, Times(slow_steps=1)) - 2
    assert seconds(text, PROMPT, None, monkeypatch) / slow > 1.05


@pytest.mark.parametrize(("count", "length", "matches"), [(13, 8, True), (13, 9, True), (13, 10, False), (5, 8, False)])
def test_a_match_has_only_tokens_that_there_are(count: int, length: int, matches: bool) -> None:
    tokens = [*range(10, 19), 1, *range(10, 19)][-count - 6 :] if count == 13 else [1, 2, 9, 1, 2]
    sequence = Sequence(0, tokens, 100, frozenset())
    assert PromptLookup().has_match(sequence, length) == matches


class Hopeful(PromptLookup):
    """Says that there may be drafts, and has none."""

    asked = 0

    def may_draft(self, sequence: Sequence) -> bool:
        return True

    def drafts(self, wanted: Mapping[Sequence, int]) -> dict[Sequence, list[int]]:
        self.asked += 1
        return {}


@pytest.mark.parametrize(("host", "fewest", "most"), [(0.01, 8, 60), (50.0, 1, 5)])
def test_a_device_that_stops_for_long_is_stopped_rarely(
    host: float, fewest: int, most: int, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = Hopeful()
    seconds(noise(rng, 1000, PROMPT + 300), PROMPT, drafter, monkeypatch, Times(one=0.4 + host, host=host))
    assert fewest <= drafter.asked <= most


def test_drafts_without_any_right_token_ask_for_longer_matches() -> None:
    budget = DraftBudget()
    first = budget.long_match(0)
    assert first is not None
    budget.record(4, 0)
    budget.back_off(0)
    assert budget.long_match(0) == 4 * first
    budget.record(4, 1)
    assert budget.long_match(0) == 4 * first
    for _ in range(5):
        budget.record(7, 7)
    assert budget.long_match(0) == first


def test_where_even_right_drafts_are_not_worth_it_matches_do_not_count_for_a_while() -> None:
    budget = DraftBudget()
    budget.pause(10)
    assert budget.long_match(10) is not None
    budget.pause(10, long_match=True)
    waiting = next(tokens for tokens in range(10, 100) if budget.long_match(tokens) is not None)
    assert waiting > 20
