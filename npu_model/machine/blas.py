"""`one_thread`: limits BLAS to one thread while machines run.

On products as small as tiles, several threads are slower than one, much slower where cores are shared; and with one,
results do not depend on the number of cores.
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
    """The process-wide limit of BLAS threads: the first user sets it, the last one restores the previous number.

    Attributes:
        previous: Handle that restores the number of threads from before; None while no limit has been set.
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
    """Limit NumPy's products in the whole process to one thread each, while in the context.

    Machines on several Python threads may use this at once.
    """
    _LIMIT.enter()
    try:
        yield
    finally:
        _LIMIT.leave()


__all__ = ["one_thread"]
