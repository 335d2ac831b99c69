"""The state that the layers of a language model keep between steps, as data: `StateKind` rows."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from npu_compiler.graph.dtypes import itemsize


@dataclass(frozen=True)
class StateKind:
    """A kind of state of a layer. Its tensors hold a row for each token; a block of a pool holds some rows of each.

    Tracing makes the inputs of a step's module from a kind, the pool its memory, the scheduler its rule for prefixes,
    and a group of devices its division. To add a kind (a latent that keys and values are computed from, a recurrent
    state), write a row below, let `probe.py` find its layers, and add to `modules.py` the cache that updates its
    tensors. A kind without a row for each token also says here how much a block holds.

    Attributes:
        tensors: Arguments of the traced modules, each a list with one tensor for each layer. The program's inputs are
            named after them: `k_0` is the first layer's.
        dtype: Element type. None: the compute dtype.
        sharded_axis: Axis of a row that the devices of a group divide. None: each device has whole rows.
        shares_prefixes: Whether sequences that begin with the same tokens may share a block that is full of these.
    """

    tensors: tuple[str, ...]
    dtype: str | None = None
    sharded_axis: int | None = None
    shares_prefixes: bool = True


FULL_ATTENTION = StateKind(tensors=("k", "v"), sharded_axis=0)


@dataclass(frozen=True)
class LayerState:
    """The state of one layer.

    Attributes:
        rows: The shape of a row of each of the kind's tensors: [KV heads, head dim] of keys and of values.
        window: Number of last tokens whose rows are read. 0: all.
    """

    kind: StateKind
    rows: tuple[tuple[int, ...], ...]
    window: int = 0


def state_inputs(states: Sequence[LayerState]) -> frozenset[str]:
    """Names of the program inputs that are state."""
    return frozenset(f"{tensor}_{layer}" for layer, state in enumerate(states) for tensor in state.kind.tensors)


def row_bytes(states: Iterable[LayerState], dtype: str) -> int:
    """Memory of one token's rows in all layers, in a compute dtype."""
    return sum(int(np.prod(row)) * itemsize(state.kind.dtype or dtype) for state in states for row in state.rows)


def read_window(states: Iterable[LayerState]) -> int:
    """Number of last tokens whose rows some layer reads. 0: all."""
    windows = [state.window for state in states]
    return 0 if 0 in windows else max(windows, default=0)
