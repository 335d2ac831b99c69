"""Recurrent states of traced modules: tensors of a fixed size that a layer reads and replaces at each step.

transformers' cache has two sorts: the last columns of a convolution's input, and the state of a recurrence (a selective
scan, a delta rule, a linear attention). A layer may have several of each. Some modules keep their states in attributes
instead. The memory of states is divided into lanes, one for each sequence.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from typing import Any

import torch
from torch import nn

from npu_sim.llm.state import StateName


class RecurrentCache:
    """The part of a cache for transformers that holds recurrent states; a base class.

    Attributes:
        states: State → tensor [sequences, …]; a state that is absent begins with zeros. Layers may change tensors in
            place; the tensors that are here afterwards are the states after the step.
    """

    states: dict[StateName, torch.Tensor]

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self.states.get(StateName("conv", layer_idx, state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self.states.get(StateName("recurrent", layer_idx, state_idx))

    def has_previous_state(self, *_: Any, **__: Any) -> bool:
        return bool(self.states)

    def is_recording_past(self, *_: Any) -> bool:
        return False

    def update_conv_state(
        self,
        conv_states: torch.Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """Append new columns [sequences, channels, tokens]; return the kept columns followed by the new ones.

        Only the last columns stay. Models of transformers call this, with transformers' argument names.

        Args:
            conv_states: The new columns.
            layer_idx, state_idx: Number of the layer, and of the state among the layer's.
            conv_kernel_size: Number of columns to keep, in the first call. None: that of `conv_states`.
        """
        name = StateName("conv", layer_idx, state_idx)
        kept = self.states.get(name)
        if kept is None:
            width = conv_kernel_size or conv_states.shape[-1]
            missing = max(0, width - conv_states.shape[-1])
            columns = nn.functional.pad(conv_states, (missing, 0)) if missing else conv_states
            self.states[name] = columns[..., -width:]
        else:
            columns = torch.cat([kept, conv_states], dim=-1)
            self.states[name] = columns[..., -kept.shape[-1] :].to(kept.dtype)
        return columns

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> torch.Tensor:
        """Replace a layer's recurrent state, and return the new one."""
        name = StateName("recurrent", layer_idx, state_idx)
        kept = self.states.get(name)
        self.states[name] = recurrent_states if kept is None else recurrent_states.to(kept.dtype)
        return self.states[name]


def own_tensors(causal: nn.Module) -> dict[StateName, torch.Tensor | None]:
    """The plain attributes of a model's modules that are tensors or None, each as the state that it may be."""
    return {
        StateName(f"{path}.{name}", 0, 0): value
        for path, module in causal.named_modules()
        for name, value in vars(module).items()
        if value is None or isinstance(value, torch.Tensor)
    }


@contextlib.contextmanager
def own_states(causal: nn.Module, states: dict[StateName, torch.Tensor]) -> Iterator[None]:
    """Let modules find states in their attributes, and take from there what they leave.

    Args:
        states: All recurrent states of a step; those in attributes have names with a path.
    """
    places = [(name, *name.sort.rpartition(".")[::2]) for name in states if "." in name.sort]
    modules = {name: (causal.get_submodule(path), attribute) for name, path, attribute in places}
    try:
        for name, (module, attribute) in modules.items():
            setattr(module, attribute, states[name])
        yield
        states.update({name: getattr(module, attribute) for name, (module, attribute) in modules.items()})
    finally:
        for module, attribute in modules.values():
            setattr(module, attribute, None)


def read_lanes(
    names: Sequence[StateName], pools: Sequence[torch.Tensor], lanes: torch.Tensor, firsts: torch.Tensor
) -> dict[StateName, torch.Tensor]:
    """Return name → state of a step's sequences, read from their lanes.

    Args:
        pools: [lanes, …] for each name.
        lanes: [S], the lane of each sequence.
        firsts: [S], the position of each sequence's first token in the step. At position 0 its states are zeros,
            whatever its lane holds of another sequence.
    """

    def read(pool: torch.Tensor) -> torch.Tensor:
        begun = (firsts > 0).reshape(-1, *[1] * (pool.dim() - 1))
        return torch.where(begun, pool.index_select(0, lanes), torch.zeros((), dtype=pool.dtype, device=pool.device))

    return {name: read(pool) for name, pool in zip(names, pools, strict=True)}


def write_lanes(
    states: dict[StateName, torch.Tensor],
    names: Sequence[StateName],
    pools: Sequence[torch.Tensor],
    lanes: torch.Tensor,
) -> list[torch.Tensor]:
    """Return the pools after writing the states of a step's sequences to their lanes."""
    return [
        torch.index_copy(pool, 0, lanes, states[name].to(pool.dtype)) for name, pool in zip(names, pools, strict=True)
    ]


def folded(attend: Callable[..., Any]) -> Callable[..., Any]:
    """Make an attention function for one row of tokens also take the tokens of several sequences over one pool.

    If the query is [S, H, T, head dim] and the keys are those of a pool, `attend` gets [1, H, S · T, head dim].
    """

    @wraps(attend)
    def attend_folded(module: nn.Module, query: torch.Tensor, key: torch.Tensor, *others: Any, **named: Any) -> Any:
        if query.shape[0] == 1 or (key.dim() == 4 and key.shape[0] != 1):
            return attend(module, query, key, *others, **named)
        sequences, heads, tokens, width = query.shape
        flat = query.transpose(1, 2).reshape(1, sequences * tokens, heads, width).transpose(1, 2)
        attended, weights = attend(module, flat, key, *others, **named)
        return attended.reshape(sequences, tokens, *attended.shape[2:]), weights

    return attend_folded
