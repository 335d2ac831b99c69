"""Interleaved timing: each round runs every contender once, so a slowdown of the machine affects all equally."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

PAUSE = 0.05  # seconds
WARM = 0.02  # seconds
LEAST_ROUNDS = 3
LONG = 0.5  # seconds
ENOUGH = 0.02  # seconds

Timer = Callable[[], float]  # runs a contender and returns the seconds of one run


@dataclass(frozen=True)
class Result:
    """The times of one contender in seconds: median and minimum over the rounds."""

    median: float
    best: float


def wall_time(run: Callable[[], object]) -> Timer:
    """Return a timer of a function by the wall clock."""

    def timer() -> float:
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    return timer


def settled(timer: Timer) -> Timer:
    """Wrap a timer for contenders that compute with threads of this process.

    Each timed run follows a pause, because the worker threads of the previous contender keep spinning for a while after
    its last run. It also follows untimed runs of the same contender for at least `WARM` seconds, because clock rate and
    caches recover from the pause only then. Long runs need no untimed one.
    """

    def run() -> float:
        time.sleep(PAUSE)
        elapsed, warm = timer(), time.perf_counter() + WARM
        if elapsed < LONG:
            while time.perf_counter() < warm:
                timer()
            elapsed = timer()
        return elapsed

    return run


def back_to_back(run: Callable[[], object], wait: Callable[[], object] = lambda: None) -> Timer:
    """Return a timer that averages over as many consecutive calls as take `ENOUGH` seconds.

    Args:
        wait: Waits until the device has finished what the calls have launched.
    """

    def timer() -> float:
        run()
        count = 1
        while True:
            wait()
            start = time.perf_counter()
            for _ in range(count):
                run()
            wait()
            elapsed = time.perf_counter() - start
            if elapsed > ENOUGH:
                return elapsed / count
            count *= 4

    return timer


def interleave(
    timers: Mapping[str, Timer], rounds: int, warmup: int = 0, limit: float = float("inf")
) -> dict[str, Result]:
    """Time each contender once per round, after `warmup` unmeasured rounds.

    Args:
        timers: Contender → timer.
        rounds: Maximum number of rounds.
        warmup: Number of unmeasured rounds.
        limit: Seconds after which no further round begins, if there have been `LEAST_ROUNDS`.
    """
    seconds: dict[str, list[float]] = {name: [] for name in timers}
    end = time.perf_counter() + limit
    for index in range(warmup + rounds):
        if index >= warmup + LEAST_ROUNDS and time.perf_counter() > end:
            break
        for name, timer in timers.items():
            elapsed = timer()
            if index >= warmup:
                seconds[name].append(elapsed)
    return {name: Result(statistics.median(values), min(values)) for name, values in seconds.items()}


def read_bandwidth(gigabytes: float = 0.5, rounds: int = 5) -> float:
    """Measure the memory read bandwidth of all threads in bytes per second; it bounds the time of a decode step."""
    import torch

    data = torch.ones(int(gigabytes * 1e9 / 8), dtype=torch.int64)
    best = min(interleave({"read": settled(wall_time(data.sum))}, rounds, warmup=2)["read"].best for _ in range(2))
    return data.numel() * data.element_size() / best


def matrix_rate(size: int = 2048, rounds: int = 4) -> float:
    """Measure PyTorch's float32 matrix multiplication in FLOP/s, which bounds the time of compute-bound steps."""
    import torch

    a, b = torch.randn(size, size), torch.randn(size, size)
    return 2 * size**3 / interleave({"matmul": settled(wall_time(lambda: a @ b))}, rounds, warmup=2)["matmul"].best
