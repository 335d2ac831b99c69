"""The state that the layers of a language model keep between steps, as data: `StateKind` rows."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from npu_compiler.graph.dtypes import itemsize


@dataclass(frozen=True)
class StateKind:
    """A kind of state of a layer. Its tensors hold a row for each token; a block of a pool holds some rows of each.

    Tracing makes the inputs of a step's module from a kind, the pool its memory, the scheduler its rule for prefixes,
    and a group of devices its division. To add a kind (a window of keys and values, a latent that both are computed
    from, a recurrent state), write a row below, name it for its layers in `layer_states`, and add to `modules.py` the
    cache that updates its tensors. A kind without a row for each token also says here how much a block holds; one whose
    old rows are no longer read, after how many tokens a block may be freed.

    Attributes:
        tensors: Arguments of the traced modules, each a list with one tensor for each layer. The program's inputs are
            named after them: `k_0` is the first layer's.
        row: Function from a config to the shape of a row.
        dtype: Element type. None: the compute dtype.
        sharded_axis: Axis of a row that the devices of a group divide. None: each device has whole rows.
        shares_prefixes: Whether sequences that begin with the same tokens may share a block that is full of these.
    """

    tensors: tuple[str, ...]
    row: Callable[[Any], tuple[int, ...]]
    dtype: str | None = None
    sharded_axis: int | None = None
    shares_prefixes: bool = True


def key_value_row(config: Any) -> tuple[int, int]:
    """The shape of a token's keys in a layer, and of its values: [KV heads, head dim]."""
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return getattr(config, "num_key_value_heads", None) or heads, head_dim


FULL_ATTENTION = StateKind(tensors=("k", "v"), row=key_value_row, sharded_axis=0)


def layer_states(config: Any) -> list[StateKind]:
    """The kind of state of each layer."""
    return [FULL_ATTENTION] * int(config.num_hidden_layers)


def state_inputs(config: Any) -> frozenset[str]:
    """Names of the program inputs that are state."""
    return frozenset(f"{tensor}_{layer}" for layer, kind in enumerate(layer_states(config)) for tensor in kind.tensors)


def row_bytes(config: Any, dtype: str) -> int:
    """Memory of one token's rows in all layers, in a compute dtype."""
    return sum(
        len(kind.tensors) * int(np.prod(kind.row(config))) * itemsize(kind.dtype or dtype)
        for kind in layer_states(config)
    )
