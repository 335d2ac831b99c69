"""`PromptLookup`: drafts tokens from a sequence's own text (https://github.com/apoorvumang/prompt-lookup-decoding).

Speculative decoding guesses next tokens (drafts them), verifies the guesses in one step and keeps them up to the first
for which the model chooses another token. Every position is sampled with its own random number, so that a kept token is
the one that the model would have chosen without a draft: drafts change how many steps a text takes, never the text,
greedy or sampled.
"""

from collections.abc import Mapping
from typing import Protocol

from npu_sim.llm.engine.sequence import Sequence


class Drafter(Protocol):
    """An interface: guesses the next tokens of sequences."""

    def drafts(self, wanted: Mapping[Sequence, int]) -> Mapping[Sequence, list[int]]:
        """Sequence → tokens that may follow it, as many as `wanted` says at most.

        A sequence without a draft is left out. An empty draft means that the drafter has not read all tokens of the
        sequence yet and continues with the next call.
        """

    def may_draft(self, sequence: Sequence) -> bool:
        """Whether there may be a draft once the token that follows the sequence's known ones has been chosen.

        A device that runs ahead must wait for that token to be read; False avoids the wait.
        """

    def has_match(self, sequence: Sequence, length: int) -> bool:
        """Whether the text before the place that a draft is taken from ends like the sequence.

        At least `length` tokens must be equal. Tokens that a launched step chooses, which are not known yet, count as
        equal.
        """

    def forget(self, sequence: Sequence) -> None:
        """Drop all data of a sequence that has ended."""


class PromptLookup:
    """Drafts the tokens that followed the latest earlier occurrence of the sequence's last tokens.

    Args:
        match: Number of last tokens that must have occurred together before, at least 2.
    """

    def __init__(self, match: int = 3) -> None:
        self._match = match
        # The place after the latest occurrence of each run of `match` tokens, and of these without their last one; and
        # the place up to which runs are in.
        self._places: dict[Sequence, dict[tuple[int, ...], int]] = {}
        self._ends: dict[Sequence, int] = {}

    def drafts(self, wanted: Mapping[Sequence, int]) -> dict[Sequence, list[int]]:
        drafts = {sequence: self._draft(sequence, count) for sequence, count in wanted.items()}
        return {sequence: draft for sequence, draft in drafts.items() if draft}

    def may_draft(self, sequence: Sequence) -> bool:
        return tuple(sequence.tokens[1 - self._match :]) in self._index(sequence)

    def has_match(self, sequence: Sequence, length: int) -> bool:
        tokens, unknown = sequence.tokens, sequence.pending
        place = self._index(sequence).get(tuple(tokens[unknown - self._match :]))
        length -= unknown
        return place is not None and length <= place and tokens[place - length : place] == tokens[-length:]

    def forget(self, sequence: Sequence) -> None:
        self._places.pop(sequence, None)
        self._ends.pop(sequence, None)

    def _index(self, sequence: Sequence) -> dict[tuple[int, ...], int]:
        """Each run of `match` (or one fewer) tokens, without the last token → index after its latest occurrence."""
        places, tokens, match = self._places.setdefault(sequence, {}), sequence.tokens, self._match
        for end in range(max(self._ends.get(sequence, 0), match), len(tokens)):
            run = tuple(tokens[end - match : end])
            places[run], places[run[:-1]] = end, end - 1
        self._ends[sequence] = len(tokens)
        return places

    def _draft(self, sequence: Sequence, count: int) -> list[int]:
        tokens = sequence.tokens
        place = self._index(sequence).get(tuple(tokens[-self._match :]))
        draft = [] if place is None else tokens[place : place + count]
        while place is not None and len(draft) < count:  # the sequence repeats itself: so does the draft
            draft.append(draft[len(draft) - (len(tokens) - place)])
        return draft
