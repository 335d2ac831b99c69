"""Samples of long lists of cases: `make test` tries another part at each run, `make test-all` all of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import pytest


def drawn(cases: Sequence[Any], share: float, name: Callable[[Any], str]) -> list[Any]:
    """The cases as parameters with these names; all but a share of them, drawn by TEST_SEED, are marked as slow."""
    soon = set(Random(int(os.environ["TEST_SEED"])).sample(range(len(cases)), round(share * len(cases))))
    return [
        pytest.param(case, id=name(case), marks=() if index in soon else pytest.mark.slow)
        for index, case in enumerate(cases)
    ]
