"""Descriptions of the state that a model's layers keep between steps: keys and values, recurrent states."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from npu_compiler.graph.dtypes import itemsize


@dataclass(frozen=True)
class StateKind:
    """A kind of state that a layer keeps. Its tensors hold a row for each token, or one for each sequence.

    Rows of tokens lie in the blocks of a pool; the row of a sequence lies in a lane, which the sequence holds while it
    runs. The kind determines the inputs of a traced step, the memory of the pool, whether the scheduler shares
    prefixes, and how the state is divided among devices. To add a kind (such as a latent from which keys and values are
    computed), see "A new kind" in docs/engine.md, which lists the places.

    Attributes:
        tensors: Arguments of the traced modules, each a list with one tensor for each layer that has such a state. The
            program's inputs are named after them: `k_0` is the first tensor of the argument `k`.
        dtype: Element type. None: the compute dtype.
        sharded_axis: Axis of a row that is divided among the devices of a group. None: each device has whole rows.
        shares_prefixes: Whether sequences that begin with the same tokens may share the full blocks of this prefix.
        is_recurrent: Whether there is one row for each sequence, which every step replaces. As the rows of earlier
            tokens are gone, a sequence cannot go back to an earlier token, so that no prefix is shared and no draft is
            tried.
    """

    tensors: tuple[str, ...]
    dtype: str | None = None
    sharded_axis: int | None = None
    shares_prefixes: bool = True
    is_recurrent: bool = False


FULL_ATTENTION = StateKind(tensors=("k", "v"), sharded_axis=0)
TOKENS = StateKind(tensors=("k",), dtype="int64")
"""The tokens themselves, where each step computes the whole sequence."""
RECURRENT = StateKind(tensors=("r",), shares_prefixes=False, is_recurrent=True)


@dataclass(frozen=True)
class LayerState:
    """One state of a layer. A layer may have several, such as keys and values beside recurrent states.

    Attributes:
        rows: The shape of a row in each of the kind's tensors, such as [KV heads, head dim] for keys and for values.
        window: Number of last tokens whose rows are read. 0: all.
        dtype: Element type. None: that of the kind.
    """

    kind: StateKind
    rows: tuple[tuple[int, ...], ...]
    window: int = 0
    dtype: str | None = None


def state_inputs(states: Iterable[LayerState]) -> frozenset[str]:
    """Names of the program inputs that hold these states."""
    layers = Counter(tensor for state in states for tensor in state.kind.tensors)
    return frozenset(f"{tensor}_{layer}" for tensor, count in layers.items() for layer in range(count))


def row_bytes(states: Iterable[LayerState], dtype: str) -> int:
    """Bytes that each token adds to the KV cache, over all layers; `dtype` is the compute dtype.

    Recurrent states, which do not grow with the number of tokens, are not counted.
    """
    return _bytes((state for state in states if not state.kind.is_recurrent), dtype)


def lane_bytes(states: Iterable[LayerState], dtype: str) -> int:
    """Bytes of one sequence's recurrent states in all layers; `dtype` is the compute dtype."""
    return _bytes((state for state in states if state.kind.is_recurrent), dtype)


def _bytes(states: Iterable[LayerState], dtype: str) -> int:
    return sum(
        int(np.prod(row)) * itemsize(state.dtype or state.kind.dtype or dtype) for state in states for row in state.rows
    )


def is_recurrent(states: Iterable[LayerState]) -> bool:
    """Whether some layer has a recurrent state."""
    return any(state.kind.is_recurrent for state in states)


def read_window(states: Iterable[LayerState]) -> int:
    """Number of last tokens whose keys and values at least one layer still attends to. 0: all tokens."""
    windows = [state.window for state in states if not state.kind.is_recurrent]
    return 0 if 0 in windows else max(windows, default=0)


class StateName(NamedTuple):
    """The place of a recurrent state in transformers' cache.

    Attributes:
        sort: "conv" (last columns of a convolution's input) or "recurrent" (state of a recurrence); or the path of a
            module's attribute that holds the state.
        layer, place: Number of the layer, and of the state among the layer's states of this sort.
    """

    sort: str
    layer: int
    place: int


@dataclass(frozen=True)
class StateForm:
    """The form in which a Hugging Face model keeps and reads its state.

    Attributes:
        layers: Number of each layer that has keys and values; -1 - n stands for the vectors by which layer n chooses
            keys.
        is_additive: Whether the model has attention code of its own, which adds masks to scores, and does not call an
            attention function that it is given.
        is_paged: Whether paged attention can replace the model's attention.
        takes_mask: Whether the model needs a mask that says that no key is padding, since it counts keys by it.
        recurrent: The model's recurrent states.
        takes_sequences: Whether a step may have several sequences, for a model with recurrent states: some models give
            the tokens of all sequences the same positions.
        masks: Name of each buffer that is a square mask of the model's own attention → the number of last positions
            that it shows, 0 for all.
        takes_pieces: Whether a step may continue a sequence by several tokens: some recurrences would then begin with
            zeros.
        is_whole: Whether no step continues another one: each computes the whole sequence (see `whole`).
        is_own: Whether the recurrent states are in a cache of the module's own class (see `own_caches`).
    """

    layers: tuple[int, ...]
    is_additive: bool = False
    is_paged: bool = True
    takes_mask: bool = False
    recurrent: tuple[StateName, ...] = ()
    takes_pieces: bool = True
    takes_sequences: bool = True
    masks: tuple[tuple[str, int], ...] = ()
    is_whole: bool = False
    is_own: bool = False
