"""The table of our own decompositions: an overload of an op → a function that does the same in other ops of PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

OWN: dict[torch._ops.OpOverload, Callable[..., Any]] = {}

Function = TypeVar("Function", bound=Callable[..., Any])


def decomposes(overloads: str) -> Callable[[Function], Function]:
    """Decorator: the function is what these overloads decompose into; it takes their arguments.

    It is traced on tensors without data, so it may ask for shapes and dtypes, but not for values. In-place variants
    need none of their own. Where the device does not run it, PyTorch's own decompositions are tried next.

    Args:
        overloads: Names such as `aten.hypot.default`, separated by spaces. One that this PyTorch lacks is left out.
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
