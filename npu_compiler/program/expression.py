"""Evaluates the C expressions of element-wise ops on NumPy arrays.

An expression is a conditional (`a < 0 ? 0 : a`) over the binary operators of C, unary `-`, `~` and `!`, calls of named
functions, names and numbers.
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from npu_compiler.program.functions import MOST_ROUNDS, Function, Let

Value: TypeAlias = Any  # an array, or a scalar
Names: TypeAlias = Mapping[str, Value]
Evaluator: TypeAlias = Callable[[Names], Value]

_TOKEN = re.compile(
    r"\s*(?:(?P<number>\d+\.?\d*(?:e-?\d+)?f?)|(?P<name>\w+)|(?P<sign>[<>=!]=|&&|\|\||[-+*/<>!~&|^?:(),]))"
)


def _arithmetic(function: Callable[[Value, Value], Value]) -> Callable[[Value, Value], Value]:
    """Wrap a function of two numbers so that it treats booleans as integers, as C does."""
    return lambda a, b: function(_number(a), _number(b))


def _number(value: Value) -> Value:
    return value.astype(np.int32) if getattr(value, "dtype", None) is _BOOL else value


_BOOL = np.dtype(bool)


_LEVELS: tuple[dict[str, Callable[[Value, Value], Value]], ...] = (  # the loosest first
    {"||": np.logical_or},
    {"&&": np.logical_and},
    {"|": _arithmetic(operator.or_)},
    {"^": _arithmetic(operator.xor)},
    {"&": _arithmetic(operator.and_)},
    {"==": operator.eq, "!=": operator.ne},
    {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge},
    {"+": _arithmetic(operator.add), "-": _arithmetic(operator.sub)},
    {"*": _arithmetic(operator.mul), "/": _arithmetic(operator.truediv)},
)
_UNARY: dict[str, Callable[[Value], Value]] = {
    "-": lambda x: -_number(x),
    "~": lambda x: ~_number(x),
    "!": np.logical_not,
}


@functools.cache
def parse(text: str) -> Evaluator:
    """A function that evaluates an expression, given the values of its names and functions.

    Raises:
        ValueError: the text is no such expression.
    """
    reader = _Reader(text)
    evaluator = reader.conditional()
    reader.expect("")
    return evaluator


def called(function: Function, functions: Names, *values: Value) -> Value:
    """The result of a function for the values of its parameters; `functions` are the functions that it may call."""
    names = {**functions, **dict(zip(function.parameters, values, strict=True))}
    for step in function.steps:
        if isinstance(step, Let):
            names[step.name] = parse(step.expr)(names)
            continue
        count = np.clip(np.trunc(np.nan_to_num(parse(step.count)(names))), 0, MOST_ROUNDS)
        names |= {name: parse(first)(names) for name, (first, _) in step.variables.items()}
        for k in range(int(np.max(count, initial=0))):
            names["k"] = np.float32(k)
            after = {name: parse(text)(names) for name, (_, text) in step.variables.items()}
            names |= {name: np.where(k < count, value, names[name]) for name, value in after.items()}
    return parse(function.result)(names)


@dataclass
class _Reader:
    text: str
    position: int = 0
    kind: str = field(default="", init=False)
    token: str = field(default="", init=False)

    def __post_init__(self) -> None:
        self._advance()

    def _advance(self) -> str:
        """Go to the next token, which is empty at the end; returns the previous one."""
        before, match = self.token, _TOKEN.match(self.text, self.position)
        if match is None and self.text[self.position :].strip():
            raise ValueError(f"cannot read {self.text[self.position :]!r} in the expression {self.text!r}")
        self.kind, self.token = ("", "") if match is None else (match.lastgroup or "", match[match.lastgroup or 0])
        self.position = self.position if match is None else match.end()
        return before

    def expect(self, token: str) -> None:
        if self.token != token:
            raise ValueError(f"{self.token!r} instead of {token!r} in the expression {self.text!r}")
        self._advance()

    def conditional(self) -> Evaluator:
        condition = self._binary(0)
        if self.token != "?":
            return condition
        self._advance()
        first = self.conditional()
        self.expect(":")
        second = self.conditional()
        return lambda names: np.where(condition(names), first(names), second(names))

    def _binary(self, level: int) -> Evaluator:
        if level == len(_LEVELS):
            return self._unary()
        left = self._binary(level + 1)
        while self.token in _LEVELS[level]:
            function = _LEVELS[level][self._advance()]
            left = _applied(function, left, self._binary(level + 1))
        return left

    def _unary(self) -> Evaluator:
        if self.token in _UNARY:
            return _applied(_UNARY[self._advance()], self._unary())
        return self._primary()

    def _primary(self) -> Evaluator:
        kind, token = self.kind, self._advance()
        if kind == "number":
            return lambda names: names["number"](token.rstrip("f"))
        if token == "(":
            inner = self.conditional()
            self.expect(")")
            return inner
        if kind != "name":
            raise ValueError(f"{token!r} begins no operand in the expression {self.text!r}")
        if self.token != "(":
            return lambda names: names[token]
        self._advance()
        operands = [self.conditional()]
        while self.token == ",":
            self._advance()
            operands.append(self.conditional())
        self.expect(")")
        return lambda names: names[token](*[operand(names) for operand in operands])


def _applied(function: Callable[..., Value], *operands: Evaluator) -> Evaluator:
    if len(operands) == 2:
        first, second = operands
        return lambda names: function(first(names), second(names))
    return lambda names: function(*[operand(names) for operand in operands])
