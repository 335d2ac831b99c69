"""A language model of a few NumPy lines over a paged pool, for tests of what serves it.

The pool holds a number for each row, made of the token and the position that were written there. The next token depends
on the numbers in all rows of the sequence's table, so a wrong table, position or token, a row that somebody else has
written, and a block used after it was given away all change the answer. A recurrent toy has a
number for each lane, made of all tokens in their order: one left out, taken twice or of another changes the answer too.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from sampling_rule import draw, probabilities

from npu_compiler.errors import DeviceError, InputError
from npu_sim.llm import make_sampler
from npu_sim.llm.engine.batch import Batch
from npu_sim.llm.engine.step_times import StepTimes
from npu_sim.serving.request import Request, SamplingSettings

VOCAB = 24
_M = np.uint64(0x9E3779B97F4A7C15)


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    values = (values ^ (values >> np.uint64(31))) * np.uint64(0xBF58476D1CE4E5B9)
    return values ^ (values >> np.uint64(29))


def row_values(tokens: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return the pool's row values of tokens at positions: [N]."""
    return _mixed((tokens.astype(np.uint64) + np.uint64(1)) * _M + positions.astype(np.uint64) * np.uint64(0x51ED270B))


def states_of(rows: NDArray[np.uint64], before: int = 0) -> list[int]:
    """Return the numbers of a lane after each of these rows, from that before them on."""
    states = []
    for row in rows.tolist():
        before = ((before ^ row) * int(_M) + 1) % 2**64
        states.append(before)
    return states


def logits_of(rows: NDArray[np.uint64], last: int) -> NDArray[np.float32]:
    """The logits [VOCAB] after a sequence whose rows hold these values; often a step of a cycle."""
    state = _mixed(rows.sum(dtype=np.uint64)[None])
    noise = _mixed(state * _M + np.arange(VOCAB, dtype=np.uint64) * np.uint64(0xD1B54A32D192ED03))
    logits = (noise >> np.uint64(44)).astype(np.float32) / 2**18
    if state[0] % np.uint64(8):
        logits[(last * 5 + 3) % VOCAB] += 6
    return logits


class ToyResult:
    on_host = False

    def __init__(self, model: ToyModel, tokens: NDArray[np.int32], logits: NDArray[np.float32]) -> None:
        self._model, self._tokens, self._logits = model, tokens, logits
        self._step = model.steps
        self.fails = model.steps in model.fail_reading

    def tokens(self) -> NDArray[np.int32]:
        if self.fails:
            raise DeviceError("the toy has failed while running")
        return self._tokens

    def logits(self) -> NDArray[np.float32]:
        assert self._step == self._model.steps, "logits read after a later step was launched"
        return self._logits


