"""A model that recites a text in virtual time, for tests of the cost and gain of drafts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from npu_sim.llm.engine.batch import Batch
from npu_sim.llm.engine.core import EngineCore, SequenceOutput
from npu_sim.llm.engine.sequence import Sequence
from npu_sim.llm.speculation import planner
from npu_sim.llm.speculation.lookup import Drafter


@dataclass
class Clock:
    """Stand-in for the module `time`."""

    now: float = 1000.0

    def perf_counter(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now


@dataclass(frozen=True)
class Times:
    """Milliseconds that things take.

    Attributes:
        one: A step of one token.
        several: A step of two to eight tokens.
        host: The host's work for each step.
        begin: The launch of a step, until it begins.
        end: The end of a step, until the host knows of it.
        slow_steps: Number of steps of several tokens that take two seconds more.
    """

    one: float = 0.4
    several: float = 0.64
    host: float = 0.12
    begin: float = 0.05
    end: float = 0.07
    slow_steps: int = 0


@dataclass
class _Result:
    model: RecitingModel
    chosen: NDArray[np.int32]
    done: float
    on_host = False

    def tokens(self) -> NDArray[np.int32]:
        clock = self.model.clock
        clock.now = max(clock.now, self.done + self.model.times.end / 1000)
        return self.chosen

    def logits(self) -> Any:
        raise AssertionError("nobody asked for logits")


class RecitingModel:
    """A `BatchModel` for one sequence, whose every token is the next one of the text."""

    block_size, blocks, context_length, vocab_size = 16, 128, 2048, 1 << 20
    max_tokens, max_sequences, runs_ahead, shares_prefixes, read_window = 2048, 8, True, True, 0
    rewinds = True

    def __init__(self, text: list[int], times: Times, clock: Clock, max_outputs: int = 64) -> None:
        self._text, self.times, self.clock, self.max_outputs = [*text, 0], times, clock, max_outputs
        self.slow_steps = times.slow_steps
        self._free = 0.0

    def step(self, batch: Batch) -> _Result:
        self.clock.now += self.times.host / 1000
        taken = self.times.one if len(batch.tokens) == 1 else self.times.several
        if 1 < len(batch.tokens) <= 8 and self.slow_steps:
            self.slow_steps -= 1
            taken += 2000
        self._free = max(self._free, self.clock.now + self.times.begin / 1000) + taken / 1000
        places = batch.positions[batch.outputs] + 1
        return _Result(self, np.array([self._text[place] for place in places], np.int32), self._free)

    def piece(self, start: int, end: int) -> tuple[int, int]:
        return start, end

    def check(self) -> None: ...

    def copy_blocks(self, pairs: Any) -> None: ...


def seconds(
    text: list[int],
    prompt: int,
    drafter: Drafter | None,
    monkeypatch: pytest.MonkeyPatch,
    times: Times | None = None,
    max_outputs: int = 64,
) -> float:
    """Return the virtual seconds of reciting a text after its first `prompt` tokens, from the first new token on."""
    clock = Clock()
    monkeypatch.setattr(planner, "time", clock)
    known: list[float] = []
    told: list[int] = []

    def receive(outputs: list[SequenceOutput]) -> None:
        for output in outputs:
            told.extend(output.tokens)
            known.append(clock.now)

    model = RecitingModel(text, times or Times(), clock, max_outputs)
    runner = EngineCore(model, None, drafter, receive, clock.monotonic)
    runner.add(Sequence(0, text[:prompt], len(text), frozenset(), last_time=clock.now))
    while runner.busy:
        runner.advance()
    assert told == text[prompt:]
    return known[-1] - known[0]
