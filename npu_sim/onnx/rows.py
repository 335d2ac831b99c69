"""The table of ONNX operators: for each a function that computes it with those of PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

import torch

Result: TypeAlias = torch.Tensor | tuple[torch.Tensor, ...] | list[torch.Tensor]
Converter: TypeAlias = Callable[..., Result | None]
Function = TypeVar("Function", bound=Converter)
ALL = frozenset(range(64))  # every input
MOST_NUMBERED = 2**16


class Refusal(Exception):
    """A node says something that has no converter; the message is the rest of a sentence about it."""


@dataclass(frozen=True)
class Call:
    """A node as its converter sees it.

    Attributes:
        op: The operator.
        opset: Version of the operator's domain that the model imports.
        attrs: Attributes: numbers, strings, lists of them, and tensors.
        outputs: Number of outputs that have a name.
        dtypes: Dtypes of the inputs.
    """

    op: str
    opset: int
    attrs: Mapping[str, Any] = field(default_factory=dict)
    outputs: int = 1
    dtypes: tuple[torch.dtype | None, ...] = ()

    def attr(self, name: str, default: Any = None) -> Any:
        """Return an attribute, or the default where it is left out."""
        return self.attrs.get(name, default)


@dataclass(frozen=True)
class Row:
    """An operator.

    Attributes:
        convert: Function of a `Call` and the inputs, None for those left out; returns the outputs, or None where the
            nodes by which ONNX defines the operator are to compute them.
        static: Indices of the inputs that are passed as plain numbers and lists, and have to be constants.
        hints: Indices of the inputs that are passed so where they are constants, else as tensors.
        scalars: Whether constants without dimensions are passed as numbers.
        folds: Whether the results are constants where all inputs are.
        of_shape: Whether the results depend only on the input's shape, so that they are always constants.
    """

    convert: Converter
    static: Collection[int] = ()
    hints: Collection[int] = ()
    scalars: bool = False
    folds: bool = True
    of_shape: bool = False


def node_title(name: str, op: str) -> str:
    """Return the words for a node in a message; names from a file are on one line."""
    return f"node '{shown(name)}' ({shown(op)})"


def shown(name: str) -> str:
    """Return a name of a file for a message: on one line, and not too long."""
    return (name if name.isprintable() else ascii(name)[1:-1])[:80]


def number(value: Any) -> Any:
    """Return the number that a constant of at most one element is; None and tensors as they are."""
    while isinstance(value, list) and len(value) == 1:
        value = value[0]
    return value


def numbered(count: int, what: str) -> range:
    """Return the numbers below `count`, for a loop that runs while a file is read.

    Args:
        what: Noun in the plural for the message, such as "places along an axis".

    Raises:
        Refusal: There are more than `MOST_NUMBERED`, with which a small file could keep its reader for minutes.
    """
    if count > MOST_NUMBERED:
        raise Refusal(f"has {count} {what}; known are at most {MOST_NUMBERED}")
    return range(count)


ROWS: dict[str, Row] = {}
"""Operator of the domain `ai.onnx` → its row."""


def converts(*ops: str, **facts: Any) -> Callable[[Function], Function]:
    """Register a function as the converter of some operators; `facts` are fields of their rows."""

    def register(function: Function) -> Function:
        for op in ops:
            ROWS[op] = Row(function, **facts)
        return function

    return register
