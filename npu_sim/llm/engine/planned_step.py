"""`PlannedStep`: the next step while the scheduler puts it together: tokens to compute, and outputs to choose."""

from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import NDArray

from npu_sim.llm.engine.batch import Batch
from npu_sim.llm.engine.sequence import Sequence


@dataclass(slots=True)
class Choice:
    """The outputs of one sequence in a step: its next token, and one for each drafted token after it.

    Attributes:
        first: Index of its first output among those of the step.
    """

    sequence: Sequence
    first: int
    draft: tuple[int, ...] = ()


@dataclass(slots=True)
class Scored:
    """Outputs of a step after tokens of a prompt whose next tokens are known, for the log probabilities of these.

    Attributes:
        first: Index of the first of the outputs among those of the step.
        token: Index, in the sequence, of the token whose log probability the first output gives.
        count: Number of outputs, which are those of consecutive tokens.
    """

    sequence: Sequence
    first: int
    token: int
    count: int


@dataclass(slots=True)
class PlannedStep:
    """The next step: sequences that compute one token each (`singles`), then all others.

    Attributes:
        copies: Blocks to copy before the step, each (from, to). A block may be the source of several copies, but is the
            target of one at most, and never both.
        singles: The sequences that compute one token and choose one; output i is that of the i-th of them.
        others: All other sequences of the step.
        choices: The outputs after those of `singles` that choose tokens.
        scored: The outputs that score tokens of prompts.
        prompt_tokens: Tokens that belong to pieces of prompts.
        cost_shares: Sequence → its share, a weight, of the time by which drafts make this step longer.
        drafting_seconds: Time that the drafter took for this step.
        batch: Input of the model, once `finish` has made it.
    """

    copies: list[tuple[int, int]] = field(default_factory=list)
    singles: list[Sequence] = field(default_factory=list)
    others: list[Sequence] = field(default_factory=list)
    choices: list[Choice] = field(default_factory=list)
    scored: list[Scored] = field(default_factory=list)
    prompt_tokens: int = 0
    cost_shares: dict[Sequence, int] = field(default_factory=dict)
    drafting_seconds: float = 0.0
    batch: Batch = field(init=False)
    _tokens: list[int] = field(default_factory=list)
    _positions: list[int] = field(default_factory=list)
    _rows: list[int] = field(default_factory=list)
    _outputs: list[int] = field(default_factory=list)
    _choosers: list[int] = field(default_factory=list)
    _uniforms: list[float] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Number of tokens that the step computes."""
        return len(self._tokens)

    @property
    def drafts(self) -> list[Choice]:
        """The outputs of those sequences whose drafts this step verifies."""
        return [choice for choice in self.choices if choice.draft]

    @property
    def sequences(self) -> list[Sequence]:
        """All sequences of the step, in the order of the batch's tables."""
        return self.singles + self.others

    def add_singles(self, sequences: list[Sequence]) -> None:
        """Add sequences that compute their last token and choose the next; to be called once, before `add`."""
        self.singles = sequences
        self._tokens = [-1 - sequence.output if sequence.pending else sequence.tokens[-1] for sequence in sequences]
        self._positions = [sequence.computed for sequence in sequences]
        self._uniforms = [sequence.next_uniform() if sequence.draws else 0.0 for sequence in sequences]
        self._choosers = [sequence.slot for sequence in sequences]
        self._rows, self._outputs = list(range(len(sequences))), list(range(len(sequences)))
        for index, sequence in enumerate(sequences):
            sequence.computed += 1
            sequence.pending += 1
            sequence.output = index

    @property
    def more_outputs(self) -> int:
        """Number of outputs beyond one for each sequence that chooses a token."""
        return sum(len(choice.draft) for choice in self.choices) + sum(scored.count for scored in self.scored)

    def add(
        self, sequence: Sequence, tokens: list[int], outputs: int, draft: tuple[int, ...] = (), scored: int = 0
    ) -> None:
        """Add tokens of a sequence to compute; after each of the last `outputs` of them, a new token is chosen.

        The outputs of the `scored` tokens before these give the log probabilities of the tokens that follow them.
        """
        start = sequence.computed
        self._rows += [len(self.singles) + len(self.others)] * len(tokens)
        self.others.append(sequence)
        self._tokens += tokens
        self._positions += range(start, start + len(tokens))
        sequence.computed = start + len(tokens)
        if not draft:
            self.prompt_tokens += len(tokens)
        if scored:
            first = len(tokens) - outputs - scored
            self.scored.append(Scored(sequence, len(self._outputs), start + first + 1, scored))
            self._outputs += range(len(self._tokens) - outputs - scored, len(self._tokens) - outputs)
            self._choosers += [-1] * scored
            self._uniforms += [0.0] * scored
        if outputs:
            sequence.output = len(self._outputs)
            self.choices.append(Choice(sequence, sequence.output, draft))
            self._outputs += range(len(self._tokens) - outputs, len(self._tokens))
            self._choosers += [sequence.slot] * outputs
            for _ in range(outputs):
                self._uniforms.append(sequence.next_uniform())
                sequence.pending += 1

    def finish(self, tables: NDArray[np.int32], settings: NDArray[np.float32]) -> None:
        """Set `batch`, the input of the model.

        Args:
            tables: [slots, T], the blocks of the sequence that holds each slot.
            settings: [slots + 1, 3], as in `Batch`; the last ones are those of outputs that choose nothing.
        """
        sequences, upcoming = self.sequences, None
        width = max(len(sequence.table) for sequence in sequences)
        if len(self._tokens) == len(self._outputs) == 1 and sequences[0].draws:
            (sequence,) = sequences
            upcoming = partial(sequence.uniforms, len(sequence.tokens) + sequence.pending - 1 - sequence.prompt_length)
        slots = [sequence.slot for sequence in sequences]
        self.batch = Batch(
            np.array(self._tokens, np.int32),
            np.array(self._positions, np.int32),
            np.array(self._rows, np.int32),
            tables[slots, :width],
            np.array(self._outputs, np.int32),
            settings[self._choosers],
            np.array(self._uniforms, np.float32),
            np.array(slots, np.int32),
            upcoming,
            np.array([sequence.adapter_place for sequence in sequences], np.int32),
        )
