"""Texts about long background work, for programs that show users what this process may be waiting for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

_texts: dict[object, str] = {}


@contextmanager
def background_work(text: str) -> Iterator[Callable[[str], None]]:
    """Context that announces work by a text, which `current_work` may return.

    The yielded function replaces the text.
    """
    work = object()

    def say(text: str) -> None:
        _texts[work] = text

    say(text)
    try:
        yield say
    finally:
        del _texts[work]


def current_work() -> str | None:
    """The text of the background work that has been running for the longest time; None if there is none."""
    return next(iter(list(_texts.values())), None)
