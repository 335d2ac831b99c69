"""`LazyTensors`: a mapping whose keys are known at once, and whose values are made when they are looked up."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeVar

Value = TypeVar("Value")


class LazyTensors(Mapping[str, Value]):
    """Tensors by name, each read or converted when it is looked up; a subclass says how in `__getitem__`.

    Args:
        keys: One or more mappings whose keys, which differ, are the names, in this order; they may still grow.
    """

    def __init__(self, *keys: Mapping[str, object]) -> None:
        self._keys = keys

    def __contains__(self, key: object) -> bool:
        return any(key in names for names in self._keys)

    def __iter__(self) -> Iterator[str]:
        for names in self._keys:
            yield from names

    def __len__(self) -> int:
        return sum(map(len, self._keys))
