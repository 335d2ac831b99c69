"""`PlannedStep`: the next step by the scheduler, and `StepBuilder`, which puts it together."""

from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import NDArray

from npu_sim.llm.engine.batch import Batch
from npu_sim.llm.engine.sequence import Sequence


@dataclass(slots=True)
class Choice:
    """The outputs of one sequence in a step: its next token, and one for each draft after it.

    Attributes:
        first: Index of the first one among the step's outputs.
    """

    sequence: Sequence
    first: int
    draft: tuple[int, ...] = ()


@dataclass(slots=True)
class PlannedStep:
    """A planned step.

    Attributes:
        batch: Input of the model.
        copies: Blocks to copy before it: (from, to); none is in two pairs but as the source of both.
        singles: The sequences that compute one token and choose one; output i is that of the i-th of them.
        others: All other sequences of the step.
        choices: The outputs after those of `singles`.
        prompt_tokens: Tokens of the batch that belong to pieces of prompts.
        cost_shares: Shares of the time that drafts add to this step, by the sequences that pay it.
        drafting_seconds: Time that drafting took.
    """

    batch: Batch
    copies: list[tuple[int, int]]
    singles: list[Sequence]
    others: list[Sequence]
    choices: list[Choice]
    prompt_tokens: int
    cost_shares: dict[Sequence, int]
    drafting_seconds: float

    @property
    def drafts(self) -> list[Choice]:
        """The outputs of sequences that have a draft in it."""
        return [choice for choice in self.choices if choice.draft]

    @property
    def sequences(self) -> list[Sequence]:
        return self.singles + self.others


@dataclass(slots=True)
class StepBuilder:
    """A step being put together: its singles, then sequences with other numbers of tokens and outputs."""

    copies: list[tuple[int, int]] = field(default_factory=list)
    singles: list[Sequence] = field(default_factory=list)
    others: list[Sequence] = field(default_factory=list)
    choices: list[Choice] = field(default_factory=list)
    cost_shares: dict[Sequence, int] = field(default_factory=dict)
    drafting_seconds: float = 0.0
    _draft_tokens: int = 0
    _fed: list[int] = field(default_factory=list)
    _starts: list[int] = field(default_factory=list)
    _drawn: list[float] = field(default_factory=list)
    _tokens: list[int] = field(default_factory=list)
    _positions: list[int] = field(default_factory=list)
    _rows: list[int] = field(default_factory=list)
    _outputs: list[int] = field(default_factory=list)
    _choosers: list[int] = field(default_factory=list)
    _uniforms: list[float] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return len(self.singles) + len(self._tokens)

    def add_singles(self, sequences: list[Sequence]) -> None:
        """Compute the last token of each of these; to be called once, before `add`."""
        self.singles = sequences
        self._fed = [-1 - sequence.output if sequence.pending else sequence.tokens[-1] for sequence in sequences]
        self._starts = [sequence.computed for sequence in sequences]
        self._drawn = [sequence.next_uniform() if sequence.draws else 0.0 for sequence in sequences]
        for index, sequence in enumerate(sequences):
            sequence.computed += 1
            sequence.pending += 1
            sequence.output = index

    def add(self, sequence: Sequence, tokens: list[int], outputs: int, draft: tuple[int, ...] = ()) -> None:
        """Compute these tokens of a sequence; the last `outputs` of them are followed by a choice."""
        start, before = sequence.computed, len(self.singles)
        self._rows += [before + len(self.others)] * len(tokens)
        self.others.append(sequence)
        self._tokens += tokens
        self._positions += range(start, start + len(tokens))
        sequence.computed = start + len(tokens)
        if draft:
            self._draft_tokens += len(tokens)
        if outputs:
            self.choices.append(Choice(sequence, before + len(self._outputs), draft))
            sequence.output = self.choices[-1].first
            end = before + len(self._tokens)
            self._outputs += range(end - outputs, end)
            self._choosers += [sequence.slot] * outputs
            for _ in range(outputs):
                self._uniforms.append(sequence.next_uniform())
                sequence.pending += 1

    def step(self, tables: NDArray[np.int32], settings: NDArray[np.float32]) -> PlannedStep:
        """The step.

        Args:
            tables: [slots, T], each slot's table of blocks.
            settings: [slots, 3], as in `Batch`.
        """
        one_each, upcoming = list(range(len(self.singles))), None
        slots = [sequence.slot for sequence in self.singles]
        sequences = self.singles + self.others
        width = max(len(sequence.table) for sequence in sequences)
        if self.tokens == 1 and sequences[0].draws and (one_each or self.choices):
            (sequence,) = sequences
            upcoming = partial(sequence.uniforms, len(sequence.tokens) + sequence.pending - 1 - sequence.prompt_length)
        batch = Batch(
            np.array(self._fed + self._tokens, np.int32),
            np.array(self._starts + self._positions, np.int32),
            np.array(one_each + self._rows, np.int32),
            tables[slots + [sequence.slot for sequence in self.others], :width],
            np.array(one_each + self._outputs, np.int32),
            settings[slots + self._choosers],
            np.array(self._drawn + self._uniforms, np.float32),
            upcoming,
        )
        prompts = len(self._tokens) - self._draft_tokens
        return PlannedStep(
            batch,
            self.copies,
            self.singles,
            self.others,
            self.choices,
            prompts,
            self.cost_shares,
            self.drafting_seconds,
        )
