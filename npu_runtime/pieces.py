"""Work on large host arrays piece by piece, by several threads: one thread does not use all of a machine's memory."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TypeVar

ResultT = TypeVar("ResultT")

_MOST_THREADS = 12  # by then memory is busy


def in_pieces(work: Callable[[slice], ResultT], size: int, piece: int) -> list[ResultT]:
    """What `work` makes of 0..`size` in slices of `piece`, in order; NumPy's loops run side by side in threads."""
    slices = [slice(start, min(start + piece, size)) for start in range(0, size, piece)]
    return [work(part) for part in slices] if len(slices) < 2 else list(_threads().map(work, slices))


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(os.cpu_count() or 1, _MOST_THREADS), "pieces")
