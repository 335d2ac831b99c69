"""Times implementations of a kernel call against each other, on memory of their own.

A trial must not change memory that the program keeps, such as a cache that is updated in place, or an arena that holds
other values. So it runs on stand-ins of the same shapes, strides and dtypes. Only constant operands, which are never
written, are the real ones. Layouts that are prepared from them for a trial are freed with it.

A run of a program reads each weight once, from memory, while small activations come from the cache, where the previous
call left them. So before each measurement a buffer larger than the caches is read, then the small activations.
That reading also takes the time in which the threads of PyTorch's or our pool, whichever ran last, stop spinning.
"""

from __future__ import annotations

import copy
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import numpy as np

from npu_runtime.cpu.arrays import HALVES, expand, host_memory, strides_of, with_strides
from npu_runtime.cpu.bound_call import ArrayCall, Candidate
from npu_runtime.hardware import Launch, Operand
from npu_runtime.pieces import in_pieces

_FEWEST_ROUNDS = 3
_MOST_SECONDS = 0.25  # for the rounds of a call; reached only where they do not agree
# Candidates up to this ratio of the best one's time are measured again, for so many rounds at most, until their two
# shortest times differ by no more than the second ratio: noise of a fifth would otherwise decide between them.
_CLOSE, _CLOSE_AGREEMENT, _MOST_ROUNDS = 1.3, 1.03, 12
_AGREEMENT = 1.2  # ratio of the two shortest times of a candidate, up to which they say what it takes
# A candidate that many times slower than the best is not measured further: already after one round, after two.
_HOPELESS, _SLOW = 6.0, 3.0
_SETTING_UP = 0.02  # seconds that a first launch may take longer than the later ones
_WARM_BYTES = 2**20
_PATTERN = 2**15  # elements; PyTorch converts that many in one thread
_PIECE = 2**20  # elements of eight bytes
_LEAST_EVICTED, _MOST_EVICTED = 64 * 2**20, 256 * 2**20  # bytes


def stand_in(call: ArrayCall) -> ArrayCall:
    """A copy of the call on memory of its own, filled with random numbers; constant operands are shared."""
    inputs = [
        array if operand.is_constant else _random(array)
        for array, operand in zip(call.inputs, call.operands, strict=True)
    ]
    if call.name == "attention_kernel" and call.params["has_mask"] and not call.is_constant(3):
        _half_visible(inputs[3])
    return replace(
        call,
        inputs=inputs,
        outputs=[_random(array) for array in call.outputs],
        operands=[_apart(operand) for operand in call.operands],
    )


def _apart(operand: Operand) -> Operand:
    """The operand with a copy of its memory object that shares no prepared layouts with the original."""
    memory = copy.copy(operand.memory)
    memory.prepared = {}
    return replace(operand, memory=memory)


def _random(like: np.ndarray) -> np.ndarray:
    """Normally distributed numbers in the array's layout; zeros if it does not hold floats."""
    strides = strides_of(like)
    steps = ((size - 1) * stride for size, stride in zip(like.shape, strides, strict=True))
    flat = host_memory(1 + sum(steps) if like.size else 0, like.dtype)
    data, pattern = flat.view(np.uint8), np.zeros(_PIECE, np.uint8)
    if like.dtype == np.float32 or like.dtype in HALVES:
        numbers = np.random.default_rng(0).standard_normal(_PATTERN, np.float32)
        pattern = numbers.astype(like.dtype).view(np.uint8)
    for start in range(0, data.size, pattern.size):
        part = data[start : start + pattern.size]
        part[:] = pattern[: part.size]
    return with_strides(flat, like.shape, strides)


