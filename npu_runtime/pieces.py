"""Work on large host arrays by several threads: one thread does not use all of a machine's memory."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import TypeVar

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")

_MOST_THREADS = 12  # by then memory is busy
_AHEAD = 3  # items; more results would only take memory


def in_pieces(work: Callable[[slice], ResultT], size: int, piece: int) -> list[ResultT]:
    """What `work` makes of 0..`size` in slices of `piece`, in order; NumPy's loops run side by side in threads."""
    slices = [slice(start, min(start + piece, size)) for start in range(0, size, piece)]
    return [work(part) for part in slices] if len(slices) < 2 else list(_threads().map(work, slices))


def ahead(work: Callable[[ItemT], ResultT], items: Iterable[ItemT]) -> Iterator[ResultT]:
    """What `work` makes of each item, in order; while one result is used, a few of the next are made."""
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
