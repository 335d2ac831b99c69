"""Finds repetitions in a sequence, such as the layers of a network in a list of kernel calls."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

LONGEST_PERIOD = 512
WORTHWHILE = 4  # elements that a run must leave out


@dataclass(frozen=True)
class Run:
    """A part of a sequence: `period` elements, the first at index `start`, `count` times in a row."""

    start: int
    period: int
    count: int

    @property
    def stop(self) -> int:
        return self.start + self.period * self.count


def fold(keys: Sequence[Hashable]) -> list[Run]:
    """Divide a sequence into runs, in order; elements that do not repeat are in runs with a count of 1.

    Given: a b c b c b c d
    Result: (a) × 1, (b c) × 3, (d) × 1

    The run that shortens the sequence most is taken first. Repetitions of more than `LONGEST_PERIOD` elements, and runs
    that save fewer than `WORTHWHILE` elements, are not searched.
    """
    numbers: dict[Hashable, int] = {}
    ids = np.array([numbers.setdefault(key, len(numbers)) for key in keys], np.int64)
    runs, unfolded = [], [(0, len(ids))]
    while unfolded:
        start, stop = unfolded.pop()
        repeat = _longest(ids[start:stop])
        if repeat is None:
            if start < stop:
                runs.append(Run(start, stop - start, 1))
            continue
        run = Run(start + repeat.start, repeat.period, repeat.count)
        runs.append(run)
        unfolded += [(start, run.start), (run.stop, stop)]
    return sorted(runs, key=lambda run: run.start)


def _longest(ids: np.ndarray) -> Run | None:
    """The run that shortens the sequence most; of equal ones, the first with the shortest period.

    None if nothing repeats.
    """
    best, saved = None, WORTHWHILE - 1
    for period in range(1, min(len(ids) // 2, LONGEST_PERIOD) + 1):
        same = ids[:-period] == ids[period:]
        # How many elements from each on equal those a period later: distance to the next that does not.
        breaks = np.append(np.flatnonzero(~same), len(same))
        length = breaks[np.searchsorted(breaks, np.arange(len(same)))] - np.arange(len(same))
        start = int(length.argmax())
        repeats = int(length[start]) // period
        if repeats * period > saved:
            best, saved = Run(start, period, repeats + 1), repeats * period
    return best
