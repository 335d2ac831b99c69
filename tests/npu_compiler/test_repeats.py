"""Folding what repeats in a sequence."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npu_compiler.program.repeats import Run, fold


@pytest.mark.parametrize(
    ("text", "runs"),
    [
        ("", []),
        ("abc", [Run(0, 3, 1)]),
        ("abababx", [Run(0, 2, 3), Run(6, 1, 1)]),
        ("x" + "aab" * 4 + "yz", [Run(0, 1, 1), Run(1, 3, 4), Run(13, 2, 1)]),
        ("aaaaabcabcabcabc", [Run(0, 4, 1), Run(4, 3, 4)]),
        ("abab", [Run(0, 4, 1)]),
        ("aaaaaaaa", [Run(0, 1, 8)]),
    ],
)
def test_layers_are_found(text: str, runs: list[Run]) -> None:
    assert fold(text) == runs


@given(st.lists(st.sampled_from("abc"), max_size=60))
def test_runs_say_the_whole_sequence(letters: list[str]) -> None:
    runs = fold(letters)
    assert [r.start for r in runs] == [0, *(r.stop for r in runs[:-1])] if runs else not letters
    unfolded = [letter for r in runs for letter in letters[r.start : r.start + r.period] * r.count]
    assert unfolded == letters


@given(st.text("abc", max_size=5), st.text("xyz", min_size=1), st.integers(5, 9), st.text("abc", max_size=5))
def test_a_repeated_layer_is_folded_wherever_it_stands(before: str, layer: str, count: int, after: str) -> None:
    runs = fold(before + layer * count + after)
    assert any(run.start == len(before) and run.count >= count for run in runs)
