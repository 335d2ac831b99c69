"""The table of element-wise ops, as data that every target shares; `ops/elementwise.py` fills it."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from npu_compiler.graph.dtypes import as_int32
from npu_compiler.program.kernels import KernelDecl, Operand


@dataclass(frozen=True)
class Elementwise:
    """One element-wise op.

    Attributes:
        operands: The schema's argument names that may be tensors.
        expr: The result in C, over floats `a`, `b`, `c` (the operands in order) and the attributes. Besides C's math
            library a target has `floor_div(a, b)` and `floor_mod(a, b)`, torch's floor division and remainder.
        integer: The result in C over ints, for when no operand is a float; None where ints become floats first. Besides
            operators a target has `int_pow` and, with quotient 0 and remainder `a` for a divisor of 0, `trunc_div`,
            `trunc_mod`, `floor_div` and `floor_mod`.
        torch: Dotted torch function, called with the operands and the attributes as keywords.
        attrs: Attribute → default.
    """

    name: str
    operands: tuple[str, ...]
    expr: str
    integer: str | None
    torch: str
    attrs: Mapping[str, float | bool] = field(default_factory=dict)


ELEMENTWISE: dict[str, Elementwise] = {}

ELEMENTWISE_DECL = KernelDecl(
    "elementwise",
    "",
    inputs=tuple(Operand(name, optional=True) for name in "abc"),
    outputs=(Operand("out", optional=False),),
    fields={"scalars": "3f", "int_scalars": "3i", "attrs": "3f"},
)


def elementwise_params(params: Mapping[str, Any]) -> dict[str, Any]:
    """An element-wise call's parameters as `ELEMENTWISE_DECL` has them; an absent operand's value is a scalar."""
    scalars = [0 if x is None else x for x in params["scalars"]]
    scalars += [0] * (3 - len(scalars))
    present = {f"has_{name}": x is None for name, x in zip("abc", params["scalars"], strict=False)}
    attrs = [as_float32(params[name]) for name in ELEMENTWISE[params["op"]].attrs]
    return {
        "has_b": False,
        "has_c": False,
        **present,
        "scalars": [as_float32(x) for x in scalars],
        "int_scalars": [as_int32(x) for x in scalars],
        "attrs": attrs + [0.0] * (3 - len(attrs)),
    }


def as_float32(value: float) -> float:
    """The nearest float32; infinite beyond its range, as in a comparison of float32 values with this one."""
    return ctypes.c_float(value).value
