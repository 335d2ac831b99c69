"""`SimulatedModel`: a model that computes nothing, but moves a virtual clock by the cost of each step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from npu_compiler.errors import InputError
from npu_sim.llm.engine.batch import Batch
from npu_sim.llm.simulated.step_prices import Cost, StepPrices


class VirtualClock:
    """A clock that stands still until something moves it.

    Attributes:
        now: The time in seconds.
    """

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class SimulatedModel:
    """A `BatchModel` that computes nothing: every token is 0. See `BatchModel` for the attributes.

    Prefixes are not shared, since only the lengths of prompts are known.

    Args:
        prices: Time and energy of each step.
        clock: Moved by each step.
        on_step: Called before each step.

    Attributes:
        cost: Time and energy of all steps so far, including the loading of weights between them.
        steps, rows: Number of steps so far, and of the tokens in them.
        decoded: Number of sequences of the latest step if each of them decoded a token, else 0.
    """

    vocab_size = 1
    runs_ahead = 0
    shares_prefixes = False
    read_window = 0
    rewinds = True

    def __init__(
        self,
        prices: StepPrices,
        clock: VirtualClock,
        on_step: Callable[[], None],
        *,
        block_size: int,
        blocks: int,
        context_length: int,
        max_tokens: int,
        max_sequences: int,
    ) -> None:
        self.block_size, self.blocks, self.context_length = block_size, blocks, context_length
        self.max_tokens, self.max_sequences = max_tokens, max_sequences
        self.max_outputs = min(max_tokens, max_sequences)
        self.cost, self.steps, self.rows, self.decoded = Cost(0.0, 0.0), 0, 0, 0
        self._prices, self._clock, self._on_step = prices, clock, on_step
        self._loaded: Cost | None = None

    def step(self, batch: Batch) -> _Zeros:
        """Move the clock by the time that the step costs; return zeros for its tokens and logits."""
        self._on_step()
        count = len(batch.tokens)
        if count == len(batch.tables):
            costs, load = self._prices.decode(count, int(batch.positions.sum()) + count)
            cost, self.decoded = Cost(*costs[:, 0].tolist()), count
        else:
            cost, load = self._mixed(batch)
            self.decoded = 0
        if load != self._loaded:  # another program, which keeps other weights in the scratchpad
            cost, self._loaded = Cost(cost.seconds + load.seconds, cost.joules + load.joules), load
        self._spend(cost, 1, count)
        return _Zeros(len(batch.outputs))

    def _mixed(self, batch: Batch) -> tuple[Cost, Cost]:
        ends = np.append(np.flatnonzero(np.diff(batch.sequences)), len(batch.tokens) - 1)
        counts, rows = np.diff(ends, prepend=-1), batch.positions[ends] + 1
        single = counts == 1
        pieces = list(zip(counts[~single].tolist(), rows[~single].tolist(), strict=True))
        return self._prices.step(int(single.sum()), int(rows[single].sum()), pieces)

    def repeat(self, rows: int, steps: int, until: float) -> list[float]:
        """Move the clock as if the latest step, in which all sequences decoded, were repeated for their next tokens.

        Args:
            rows: Total number of cache rows that the sequences attend to in the first step.
            steps: Maximum number of steps.
            until: Time at which no further step begins.

        Returns:
            The duration of each step.
        """
        (seconds, joules), _ = self._prices.decode(self.decoded, rows, steps)
        ends = self._clock.now + np.cumsum(seconds)
        count = min(steps, 1 + int(np.searchsorted(ends, until)))
        self._spend(Cost(float(seconds[:count].sum()), float(joules[:count].sum())), count, count * self.decoded)
        durations: list[float] = seconds[:count].tolist()
        return durations

    def _spend(self, cost: Cost, steps: int, rows: int) -> None:
        self.cost = Cost(self.cost.seconds + cost.seconds, self.cost.joules + cost.joules)
        self.steps += steps
        self.rows += rows
        self._clock.now += cost.seconds

    def piece(self, start: int, end: int) -> tuple[int, int]:
        """The tokens (first, last + 1) of a prompt that the next step computes: all that are left."""
        return start, end

    def check(self) -> None:
        """Do nothing, since no part of this model can be lost."""

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Raise InputError unless `pairs` is empty: blocks are not shared, so none are copied."""
        if pairs:
            raise InputError("a simulated model shares no blocks that could be copied")


class _Zeros:
    """The result of a simulated step: tokens and logits that are all 0."""

    on_host = False

    def __init__(self, count: int) -> None:
        self._count = count

    def tokens(self) -> NDArray[np.int32]:
        """The chosen tokens [R]: zeros."""
        return np.zeros(self._count, np.int32)

    def logits(self) -> NDArray[np.float32]:
        """The logits [R, 1]: zeros."""
        return np.zeros((self._count, 1), np.float32)
