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

import itertools
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from npu_sim.llm.graph import ContiguousShape
from npu_sim.llm.simulated.programs import ProgramCost

RATIO = 8
LEAST_CONTEXT = 16  # shorter ones cost the same


class Programs(Protocol):
    """A source of costs of step programs."""

    def cost(self, shape: ContiguousShape) -> ProgramCost:
        """The cost of a run."""


@dataclass(frozen=True)
class Cost:
    """Time, and energy without the static power."""

    seconds: float = 0.0
    joules: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.seconds + other.seconds, self.joules + other.joules)

    def __mul__(self, factor: float) -> Cost:
        return Cost(self.seconds * factor, self.joules * factor)

    def above(self, other: Cost) -> Cost:
        """The excess over another cost, if there is any."""
        return Cost(max(0.0, self.seconds - other.seconds), max(0.0, self.joules - other.joules))


class StepPrices:
    """Costs of the steps of an engine.

    Args:
        programs: Costs of the programs of the given sizes.
        max_sequences, max_tokens: The most sequences and tokens of a step.
        context_length: The most tokens of a sequence.
    """

    def __init__(self, programs: Programs, max_sequences: int, max_tokens: int, context_length: int) -> None:
        self._programs = programs
        self._contexts = _knots(context_length, min(LEAST_CONTEXT, context_length))
        self._sequences = _knots(_padded(max_sequences), 1)
        self._tokens = _knots(_padded(max_tokens), 1)
        self._typical = self._contexts[-2:][0]

    def step(self, decodes: int, decode_rows: float, pieces: Sequence[tuple[int, int]]) -> tuple[Cost, Cost]:
        """The cost of a step, and of loading the weights that its program keeps in the scratchpad.

        Args:
            decodes: Sequences that decode a token.
            decode_rows: Rows of the cache that they attend to, in all.
            pieces: For each piece of a prompt, its tokens, and the rows of the cache that its last token attends to.
        """
        total = self._attention(decodes, decode_rows / decodes, decoding=True) if decodes else Cost()
        for tokens, rows in pieces:
            total += self._attention(tokens, rows, decoding=False)
        if not pieces:
            program = self._program(_padded(decodes), 1)
            return total + _other(program), _reload(program)
        program = self._program(1, _padded(decodes + sum(tokens for tokens, _ in pieces)))
        total += _other(program)
        if decodes:  # the logits of a prompt are one row, those of decodes one each
            size = _padded(decodes)
            total += _other(self._program(size, 1)).above(_other(self._program(1, size)))
        return total, _reload(program)

    def _program(self, sequences: int, tokens: int) -> ProgramCost:
        return self._programs.cost(ContiguousShape(sequences, tokens, self._typical))

    def _attention(self, rows: int, context: float, *, decoding: bool) -> Cost:
        """The cost of attention of one token of each of several sequences, or of several tokens of one."""

        def known(size: int, length: int) -> Cost:
            shape = ContiguousShape(size, 1, length) if decoding else ContiguousShape(1, size, length)
            program = self._programs.cost(shape)
            return Cost(program.attention_seconds, program.attention_joules)

        sizes = _between(self._sequences if decoding else self._tokens, rows)
        lengths = _between(self._contexts, context)
        weighted = (
            known(size, length) * (share * part) for (size, share), (length, part) in itertools.product(sizes, lengths)
        )
        return sum(weighted, Cost())


def _other(program: ProgramCost) -> Cost:
    return Cost(program.other_seconds, program.other_joules)


def _reload(program: ProgramCost) -> Cost:
    return Cost(program.reload_seconds, program.reload_joules)


def _knots(most: int, least: int) -> list[int]:
    """Sizes from `least` to `most`, ascending, each at most `RATIO` times the one before."""
    sizes = [most]
    while sizes[0] > least:
        sizes.insert(0, max(least, -(-sizes[0] // RATIO)))
    return sizes


def _between(knots: Sequence[int], value: float) -> list[tuple[int, float]]:
    """The knots around a value with their weights in a linear interpolation; the last ones are taken beyond."""
    place = bisect_left(knots, value)
    if place == len(knots):
        return [(knots[-1], 1.0)]
    if place == 0 or knots[place] == value:
        return [(knots[place], 1.0)]
    low, high = knots[place - 1], knots[place]
    weight = (value - low) / (high - low)
    return [(low, 1.0 - weight), (high, weight)]


def _padded(count: int) -> int:
    """The smallest power of two that is at least a count."""
    return 1 << (count - 1).bit_length()
