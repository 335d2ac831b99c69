"""The table of this package's decompositions: an overload of an op → a function that computes it by other ops.

A second table says which calls are never decomposed: an overload → a function of a call's arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

OWN: dict[torch._ops.OpOverload, Callable[..., Any]] = {}
STAYS: dict[torch._ops.OpOverload, Callable[..., bool]] = {}

Function = TypeVar("Function", bound=Callable[..., Any])


def decomposes(overloads: str) -> Callable[[Function], Function]:
    """Return a decorator that registers a function as the decomposition of these overloads; it takes their arguments.

    The function is traced on tensors without data, so it may use shapes and dtypes, but not values. In-place variants
    need no function of their own. If the device cannot run the result, PyTorch's own decompositions are tried next.

    Args:
        overloads: Names such as `aten.hypot.default`, separated by spaces. Those that this version of PyTorch lacks are
            ignored.
    """
    return _adds_to(OWN, overloads)


def stays_where(overloads: str) -> Callable[[Function], Function]:
    """Return a decorator that registers a function that tells whether a call of these overloads is never decomposed.

    It is given the call's arguments, tensors without data. PyTorch's own decompositions are not tried either.

    Args:
        overloads: As in `decomposes`.
    """
    return _adds_to(STAYS, overloads)


def _adds_to(table: dict[torch._ops.OpOverload, Callable[..., Any]], overloads: str) -> Callable[[Function], Function]:
    def add(function: Function) -> Function:
        for name in overloads.split():
            _, packet, overload = name.split(".")
            op = getattr(getattr(torch.ops.aten, packet, None), overload, None)
            if op is None:
                continue
            if op in table:
                raise ValueError(f"op '{name}' has two functions in one table")
            table[op] = function
        return function

    return add
