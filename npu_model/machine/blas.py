"""`one_thread`: BLAS computes with one thread while machines run.

For products of tiles, more threads take longer than one, much longer where cores are shared; and results do not depend
on the number of cores.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from threading import Lock
from typing import Any

from threadpoolctl import ThreadpoolController


@dataclass
class _Limit:
    """The process's limit: the first user sets it, the last one takes it back.

    Attributes:
        previous: Puts back the number of threads from before.
    """

    lock: Lock = field(default_factory=Lock)
    users: int = 0
    previous: Any = None

    @cached_property
    def controller(self) -> ThreadpoolController:
        return ThreadpoolController()

    def enter(self) -> None:
        with self.lock:
            if not self.users:
                self.previous = self.controller.limit(limits=1, user_api="blas")
            self.users += 1

    def leave(self) -> None:
        with self.lock:
            self.users -= 1
            if not self.users:
                self.previous.restore_original_limits()


_LIMIT = _Limit()


@contextmanager
def one_thread() -> Iterator[None]:
    """Let all NumPy products of the process be computed by one thread each.

    Machines on several threads of Python may do so at once.
    """
    _LIMIT.enter()
    try:
        yield
    finally:
        _LIMIT.leave()


__all__ = ["one_thread"]
