"""Suppression of what PyTorch prints and logs when a trace fails; the error says it in a sentence."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def quiet_tracing() -> Iterator[None]:
    """Suppress PyTorch's warnings and errors in this thread's logs within this context.

    Text that this thread writes to stderr is held back until the context ends, and dropped if an exception ends it.
    Other threads are not affected.
    """
    mute = _Mute()
    handlers = [handler for logger in _torch_loggers() for handler in logger.handlers]
    for handler in handlers:
        handler.addFilter(mute)
    held = _Held(sys.stderr)
    sys.stderr = held
    try:
        yield
        held.release()
    finally:
        held.is_over = True
        if sys.stderr is held:
            sys.stderr = held.stream
        for handler in handlers:
            handler.removeFilter(mute)


def _torch_loggers() -> list[logging.Logger]:
    loggers = [logging.getLogger("torch"), *logging.Logger.manager.loggerDict.values()]
    return [x for x in loggers if isinstance(x, logging.Logger) and (x.name == "torch" or x.name.startswith("torch."))]


class _Mute(logging.Filter):
    def __init__(self) -> None:
        super().__init__()
        self._thread = threading.get_ident()

    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno < logging.WARNING or record.thread != self._thread


class _Held:
    """A stream that holds back what one thread writes; after its context ends, it passes everything on.

    Someone may still refer to it then.
    """

    def __init__(self, stream: Any) -> None:
        self.stream, self.is_over = stream, False
        self._thread = threading.get_ident()
        self._text: list[str] = []

    def write(self, text: str) -> int:
        if self.is_over or threading.get_ident() != self._thread:
            return int(self.stream.write(text) or 0)
        self._text.append(text)
        return len(text)

    def release(self) -> None:
        """Write the text that was held back to the underlying stream."""
        if self._text:
            self.stream.write("".join(self._text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)
