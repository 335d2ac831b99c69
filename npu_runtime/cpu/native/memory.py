"""Memory for packed weights on huge pages; with small pages, a streaming kernel loses a tenth of the bandwidth."""

from __future__ import annotations

import numpy as np

from npu_runtime.cpu.arrays import HUGE_PAGE, huge_pages
from npu_runtime.forks import free_lock

_ALIGNMENT = 64  # a cache line
_CHUNK = 4 * HUGE_PAGE

_lock = free_lock()
_chunk = np.empty(0, np.uint8)


def weight_memory(size: int) -> np.ndarray:
    """Uninitialized bytes that begin on a cache line.

    Less than a huge page is taken from a chunk of several, which lives as long as anything taken from it.

    Raises:
        MemoryError: there is not enough memory.
    """
    global _chunk
    if size >= HUGE_PAGE:
        return huge_pages(size)
    with _lock:
        if _chunk.size < size:
            _chunk = huge_pages(_CHUNK)
        data, _chunk = _chunk[:size], _chunk[-(-size // _ALIGNMENT) * _ALIGNMENT :]
    return data
