"""Caches of a module's own class that hold recurrent states: found by running the module, and filled for each step.

A module makes its cache when it gets none. The tensors in it with a row for each sequence are its states, which begin
with zeros; whatever else it holds is left as it is. A step has one token of each sequence.
"""

import copy
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from npu_compiler.errors import InputError
from npu_sim.llm.selections import Selections
from npu_sim.llm.state import StateName

_SEQUENCES = 3  # a number that no size of a cache has by chance, as tests would show


class OwnCache:
    """A cache that a module has made.

    Attributes:
        argument: The name by which the module takes and returns it.
        states: Its tensors on the meta device, each [sequences, …].
        takes_sequences: Whether the module continues several sequences from it. Some mix their rows.
    """

    def __init__(self, causal: Any) -> None:
        """Run a module on the meta device without a cache.

        Raises:
            InputError: it makes none, or one whose tensors grow with the number of tokens.
        """
        self.argument, self._template, logits = _made(causal, 1)
        self.states, self.takes_sequences = list(_tensors(self._template)), logits.shape[:2] == (_SEQUENCES, 1)
        longer = _tensors(_made(causal, 2)[1])
        if not self.states or [x.shape for x in self.states] != [x.shape for x in longer]:
            raise InputError("its module makes a cache that holds no recurrent states")

    def names(self) -> list[StateName]:
        return [StateName("own", 0, place) for place in range(len(self.states))]

    def step(self, causal: Any, ids: torch.Tensor, states: Sequence[torch.Tensor]) -> tuple[torch.Tensor, Any]:
        """Run one token [S, 1] of each sequence; return the float32 logits [S, vocab] and the new states."""
        cache = _filled(self._template, iter(states))
        with Selections():
            result = causal(input_ids=ids, use_cache=True, **{self.argument: cache})
        new = _tensors(getattr(result, self.argument), ids.shape[0])
        return result.logits[:, -1].float(), list(new)


def _made(causal: Any, tokens: int) -> tuple[str, Any, torch.Tensor]:
    """The name and value of the cache that a module makes, and its logits."""
    with torch.no_grad(), torch.device("meta"), Selections():
        ids = torch.empty(_SEQUENCES, tokens, dtype=torch.long)
        result = causal(input_ids=ids, use_cache=True)
    taken = inspect.signature(causal.forward).parameters
    names = [name for name in ("cache_params", "state") if name in taken and getattr(result, name, None) is not None]
    if not names:
        raise InputError("its layers keep no keys and values")
    return names[0], getattr(result, names[0]), result.logits


def _is_state(value: Any, sequences: int) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 1 and value.shape[0] == sequences


def _parts(value: Any) -> Iterator[Any]:
    """The values directly within a list, a dictionary or a cache of transformers."""
    if isinstance(value, (list, tuple)):
        yield from value
    elif isinstance(value, dict):
        yield from value.values()
    elif type(value).__name__.endswith("Cache"):
        yield from vars(value).values()


def _tensors(cache: Any, sequences: int = _SEQUENCES) -> Iterator[torch.Tensor]:
    """The states in a cache, in the order of its fields."""
    for part in _parts(cache):
        if _is_state(part, sequences):
            yield part
        else:
            yield from _tensors(part, sequences)


def _filled(cache: Any, states: Iterator[torch.Tensor]) -> Any:
    """A copy of a cache with other states."""
    if _is_state(cache, _SEQUENCES):
        return next(states)
    if isinstance(cache, torch.Tensor):
        return torch.zeros_like(cache)
    if isinstance(cache, (list, tuple)):
        return type(cache)(_filled(part, states) for part in cache)
    if isinstance(cache, dict):
        return {key: _filled(part, states) for key, part in cache.items()}
    if type(cache).__name__.endswith("Cache"):
        copied = copy.copy(cache)
        vars(copied).update({name: _filled(part, states) for name, part in vars(cache).items()})
        return copied
    return cache
