"""The garbage collector runs seldom while programs are lowered and timed."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from npu_model.collection import seldom_collected


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


def test_the_collector_runs_seldom_within_and_as_before_afterwards() -> None:
    gc.set_threshold(700, 10, 5)
    with pytest.raises(ValueError, match="within"), seldom_collected():
        assert gc.get_threshold() == (50_000, 10, 5)
        with seldom_collected():
            pass
        assert gc.get_threshold() == (50_000, 10, 5)
        raise ValueError("within")
    assert gc.get_threshold() == (700, 10, 5)


@pytest.mark.parametrize("young", [0, 90_000])
def test_a_collector_that_is_off_or_seldom_runs_stays_so(young: int) -> None:
    gc.set_threshold(young, 10, 10)
    with seldom_collected():
        assert gc.get_threshold() == (young, 10, 10)
    assert gc.get_threshold() == (young, 10, 10)
