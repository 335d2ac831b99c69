"""Inputs and outputs by name. If there is exactly one, it is also called "input" or "output"."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TypeVar

from npu_compiler.errors import InputError

ValueT = TypeVar("ValueT")


def inputs_by_name(given: Mapping[str, ValueT], expected: Collection[str], whose: str) -> Mapping[str, ValueT]:
    """Check that exactly the expected inputs are given, and return them by their names.

    Args:
        whose: Owner of these inputs, for the message: "program" or "graph".

    Raises:
        InputError: names all that are missing or unknown.
    """
    if len(expected) == 1 and given.keys() == {"input"}:
        return dict(zip(expected, given.values(), strict=True))
    unknown, missing = sorted(given.keys() - set(expected)), sorted(set(expected) - given.keys())
    if unknown or missing:
        problems = [f"unknown input '{name}'" for name in unknown] + [f"missing input '{name}'" for name in missing]
        names = ", ".join(f"'{name}'" for name in expected)
        raise InputError(f"{'; '.join(problems)} (the {whose}'s inputs are {names})")
    return given


class Outputs(dict[str, ValueT]):
    """Output name → value; if there is exactly one, it is also `["output"]`, and `[n]` is the n-th."""

    def __missing__(self, name: str | int) -> ValueT:
        values = list(self.values())
        if name == "output" and len(values) == 1:
            return values[0]
        if isinstance(name, int) and -len(values) <= name < len(values):
            return values[name]
        raise KeyError(name)
