"""Detection of changes of a module's weights after they were loaded onto a device."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

import torch
from torch import nn

from npu_compiler.errors import InputError

_DEPTH = 8  # of containers in each other, in which tensors are looked for
_SAMPLE = 2  # tensors whose memory is looked at in each check


class WeightWatch:
    """Detects writes to a module's tensors, and their replacement by others.

    PyTorch counts in-place writes to a tensor (`Tensor._version`). They are detected at the next call, and so are other
    objects in the place of a parameter, a buffer, a submodule or a tensor in a plain attribute. Changes that neither
    count nor bring another object are detected only by the tensors' addresses: at the next call after `module.half()`
    or `.to()`, which move all tensors, but only within some calls after an assignment to the `.data` of one tensor.
    Writes through `.data` are not detected.

    Args:
        module: The module. None: no replacements are reported.
        tensors: Key in the module → tensor, detached.
        plain: Tensors that are neither parameters nor buffers.
    """

    def __init__(self, module: nn.Module | None, tensors: Mapping[str, torch.Tensor], plain: PlainTensors) -> None:
        self._plain, self._before = plain, plain.now()
        self._tensors = [x for x in tensors.values() if not x.is_inference()]
        self._versions = sum([x._version for x in self._tensors])
        owners = [] if module is None else [_owner(module, key) for key in tensors]
        places = [(owned, name) for owned, name in owners if owned.get(name) is not None]
        self._owned, self._names = [owned for owned, _ in places], [name for _, name in places]
        self._values = [owned[name] for owned, name in places]
        self._addresses = cycle([(owned, name, owned[name].data_ptr()) for owned, name in places])
        self._parts = [x._modules for x in module.modules()] if module is not None else []
        self._parts_before = [dict(x) for x in self._parts]

    def has_changed(self) -> bool:
        """Return whether a change was detected since this watch was made."""
        # Runs at every call, so its loops are in C: 24 µs for the 199 tensors and 228 modules of BERT-base (AMD Zen 4).
        if sum([x._version for x in self._tensors]) != self._versions or self._parts != self._parts_before:
            return True
        if not all(map(operator.is_, map(dict.get, self._owned, self._names), self._values)):
            return True
        if self._before and any(x is not y for x, y in zip(self._plain.now(), self._before, strict=True)):
            return True
        return any(owned[name].data_ptr() != x for owned, name, x in islice(self._addresses, _SAMPLE))

    @property
    def new_part(self) -> str | None:
        """The name, in its parent, of a submodule that was added, replaced or removed; None: all are as they were."""
        for now, before in zip(self._parts, self._parts_before, strict=True):
            for name in {**before, **now}:
                if now.get(name) is not before.get(name):
                    return name
        return None


class PlainTensors:
    """The tensors of a module that are neither parameters nor buffers, in attributes or in containers there.

    Args:
        module: The module. None: there are no such tensors.
        tensors: Key in the graph → tensor. Tensors that the module's attributes do not hold, such as a constant that
            `forward` creates, are ignored.
    """

    def __init__(self, module: nn.Module | None, tensors: Mapping[str, torch.Tensor]) -> None:
        wanted = {_memory(value): key for key, value in tensors.items() if module and not _owner(module, key)[0]}
        self._places: dict[str, _Place] = {}
        if module is None or not wanted:
            return
        for name, part in module.named_modules():
            for path, value in tensors_in_attributes(part):
                key = wanted.get(_memory(value))
                if key is not None:
                    title = ".".join(filter(None, (name, path[0]))) + "".join(f"[{step!r}]" for step in path[1:])
                    self._places.setdefault(key, _Place(part, path, title))

    def now(self) -> list[Any]:
        """Return the values that these attributes hold now, in order; None for an attribute that is gone."""
        return [place.value() for place in self._places.values()]

    def current(self, key: str, original: torch.Tensor) -> torch.Tensor | None:
        """Return the tensor that a module now holds in the attribute of a tensor; None if it was not in an attribute.

        Raises:
            InputError: the attribute holds something else, or a tensor of another shape, dtype or device.
        """
        place = self._places.get(key)
        if place is None:
            return None
        value = place.value()
        if not isinstance(value, torch.Tensor):
            problem = f"by a {type(value).__name__}" if value is not None else "or removed"
        elif (value.shape, value.dtype, value.device) != (original.shape, original.dtype, original.device):
            problem = f"by a tensor of {value.dtype} with shape {list(value.shape)} on {value.device}"
        else:
            return value
        raise InputError(f"'{place.title}' was replaced {problem} after the module was compiled; compile it again")


@dataclass(frozen=True)
class _Place:
    """The location of a tensor in a module's attributes.

    Attributes:
        owner: The module.
        path: Attribute names, keys and indices that lead to the tensor.
        title: The location's name in messages.
    """

    owner: nn.Module
    path: tuple[Any, ...]
    title: str

    def value(self) -> Any:
        """Return the value at the location; None if it does not exist."""
        value: Any = self.owner.__dict__
        try:
            for step in self.path:
                value = value[step] if isinstance(value, (dict, list, tuple)) else getattr(value, step)
        except (LookupError, TypeError, AttributeError):
            return None
        return value


def _memory(value: torch.Tensor) -> tuple[Any, ...]:
    return value.data_ptr(), value.dtype, value.shape, value.stride()


def tensors_in_attributes(part: nn.Module) -> Iterator[tuple[tuple[Any, ...], torch.Tensor]]:
    """Yield the path and value of each tensor in a module's attributes, except parameters, buffers and submodules."""
    return _tensors_in(part.__dict__, set(), _DEPTH)


def _tensors_in(value: Any, seen: set[int], depth: int) -> Iterator[tuple[tuple[Any, ...], torch.Tensor]]:
    """Yield the path and value of each tensor in nested dicts, lists, tuples and attributes, except in modules."""
    if isinstance(value, torch.Tensor):
        if value.layout is torch.strided:
            yield (), value
        return
    if isinstance(value, (nn.Module, type)) or id(value) in seen or not depth:
        return
    seen.add(id(value))
    if isinstance(value, dict):
        children = [item for item in value.items() if item[0] not in ("_parameters", "_buffers", "_modules")]
    elif isinstance(value, (list, tuple)):
        children = list(enumerate(value))
    else:
        children = list(getattr(value, "__dict__", {}).items())
    for step, child in children:
        for path, tensor in _tensors_in(child, seen, depth - 1):
            yield (step, *path), tensor


def live_tensor(module: nn.Module, key: str, original: torch.Tensor, plain: PlainTensors) -> torch.Tensor:
    """Return the module's current tensor under a key, or `original`, its former value, if there is none now.

    Args:
        key: Key of a parameter, of a buffer, or of one of the `plain` tensors, which lie in other attributes.
    """
    owned, name = _owner(module, key)
    value: torch.Tensor | None = owned.get(name)
    if value is None:
        value = plain.current(key, original)
    return original if value is None else value


def _submodule(module: nn.Module, path: str) -> nn.Module | None:
    try:
        return module.get_submodule(path)
    except AttributeError:
        return None


def _owner(module: nn.Module, key: str) -> tuple[dict[str, Any], str]:
    """Return the dict that holds a parameter or buffer, and its name there.

    The dict is empty if the module that the key names does not exist.
    """
    path, _, name = key.rpartition(".")
    owner = _submodule(module, path)
    if owner is None:
        return {}, name
    return (owner._parameters if name in owner._parameters else owner._buffers), name
