"""Counts and measurements of the engine."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from npu_sim.llm.engine.sequence import FinishReason

SECONDS = tuple(mantissa * 10.0**exponent for exponent in range(-4, 3) for mantissa in (1.0, 2.0, 5.0))


@dataclass(frozen=True)
class Histogram:
    """Counts of observed values by bucket since the start, in the form of a Prometheus histogram.

    Attributes:
        bounds: Upper bound of each bucket, inclusive; after them comes one without a bound.
        counts: Observations in each bucket.
        total: Sum of the observations.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float

    @property
    def count(self) -> int:
        return sum(self.counts)


_FEW = 16  # values, which are counted faster one by one


class Observations:
    """A histogram that one thread fills."""

    def __init__(self, bounds: tuple[float, ...] = SECONDS) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def add(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def add_all(self, values: list[float]) -> None:
        if len(values) < _FEW:
            for value in values:
                self.add(value)
        else:
            places = np.bincount(np.searchsorted(self._bounds, values), minlength=len(self._counts))
            self._counts = [before + int(new) for before, new in zip(self._counts, places, strict=True)]
            self._total += sum(values)

    def histogram(self) -> Histogram:
        return Histogram(self._bounds, tuple(self._counts), self._total)


@dataclass(frozen=True)
class EngineStats:
    """The engine's state, and its counts since the start. Times are in seconds.

    Attributes:
        waiting, running: Requests that wait for admission, and those that hold KV blocks.
        batch_size: Number of sequences in the latest step.
        steps: Steps launched.
        prompt_tokens: Tokens of the prompts that were submitted, of which `cached_tokens` were found in the cache.
        new_tokens: Tokens chosen, without those that ended a sequence.
        drafted_tokens, accepted_tokens: Tokens that speculative decoding guessed, and those of them that the model
            confirmed.
        blocks_free, blocks_used, blocks_cached: Blocks of the pool that hold nothing, belong to running requests, or
            hold a prefix that a later prompt can reuse.
        rows_empty: Rows of the used blocks that hold no token yet.
        preemptions: Times that a request lost its blocks to an earlier one.
        finished: Requests that have ended, by reason.
        queue_seconds: Time from a request's submission to its admission.
        first_token_seconds: Time from a request's submission to its first token.
        between_tokens_seconds: Time from each token of a request to the next.
        step_seconds: Time for each step between its launch, or the end of the step before, and its result.
    """

    waiting: int
    running: int
    batch_size: int
    steps: int
    prompt_tokens: int
    cached_tokens: int
    new_tokens: int
    drafted_tokens: int
    accepted_tokens: int
    blocks_free: int
    blocks_used: int
    blocks_cached: int
    rows_empty: int
    preemptions: int
    finished: Mapping[FinishReason, int]
    queue_seconds: Histogram
    first_token_seconds: Histogram
    between_tokens_seconds: Histogram
    step_seconds: Histogram


def merged(living: Iterable[EngineStats], gone: Iterable[EngineStats]) -> EngineStats:
    """The stats of several engines as if of one: the state of the living engines, and the counts of all."""
    living = [*living]
    everyone = [*living, *gone]
    values: dict[str, Any] = {name: sum(getattr(one, name) for one in living) for name in _STATE}
    values |= {name: sum(getattr(one, name) for one in everyone) for name in _COUNTS}
    values |= {name: _added([getattr(one, name) for one in everyone]) for name in _TIMES}
    finished: Counter[FinishReason] = Counter()
    for one in everyone:
        finished.update(one.finished)
    return EngineStats(**values, finished=dict(finished))


def _added(histograms: list[Histogram]) -> Histogram:
    """The sum of histograms that all have the bounds `SECONDS`."""
    counts = [sum(counts) for counts in zip(*(histogram.counts for histogram in histograms), strict=True)]
    return Histogram(
        SECONDS, tuple(counts or [0] * (len(SECONDS) + 1)), sum(histogram.total for histogram in histograms)
    )


_STATE = ("waiting", "running", "batch_size", "blocks_free", "blocks_used", "blocks_cached", "rows_empty")
_TIMES = ("queue_seconds", "first_token_seconds", "between_tokens_seconds", "step_seconds")
_COUNTS = tuple(field.name for field in fields(EngineStats) if field.name not in (*_STATE, *_TIMES, "finished"))