class ToyModel:
    """A `BatchModel` of a few NumPy lines, whose logits depend on every row of the sequence's table or of its end.

    Attributes:
        steps: Steps launched so far.
        fail_launching, fail_reading: Numbers of steps that fail.
        not_finite: Last tokens after which logits are not finite.
    """

    def __init__(
        self,
        blocks: int = 16,
        block_size: int = 4,
        context_length: int = 48,
        max_tokens: int = 16,
        max_sequences: int = 8,
        runs_ahead: int = False,
        max_outputs: int | None = None,
        read_window: int = 0,
        recurrent: bool = False,
    ) -> None:
        self.shares_prefixes = self.rewinds = not recurrent
        self.read_window = read_window
        self.blocks, self.block_size, self.context_length = blocks, block_size, context_length
        self.vocab_size, self.runs_ahead = VOCAB, runs_ahead
        self.max_tokens, self.max_outputs, self.max_sequences = max_tokens, max_outputs or max_tokens, max_sequences
        self.steps = 0
        self.computed = 0
        self.fail_launching: set[int] = set()
        self.fail_reading: set[int] = set()
        self.not_finite: set[int] = set()
        self._pool = np.random.default_rng(0).integers(0, 2**63, blocks * block_size).astype(np.uint64)
        self._lanes = np.random.default_rng(1).integers(0, 2**63, max_sequences).astype(np.uint64)
        self._chosen = np.zeros(0, np.int32)

    def step(self, batch: Batch) -> ToyResult:
        self.steps += 1
        if self.steps in self.fail_launching:
            raise DeviceError("the toy has failed at the launch")
        self._check(batch)
        tokens = batch.tokens.astype(np.int64)
        fed = tokens < 0
        if fed.any():
            assert self.runs_ahead
            tokens[fed] = self._chosen[-1 - tokens[fed]]
        size = self.block_size
        positions = batch.positions.astype(np.int64)
        rows = batch.tables[batch.sequences, positions // size].astype(np.int64) * size + positions % size
        assert len(set(rows.tolist())) == len(rows), "two tokens write one row"
        self._pool[rows] = row_values(tokens, positions)
        self.computed += len(tokens)
        states = None if self.rewinds else self._renewed(batch, row_values(tokens, positions))
        logits = np.zeros((len(batch.outputs), VOCAB), np.float32)
        for index, output in enumerate(batch.outputs):
            places = np.arange(positions[output] + 1)[-self.read_window :]
            table = batch.tables[batch.sequences[output]].astype(np.int64)
            read = self._pool[table[places // size] * size + places % size]
            logits[index] = logits_of(read if states is None else states[output : output + 1], int(tokens[output]))
        self._chosen = np.array(
            [
                -1 if int(tokens[output]) in self.not_finite else chosen(row, settings, uniform)
                for output, row, settings, uniform in zip(
                    batch.outputs, logits, batch.settings, batch.uniforms, strict=True
                )
            ],
            np.int32,
        )
        return ToyResult(self, self._chosen, logits)

    def _renewed(self, batch: Batch, rows: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Renew the lanes of a step's sequences, and return what they were after each token."""
        assert batch.lanes is not None and len(set(batch.lanes.tolist())) == len(batch.lanes) == len(batch.tables)
        states = np.zeros(len(rows), np.uint64)
        for sequence in np.unique(batch.sequences):
            own, lane = np.flatnonzero(batch.sequences == sequence), batch.lanes[sequence]
            before = int(self._lanes[lane]) if batch.positions[own[0]] else 0
            states[own] = states_of(rows[own], before)
            self._lanes[lane] = states[own[-1]]
        return states

    def piece(self, start: int, end: int) -> tuple[int, int]:
        return start, end

    def check(self) -> None: ...

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        pool = self._pool.reshape(self.blocks, self.block_size)
        sources, targets = (list(side) for side in zip(*pairs, strict=True))
        assert not set(sources) & set(targets) and len(set(targets)) == len(targets)
        pool[targets] = pool[sources]

    def _check(self, batch: Batch) -> None:
        count, (sequences, _) = len(batch.tokens), batch.tables.shape
        if not (0 < count <= self.max_tokens and sequences <= self.max_sequences):
            raise InputError(f"a step of {count} tokens and {sequences} sequences")
        if len(batch.outputs) > self.max_outputs or batch.settings.shape != (len(batch.outputs), 3):
            raise InputError(f"a step of {len(batch.outputs)} outputs")
        assert (np.diff(batch.outputs) > 0).all() and (batch.positions < self.context_length).all()
        assert (batch.tokens < VOCAB).all() and (batch.positions >= 0).all()
        if batch.tables.min(initial=0) < 0 or batch.tables.max(initial=0) >= self.blocks:
            raise InputError("a block outside the pool")


class EvenTimes(StepTimes):
    """All steps take equally long, so drafts do not depend on how fast the machine is."""

    drafting = 0.0

    def knows(self, tokens: int) -> bool:
        return True

    def seconds(self, tokens: int) -> float:
        return 1.0


def chosen(logits: NDArray[np.float32], settings: NDArray[np.float32], uniform: float) -> int:
    """The token that settings and a random number choose."""
    temperature, top_k, top_p = (float(value) for value in settings)
    if temperature == 0:
        return int(logits.argmax())
    kept = None if np.isinf(top_k) else int(top_k)
    return draw(probabilities(logits, temperature, top_k=kept, top_p=top_p), float(uniform))


def alone(
    request: Request, limit: int, stop_ids: frozenset[int] = frozenset(), window: int = 0, recurrent: bool = False
) -> tuple[int, ...]:
    """The answer to a request: what the model says when it has one sequence and the pool to itself.

    Args:
        limit: Maximum length of prompt and answer.
        window: Number of last tokens on which each depends. 0: all.
        recurrent: Whether it depends on a recurrent state instead.
    """
    stops = stop_ids if request.stop_ids is None else request.stop_ids
    ahead = limit if request.max_new_tokens is None else len(request.prompt) + request.max_new_tokens
    return _alone(request.prompt, request.sampling, stops, min(limit, ahead), window, recurrent)


@lru_cache(1000)
def _alone(
    prompt: tuple[int, ...],
    sampling: SamplingSettings,
    stops: frozenset[int],
    limit: int,
    window: int,
    recurrent: bool,
) -> tuple[int, ...]:
    sampler = make_sampler(sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p, seed=sampling.seed)
    tokens = list(prompt)
    while len(tokens) < limit:
        values = row_values(np.array(tokens), np.arange(len(tokens)))
        read = np.array(states_of(values)[-1:], np.uint64) if recurrent else values[-window:]
        token = sampler(logits_of(read, tokens[-1]))
        if token in stops:
            break
        tokens.append(token)
    return tuple(tokens[len(prompt) :])