def _half_visible(mask: np.ndarray) -> None:
    """Fill an attention mask as that of a half full cache, as kernels that skip hidden keys may then be faster."""
    queries, keys = mask.shape[-2:] if mask.ndim > 1 else (1, mask.shape[-1])
    seen = np.tri(queries, keys, (keys - queries) // 2, dtype=bool)
    values = expand(seen if mask.dtype == bool else np.where(seen, 0.0, -math.inf), mask.shape)
    assert values is not None
    repeated = [1 if stride == 0 else size for size, stride in zip(mask.shape, mask.strides, strict=True)]
    with_strides(mask, repeated, strides_of(mask))[...] = with_strides(values, repeated, strides_of(values))


@dataclass(frozen=True)
class Times:
    """Result of a trial.

    Attributes:
        seconds: Name → seconds of one launch, the least of all rounds; infinite if a launch fails. In the order of
            the candidates, without those that do not handle the call or were not tried.
        agree: Whether the rounds agree; on a busy machine they may not, and another trial may differ.
        spreads: Name → seconds by which the median of all rounds is longer than the least; 0 after a single launch.
    """

    seconds: dict[str, float]
    agree: bool
    spreads: dict[str, float] = field(default_factory=dict)


def measure(call: ArrayCall, candidates: Sequence[Candidate]) -> Times:
    """Time the candidates that handle the call, in interleaved rounds.

    Args:
        call: Result of `stand_in`.
    """
    launches: dict[str, Launch] = {}
    first: dict[str, float] = {}
    for candidate in sorted(candidates, key=lambda candidate: bool(candidate.variant_of)):
        if first.get(candidate.variant_of, 0.0) > _bearable(first):
            continue
        launch = candidate.make(call)
        if launch is not None:
            launches[candidate.name], first[candidate.name] = launch, _first_seconds(launch)
    running = [name for name, seconds in first.items() if math.isfinite(seconds) and seconds <= _bearable(first)]
    taken = {x.name: [] if x.name in running else [first[x.name]] for x in candidates if x.name in first}
    changing = [x for x, operand in zip(call.inputs, call.operands, strict=True) if not operand.is_constant]
    warm = [data for data in map(_bytes, changing) if data.nbytes <= _WARM_BYTES]
    deadline = time.perf_counter() + _MOST_SECONDS
    measured, done = running, 0
    while (running and done == 0) or len(running) > 1:
        if done >= _FEWEST_ROUNDS:
            late = done == _MOST_ROUNDS or time.perf_counter() > deadline
            if late or _agree(taken, running, _CLOSE_AGREEMENT):
                break
        for name in running:
            _evict()
            for data in warm:
                data.max(initial=0)
            start = time.perf_counter()
            launches[name]()
            taken[name].append(time.perf_counter() - start)
        done += 1
        best = min(min(taken[name]) for name in running)
        if done >= _FEWEST_ROUNDS and _agree(taken, running, _AGREEMENT):
            ratio = _CLOSE
        else:
            ratio = _HOPELESS if done == 1 else _SLOW
        running = [name for name in running if min(taken[name]) <= ratio * best]
    return Times(
        {name: min(times) for name, times in taken.items()},
        len(running) < 2 or _agree(taken, running, _AGREEMENT),
        {name: statistics.median(taken[name]) - min(taken[name]) for name in measured},
    )


def _bearable(first: Mapping[str, float]) -> float:
    """The time that a first launch may take without its candidate being given up, from the times of others."""
    return _HOPELESS * min(first.values(), default=math.inf) + _SETTING_UP


def _agree(taken: Mapping[str, Sequence[float]], names: Sequence[str], ratio: float) -> bool:
    """Whether the two shortest times of each candidate differ by no more than that ratio."""
    for name in names:
        least, second, *_ = sorted(taken[name])
        if second > ratio * least:
            return False
    return True


def _first_seconds(launch: Launch) -> float:
    """Seconds of the first launch, in which a library also sets up; infinite if it fails."""
    start = time.perf_counter()
    try:
        launch()
    except Exception:  # whatever a library raises: this candidate cannot be used here
        return math.inf
    return time.perf_counter() - start


def _bytes(array: np.ndarray) -> np.ndarray:
    """All memory from the array's first to its last element, as bytes."""
    steps = ((size - 1) * stride for size, stride in zip(array.shape, strides_of(array), strict=True))
    return with_strides(array, [1 + sum(steps) if array.size else 0], [1]).view(np.uint8)


def _evict() -> None:
    buffer = _larger_than_caches()
    in_pieces(lambda piece: buffer[piece].max(), buffer.size, _PIECE)


@cache
def _larger_than_caches() -> np.ndarray:
    size = min(max(2 * _last_cache_bytes(), _LEAST_EVICTED), _MOST_EVICTED)
    return np.ones(size // 8)


def _last_cache_bytes() -> int:
    """The size of the largest cache of the first core; 0 if the system does not tell."""
    units = {"K": 2**10, "M": 2**20}
    try:
        texts = [path.read_text().strip() for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
        return max((int(text[:-1]) * units[text[-1]] for text in texts), default=0)
    except (OSError, ValueError, KeyError, IndexError):
        return 0


def best_of(seconds: Mapping[str, float], margin: float, extra: Mapping[str, float]) -> str:
    """The fastest candidate's name; a later candidate is only preferred if it is faster by `margin` than all before it.

    Args:
        extra: Name → seconds that a candidate costs besides its own time.
    """
    best, least = next(iter(seconds)), math.inf
    for name in seconds:
        cost = seconds[name] + extra.get(name, 0.0)
        if cost < (1 - margin) * least:
            best, least = name, cost
    return best
