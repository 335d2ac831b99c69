"""Peak rates of this CPU, measured with NumPy, since no table has the bandwidth of a machine's memory."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import numpy as np

from npu_runtime.cpu.levels import this_cpu
from npu_runtime.hardware import Ceilings
from npu_runtime.pieces import in_pieces

_READ = 2**24  # 8-byte words, more than caches hold
_PIECE = 2**19  # of these, for one thread at a time
_EDGE = 1024  # of the square matrices
_ROUNDS = 4
# Features with which a product in 16 bits has a rate of its own.
_MULTIPLIES_16_BITS = {"avx512_bf16", "amx_bf16", "bf16"}


@functools.cache
def measured_ceilings() -> Ceilings:
    """The bandwidth of reading 128 MiB by all threads, and the rate of NumPy's matrix product, the best of four each.

    Takes some tenths of a second, once per process. A 16-bit dtype has float32's rate if the CPU has to widen it, and
    is left out otherwise.
    """
    words = np.ones(_READ, np.uint64)
    bandwidth = words.nbytes / _best(lambda: in_pieces(lambda part: np.bitwise_or.reduce(words[part]), _READ, _PIECE))
    matrix = np.ones((_EDGE, _EDGE), np.float32)
    rate = 2 * _EDGE**3 / _best(lambda: matrix @ matrix)
    widened = () if this_cpu().features & _MULTIPLIES_16_BITS else ("float16", "bfloat16")
    return Ceilings(bandwidth, dict.fromkeys(("float32", *widened), rate))


def _best(work: Callable[[], object]) -> float:
    """The shortest of some runs of `work`, in seconds."""
    seconds = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds)
