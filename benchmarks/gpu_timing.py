"""Timing on an NVIDIA GPU: contenders in turn, by device events; the GPU's own ceilings; where a step's time goes."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.figures import EAGER
from benchmarks.timing import Result
from cuda_runtime import CUDABackend
from npu_compiler import CompiledProgram

ROUND_SECONDS = 0.04
FEWEST_CALLS, MOST_CALLS = 3, 200


@dataclass(frozen=True)
class Budget:
    """What a measurement may cost.

    Attributes:
        rounds: Of timing.
        may_compile: Whether there is time left to start another `torch.compile`.
    """

    rounds: int
    may_compile: Callable[[], bool]


@dataclass(frozen=True)
class Contender:
    """A step that can be timed.

    Attributes:
        run: Enqueues one step.
        timed: The seconds that what it is handed takes on the device, by events on the stream that `run` uses.
    """

    run: Callable[[], object]
    timed: Callable[[Callable[[], None]], float]


def torch_contender(run: Callable[[], object]) -> Contender:
    """A step on PyTorch's current stream."""
    return Contender(run, torch_timed)


def torch_timed(launch: Callable[[], object]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    launch()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000


def time_in_turn(contenders: Mapping[str, Contender], rounds: int, warmup: int = 3) -> dict[str, Result]:
    """Seconds of a step of each contender: every round times many steps of each, back to back, host side included."""
    calls = {}
    for name, contender in contenders.items():
        for _ in range(warmup):
            contender.run()
        torch.cuda.synchronize()
        calls[name] = min(MOST_CALLS, max(FEWEST_CALLS, round(ROUND_SECONDS / _seconds_a_call(contender, 3))))
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, contender in contenders.items():
            torch.cuda.synchronize()
            contender.run()  # untimed: it brings the caches into the state that a steady step finds
            seconds[name].append(_seconds_a_call(contender, calls[name]))
    return {name: Result(statistics.median(values), min(values)) for name, values in seconds.items()}


def medians(results: Mapping[str, Result]) -> dict[str, float]:
    """Milliseconds."""
    return {name: 1000 * result.median for name, result in results.items()}


def _seconds_a_call(contender: Contender, calls: int) -> float:
    def several() -> None:
        for _ in range(calls):
            contender.run()

    return contender.timed(several) / calls


@dataclass(frozen=True)
class Ceilings:
    """What this GPU does at most, measured: bytes read per second, and FLOP per second of a large bfloat16 product."""

    bandwidth: float
    matrix_rate: float


def measure_ceilings(rounds: int = 7) -> Ceilings:
    """The best of several ways to read 4 GiB, none of which is the fastest on every GPU, and of a product of 8192³."""
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
    """(kernel, milliseconds, launches) of a step by the GPU's own time stamps, the most expensive first.

    They are taken inside the step's CUDA graph. The runtime's `Profiler` runs kernels one by one between two events,
    which makes a kernel of some microseconds look longer than it is.
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
    """What one more run does, by the backend's counters, and how many kernels are in it."""
    before = backend.counters.copy()
    run()
    return {"kernels": len(program.plan.calls), **(backend.counters - before)}


def _pearson(result: Tensor, reference: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([result.float().flatten(), reference.flatten()]))[0, 1])


def agreement(results: Mapping[str, Tensor], reference: Tensor) -> dict[str, float]:
    """Every contender's error relative to a float32 reference, over all logits [..., classes].

    Raises:
        ValueError: one correlates with the reference by 0.999 or less, and less than eager PyTorch does; or it has a
            row's greatest logit elsewhere by more than a near-tie, which is twice the greatest error of eager PyTorch.
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
