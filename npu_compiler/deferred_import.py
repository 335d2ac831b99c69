"""Lazy imports of a package's public names: a module is imported when one of its names is first used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from npu_compiler.errors import InputError
from npu_compiler.installing import missing_package


def deferred(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """A package's `__getattr__` (PEP 562), which imports a name's module when the name is first used.

    If the import fails because an optional dependency is missing, the error says how to install it.

    Args:
        modules: Name → the package's module that defines it.
    """

    def find(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module '{package}' has no attribute '{name}'")
        try:
            module = import_module(f"{package}.{modules[name]}")
        except ModuleNotFoundError as error:
            reason = missing_package(error)
            if reason is None:
                raise
            raise InputError(f"{package}.{name}: {reason}") from error
        return getattr(module, name)

    return find
