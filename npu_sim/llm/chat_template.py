"""Rendering of chat templates: Jinja code by a model's author, in a sandbox with bounds on time and size.

A template cannot reach files or Python's internals (`ImmutableSandboxedEnvironment`). Each turn of a loop and each call
checks the time limit, products and powers are bounded before they are computed, and the text is bounded too.
"""

import json
import time
from collections.abc import Iterator, Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from npu_compiler.errors import InputError

SECONDS = 10.0  # that a template may take; usual ones take a millisecond
LARGEST_TEXT = 2**24  # characters


def render(source: str, values: Mapping[str, Any]) -> str:
    """Render a chat template with these variables.

    Raises:
        InputError: rendering takes too long, or the text becomes too long.
        TemplateError: the template is wrong, or rejects the variables. Templates may raise other errors too.
    """
    environment, template = _compiled(source)
    environment.deadline = time.monotonic() + SECONDS
    return "".join(_bounded(template.generate(values)))


def _bounded(pieces: Iterator[str]) -> Iterator[str]:
    length = 0
    for piece in pieces:
        length += len(piece)
        if length > LARGEST_TEXT:
            raise InputError(f"its text is longer than {LARGEST_TEXT} characters")
        yield piece


class _Bounded(ImmutableSandboxedEnvironment):
    """A Jinja sandbox that ends a template that runs for too long.

    Attributes:
        deadline: The time by `time.monotonic` at which rendering is stopped. Each new rendering moves it, for all
            threads.
    """

    intercepted_binops = frozenset({"*", "**"})
    deadline = float("inf")

    def tick(self) -> str:
        """Raise InputError if the deadline has passed; return an empty text for the template otherwise."""
        if time.monotonic() > self.deadline:
            raise InputError(f"it takes longer than {SECONDS:g} seconds")
        return ""

    def call(self, context: Context, function: Any, *args: Any, **kwargs: Any) -> Any:
        self.tick()
        return super().call(context, function, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute a product or a power.

        Raises InputError if it would repeat a text or raise a number beyond the bounds.
        """
        if operator == "**" and not (abs(left) <= 2**32 and abs(right) <= 64):
            raise InputError(f"it computes {left!r:.20} ** {right!r:.20}")
        sizes = [len(value) if hasattr(value, "__len__") else value for value in (left, right)]
        if any(hasattr(value, "__len__") for value in (left, right)) and sizes[0] * sizes[1] > LARGEST_TEXT:
            raise InputError(f"it repeats something to more than {LARGEST_TEXT} elements")
        return super().call_binop(context, operator, left, right)

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        for loop in source.find_all(nodes.For):
            tick = nodes.Call(nodes.EnvironmentAttribute("tick"), [], [], None, None)
            loop.body.insert(0, nodes.ExprStmt(tick, lineno=loop.lineno))
        return super()._generate(source, *args, **kwargs)


@lru_cache(maxsize=16)
def _compiled(source: str) -> tuple[_Bounded, Template]:
    """The sandbox and the compiled template, with the functions that transformers gives to chat templates."""

    def raise_exception(message: str) -> NoReturn:
        raise TemplateError(message)

    environment = _Bounded(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, **{"ensure_ascii": False, **options})
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment, environment.from_string(source)
