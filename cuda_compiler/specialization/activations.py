"""Activations that CUDA kernels apply to their results: those that every device has, and further element-wise ops.

The latter are named with their attributes, as in `leaky_relu(negative_slope=0.1)`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from npu_compiler.program.elementwise import (
    ACTIVATION_OF,
    ACTIVATIONS,
    ELEMENTWISE,
    Elementwise,
    elementwise_kernel,
)
from npu_compiler.program.kernels import KernelCall

_DIVISIONS = re.compile(r"\bfloor_(div|mod)\(")  # which only element-wise kernels have


def activation_of(call: KernelCall) -> str | None:
    """The activation that a call computes; None if it is no element-wise op of one tensor, or kernels lack it."""
    decl = elementwise_kernel(call)
    if decl is None or list(call.params["scalars"]) != [None]:
        return None
    op = decl.op
    if op.name in ACTIVATION_OF:
        return ACTIVATION_OF[op.name]
    return activation_text(op, call.params) if kernels_have(op) else None


def kernels_have(op: Elementwise) -> bool:
    """Whether kernels can apply an element-wise op to their results, with what their templates define."""
    return op.name != "copy" and not op.functions and _DIVISIONS.search(op.expr) is None


def activation_text(op: Elementwise, params: Mapping[str, Any]) -> str:
    """An element-wise op with the values of its attributes, as the name of an activation."""
    return f"{op.name}({', '.join(f'{name}={float(params[name])!r}' for name in op.attrs)})"


def op_of(activation: str) -> tuple[Elementwise, Mapping[str, float]]:
    """The element-wise op of an activation, and its attributes; of `none`, the copy."""
    name, _, rest = activation.partition("(")
    if not rest:
        return ELEMENTWISE[ACTIVATIONS.get(name, "copy")], {}
    pairs = (pair.split("=") for pair in rest.removesuffix(")").split(", ") if pair)
    return ELEMENTWISE[name], {attr: float(value) for attr, value in pairs}
