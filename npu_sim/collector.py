"""Pausing Python's garbage collector while many objects are made that stay."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """No garbage collection meanwhile, if there was any before.

    Importing torch or tracing a model makes a million objects, nearly all of which stay; looking at them time and again
    would take a tenth of the time or more.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
