"""Samples of long lists of test cases: `make test` runs a part of a list, and `make test-all` some more of it."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from random import Random
from typing import Any

import pytest

# The part of each slow test's cases to run; TEST_SEED decides which.
SHARE = float(os.environ.get("TEST_SHARE", "1"))


def drawn(cases: Iterable[Any], share: float, name: Callable[[Any], str] = str) -> list[Any]:
    """Return the cases as parameters of a test, those beyond the share marked as slow.

    TEST_SEED decides which ones, so that each run without a fixed seed tries others. A case's name decides too: of
    lists with equal names, the smaller share is a part of the larger one, and what is made for a case serves both.
    """
    cases = list(cases)
    soon = _sample([name(case) for case in cases], share)
    return [
        pytest.param(case, id=name(case), marks=() if index in soon else pytest.mark.slow)
        for index, case in enumerate(cases)
    ]


def left_out(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Return the cases of slow tests that are beyond `SHARE` of each test's, of which at least one is run."""
    tests = defaultdict[str, list[pytest.Item]](list)
    for item in items:
        if item.get_closest_marker("slow") is not None:
            tests[item.nodeid.partition("[")[0]].append(item)
    left: list[pytest.Item] = []
    for cases in tests.values():
        kept = _sample([case.nodeid for case in cases], SHARE)
        left += [case for index, case in enumerate(cases) if index not in kept]
    return left


def _sample(names: Sequence[str], share: float) -> set[int]:
    """Draw a share of some cases by TEST_SEED and their names, at least one; return their indices."""
    seed = os.environ["TEST_SEED"]
    order = sorted(range(len(names)), key=lambda index: Random(f"{seed} {names[index]}").random())
    return set(order[: max(1, round(share * len(names)))])
