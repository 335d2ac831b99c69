"""Work on large host arrays by several threads, as one thread does not use all of a machine's memory bandwidth.

1. Every result is returned in the order of its slice or item, whatever thread finishes first.
2. `in_pieces` returns when all of its work is done, so the caller may read what the work wrote.
3. `ahead` has at most `_AHEAD` + 1 results that the caller has not taken, which bounds its memory.
4. An error in `work` is raised in the caller, in place of the result of its slice or item.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import TypeVar

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")

_MOST_THREADS = 12  # more of them do not copy faster
_AHEAD = 3  # items; more would take memory without hiding more latency


def in_pieces(work: Callable[[slice], ResultT], size: int, piece: int) -> list[ResultT]:
    """The results of `work` for slices of `piece` indices of 0..`size`, computed by several threads.

    NumPy's loops release the GIL.
    """
    slices = [slice(start, min(start + piece, size)) for start in range(0, size, piece)]
    return [work(part) for part in slices] if len(slices) < 2 else list(_threads().map(work, slices))


def ahead(work: Callable[[ItemT], ResultT], items: Iterable[ItemT]) -> Iterator[ResultT]:
    """The results of `work` for each item; while the caller uses one, the next few are computed."""
    with ThreadPoolExecutor(_AHEAD, "ahead") as pool:
        under_way: deque[Future[ResultT]] = deque()
        for item in items:
            under_way.append(pool.submit(work, item))
            if len(under_way) > _AHEAD:
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(os.cpu_count() or 1, _MOST_THREADS), "pieces")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_threads.cache_clear)  # a forked child has none of these threads
