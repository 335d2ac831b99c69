"""Dtypes that PyTorch traces otherwise than it computes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from npu_compiler.errors import IRError


@dataclass(frozen=True)
class Promotion:
    """A dtype of an op's result that PyTorch's tracing gets wrong.

    Attributes:
        applies: Whether it does so for these arguments of a node.
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
    """A node's traced value, with the dtype that PyTorch computes.

    Raises:
        IRError: that differs from the traced dtype, from which the dtypes of other nodes were traced.
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
