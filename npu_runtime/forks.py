"""Locks in a process that forks: the forked child has only the thread that forked it, so others' locks would stay held.

1. A device's lock is taken before a fork, so that the child gets the device between two calls, not during one of
   another thread, whose work would stay unfinished in the child.
2. If another thread's call does not end within `_PATIENCE`, the child gets the device with a lock that refuses.
3. Every other lock is free in the child, whoever held it: the state that these guard is valid at every step.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from typing import Any, Protocol

from npu_compiler.errors import DeviceError

_PATIENCE = 10.0  # seconds
_ATTEMPT = 0.05  # seconds to wait for one lock with others taken, which somebody may hold it for


class Locked(Protocol):
    """An object whose attribute `lock` is held throughout each call on it."""

    lock: Any


class _RefusingLock:
    """A lock that raises `DeviceError`, for a device that another thread was using at the fork."""

    def __enter__(self) -> bool:
        raise DeviceError(
            "this process was forked while another thread was in a call on the device; fork between calls, start the "
            "process with the method 'spawn', or open the device after the fork"
        )

    def __exit__(self, *_: object) -> None:
        """Do nothing: never reached, since entering fails."""


_owners: weakref.WeakSet[Locked] = weakref.WeakSet()
_free_locks: weakref.WeakSet[Any] = weakref.WeakSet()
_forking = threading.local()


def call_lock(owner: Locked) -> Any:
    """A new reentrant lock for an object's attribute `lock`, registered so that a fork waits for it (rules 1 and 2)."""
    _owners.add(owner)
    return threading.RLock()


def free_lock() -> threading.Lock:
    """A new lock that is free in a forked child (rule 3)."""
    lock = threading.Lock()
    _free_locks.add(lock)
    return lock


def _before_fork() -> None:
    owners = list(_owners)
    deadline = time.monotonic() + _PATIENCE
    _forking.taken = _take(owners)
    while len(_forking.taken) < len(owners) and time.monotonic() < deadline:
        _release(_forking.taken)
        _forking.taken = _take(owners)


def _take(owners: list[Locked]) -> list[Any]:
    """Take the locks of all owners that become free in time, and return them."""
    taken = []
    for owner in owners:
        lock = owner.lock
        if isinstance(lock, _RefusingLock) or lock.acquire(timeout=_ATTEMPT):
            taken.append(lock)
    return taken


def _release(taken: list[Any]) -> None:
    for lock in taken:
        if not isinstance(lock, _RefusingLock):
            lock.release()


def _in_parent() -> None:
    _release(_forking.taken)


def _in_child() -> None:
    taken = {id(lock) for lock in _forking.taken}
    _release(_forking.taken)
    for owner in _owners:
        if id(owner.lock) not in taken:
            owner.lock = _RefusingLock()
    for lock in _free_locks:
        lock._at_fork_reinit()  # as Python's own modules have theirs made anew


if hasattr(os, "register_at_fork"):  # not on Windows, which does not fork
    os.register_at_fork(before=_before_fork, after_in_parent=_in_parent, after_in_child=_in_child)
