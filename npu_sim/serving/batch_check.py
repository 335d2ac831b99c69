"""Checks of a batch, made before a model runs it."""

import math
from collections.abc import Sequence

import numpy as np

from npu_compiler.errors import InputError
from npu_sim.llm.engine.batch import Batch, BatchModel


def check_batch(batch: Batch, model: BatchModel, chosen: int) -> None:
    """Check that a step stays within a model's limits and its pool.

    Args:
        chosen: Number of outputs of the previous step, whose tokens the batch may refer to.

    Raises:
        InputError: the batch exceeds a limit, or refers to a token or block that does not exist.
    """
    count, rows = len(batch.tokens), len(batch.outputs)
    shapes = {"positions": (count,), "sequences": (count,), "settings": (rows, 3), "uniforms": (rows,)}
    for name, shape in shapes.items():
        if getattr(batch, name).shape != shape:
            raise InputError(f"the batch's {name} have shape {list(getattr(batch, name).shape)}, not {list(shape)}")
    if not 1 <= count <= model.max_tokens:
        raise InputError(f"a step has 1 to {model.max_tokens} tokens, not {count}")
    if rows > model.max_outputs:
        raise InputError(f"a step has at most {model.max_outputs} outputs, not {rows}")
    if batch.tables.ndim != 2 or not batch.tables.size:
        raise InputError(f"the batch's tables have shape {list(batch.tables.shape)}, not [sequences, blocks]")
    limits = {
        "tokens": (-chosen, model.vocab_size),
        "positions": (0, min(model.context_length, batch.tables.shape[1] * model.block_size)),
        "sequences": (0, len(batch.tables)),
        "outputs": (0, count),
    }
    for name, (low, end) in limits.items():
        values = getattr(batch, name).tolist()  # which Python compares faster than NumPy, as far as steps are short
        if values and not low <= min(values) <= max(values) < end:
            wrong = next(value for value in values if not low <= value < end)
            raise InputError(f"the batch's {name} must be from {low} to {end - 1}, not {wrong}")
    if batch.adapters is not None and batch.adapters.shape != (len(batch.tables),):
        raise InputError(f"the batch's adapters have shape {list(batch.adapters.shape)}, not {[len(batch.tables)]}")
    if rows > 1 and (batch.outputs[1:] <= batch.outputs[:-1]).any():
        raise InputError("the batch's outputs must increase")
    tables = batch.tables
    if len(tables) > model.max_sequences or tables.min() < 0 or tables.max() >= model.blocks:
        _check_tables(batch, model)
    if rows:
        _check_settings(batch)


def _check_tables(batch: Batch, model: BatchModel) -> None:
    """Raise InputError if the step would read a wrong entry of `batch.tables`, or has too many sequences.

    Called if the tables have a wrong entry somewhere, which the step need not read, or more rows than a step has
    sequences.
    """
    last = np.full(len(batch.tables), -1)
    np.maximum.at(last, batch.sequences, batch.positions // model.block_size)
    if (sequences := np.count_nonzero(last >= 0)) > model.max_sequences:
        raise InputError(f"a step has at most {model.max_sequences} sequences, not {sequences}")
    read = np.where(np.arange(batch.tables.shape[1]) <= last[:, None], batch.tables, 0)
    if read.min() < 0 or read.max() >= model.blocks:
        sequence, place = np.argwhere((read < 0) | (read >= model.blocks))[0]
        raise InputError(
            f"block {place} of sequence {sequence} is {read[sequence, place]}, but the pool has blocks 0 to "
            f"{model.blocks - 1}"
        )


def _check_settings(batch: Batch) -> None:
    for (temperature, top_k, top_p), uniform in zip(batch.settings.tolist(), batch.uniforms.tolist(), strict=True):
        if not 0 <= temperature < math.inf:
            raise InputError("temperatures must be finite numbers of at least 0")
        if temperature > 0 and not top_k >= 1:
            raise InputError("top_k must be at least 1")
        if temperature > 0 and not 0 < top_p <= 1:
            raise InputError("top_p must be above 0 and at most 1")
        if not 0 <= uniform < 1:
            raise InputError("random numbers must be at least 0 and below 1")


def check_pairs(pairs: Sequence[tuple[int, int]], blocks: int) -> None:
    """Check that blocks can be copied, each (from, to), in any order.

    Raises:
        InputError: a block is outside the pool, is copied to twice, or is copied both from and to.
    """
    sources, targets = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    for block in (*sources, *targets):
        if not 0 <= block < blocks:
            raise InputError(f"block {block} is outside the pool, whose blocks are 0 to {blocks - 1}")
    if len(set(targets)) < len(targets) or set(sources) & set(targets):
        raise InputError("blocks are copied to twice, or both from and to")
