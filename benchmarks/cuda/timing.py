"""Timing on an NVIDIA GPU: contenders in turns by device events, the GPU's peak rates, and time per kernel."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.figures import EAGER
from benchmarks.timing import Result, Timer, interleave
from cuda_runtime import CUDABackend
from npu_compiler import CompiledProgram

ROUND_SECONDS = 0.04
FEWEST_CALLS, MOST_CALLS = 3, 200


@dataclass(frozen=True)
class Budget:
    """Limits on the time that a measurement takes.

    Attributes:
        rounds: The number of timing rounds.
        may_compile: Returns whether there is time left to start another `torch.compile`.
    """

    rounds: int
    may_compile: Callable[[], bool]


@dataclass(frozen=True)
class Contender:
    """A step that can be timed.

    Attributes:
        run: Enqueues one step.
        timed: Measures a function's device time in seconds, by events on the stream that `run` uses.
    """

    run: Callable[[], object]
    timed: Callable[[Callable[[], None]], float]


def torch_contender(run: Callable[[], object]) -> Contender:
    """Return a contender that runs a step on PyTorch's current stream."""
    return Contender(run, torch_timed)


def torch_timed(launch: Callable[[], object]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    launch()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000


def time_in_turn(contenders: Mapping[str, Contender], rounds: int) -> dict[str, Result]:
    """Return the seconds per step of each contender.

    Each round times many consecutive steps of each contender, host time included.
    """
    return interleave({name: steady(contender) for name, contender in contenders.items()}, rounds)


def steady(contender: Contender, warmup: int = 3) -> Timer:
    """Return a timer of a step, which averages over as many steps as take about `ROUND_SECONDS`.

    Args:
        warmup: Number of steps to run now, before the number of steps is chosen.
    """
    for _ in range(warmup):
        contender.run()
    torch.cuda.synchronize()
    calls = min(MOST_CALLS, max(FEWEST_CALLS, round(ROUND_SECONDS / _seconds_a_call(contender, 3))))

    def timer() -> float:
        torch.cuda.synchronize()
        contender.run()  # untimed: it warms the GPU's caches as a previous step would
        return _seconds_a_call(contender, calls)

    return timer


def medians(results: Mapping[str, Result]) -> dict[str, float]:
    """Return the median milliseconds by contender."""
    return {name: 1000 * result.median for name, result in results.items()}


def _seconds_a_call(contender: Contender, calls: int) -> float:
    def several() -> None:
        for _ in range(calls):
            contender.run()

    return contender.timed(several) / calls


@dataclass(frozen=True)
class Ceilings:
    """This GPU's measured peak rates: memory reads in bytes/s, and bfloat16 matrix multiplication in FLOP/s."""

    bandwidth: float
    matrix_rate: float


def measure_ceilings(rounds: int = 7) -> Ceilings:
    """Measure the GPU's peak rates by the fastest of several ways to read 4 GiB, and a matrix product of size 8192³."""
    data = torch.randn(2**30, device="cuda")
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in "ab")
    by_rows = torch.compile(lambda x: x.view(2**14, -1).sum(1), dynamic=False)
    readers: dict[str, Callable[[], object]] = {
        "sum": data.sum,
        "integers": data.view(torch.int64).sum,
        "greatest": data.amax,
        "rows": lambda: by_rows(data),
    }
    contenders = {name: torch_contender(run) for name, run in readers.items()}
    best = time_in_turn({**contenders, "product": torch_contender(lambda: a @ b)}, rounds)
    fastest_read = min(best[name].best for name in readers)
    return Ceilings(data.numel() * data.element_size() / fastest_read, 2 * 8192**3 / best["product"].best)


def account(run: Callable[[], object], steps: int = 5) -> list[tuple[str, float, float]]:
    """Return (kernel, milliseconds, launches) for one step, from the GPU's time stamps, the longest first.

    The kernels run inside the step's CUDA graph. The runtime's `Profiler` would run each kernel between two events,
    which adds microseconds to every one.
    """
    run()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(steps):
            run()
        torch.cuda.synchronize()
    rows = [
        (event.key, event.self_device_time_total / 1000 / steps, event.count / steps)
        for event in profile.key_averages()
        if event.self_device_time_total
    ]
    return sorted(rows, key=lambda row: -row[1])


def steady_run(backend: CUDABackend, program: CompiledProgram, run: Callable[[], object]) -> dict[str, int]:
    """Return the changes of the backend's counters in one more run, and the number of kernels in the program."""
    before = backend.counters.copy()
    run()
    return {"kernels": len(program.plan.calls), **(backend.counters - before)}


def _pearson(result: Tensor, reference: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([result.float().flatten(), reference.flatten()]))[0, 1])


def agreement(results: Mapping[str, Tensor], reference: Tensor) -> dict[str, float]:
    """Return contender → relative error ‖logits - reference‖ / ‖reference‖, for logits [..., classes].

    Raises:
        ValueError: a contender's Pearson r is below 0.999 and below that of eager PyTorch; or the argmax of a row
            differs by more than a near-tie, which is twice the largest error of eager PyTorch.
    """
    reference = reference.reshape(-1, reference.shape[-1])
    enough = min(0.999, _pearson(results[EAGER], reference))
    tie = 2 * float((results[EAGER].reshape(reference.shape) - reference).abs().max())
    errors = {}
    for name, result in results.items():
        logits = result.reshape(reference.shape).float()
        pearson = _pearson(logits, reference)
        chosen = reference.gather(1, logits.argmax(1, keepdim=True))[:, 0]
        behind = float((reference.amax(1) - chosen).max())
        if not (pearson >= enough and behind <= tie):
            raise ValueError(
                f"wrong logits by {name}: Pearson r is {pearson}; the argmax is {behind} behind, a near-tie is {tie}"
            )
        errors[name] = float((logits - reference).norm() / reference.norm())
    return errors
