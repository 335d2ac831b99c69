"""`ModelDrafter`: drafts tokens with a smaller model that has a KV pool of its own.

The draft model samples each position with the random number that the large model will use for it, so that two similar
distributions mostly lead to the same token.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import takewhile

import numpy as np

from npu_compiler.errors import InputError
from npu_sim.llm.engine.batch import NO_DRAFTS, Batch, BatchModel, StepResult
from npu_sim.llm.engine.blocks import BlockPool
from npu_sim.llm.engine.sequence import Sequence

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Rows:
    """A sequence's rows in the draft model's KV pool.

    Attributes:
        table: Blocks of the sequence.
        computed: Number of the sequence's own tokens whose keys and values are in the pool.
        guesses: Drafted tokens after these whose keys and values are in the pool too.
    """

    table: list[int] = field(default_factory=list)
    computed: int = 0
    guesses: list[int] = field(default_factory=list)

    def catch_up(self, tokens: list[int]) -> None:
        """Count those guesses as computed that the sequence's tokens have confirmed, and forget the others."""
        pairs = zip(self.guesses, tokens[self.computed :], strict=False)
        self.computed += sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        self.guesses = []


class ModelDrafter:
    """Drafts tokens with a model that has the same token ids as the large model.

    Before each step of the large model, the draft model computes one step of a prompt; a sequence's drafts are empty
    until its prompt is complete. A sequence for which the pool has no room gets no drafts. If the draft model fails,
    drafting ends for good.

    Args:
        model: The draft model, used by nothing else.

    Raises:
        InputError: the model cannot take back tokens.
    """

    def __init__(self, model: BatchModel) -> None:
        if not model.rewinds:
            raise InputError(NO_DRAFTS)
        self._model = model
        self._pool = BlockPool(model.blocks)
        self._rows: dict[Sequence, _Rows] = {}
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

    def has_match(self, sequence: Sequence, length: int) -> bool:
        return False

    def forget(self, sequence: Sequence) -> None:
        if rows := self._rows.pop(sequence, None):
            self._pool.release(rows.table)

    def _draft_all(self, wanted: Mapping[Sequence, int]) -> dict[Sequence, list[int]]:
        pieces, reading = self._pieces(wanted)
        if not pieces:
            return {}
        going = [x for x, piece in pieces.items() if self._rows[x].computed + len(piece) == len(x.tokens)]
        drafts: dict[Sequence, list[int]] = {sequence: [] for sequence in going}
        reading += [sequence for sequence in pieces if sequence not in drafts]
        results: list[tuple[list[Sequence], StepResult]] = []
        for index in range(max((wanted[sequence] for sequence in going), default=1)):
            result = self._model.step(self._batch(pieces, going, index))
            results.append((going, result))
            for sequence, piece in pieces.items() if index == 0 else ():
                self._rows[sequence].computed += len(piece)
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
            self._rows[sequence].guesses = draft[:-1]
        return {sequence: draft for sequence, draft in drafts.items() if draft} | {sequence: [] for sequence in reading}

    def _pieces(self, wanted: Mapping[Sequence, int]) -> tuple[dict[Sequence, list[int]], list[Sequence]]:
        """Sequence → its tokens that are not in the pool yet, as many as fit into a step and into the pool.

        The second result lists the sequences for which the step has no room left.
        """
        model, pieces, left_out = self._model, dict[Sequence, list[int]](), list[Sequence]()
        room = model.max_tokens
        for sequence, count in wanted.items():
            tokens, rows = sequence.tokens, self._rows.setdefault(sequence, _Rows())
            rows.catch_up(tokens)
            piece = tokens[rows.computed : rows.computed + room]
            if len(pieces) == min(model.max_sequences, model.max_outputs):
                continue
            if not piece:
                left_out.append(sequence)
                continue
            end = len(tokens) + count - 1
            if end <= model.context_length and max(piece) < model.vocab_size and self._make_room(rows, end):
                pieces[sequence] = piece
                room -= len(piece)
        return pieces, left_out

    def _make_room(self, rows: _Rows, tokens: int) -> bool:
        while len(rows.table) * self._model.block_size < tokens:
            if (block := self._pool.allocate()) is None:
                return False
            rows.table.append(block)
        return True

    def _batch(self, pieces: Mapping[Sequence, list[int]], going: list[Sequence], index: int) -> Batch:
        """The batch of these pieces, with an output for each sequence of `going`.

        For `index` above 0, the pieces are the drafted tokens with that number.
        """
        held = [self._rows[sequence] for sequence in pieces]
        lengths = [len(piece) for piece in pieces.values()]
        starts = [len(x.tokens) + index - 1 if index else self._rows[x].computed for x in pieces]
        tables = np.zeros((len(held), max(len(rows.table) for rows in held)), np.int32)
        for row, rows in zip(tables, held, strict=True):
            row[: len(rows.table)] = rows.table
        ends = dict(zip(pieces, np.cumsum(lengths).tolist(), strict=True))
        uniforms = [x.uniform(len(x.tokens) - x.prompt_length + index) for x in going]
        return Batch(
            np.array([token for piece in pieces.values() for token in piece], np.int32),
            np.concatenate([np.arange(s, s + n, dtype=np.int32) for s, n in zip(starts, lengths, strict=True)]),
            np.repeat(np.arange(len(held), dtype=np.int32), lengths),
            tables,
            np.array([ends[sequence] - 1 for sequence in going], np.int32),
            np.array([sequence.settings for sequence in going], np.float32).reshape(-1, 3),
            np.array(uniforms, np.float32),
        )
