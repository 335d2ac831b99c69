"""The interface between engine and model: a step over a batch of tokens, with keys and values in a pool of blocks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

NO_DRAFTS = "the model's layers have recurrent states, which cannot be taken back after a wrong draft; choose no drafts"


@dataclass(frozen=True)
class Batch:
    """The tokens of one step: any mixture of decoding sequences, with one token each, and of pieces of prompts.

    Tokens of a sequence stand beside each other, in order of position. The keys and values of all tokens of the step
    are written to the pool before any token attends; token n then attends to the rows 0..positions[n] of its own
    sequence only, or, with a window, to the last of these.

    Attributes:
        tokens: [N], int32, token ids. Where the model runs ahead, -1 - k stands for the token that output k of the
            previous step chooses.
        positions: [N], int32, each token's position in its sequence.
        sequences: [N], int32, the row of `tables` that a token belongs to.
        tables: [S, T], int32: the blocks of each sequence, in order; entries beyond its last block are ignored. T is
            what the longest sequence needs; the model pads.
            The row at position p of a sequence with table t is row p % block_size of block t[p // block_size].
        outputs: [R], int32, increasing: indices into `tokens` of those after which a token is to be chosen.
        settings: [R, 3], float32: temperature (0: greedy), top_k (infinity: all) and top_p of each output.
        uniforms: [R], float32: a random number from [0, 1) for each output.
        lanes: [S], int32: the index of each sequence's recurrent states in the model's memory for them. Where a
            sequence begins, at position 0, the old contents are ignored. None: the model has no recurrent states.
        upcoming: Function from a count to the random numbers of the sequence's next tokens, so that a model can upload
            those of many steps at once. None unless the step is a single sampled token.
        adapters: [S], int32: the index of each sequence's LoRA adapter among the model's; -1: no adapter. None: all are
            -1.
    """

    tokens: NDArray[np.int32]
    positions: NDArray[np.int32]
    sequences: NDArray[np.int32]
    tables: NDArray[np.int32]
    outputs: NDArray[np.int32]
    settings: NDArray[np.float32]
    uniforms: NDArray[np.float32]
    lanes: NDArray[np.int32] | None = None
    upcoming: Callable[[int], NDArray[np.float32]] | None = None
    adapters: NDArray[np.int32] | None = None


class StepResult(Protocol):
    """The tokens that a step chose. Reading them waits until the device has run the step.

    Attributes:
        on_host: Whether the next step takes the tokens from the host, so that they must be read before it is planned.
    """

    on_host: bool

    def tokens(self) -> NDArray[np.int32]:
        """Return the chosen token of each output, [R]; -1 where its logits are not finite."""

    def logits(self) -> NDArray[np.float32]:
        """Return the logits [R, vocab] of each output. Slow for large batches; for log probabilities and grammars."""


class BatchModel(Protocol):
    """A language model that runs batches over a pool of KV blocks.

    Attributes:
        block_size: Tokens per block.
        blocks: Blocks in the pool.
        context_length: Maximum number of tokens of a sequence.
        vocab_size: Number of token ids.
        max_tokens: Maximum number of tokens of a step.
        max_outputs: Maximum number of outputs of a step.
        max_sequences: Maximum number of sequences of a step.
        runs_ahead: Number of steps that may be unfinished when another one is launched, whose input tokens may then be
            outputs of these. 0: `step` returns when the device has finished.
        shares_prefixes: Whether sequences that begin with the same tokens may share the full blocks of this prefix.
        read_window: Number of last tokens whose keys and values some layer reads; blocks of earlier tokens are
            released. 0: all tokens.
        rewinds: Whether a sequence may go back and replace computed tokens, as after a rejected draft. A recurrent
            state cannot go back.
    """

    block_size: int
    blocks: int
    context_length: int
    vocab_size: int
    max_tokens: int
    max_outputs: int
    max_sequences: int
    runs_ahead: int
    shares_prefixes: bool
    read_window: int
    rewinds: bool

    def step(self, batch: Batch) -> StepResult:
        """Launch one step without waiting for it, and return the result, which is read later.

        The next step may be launched before that.

        Raises:
            InputError: the batch exceeds the model's limits or refers to blocks outside the pool.
        """

    def piece(self, start: int, end: int) -> tuple[int, int]:
        """The piece of a prompt that one step should compute, of the tokens `start` to `end` that are left.

        Returns:
            (first, last + 1) of its tokens. It may begin before `start`, and then computes earlier tokens again.
        """

    def check(self) -> None:
        """Raise the reason (`NPUError`) if no further step can succeed, since a part of the model is lost."""

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, each (from, to), in all layers, after the steps launched so far."""
