"""`ModelDrafter`: drafts by a smaller model with a KV pool of its own.

It draws each position with the random number that the large model will use there, so that two similar distributions
choose the same token more often than not.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from npu_compiler.errors import InputError
from npu_sim.llm import Checkpoint
from npu_sim.llm.engine.batch import Batch, BatchModel, StepResult
from npu_sim.llm.engine.blocks import BlockPool
from npu_sim.llm.engine.sequence import Sequence

_log = logging.getLogger(__name__)


def check_same_tokens(small: Checkpoint, large: Checkpoint) -> None:
    """Check that the token ids of a draft model mean what those of the large model mean.

    Raises:
        InputError: they do not.
    """
    ours, theirs = large.tokenizer.get_vocab(), small.tokenizer.get_vocab()
    wrong = next((token for token, number in theirs.items() if ours.get(token) != number), None)
    if wrong is not None:
        there = f"is {ours[wrong]}" if wrong in ours else "does not exist"
        raise InputError(
            f"{small.name} cannot draft for {large.name}, whose tokens are others: {wrong!r} is token {theirs[wrong]} "
            f"of the first and {there} in the second; choose a smaller model of the same family"
        )
    sizes = [int(checkpoint.config.vocab_size) for checkpoint in (small, large)]
    if sizes[0] > sizes[1]:
        raise InputError(
            f"{small.name} cannot draft for {large.name}: it has {sizes[0]} token ids, the other only {sizes[1]}"
        )


@dataclass(slots=True)
class _Drafted:
    """What the draft model's pool holds of a sequence.

    Attributes:
        table: Its blocks.
        known: Number of the sequence's own tokens whose keys and values are there.
        guesses: Tokens after these whose keys and values are there too.
    """

    table: list[int] = field(default_factory=list)
    known: int = 0
    guesses: list[int] = field(default_factory=list)

    def catch_up(self, tokens: list[int]) -> None:
        """Count guesses that the sequence's tokens have confirmed."""
        for guess in self.guesses:
            if self.known == len(tokens) or tokens[self.known] != guess:
                break
            self.known += 1
        self.guesses = []


class ModelDrafter:
    """Drafts tokens with a model whose token ids mean the same as the large one's.

    A prompt is computed a step at a time, one before each step of the large model; drafts begin when it is done, and
    are empty before. A sequence for which the pool has no room gets none. If the model fails, there are no drafts any
    more.

    Args:
        model: Nobody else may use it meanwhile.
    """

    def __init__(self, model: BatchModel) -> None:
        self._model = model
        self._pool = BlockPool(model.blocks)
        self._drafted: dict[Sequence, _Drafted] = {}
        self._broken = False

    def drafts(self, wanted: Mapping[Sequence, int]) -> dict[Sequence, list[int]]:
        if self._broken:
            return {}
        try:
            return self._draft_all(wanted)
        except Exception as error:  # of the device
            _log.warning("the draft model has failed, so nothing is drafted any more: %s", error)
            self._broken = True
            return {}

    def may_draft(self, sequence: Sequence) -> bool:
        return not self._broken

    def is_sure(self, sequence: Sequence, evidence: int) -> bool:
        return False

    def forget(self, sequence: Sequence) -> None:
        if drafted := self._drafted.pop(sequence, None):
            self._pool.release(drafted.table)

    def _draft_all(self, wanted: Mapping[Sequence, int]) -> dict[Sequence, list[int]]:
        pieces, reading = self._pieces(wanted)
        if not pieces:
            return {}
        held = {sequence: self._drafted[sequence] for sequence in pieces}
        going = [
            sequence for sequence in pieces if held[sequence].known + len(pieces[sequence]) == len(sequence.tokens)
        ]
        drafts: dict[Sequence, list[int]] = {sequence: [] for sequence in going}
        reading += [sequence for sequence in pieces if sequence not in drafts]
        results: list[tuple[list[Sequence], StepResult]] = []
        for index in range(max((wanted[sequence] for sequence in going), default=1)):
            result = self._model.step(self._batch(pieces, going, index))
            results.append((going, result))
            if index == 0:
                for sequence, piece in pieces.items():
                    held[sequence].known += len(piece)
            chosen = [-1 - place for place in range(len(going))] if self._model.runs_ahead else result.tokens().tolist()
            pieces = {
                sequence: [token]
                for sequence, token in zip(going, chosen, strict=True)
                if wanted[sequence] > index + 1 and (token >= 0 or self._model.runs_ahead)
            }
            going = list(pieces)
            if not going:
                break
        for chosen_by, result in results:
            for sequence, token in zip(chosen_by, result.tokens().tolist(), strict=True):
                drafts[sequence].append(token)
        for sequence, draft in drafts.items():
            del draft[next((place for place, token in enumerate(draft) if token < 0), len(draft)) :]
            held[sequence].guesses = draft[:-1]
        return {sequence: draft for sequence, draft in drafts.items() if draft} | {sequence: [] for sequence in reading}

    def _pieces(self, wanted: Mapping[Sequence, int]) -> tuple[dict[Sequence, list[int]], list[Sequence]]:
        """Of each sequence the tokens that are not in the pool yet, as many as fit into a step and into the pool; and
        the sequences for which no token is left in the step."""
        model, pieces, budget = self._model, dict[Sequence, list[int]](), self._model.max_tokens
        left_out = []
        for sequence, count in wanted.items():
            tokens, drafted = sequence.tokens, self._drafted.setdefault(sequence, _Drafted())
            drafted.catch_up(tokens)
            piece = tokens[drafted.known : drafted.known + budget]
            if len(pieces) == min(model.max_sequences, model.max_outputs):
                continue
            if not piece:
                left_out.append(sequence)
                continue
            end = len(tokens) + count - 1
            if end <= model.context_length and max(piece) < model.vocab_size and self._make_room(drafted, end):
                pieces[sequence] = piece
                budget -= len(piece)
        return pieces, left_out

    def _make_room(self, drafted: _Drafted, tokens: int) -> bool:
        while len(drafted.table) * self._model.block_size < tokens:
            block = self._pool.allocate()
            if block is None:
                return False
            drafted.table.append(block)
        return True

    def _batch(self, pieces: Mapping[Sequence, list[int]], going: list[Sequence], index: int) -> Batch:
        """Pieces after what the pool holds and `index` guesses, with an output for each of those that go on."""
        held = [self._drafted[sequence] for sequence in pieces]
        lengths = [len(piece) for piece in pieces.values()]
        starts = [
            len(sequence.tokens) + index - 1 if index else drafted.known
            for sequence, drafted in zip(pieces, held, strict=True)
        ]
        tables = np.zeros((len(held), max(len(drafted.table) for drafted in held)), np.int32)
        for row, drafted in zip(tables, held, strict=True):
            row[: len(drafted.table)] = drafted.table
        ends = dict(zip(pieces, np.cumsum(lengths).tolist(), strict=True))
        new = [len(sequence.tokens) - sequence.prompt_length + index for sequence in going]
        return Batch(
            np.array([token for piece in pieces.values() for token in piece], np.int32),
            np.concatenate([np.arange(s, s + n, dtype=np.int32) for s, n in zip(starts, lengths, strict=True)]),
            np.repeat(np.arange(len(held), dtype=np.int32), lengths),
            tables,
            np.array([ends[sequence] - 1 for sequence in going], np.int32),
            np.array([sequence.settings for sequence in going], np.float32).reshape(-1, 3),
            np.array([sequence.uniform(place) for sequence, place in zip(going, new, strict=True)], np.float32),
        )
