"""Symbolic sizes: IR with shapes and attributes that depend on sizes which are chosen later.

In such IR a size may be written `{"$size": "2*s0 + 1"}`. `specialize` replaces symbols by numbers, which gives plain
IR; nothing is traced again, and neither PyTorch nor SymPy is needed.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeAlias

from npu_compiler.errors import IRError

Sizes: TypeAlias = Mapping[str, int]
KEY = "$size"


def symbolic(text: str) -> dict[str, str]:
    """The form in which IR contains an expression: `{"$size": text}`."""
    return {KEY: text}


def is_symbolic(value: object) -> bool:
    return isinstance(value, Mapping) and value.keys() == {KEY}


def specialize(value: Any, sizes: Sizes) -> Any:
    """IR, or a part of it, with expressions replaced by their values.

    Args:
        sizes: Symbol → its value.

    Raises:
        IRError: an expression has an unknown symbol, or is malformed.
    """
    if isinstance(value, dict):
        if is_symbolic(value):
            return evaluate(value[KEY], sizes)
        return {key: specialize(item, sizes) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [specialize(item, sizes) for item in value]
    return value


def evaluate(expression: Any, sizes: Sizes) -> Any:
    """The value of an expression of sizes, in SymPy's notation with PyTorch's functions.

    Raises:
        IRError: it has an unknown symbol, uses anything but arithmetic, is too long or too deep, or has no value that
            fits in 64 bits.
    """
    value_of = _compiled(expression) if isinstance(expression, str) else None
    if value_of is None:
        raise IRError(f"{expression!r:.80} is no size: sizes are numbers or expressions")
    try:
        return value_of(sizes)
    except KeyError as error:
        raise IRError(f"size '{expression:.80}': the symbol {error} is not known") from None
    except (ArithmeticError, TypeError, ValueError) as error:
        raise IRError(f"size '{expression:.80}' has no value for {dict(sizes)!r:.200}: {error}") from error


def symbols(expression: str) -> set[str]:
    """The names of the symbols in an expression. Raises `IRError` if the expression is malformed."""
    nodes = ast.walk(_parsed(expression))
    return {node.id for node in nodes if isinstance(node, ast.Name)} - _FUNCTIONS.keys()


# A file should not be able to keep the interpreter busy: an expression is at most as long and as deep as this, and each
# of its intermediate values fits in 64 bits.
MAX_LENGTH = 10_000
MAX_DEPTH = 100
_LIMIT = 2**63


def _parsed(expression: str) -> ast.expr:
    if len(expression) > MAX_LENGTH:
        raise IRError(f"size '{expression:.80}…' is longer than {MAX_LENGTH} characters")
    try:
        return ast.parse(expression, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # the last for what is nested too deep
        raise IRError(f"size '{expression:.80}' is not an expression: {error or 'it is too deep'}") from None


@lru_cache(4096)
def _compiled(expression: str) -> Callable[[Sizes], Any]:
    """A function from sizes to the value of an expression, parsed once."""
    try:
        return _compile(_parsed(expression), 0)
    except _NoArithmeticError as error:
        raise IRError(f"size '{expression:.80}' is not arithmetic: it {error}") from None


class _NoArithmeticError(Exception):
    """An error that says which part of an expression is not arithmetic on sizes."""


def _compile(node: ast.AST, depth: int) -> Callable[[Sizes], Any]:
    if depth > MAX_DEPTH:
        raise _NoArithmeticError(f"is nested deeper than {MAX_DEPTH} levels")
    match node:
        case ast.Constant(value=int() | float() as number):
            return lambda sizes: _fitting(number)
        case ast.Name(id=name):
            return lambda sizes: _fitting(sizes[name])
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
            return _applied(_UNARY[type(op)], [operand], depth)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _applied(_BINARY[type(op)], [left, right], depth)
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _COMPARISONS:
            return _applied(_COMPARISONS[type(op)], [left, right], depth)
        case ast.BoolOp(op=op, values=operands):
            function = all if isinstance(op, ast.And) else any
            return _applied(lambda *values: function(values), operands, depth)
        case ast.Call(func=ast.Name(id=name), args=operands, keywords=[]) if name in _FUNCTIONS:
            return _applied(_FUNCTIONS[name], operands, depth)
    raise _NoArithmeticError(f"contains a {type(node).__name__}")


def _applied(function: Callable[..., Any], operands: Sequence[ast.AST], depth: int) -> Callable[[Sizes], Any]:
    compiled = [_compile(operand, depth + 1) for operand in operands]
    return lambda sizes: _fitting(function(*[operand(sizes) for operand in compiled]))


def _fitting(value: Any) -> Any:
    if not isinstance(value, (int, float)):
        raise TypeError(f"{value!r:.80} is no number")
    if not -_LIMIT <= value < _LIMIT:  # nor is NaN
        raise OverflowError("a number in it does not fit in 64 bits")
    return value


def _clean_division(a: int, b: int) -> int:
    if a % b:
        raise ValueError(f"{a} is not divisible by {b}")
    return a // b


def _power(a: int, b: int) -> int:
    if not isinstance(b, int):
        raise TypeError(f"the exponent {b} is not whole")
    if not 0 <= b < 64 or (b > 1 and abs(a) ** 2 > _LIMIT):
        raise OverflowError(f"the power {a}**{b} does not fit in 64 bits")
    return int(a**b)


_UNARY: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Invert: lambda a: not a if isinstance(a, bool) else ~a,
    ast.Not: operator.not_,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}
_BINARY: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Mult: operator.mul,
    ast.Pow: _power,
    ast.RShift: operator.rshift,
    ast.Sub: operator.sub,
}
_COMPARISONS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Eq: operator.eq,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.NotEq: operator.ne,
}

# PyTorch's functions of symbolic sizes (torch.utils._sympy.functions) by the names under which SymPy prints them.
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "Abs": abs,
    "CeilToInt": math.ceil,
    "CleanDiv": _clean_division,
    "FloatPow": lambda a, b: float(a) ** float(b),
    "FloatTrueDiv": lambda a, b: a / b,
    "FloorDiv": lambda a, b: a // b,
    "FloorToInt": math.floor,
    "Identity": lambda a: a,
    "IntTrueDiv": lambda a, b: a / b,
    "Max": max,
    "Min": min,
    "Mod": lambda a, b: a % b,
    "ModularIndexing": lambda a, b, c: a // b % c,
    "OpaqueUnaryFn_sqrt": math.sqrt,
    "PowByNatural": _power,
    "PythonMod": lambda a, b: a % b,
    "RoundToInt": round,
    "ToFloat": float,
    "TruncToFloat": lambda a: float(math.trunc(a)),
    "TruncToInt": math.trunc,
    "ceiling": math.ceil,
    "floor": math.floor,
    "sqrt": math.sqrt,
}
