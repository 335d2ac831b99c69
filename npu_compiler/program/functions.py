"""Functions of floats beyond C's math library, which the expressions of element-wise ops may call.

A function is data: steps and a result in the language of those expressions (`program/elementwise.py`), over its
parameters and the values of earlier steps. Targets in C paste `c_text`; NumPy evaluates the same steps.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

MOST_ROUNDS = 4096  # of a loop whose length an operand decides


@dataclass(frozen=True)
class Let:
    """A step that gives a name to the value of an expression."""

    name: str
    expr: str


@dataclass(frozen=True)
class Loop:
    """A step of `count` iterations, at most `MOST_ROUNDS`, with `k` = 0, 1, …; an iteration sets all variables at once.

    Attributes:
        variables: Name → (value before the first iteration, value after an iteration).
    """

    count: str
    variables: Mapping[str, tuple[str, str]]


@dataclass(frozen=True, eq=False)
class Function:
    """A function of floats: parameters, steps and a result."""

    name: str
    parameters: tuple[str, ...]
    steps: tuple[Let | Loop, ...]
    result: str

    @property
    def expressions(self) -> list[str]:
        texts = [self.result]
        for step in self.steps:
            texts += [step.expr] if isinstance(step, Let) else [step.count, *sum(step.variables.values(), ())]
        return texts


FUNCTIONS: dict[str, Function] = {}
_CALL = re.compile(r"([a-z_]\w*)\(")


def declare_function(name: str, parameters: str, *steps: Let | Loop, result: str) -> None:
    """Add a function to the table; functions that it calls must have been added before."""
    FUNCTIONS[name] = Function(name, tuple(parameters.split()), steps, result)


def polynomial(coefficients: Sequence[float], x: str) -> str:
    """The expression of a polynomial of the variable `x`; the coefficient of the highest power comes first."""
    text = _literal(coefficients[0])
    for coefficient in coefficients[1:]:
        text = f"({text} * {x} + {_literal(coefficient)})"
    return text


def _literal(value: float) -> str:
    text = f"{abs(value):.9g}"
    text = f"{text if '.' in text or 'e' in text else f'{text}.0'}f"
    return f"(-{text})" if value < 0 else text


@functools.cache
def called_functions(expr: str) -> tuple[Function, ...]:
    """The functions that an expression calls, and those that they call, in the order of their declaration."""
    names: set[str] = set()
    waiting = [expr]
    while waiting:
        for name in set(_CALL.findall(waiting.pop())) & FUNCTIONS.keys() - names:
            names.add(name)
            waiting += FUNCTIONS[name].expressions
    return tuple(function for name, function in FUNCTIONS.items() if name in names)


def c_text(function: Function, qualifiers: str) -> str:
    """The function's definition in C, on one line."""
    lines = []
    for step in function.steps:
        if isinstance(step, Let):
            lines.append(f"const float {step.name} = {step.expr};")
            continue
        lines += [f"float {name} = {first};" for name, (first, _) in step.variables.items()]
        lines.append(f"const int rounds = {_rounds(step)};")
        lines.append("for (int i = 0; i < rounds; i++) { const float k = float(i);")
        lines += [f"const float next_{name} = {after};" for name, (_, after) in step.variables.items()]
        lines += [*(f"{name} = next_{name};" for name in step.variables), "}"]
    parameters = ", ".join(f"float {name}" for name in function.parameters)
    return f"{qualifiers} float {function.name}({parameters}) {{ {' '.join(lines)} return {function.result}; }}"


def _rounds(loop: Loop) -> str:
    count = f"({loop.count})"
    return f"int({count} > 0 ? ({count} < {MOST_ROUNDS} ? {count} : {MOST_ROUNDS}) : 0)"
