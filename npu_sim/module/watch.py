"""Noticing that a module's weights have changed since they were loaded onto a device."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from functools import cache
from itertools import cycle, islice
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

_SAMPLE = 2  # tensors whose memory is looked at in each check


class WeightWatch:
    """Says whether tensors of a module have been written, or replaced by others.

    PyTorch counts what is written to a tensor in place (`Tensor._version`), and tells when a module gets another
    parameter or buffer; both are noticed at once. What it does not count is noticed only by its memory: after
    `module.half()` or `.to()`, which move all tensors, at once; after an assignment to one `.data` within some calls.
    Writing through `.data` is not noticed.

    Args:
        tensors: Key in the module → tensor, detached.

    Attributes:
        new_part: The name of a submodule that was added or replaced, whose code is not what was compiled.
    """

    def __init__(self, module: nn.Module | None, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = [x for x in tensors.values() if not x.is_inference()]
        self._versions = sum([x._version for x in self._tensors])
        self._is_replaced = False
        self.new_part: str | None = None
        owners = [] if module is None else [_owner(module, key) for key in tensors]
        self._places = [(owned, name, owned[name].data_ptr()) for owned, name in owners if owned.get(name) is not None]
        self._next = cycle(self._places)
        for part in module.modules() if module is not None else ():
            _watched(part).add(self)

    def note_replaced(self) -> None:
        self._is_replaced = True

    def note_part(self, name: str) -> None:
        self._is_replaced, self.new_part = True, name

    def has_changed(self) -> bool:
        if self._is_replaced or sum([x._version for x in self._tensors]) != self._versions:
            return True
        for owned, name, address in islice(self._next, min(_SAMPLE, len(self._places))):
            if owned[name].data_ptr() != address:
                return True
        return False


def current_tensors(module: nn.Module, keys: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors that a module has under these keys by now, detached; what it does not hold is as it was."""
    return {key: live_tensor(module, key, known).detach() for key, known in keys.items()}


def live_tensor(module: nn.Module, key: str, known: torch.Tensor) -> torch.Tensor:
    """The module's own parameter or buffer under a key; `known`, which it had, where it holds none now."""
    owned, name = _owner(module, key)
    value: torch.Tensor | None = owned.get(name)
    return known if value is None else value


def _submodule(module: nn.Module, path: str) -> nn.Module | None:
    try:
        return module.get_submodule(path)
    except AttributeError:
        return None


def _owner(module: nn.Module, key: str) -> tuple[dict[str, Any], str]:
    """The dictionary that holds a parameter or buffer, and its name there."""
    path, _, name = key.rpartition(".")
    owner = _submodule(module, path)
    if owner is None:
        return {}, name
    return (owner._parameters if name in owner._parameters else owner._buffers), name


_WATCHES: weakref.WeakKeyDictionary[nn.Module, weakref.WeakSet[WeightWatch]] = weakref.WeakKeyDictionary()


def _watched(module: nn.Module) -> weakref.WeakSet[WeightWatch]:
    _install()
    return _WATCHES.setdefault(module, weakref.WeakSet())


@cache
def _install() -> None:
    """Have PyTorch tell when any module gets a parameter, a buffer or a submodule."""

    def note(module: nn.Module, name: str, value: Any) -> None:
        for watch in _WATCHES.get(module, ()):
            watch.note_replaced()

    def note_part(module: nn.Module, name: str, value: Any) -> None:
        if module._modules.get(name) is not value:
            for watch in _WATCHES.get(module, ()):
                watch.note_part(name)

    register_module_parameter_registration_hook(note)
    register_module_buffer_registration_hook(note)
    register_module_module_registration_hook(note_part)
