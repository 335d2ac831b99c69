"""Long work in the background, in words, for whoever shows a user what this process may be waiting for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

_texts: dict[object, str] = {}


@contextmanager
def background_work(text: str) -> Iterator[Callable[[str], None]]:
    """Context in which `current_work` returns the text; the yielded function replaces it by its argument."""
    work = object()

    def say(text: str) -> None:
        _texts[work] = text

    say(text)
    try:
        yield say
    finally:
        del _texts[work]


def current_work() -> str | None:
    """The work that goes on, the longest first; None where there is none."""
    return next(iter(list(_texts.values())), None)
