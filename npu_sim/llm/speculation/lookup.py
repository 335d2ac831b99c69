"""Speculation: several tokens are guessed, computed in one step, and kept as far as the model chooses the same.

Every position is sampled with its own random number, so a kept token is the one that the model would have chosen by
itself: drafts change how many steps a text takes, never the text, greedy or sampled.

Prompt lookup (https://github.com/apoorvumang/prompt-lookup-decoding) takes what followed the same tokens before.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from npu_sim.llm.engine.sequence import Sequence


class Drafter(Protocol):
    """Guesses tokens."""

    def drafts(self, wanted: Mapping[Sequence, int]) -> Mapping[Sequence, list[int]]:
        """For each sequence up to that many tokens that may follow its own.

        A sequence for which there are none is left out. One whose tokens have not all been read yet has an empty draft:
        they are read further with the next call.
        """

    def may_draft(self, sequence: Sequence) -> bool:
        """Whether there may be a draft once the token after the sequence's own is known.

        A device that runs ahead must stop for that token, so this spares it the stop where there is none.
        """

    def is_sure(self, sequence: Sequence, evidence: int) -> bool:
        """Whether a draft is so probably right that it does not matter how earlier ones were.

        Args:
            evidence: For a draft out of the text, how many tokens at its place must be the same as the last ones.
        """

    def forget(self, sequence: Sequence) -> None:
        """Drop what is kept of a sequence that has ended."""


@dataclass(slots=True)
class _Index:
    """Where the tokens of a sequence occur in it.

    Attributes:
        places: By each run of tokens, where the token after its last occurrence is.
        beginnings: The same of these runs without their last token.
        end: All runs that end before that place are in.
    """

    places: dict[tuple[int, ...], int] = field(default_factory=dict)
    beginnings: dict[tuple[int, ...], int] = field(default_factory=dict)
    end: int = 0


class PromptLookup:
    """Drafts from the sequence itself: what followed the latest place with the same last tokens.

    Args:
        match: Number of last tokens that must be the same, at least 2.
    """

    def __init__(self, match: int = 3) -> None:
        self._match = match
        self._indices: dict[Sequence, _Index] = {}

    def drafts(self, wanted: Mapping[Sequence, int]) -> dict[Sequence, list[int]]:
        found = ((sequence, self._draft(sequence, count)) for sequence, count in wanted.items())
        return {sequence: draft for sequence, draft in found if draft}

    def may_draft(self, sequence: Sequence) -> bool:
        return tuple(sequence.tokens[1 - self._match :]) in self._index(sequence).beginnings

    def is_sure(self, sequence: Sequence, evidence: int) -> bool:
        tokens, index, match, unknown = sequence.tokens, self._index(sequence), self._match, sequence.pending
        runs = index.beginnings if unknown else index.places
        place = runs.get(tuple(tokens[unknown - match :]))
        if place is None:
            return False
        length = evidence - unknown  # of the tokens that are known
        return length <= place and tokens[place - length : place] == tokens[len(tokens) - length :]

    def forget(self, sequence: Sequence) -> None:
        self._indices.pop(sequence, None)

    def _index(self, sequence: Sequence) -> _Index:
        """The index of a sequence, up to its last token but one."""
        index, tokens, match = self._indices.setdefault(sequence, _Index()), sequence.tokens, self._match
        for end in range(max(index.end, match), len(tokens)):
            run = tuple(tokens[end - match : end])
            index.places[run] = end
            index.beginnings[run[:-1]] = end - 1
        index.end = len(tokens)
        return index

    def _draft(self, sequence: Sequence, count: int) -> list[int]:
        tokens = sequence.tokens
        place = self._index(sequence).places.get(tuple(tokens[-self._match :]))
        if place is None:
            return []
        draft = tokens[place : place + count]
        while len(draft) < count:  # the sequence repeats itself: so does the draft
            draft.append(draft[len(draft) - (len(tokens) - place)])
        return draft
