"""The state that the layers of a language model keep between steps, as data: `StateKind` rows."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from npu_compiler.graph.dtypes import itemsize


@dataclass(frozen=True)
class StateKind:
    """A kind of state of a layer. Its tensors hold a row for each token, or one for each sequence.

    A block of a pool holds some rows of tokens; a row of a sequence has a lane, which a running sequence holds.
    Tracing makes the inputs of a step's module from a kind, the pool its memory, the scheduler its rule for prefixes,
    and a group of devices its division. To add a kind (a latent that keys and values are computed from), write a row
    below, let `probe.py` find its layers, and add to `modules.py` the cache that updates its tensors.

    Attributes:
        tensors: Arguments of the traced modules, each a list with one tensor for each layer. The program's inputs are
            named after them: `k_0` is that of the first layer that has some.
        dtype: Element type. None: the compute dtype.
        sharded_axis: Axis of a row that the devices of a group divide. None: each device has whole rows.
        shares_prefixes: Whether sequences that begin with the same tokens may share a block that is full of these.
        is_recurrent: Whether there is one row for each sequence, which every step replaces. Without the rows of earlier
            tokens, nothing that was computed can be taken back, so that no prefix is shared and no draft is tried.
    """

    tensors: tuple[str, ...]
    dtype: str | None = None
    sharded_axis: int | None = None
    shares_prefixes: bool = True
    is_recurrent: bool = False


FULL_ATTENTION = StateKind(tensors=("k", "v"), sharded_axis=0)
RECURRENT = StateKind(tensors=("r",), shares_prefixes=False, is_recurrent=True)


@dataclass(frozen=True)
class LayerState:
    """The state of one layer, or one of its states: a layer may have keys and values beside recurrent ones.

    Attributes:
        rows: The shape of a row of each of the kind's tensors: [KV heads, head dim] of keys and of values.
        window: Number of last tokens whose rows are read. 0: all.
        dtype: Element type. None: that of the kind.
    """

    kind: StateKind
    rows: tuple[tuple[int, ...], ...]
    window: int = 0
    dtype: str | None = None


def state_inputs(states: Iterable[LayerState]) -> frozenset[str]:
    """Names of the program inputs that are state."""
    layers = Counter(tensor for state in states for tensor in state.kind.tensors)
    return frozenset(f"{tensor}_{layer}" for tensor, count in layers.items() for layer in range(count))


def row_bytes(states: Iterable[LayerState], dtype: str) -> int:
    """Memory of one token's rows in all layers, in a compute dtype."""
    return _bytes((state for state in states if not state.kind.is_recurrent), dtype)


def lane_bytes(states: Iterable[LayerState], dtype: str) -> int:
    """Memory of one sequence's recurrent states in all layers, in a compute dtype."""
    return _bytes((state for state in states if state.kind.is_recurrent), dtype)


def _bytes(states: Iterable[LayerState], dtype: str) -> int:
    return sum(
        int(np.prod(row)) * itemsize(state.dtype or state.kind.dtype or dtype) for state in states for row in state.rows
    )


def is_recurrent(states: Iterable[LayerState]) -> bool:
    """Whether some layer has a recurrent state."""
    return any(state.kind.is_recurrent for state in states)


def read_window(states: Iterable[LayerState]) -> int:
    """Number of last tokens whose rows some layer reads. 0: all."""
    windows = [state.window for state in states if not state.kind.is_recurrent]
    return 0 if 0 in windows else max(windows, default=0)


class StateName(NamedTuple):
    """The place of a state in transformers' cache.

    Attributes:
        sort: "conv" or "recurrent"; or the path of an attribute of a module, which keeps the state itself.
        layer, place: Number of the layer, and of the state among those of its sort there.
    """

    sort: str
    layer: int
    place: int


@dataclass(frozen=True)
class StateForm:
    """The form in which a Hugging Face model keeps and reads its state.

    Attributes:
        layers: Number of each layer that has keys and values; -1 - n for what layer n keeps to choose keys by.
        is_additive: Whether its attention is its own, which adds masks to scores, not a function that is given to it.
        is_paged: Whether paged attention computes what its attention does.
        takes_mask: Whether it must be told that no key is padding: it counts keys by such a mask.
        recurrent: Its recurrent states.
        takes_sequences: Whether a step may have several sequences, where there are recurrent states: some models give
            the tokens of all sequences the same positions.
        masks: Name of each buffer that is a square mask of its own attention, and the number of last positions that it
            shows, 0 for all.
        takes_pieces: Whether a step may have several tokens of a sequence: some recurrences begin with zeros then.
    """

    layers: tuple[int, ...]
    is_additive: bool = False
    is_paged: bool = True
    takes_mask: bool = False
    recurrent: tuple[StateName, ...] = ()
    takes_pieces: bool = True
    takes_sequences: bool = True
    masks: tuple[tuple[str, int], ...] = ()
