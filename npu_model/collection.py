"""`seldom_collected`: a context in which Python's garbage collector runs seldom."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_YOUNG = 50_000  # new objects after which the collector runs


@contextmanager
def seldom_collected() -> Iterator[None]:
    """Let the garbage collector run after many new objects only.

    Lowering and timing make many objects that live long and are in no cycles. By default, the collector visits them,
    and those of all that is imported, such as PyTorch, again and again. A collector that is off, or runs seldom, stays
    so.
    """
    young, *older = gc.get_threshold()
    if not 0 < young < _YOUNG:
        yield
        return
    gc.set_threshold(_YOUNG, *older)
    try:
        yield
    finally:
        gc.set_threshold(young, *older)


__all__ = ["seldom_collected"]
