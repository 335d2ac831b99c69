"""The table of this package's decompositions: an overload of an op → a function that computes it by other ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

OWN: dict[torch._ops.OpOverload, Callable[..., Any]] = {}

Function = TypeVar("Function", bound=Callable[..., Any])


def decomposes(overloads: str) -> Callable[[Function], Function]:
    """Return a decorator that registers a function as the decomposition of these overloads; it takes their arguments.

    The function is traced on tensors without data, so it may use shapes and dtypes, but not values. In-place variants
    need no function of their own. If the device cannot run the result, PyTorch's own decompositions are tried next.

    Args:
        overloads: Names such as `aten.hypot.default`, separated by spaces. Those that this version of PyTorch lacks are
            ignored.
    """

    def add(function: Function) -> Function:
        for name in overloads.split():
            _, packet, overload = name.split(".")
            op = getattr(getattr(torch.ops.aten, packet, None), overload, None)
            if op is None:
                continue
            if op in OWN:
                raise ValueError(f"op '{name}' has two decompositions")
            OWN[op] = function
        return function

    return add
