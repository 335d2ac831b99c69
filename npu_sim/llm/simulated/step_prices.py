"""`StepPrices`: time and energy of the engine's steps on a chip, derived from few simulated programs.

A step computes one token for each decoding sequence, and pieces of prompts. Its rows are all these tokens, padded to
the next power of two as in the engine's programs. All its calls except attention cost what the simulated program with
that many rows spends on them. The cost of attention, whose work is rows × context, is interpolated linearly in rows and
in context between simulated programs whose rows and contexts differ by the factor `RATIO`. So no further simulation is
needed once the programs of a size are known, and a model has at most a few dozen of them.

The simulated programs have contiguous caches. The sequences of a batch are priced at the mean of their contexts, since
each reads its own rows only.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from npu_sim.llm.graph import ContiguousShape
from npu_sim.llm.simulated.programs import ProgramCost

RATIO = 4
LEAST_CONTEXT = 16  # shorter ones cost the same


class Programs(Protocol):
    """An interface: a source of costs of step programs."""

    def prepare(self, shapes: Iterable[ContiguousShape]) -> None:
        """Learn that the costs of the programs for these shapes are requested next."""

    def cost(self, shape: ContiguousShape) -> ProgramCost:
        """The cost of one run of the program for that shape."""


class Cost(NamedTuple):
    """Time in seconds, and energy in joules without the static power."""

    seconds: float
    joules: float


Costs: TypeAlias = NDArray[np.float64]  # [2, N]: seconds and joules


class StepPrices:
    """Time and energy of the engine's steps.

    Args:
        programs: Source of the costs of programs.
        max_sequences, max_tokens: Maximum number of sequences and of tokens of a step.
        context_length: Maximum number of tokens of a sequence.
    """

    def __init__(self, programs: Programs, max_sequences: int, max_tokens: int, context_length: int) -> None:
        self._programs = programs
        self._contexts = _knots(context_length, LEAST_CONTEXT)
        self._sequences = [1, *_knots(_padded(max_sequences), RATIO)]
        self._tokens = [1, *_knots(_padded(max_tokens), RATIO)]
        self._typical = self._contexts[-2:][0]
        self._interpolated: dict[tuple[int, int, bool], Cost] = {}
        self._prepared: set[object] = set()

    def decode(self, sequences: int, rows: int, steps: int = 1) -> tuple[Costs, Cost]:
        """The costs of consecutive steps in which each sequence decodes a token, and of loading the weights first.

        Only those weights count that the program then keeps in the scratchpad from run to run.

        Args:
            rows: Total number of cache rows that the sequences attend to in the first step. In each further step, every
                sequence attends to one more.
        """
        contexts = rows / sequences, rows / sequences + steps - 1
        self._prepare([(_padded(sequences), 1)], [(sequences, *contexts, True)])
        program = self._program(_padded(sequences), 1)
        attention = self._attention(sequences, rows / sequences + np.arange(steps), decoding=True)
        return attention + np.array(_other(program))[:, None], _reload(program)

    def step(self, decodes: int, decode_rows: int, pieces: Sequence[tuple[int, int]]) -> tuple[Cost, Cost]:
        """The cost of a step with pieces of prompts, and that of loading the weights as in `decode`.

        Args:
            decodes: Number of sequences that decode a token.
            decode_rows: Total number of cache rows that these attend to.
            pieces: For each piece of a prompt, the number of its tokens, and of the cache rows that its last token
                attends to.
        """
        padded = _padded(decodes + sum(tokens for tokens, _ in pieces))
        attended: list[tuple[int, float, float, bool]] = [(tokens, rows, rows, False) for tokens, rows in pieces]
        if decodes:
            attended.append((decodes, decode_rows / decodes, decode_rows / decodes, True))
        size = _padded(decodes) if decodes else 1
        self._prepare([(1, padded), *([(size, 1), (1, size)] if decodes else [])], attended)
        program = self._program(1, padded)
        total = np.array(_other(program))
        for tokens, rows in pieces:
            total += self._attention(tokens, np.array([rows]), decoding=False)[:, 0]
        if decodes:
            total += self._attention(decodes, np.array([decode_rows / decodes]), decoding=True)[:, 0]
            # The logits of a prompt are one row, those of decodes one each.
            several, one = (_other(self._program(*shape)) for shape in ((size, 1), (1, size)))
            total += np.maximum(0.0, np.subtract(several, one))
        return Cost(*total.tolist()), _reload(program)

    def _prepare(self, sizes: Sequence[tuple[int, int]], attended: Sequence[tuple[int, float, float, bool]]) -> None:
        """Tell which programs a price is derived from, unless they have been told before.

        Args:
            sizes: Sequences and tokens of programs of which all but attention counts.
            attended: For each attention its rows, the first and last of its contexts, and whether it is of decodes.
        """
        places = [
            (rows, _place(self._contexts, first)[0], _place(self._contexts, last)[1], decoding)
            for rows, first, last, decoding in attended
        ]
        key = (*sizes, *places)
        if key not in self._prepared:
            self._prepared.add(key)
            shapes = [ContiguousShape(sequences, tokens, self._typical) for sequences, tokens in sizes]
            for rows, low, high, decoding in places:
                lengths = self._contexts[low : high + 1]
                shapes += [shape for length in lengths for shape in self._shapes_around(rows, length, decoding)]
            self._programs.prepare(dict.fromkeys(shapes))

    def _program(self, sequences: int, tokens: int) -> ProgramCost:
        return self._programs.cost(ContiguousShape(sequences, tokens, self._typical))

    def _attention(self, rows: int, contexts: NDArray[Any], *, decoding: bool) -> Costs:
        """The costs of attention for one token of each of `rows` sequences, or for `rows` tokens of one sequence.

        Args:
            contexts: Numbers of cache rows attended to, ascending; the result has a cost for each.
            decoding: Whether each row is the token of another sequence.
        """
        first, last = _place(self._contexts, contexts[0])[0], _place(self._contexts, contexts[-1])[1]
        lengths = self._contexts[first : last + 1]
        costs = [self._attention_at(rows, length, decoding) for length in lengths]
        return np.array([np.interp(contexts, lengths, values) for values in zip(*costs, strict=True)])

    def _attention_at(self, rows: int, length: int, decoding: bool) -> Cost:
        """The cost of attention at a context length that is simulated; see `_attention`."""
        key = (rows, length, decoding)
        if key not in self._interpolated:
            shapes = self._shapes_around(rows, length, decoding)
            low, high = (max(shape.sequences, shape.tokens) for shape in shapes)
            programs = [self._programs.cost(shape) for shape in shapes]
            costs = [(program.attention_seconds, program.attention_joules) for program in programs]
            share = (rows - low) / (high - low) if high > low else 0.0
            seconds, joules = ((1 - share) * before + share * behind for before, behind in zip(*costs, strict=True))
            self._interpolated[key] = Cost(seconds, joules)
        return self._interpolated[key]

    def _shapes_around(self, rows: int, length: int, decoding: bool) -> list[ContiguousShape]:
        """The simulated programs below and above a number of rows; both are the same if it is simulated itself."""
        sizes = self._sequences if decoding else self._tokens
        around = [sizes[place] for place in _place(sizes, rows)]
        return [ContiguousShape(size, 1, length) if decoding else ContiguousShape(1, size, length) for size in around]


def _other(program: ProgramCost) -> Cost:
    return Cost(program.other_seconds, program.other_joules)


def _reload(program: ProgramCost) -> Cost:
    return Cost(program.reload_seconds, program.reload_joules)


def _knots(most: int, least: int) -> list[int]:
    """Sizes to simulate: `most`, and smaller ones, each by the factor `RATIO`, down to `least`; ascending."""
    sizes = [most]
    while -(-sizes[0] // RATIO) >= least and sizes[0] > 1:
        sizes.insert(0, -(-sizes[0] // RATIO))
    return sizes


def _place(knots: Sequence[int], value: float) -> tuple[int, int]:
    """Indices of the knots below and above a value.

    They are equal if the value is a knot, or lies outside all of them.
    """
    place = min(bisect_left(knots, value), len(knots) - 1)
    return (place if place == 0 or value >= knots[place] else place - 1), place


def _padded(count: int) -> int:
    """The smallest power of two that is at least `count`."""
    return 1 << (count - 1).bit_length()
