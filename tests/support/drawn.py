"""Samples of long lists of test cases, so that `make test` runs a part of a list and `make test-all` all of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from random import Random
from typing import Any

import pytest


def drawn(cases: Iterable[Any], share: float, name: Callable[[Any], str] = str) -> list[Any]:
    """Return the cases as parameters of a test, those beyond the share marked as slow.

    TEST_SEED decides which ones, so that each run without a fixed seed tries others. A case's name decides too: of
    lists with equal names, the smaller share is a part of the larger one, and what is made for a case serves both.
    """
    cases, seed = list(cases), os.environ["TEST_SEED"]
    order = sorted(range(len(cases)), key=lambda index: Random(f"{seed} {name(cases[index])}").random())
    soon = set(order[: max(1, round(share * len(cases)))])
    return [
        pytest.param(case, id=name(case), marks=() if index in soon else pytest.mark.slow)
        for index, case in enumerate(cases)
    ]
