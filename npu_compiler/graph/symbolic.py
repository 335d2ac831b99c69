"""Symbolic sizes: IR whose shapes and attributes depend on sizes that are known when a program is wanted.

In such IR a size may be written `{"$size": "2*s0 + 1"}`. `specialize` puts numbers in for the symbols, which gives
plain IR; nothing is traced again, and neither PyTorch nor SymPy is needed.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable, Mapping
from functools import cache
from types import CodeType
from typing import Any, TypeAlias

from npu_compiler.errors import IRError

Sizes: TypeAlias = Mapping[str, int]
KEY = "$size"


def symbolic(text: str) -> dict[str, str]:
    """The IR's form of an expression."""
    return {KEY: text}


def is_symbolic(value: object) -> bool:
    return isinstance(value, Mapping) and value.keys() == {KEY}


def specialize(value: Any, sizes: Sizes) -> Any:
    """The same IR, or part of IR, with numbers in place of expressions.

    Args:
        sizes: Symbol → its value.

    Raises:
        IRError: an expression has an unknown symbol, or is none.
    """
    if isinstance(value, dict):
        if is_symbolic(value):
            return evaluate(value[KEY], sizes)
        return {key: specialize(item, sizes) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [specialize(item, sizes) for item in value]
    return value


def evaluate(expression: str, sizes: Sizes) -> Any:
    """The value of an expression as SymPy prints it, with PyTorch's functions of sizes.

    Raises:
        IRError: it has an unknown symbol, uses anything but arithmetic, or has no value.
    """
    try:
        return eval(
            _compiled(expression), {"__builtins__": {}}, {**_FUNCTIONS, **sizes}
        )  # only what `_compiled` lets by
    except NameError as error:
        raise IRError(f"size '{expression}': {error}") from error
    except (ArithmeticError, TypeError, ValueError) as error:
        raise IRError(f"size '{expression}' has no value for {dict(sizes)}: {error}") from error


def symbols(expression: str) -> set[str]:
    """The names of the symbols in an expression."""
    tree = ast.parse(expression, mode="eval")
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} - _FUNCTIONS.keys()


@cache
def _compiled(expression: str) -> CodeType:
    try:
        tree = ast.parse(_without_powers(expression), mode="eval")
    except (SyntaxError, ValueError, RecursionError) as error:
        raise IRError(f"size '{expression}' is not an expression: {error}") from error
    for node in ast.walk(tree):
        is_number = isinstance(node, ast.Constant) and isinstance(node.value, (int, float))
        is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS
        if not (is_number or is_call or isinstance(node, _ARITHMETIC)) or isinstance(node, ast.Pow | ast.LShift):
            raise IRError(f"size '{expression}' is not arithmetic: it contains a {type(node).__name__}")
    return compile(tree, "<size>", "eval")


def _without_powers(expression: str) -> str:
    """Powers as a function's calls, which limits them: a file should not be able to keep the interpreter busy."""
    return re.sub(r"(\w+|\([^()]*\))\s*\*\*\s*(\d+)", r"PowByNatural(\1, \2)", expression)


_ARITHMETIC = (
    ast.Expression,
    ast.Name,
    ast.Load,
    ast.BinOp,
    ast.UnaryOp,
    ast.Compare,
    ast.BoolOp,
    ast.operator,
    ast.unaryop,
    ast.cmpop,
    ast.boolop,
)


def _clean_division(a: int, b: int) -> int:
    if a % b:
        raise ValueError(f"{a} is not divisible by {b}")
    return a // b


def _power(a: int, b: int) -> int:
    if b > _MAX_EXPONENT:
        raise ValueError(f"the exponent {b} is too large")
    return int(a**b)


_MAX_EXPONENT = 16

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
