"""Dtypes for which PyTorch's tracing and PyTorch's kernels disagree."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from npu_compiler.errors import IRError


@dataclass(frozen=True)
class Promotion:
    """An op whose result has another dtype than PyTorch's tracing says.

    Attributes:
        applies: Whether the dtypes differ for these arguments of a node.
        computed: The dtype that PyTorch's kernels return.
        description: The kind of call, for a message.
    """

    applies: Callable[[Sequence[Any]], bool]
    computed: torch.dtype
    description: str


def _is_power_of_booleans(args: Sequence[Any]) -> bool:
    base = args[0].meta["val"]
    return isinstance(args[1], bool) and base.dtype == torch.bool


PROMOTIONS: Mapping[Any, Promotion] = {
    torch.ops.aten.pow.Tensor_Scalar: Promotion(
        _is_power_of_booleans, torch.bool, "a boolean to the power of a boolean"
    ),
}


def computed_value(node: Node) -> Any:
    """Return a node's traced value, with the dtype that PyTorch's kernels return.

    Raises:
        IRError: that dtype differs from the traced one, and other nodes were traced from it.
    """
    value: Any = node.meta.get("val")
    promotion = PROMOTIONS.get(node.target)
    if promotion is None or not promotion.applies(node.args) or value.dtype == promotion.computed:
        return value
    if any(user.op != "output" for user in node.users):
        raise IRError(
            f"node '{node.name}': PyTorch traces {promotion.description} as {_name(value.dtype)}, but computes "
            f"{_name(promotion.computed)}; convert one of its operands first"
        )
    return torch.empty_like(value, dtype=promotion.computed)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
