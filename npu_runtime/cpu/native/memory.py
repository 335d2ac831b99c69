"""Memory for packed weights on huge pages; with small pages, a streaming kernel loses a tenth of the bandwidth."""

from __future__ import annotations

import contextlib
import mmap

import numpy as np

from npu_runtime.cpu.arrays import address, private_pages
from npu_runtime.forks import free_lock

_ALIGNMENT = 64  # a cache line
_HUGE_PAGE = 2 * 2**20
_CHUNK = 4 * _HUGE_PAGE

_lock = free_lock()
_chunk = np.empty(0, np.uint8)


def weight_memory(size: int) -> np.ndarray:
    """Uninitialized bytes that begin on a cache line.

    Less than a huge page is taken from a chunk of several, which lives as long as anything taken from it.

    Raises:
        MemoryError: there is not enough memory.
    """
    global _chunk
    if size >= _HUGE_PAGE:
        return _huge_pages(size)
    with _lock:
        if _chunk.size < size:
            _chunk = _huge_pages(_CHUNK)
        data, _chunk = _chunk[:size], _chunk[-(-size // _ALIGNMENT) * _ALIGNMENT :]
    return data


def _huge_pages(size: int) -> np.ndarray:
    try:
        memory = private_pages(size + _HUGE_PAGE)
    except OSError as error:
        raise MemoryError(f"{size} bytes for packed weights: {error}") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # this kernel has none
            memory.madvise(mmap.MADV_HUGEPAGE)
    data = np.frombuffer(memory, np.uint8)
    skip = -address(data) % _HUGE_PAGE
    return data[skip : skip + size]
