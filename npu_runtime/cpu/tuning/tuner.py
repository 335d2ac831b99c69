"""`Tuner`: prepares each call with the fastest of its candidates."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence

from npu_runtime.background import background_work
from npu_runtime.cpu.arrays import strides_of
from npu_runtime.cpu.bound_call import ArrayCall, Candidate
from npu_runtime.cpu.spinning_threads import spinning_seconds
from npu_runtime.cpu.tuning.table import Choice, ChoiceTable
from npu_runtime.cpu.tuning.trials import best_of, measure, stand_in
from npu_runtime.hardware import Launch
from npu_runtime.pytorch import find_torch, torch_threads

_MOST_SECONDS = 2.5  # time limit of all trials of a start; the rest takes the default and is tried at a later start
# What a call takes at the least on a slow machine, for leaving out those that are too short for a choice to matter.
_FLOPS_PER_SECOND, _BYTES_PER_SECOND = 5e10, 2e10
_SHORT = 20e-6  # seconds
# Another candidate than those before it has to be this much faster.
_MARGIN = 0.1


class Tuner:
    """Chooses a candidate for each call from the table, else by a trial, else the first that handles the call.

    A choice, once made, is kept, so that results are the same from run to run.

    Attributes:
        trials: Number of calls for which candidates were tried.
        seconds_left: Seconds left for trials in this process.
    """

    def __init__(self, table: ChoiceTable) -> None:
        self._table = table
        self.seconds_left = _MOST_SECONDS
        self._without_table: dict[str, str | None] = {}  # choices that hold for this start only
        self.trials = 0

    def launch(self, call: ArrayCall, candidates: Sequence[Candidate]) -> Launch | None:
        """The call prepared with the fastest candidate; None if no candidate handles it."""
        chosen = self._chosen(call, candidates) if len(candidates) > 1 and _is_worth_a_trial(call) else None
        return default_launch(call, sorted(candidates, key=lambda candidate: candidate.name != chosen))

    def _chosen(self, call: ArrayCall, candidates: Sequence[Candidate]) -> str | None:
        key = call_key(call)
        choice = self._table.choices.get(key)
        if choice is not None and choice.chosen in {candidate.name for candidate in candidates}:
            return choice.chosen
        if key not in self._without_table and self.seconds_left > 0:
            if any(candidate.uses_pytorch for candidate in candidates):
                find_torch()  # its import is no part of the trial
            start = time.perf_counter()
            self._without_table[key] = self._try(key, call, candidates)
            self.seconds_left -= time.perf_counter() - start
        return self._without_table.get(key)

    def _try(self, key: str, call: ArrayCall, candidates: Sequence[Candidate]) -> str | None:
        """The name of the fastest candidate by a trial; None if fewer than two handle the call, or all fail.

        The choice goes into the table if the rounds of the trial agree.
        """
        self.trials += 1
        with background_work("measuring which kernels are the fastest here"):
            times = measure(stand_in(call), candidates)
        if len(times.seconds) < 2:
            return None
        working = {name: seconds for name, seconds in times.seconds.items() if math.isfinite(seconds)}
        if not working:
            return None
        tried = [candidate for candidate in candidates if candidate.name in working]
        lost = spinning_seconds()
        chosen = best_of(working, _MARGIN, {x.name: lost for x in tried if x.leaves_threads})
        if times.agree:
            spreads = {name: value for name, value in times.spreads.items() if name in working}
            self._table.keep(key, Choice(chosen, _microseconds(working), _microseconds(spreads)))
        return chosen


def _microseconds(seconds: Mapping[str, float]) -> dict[str, float]:
    return {name: round(1e6 * value, 1) for name, value in seconds.items()}


def default_launch(call: ArrayCall, candidates: Sequence[Candidate]) -> Launch | None:
    """The call prepared with the first candidate that handles it; None if none does."""
    for candidate in candidates:
        launch = candidate.make(call)
        if launch is not None:
            return launch
    return None


def call_key(call: ArrayCall) -> str:
    """Everything that decides which candidate is the fastest for a call on a given machine, as text."""
    views = [
        f"{array.dtype.name}{list(array.shape)}:{list(strides_of(array))}{constant}"
        for array, constant in (
            *((x, " constant" * o.is_constant) for x, o in zip(call.inputs, call.operands, strict=True)),
            *((x, "") for x in call.outputs),
        )
    ]
    params = json.dumps(dict(sorted(call.params.items())), default=str)
    return f"{call.call.kernel} {params} {'; '.join(views)}; {torch_threads()} threads"


def _is_worth_a_trial(call: ArrayCall) -> bool:
    work = call.call
    return work.flops / _FLOPS_PER_SECOND + work.bytes_moved / _BYTES_PER_SECOND >= _SHORT
