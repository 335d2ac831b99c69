"""Names of a package whose modules are imported when they are used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def deferred(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """A package's `__getattr__` (PEP 562), which imports a name's module when the name is first used.

    Args:
        modules: Name → the package's module that defines it.
    """

    def find(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module '{package}' has no attribute '{name}'")
        return getattr(import_module(f"{package}.{modules[name]}"), name)

    return find
