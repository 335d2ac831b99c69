"""Dividing a step of a model with recurrent states into several runs of its programs.

In a run, a recurrent state is updated by every token in its sequence's row, even by padding. So each sequence of a run
has the same number of tokens. All tokens of a piece of a prompt but the last go through runs of one sequence, with as
large a fixed number of tokens as fits, and the rest one by one. The last run has the last token of every sequence, and
all outputs.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from npu_compiler.errors import InputError
from npu_sim.llm.engine.batch import Batch

PIECES = (64, 8)  # tokens of one sequence in a run; each is a trace and a program


def divide_step(batch: Batch, pieces: Sequence[int]) -> Iterator[Batch]:
    """Yield the runs of a step in order, as batches whose tokens, positions and sequences are [sequences, tokens].

    Args:
        pieces: Possible numbers of tokens in a run of one sequence, decreasing.
    """
    lasts = _lasts(batch)
    firsts = np.append(0, lasts[:-1] + 1)
    for indices in _earlier(firsts.tolist(), lasts.tolist(), pieces):
        yield _run(batch, indices, batch.outputs[:0])
    yield _run(batch, lasts[:, None], np.searchsorted(lasts, batch.outputs).astype(np.int32))


def _lasts(batch: Batch) -> NDArray[np.int64]:
    """Index in the batch of each sequence's last token."""
    return np.append(np.flatnonzero(np.diff(batch.sequences)), len(batch.tokens) - 1)


def _earlier(firsts: list[int], lasts: list[int], pieces: Sequence[int]) -> Iterator[NDArray[np.int64]]:
    """The runs before the last one, each as indices [sequences, tokens each] of its tokens in the batch."""
    rests = []
    for start, last in zip(firsts, lasts, strict=True):
        for size in pieces:
            while last - start >= size:
                yield np.arange(start, start + size)[None]
                start += size
        rests.append((start, last))
    for step in range(max(last - start for start, last in rests)):
        yield np.array([[start + step] for start, last in rests if start + step < last])


def _run(batch: Batch, indices: NDArray[np.int64], outputs: NDArray[np.int32]) -> Batch:
    """Return the batch of one run with the tokens at `indices`.

    `outputs` are the indices of those of its sequences after which a token is chosen.
    """
    owners, count = batch.sequences[indices[:, 0]], len(outputs)
    return replace(
        batch,
        tokens=batch.tokens[indices],
        positions=batch.positions[indices],
        sequences=np.broadcast_to(np.arange(len(owners), dtype=np.int32)[:, None], indices.shape),
        tables=batch.tables[owners],
        outputs=outputs,
        settings=batch.settings[:count],
        uniforms=batch.uniforms[:count],
        lanes=None if batch.lanes is None else batch.lanes[owners],
    )


def check_lanes(batch: Batch, lanes: int) -> None:
    """Check that the lanes and outputs of a batch fit a model with recurrent states.

    Raises:
        InputError: lanes are missing, shared by sequences or out of range, or an output does not follow a sequence's
            last token.
    """
    held, lasts = batch.lanes, _lasts(batch)
    if held is None or held.shape != (len(batch.tables),):
        raise InputError("a batch for a model with recurrent states must have a lane for each sequence")
    used = held[batch.sequences[lasts]].tolist()
    if min(used) < 0 or max(used) >= lanes or len(set(used)) < len(used):
        raise InputError(f"the batch's lanes must be different numbers from 0 to {lanes - 1}, not {used}")
    if not np.isin(batch.outputs, lasts).all():
        raise InputError("a sequence with recurrent states can have an output after its last token only")
