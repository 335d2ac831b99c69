"""The table of element-wise ops, as data that every target shares; `ops/elementwise.py` fills it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Elementwise:
    """One element-wise op.

    Attributes:
        operands: The schema's argument names that may be tensors.
        expr: The result in C, over floats `a`, `b`, `c` (the operands in order) and the attributes.
        torch: Dotted torch function, called with the operands and the attributes as keywords.
        attrs: Attribute → default.
    """

    name: str
    operands: tuple[str, ...]
    expr: str
    torch: str
    attrs: Mapping[str, float | bool] = field(default_factory=dict)


ELEMENTWISE: dict[str, Elementwise] = {}
