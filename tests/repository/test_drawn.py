"""Long lists of cases: `make test` takes a share of each, and a smaller share is a part of a larger one."""

from __future__ import annotations

import pytest
from drawn import drawn

NAMES = [f"case {number}" for number in range(60)]


def soon(share: float) -> list[str]:
    return [case.id for case in drawn(NAMES, share) if not case.marks]


def test_all_cases_are_there_in_their_order_and_a_share_is_not_slow() -> None:
    assert [case.values for case in drawn(NAMES, 1 / 3)] == [(name,) for name in NAMES]
    assert len(soon(1 / 3)) == 20 and len(soon(1)) == 60


def test_a_short_list_has_a_case_that_is_not_slow() -> None:
    assert [len(case.marks) for case in drawn(["a"], 1 / 10)] == [0]


def test_a_smaller_share_is_a_part_of_a_larger_one() -> None:
    assert set(soon(1 / 6)) < set(soon(1 / 2))


def test_every_case_is_among_those_of_some_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = set()
    for seed in range(40):
        monkeypatch.setenv("TEST_SEED", str(seed))
        tried.update(soon(1 / 4))
    assert tried == set(NAMES)
