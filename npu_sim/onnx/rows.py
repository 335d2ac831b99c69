"""The table of ONNX operators, with a function for each that computes it by PyTorch."""

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
    """Raised for a node that cannot be converted; the message continues a sentence that begins with the node."""


@dataclass(frozen=True)
class Call:
    """The facts about an ONNX node that its converter needs.

    Attributes:
        op: The operator.
        opset: Version of the operator's domain that the model imports.
        attrs: Attributes: numbers, strings, lists of them, and tensors.
        outputs: Number of outputs that have a name.
        dtypes: Dtypes of the inputs; None for those left out.
    """

    op: str
    opset: int
    attrs: Mapping[str, Any] = field(default_factory=dict)
    outputs: int = 1
    dtypes: tuple[torch.dtype | None, ...] = ()

    def attr(self, name: str, default: Any = None) -> Any:
        """Return an attribute, or the default if the node does not have it."""
        return self.attrs.get(name, default)


@dataclass(frozen=True)
class Row:
    """The converter of an operator, and how it is called.

    Attributes:
        convert: Function of a `Call` and the inputs, None for those left out. It returns the outputs, or None to
            request the operator's definition by other operators.
        static: Indices of the inputs that must be constants and are passed as plain numbers and lists.
        hints: Indices of the inputs that are passed as numbers and lists if they are constants, else as tensors.
        scalars: Whether constants without dimensions are passed as numbers.
        folds: Whether the results are constants if all inputs are.
        of_shape: Whether the results depend only on the input's shape, so that they are always constants.
    """

    convert: Converter
    static: Collection[int] = ()
    hints: Collection[int] = ()
    scalars: bool = False
    folds: bool = True
    of_shape: bool = False


def node_title(name: str, op: str) -> str:
    """Return the description of a node for error messages, with names from the file printed on one line."""
    return f"node '{shown(name)}' ({shown(op)})"


def shown(name: str) -> str:
    """Return a name from a file for a message: on one line, and at most 80 characters."""
    return (name if name.isprintable() else ascii(name)[1:-1])[:80]


def number(value: Any) -> Any:
    """Return the number in nested lists of one element; other values, such as None and tensors, as they are."""
    while isinstance(value, list) and len(value) == 1:
        value = value[0]
    return value


def numbered(count: int, what: str) -> range:
    """Return the numbers below `count`, for a loop that runs while a file is read.

    Args:
        count: The number of iterations.
        what: Noun in the plural for the message, such as "places along an axis".

    Raises:
        Refusal: `count` is above `MOST_NUMBERED`; a small malicious file could otherwise keep its reader busy.
    """
    if count > MOST_NUMBERED:
        raise Refusal(f"has {count} {what}; known are at most {MOST_NUMBERED}")
    return range(count)


ROWS: dict[str, Row] = {}
"""Operator of the domain `ai.onnx` → its converter."""


def converts(*ops: str, **facts: Any) -> Callable[[Function], Function]:
    """Return a decorator that registers a function as the converter of some operators.

    Args:
        ops: Names of the operators.
        facts: Fields of `Row`.
    """

    def register(function: Function) -> Function:
        for op in ops:
            ROWS[op] = Row(function, **facts)
        return function

    return register
