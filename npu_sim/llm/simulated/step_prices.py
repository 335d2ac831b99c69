"""`StepPrices`: what the engine's steps cost on a chip, from few simulated programs.

A step of D sequences that decode a token each and of pieces of prompts is priced as one program whose products have the
rows of both, padded to the next power of two as the engine's programs are. Its calls but attention are those of the
program of that many rows, simulated. Attention is interpolated, linear in rows and in context, between programs whose
rows and contexts are `RATIO` apart: its work is rows × context. So a price needs no simulation once the programs of its
size are known, and a model has at most a few dozen of them.

The simulated programs have contiguous caches. Sequences of a batch are priced at the mean of their contexts: each reads
its own rows only.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from npu_sim.llm.graph import ContiguousShape
from npu_sim.llm.simulated.programs import ProgramCost

RATIO = 8
LEAST_CONTEXT = 16  # shorter ones cost the same


class Programs(Protocol):
    """A source of costs of step programs."""

    def cost(self, shape: ContiguousShape) -> ProgramCost:
        """The cost of a run."""


class Cost(NamedTuple):
    """Time, and energy without the static power."""

    seconds: float
    joules: float


Costs: TypeAlias = NDArray[np.float64]  # [2, N]: seconds and joules


class StepPrices:
    """Costs of the steps of an engine.

    Args:
        programs: Costs of the programs of the given sizes.
        max_sequences, max_tokens: The most sequences and tokens of a step.
        context_length: The most tokens of a sequence.
    """

    def __init__(self, programs: Programs, max_sequences: int, max_tokens: int, context_length: int) -> None:
        self._programs = programs
        self._contexts = _knots(context_length, LEAST_CONTEXT)
        self._sequences = [1, *_knots(_padded(max_sequences), RATIO)]
        self._tokens = [1, *_knots(_padded(max_tokens), RATIO)]
        self._typical = self._contexts[-2:][0]
        self._interpolated: dict[tuple[int, int, bool], Cost] = {}

    def decode(self, sequences: int, rows: int, steps: int = 1) -> tuple[Costs, Cost]:
        """The costs of steps behind each other in which sequences decode a token each, and of loading their weights.

        The weights are those that the program keeps in the scratchpad from run to run.

        Args:
            rows: Rows of the cache that the sequences attend to in the first step, in all; each one more in the next.
        """
        program = self._program(_padded(sequences), 1)
        attention = self._attention(sequences, rows / sequences + np.arange(steps), decoding=True)
        return attention + np.array(_other(program))[:, None], _reload(program)

    def step(self, decodes: int, decode_rows: int, pieces: Sequence[tuple[int, int]]) -> tuple[Cost, Cost]:
        """The cost of a step with pieces of prompts, and of loading the weights as in `decode`.

        Args:
            decodes: Sequences that decode a token.
            decode_rows: Rows of the cache that they attend to, in all.
            pieces: For each piece of a prompt, its tokens, and the rows of the cache that its last token attends to.
        """
        program = self._program(1, _padded(decodes + sum(tokens for tokens, _ in pieces)))
        total = np.array(_other(program))
        for tokens, rows in pieces:
            total += self._attention(tokens, np.array([rows]), decoding=False)[:, 0]
        if decodes:
            total += self._attention(decodes, np.array([decode_rows / decodes]), decoding=True)[:, 0]
            # The logits of a prompt are one row, those of decodes one each.
            size = _padded(decodes)
            several, one = (_other(self._program(*shape)) for shape in ((size, 1), (1, size)))
            total += np.maximum(0.0, np.subtract(several, one))
        return Cost(*total.tolist()), _reload(program)

    def _program(self, sequences: int, tokens: int) -> ProgramCost:
        return self._programs.cost(ContiguousShape(sequences, tokens, self._typical))

    def _attention(self, rows: int, contexts: NDArray[Any], *, decoding: bool) -> Costs:
        """The costs of attention of one token of each of several sequences, or of several tokens of one.

        Args:
            contexts: Ascending.
        """
        first, last = _place(self._contexts, contexts[0])[0], _place(self._contexts, contexts[-1])[1]
        lengths = self._contexts[first : last + 1]
        costs = [self._attention_at(rows, length, decoding) for length in lengths]
        return np.array([np.interp(contexts, lengths, values) for values in zip(*costs, strict=True)])

    def _attention_at(self, rows: int, length: int, decoding: bool) -> Cost:
        """The cost at a simulated context."""
        key = (rows, length, decoding)
        if key not in self._interpolated:
            sizes = self._sequences if decoding else self._tokens
            low, high = (sizes[place] for place in _place(sizes, rows))
            costs = []
            for size in (low, high):
                shape = ContiguousShape(size, 1, length) if decoding else ContiguousShape(1, size, length)
                program = self._programs.cost(shape)
                costs.append((program.attention_seconds, program.attention_joules))
            share = (rows - low) / (high - low) if high > low else 0.0
            seconds, joules = ((1 - share) * before + share * behind for before, behind in zip(*costs, strict=True))
            self._interpolated[key] = Cost(seconds, joules)
        return self._interpolated[key]


def _other(program: ProgramCost) -> Cost:
    return Cost(program.other_seconds, program.other_joules)


def _reload(program: ProgramCost) -> Cost:
    return Cost(program.reload_seconds, program.reload_joules)


def _knots(most: int, least: int) -> list[int]:
    """Sizes up to `most`, ascending, each `RATIO` times the one before, as far as they are at least `least`."""
    sizes = [most]
    while -(-sizes[0] // RATIO) >= least and sizes[0] > 1:
        sizes.insert(0, -(-sizes[0] // RATIO))
    return sizes


def _place(knots: Sequence[int], value: float) -> tuple[int, int]:
    """Indices of the knots around a value: twice the same where it is one of them, or beyond the first or the last."""
    place = min(bisect_left(knots, value), len(knots) - 1)
    return (place if place == 0 or value >= knots[place] else place - 1), place


def _padded(count: int) -> int:
    """The smallest power of two that is at least a count."""
    return 1 << (count - 1).bit_length()
