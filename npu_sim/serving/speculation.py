"""Speculation: several tokens are guessed, computed in one step, and kept as far as the model chooses the same.

Every position is sampled with its own random number, so a kept token is the one that the model would have chosen by
itself: drafts change how many steps a text takes, never the text, greedy or sampled.

Prompt lookup (https://github.com/apoorvumang/prompt-lookup-decoding) takes what followed the same tokens before.
"""

from collections.abc import Mapping
from typing import Protocol

from npu_sim.serving.sequence import Sequence


class Drafter(Protocol):
    """Guesses tokens."""

    def drafts(self, wanted: Mapping[Sequence, int]) -> Mapping[Sequence, list[int]]:
        """For each sequence up to that many tokens that may follow its own; those that get none may be left out."""

    def forget(self, sequence: Sequence) -> None:
        """Drop what is kept of a sequence that has ended."""


class PromptLookup:
    """Drafts from the sequence itself: what followed the latest place with the same last tokens.

    Args:
        match: Number of last tokens that must be the same.
    """

    def __init__(self, match: int = 3) -> None:
        self._match = match
        self._places: dict[Sequence, dict[tuple[int, ...], int]] = {}
        self._indexed: dict[Sequence, int] = {}

    def drafts(self, wanted: Mapping[Sequence, int]) -> dict[Sequence, list[int]]:
        found = ((sequence, self._draft(sequence, count)) for sequence, count in wanted.items())
        return {sequence: draft for sequence, draft in found if draft}

    def forget(self, sequence: Sequence) -> None:
        self._places.pop(sequence, None)
        self._indexed.pop(sequence, None)

    def _draft(self, sequence: Sequence, count: int) -> list[int]:
        tokens, match = sequence.tokens, self._match
        places = self._places.setdefault(sequence, {})
        for end in range(max(self._indexed.get(sequence, 0), match), len(tokens)):
            places[tuple(tokens[end - match : end])] = end
        self._indexed[sequence] = len(tokens)
        place = places.get(tuple(tokens[-match:]))
        if place is None:
            return []
        draft = tokens[place : place + count]
        while len(draft) < count:  # the sequence repeats itself: so does the draft
            draft.append(draft[len(draft) - (len(tokens) - place)])
        return draft
