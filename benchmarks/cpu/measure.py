"""Measurement of one task of the CPU benchmark, in the process that `benchmarks.cpu` starts for it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import transformers

from benchmarks.cpu import llm as cpu_llm
from benchmarks.cpu.contender import Array, Factory, prepare
from benchmarks.cpu.llm import LanguageContenders
from benchmarks.cpu.machine import Floor, Rates
from benchmarks.cpu.models import network_of
from benchmarks.cpu.network import NetworkContenders
from benchmarks.cpu.quantized import QuantizedContenders
from benchmarks.figures import Figure
from benchmarks.timing import interleave, matrix_rate, read_bandwidth, settled


@dataclass(frozen=True)
class Settings:
    """Settings of a measurement.

    Attributes:
        threads: Number of threads.
        contenders: Beginnings of the names of the contenders to time, in lower case; empty for all.
        left_out: Beginnings of the names of contenders not to time, in lower case.
        rounds: Maximum number of rounds.
        limit: Seconds of timing after which no further round of a task begins.
    """

    threads: int
    contenders: tuple[str, ...]
    left_out: tuple[str, ...]
    rounds: int
    limit: float

    def wants(self, name: str) -> bool:
        name = name.lower()
        return (not self.contenders or name.startswith(self.contenders)) and not name.startswith(self.left_out)


def start_libraries(threads: int) -> None:
    torch.set_num_threads(threads)
    transformers.logging.set_verbosity_error()
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(tempfile.gettempdir()) / "npu-sim-inductor"))


def measure_rates(threads: int) -> Rates:
    start_libraries(threads)
    return Rates(read_bandwidth(), matrix_rate())


def measure_language_model(tasks: Sequence[str], settings: Settings, rates: Rates) -> list[Figure]:
    """Measure decode, prefill or both, which share the loaded models."""
    start_libraries(settings.threads)
    figures = []
    with tempfile.TemporaryDirectory() as folder:
        contenders = LanguageContenders(settings.threads, Path(folder))
        for task in tasks:
            floor, reference = contenders.floor(task, rates), contenders.reference(task)
            ms, errors = _times_and_errors(contenders.factories(task), reference, settings)
            figures.append(_figure(task, cpu_llm.NAME, cpu_llm.CASES[task], ms, floor, errors))
    return figures


def measure_quantized(task: str, settings: Settings, rates: Rates) -> list[Figure]:
    start_libraries(settings.threads)
    figures = []
    with tempfile.TemporaryDirectory() as folder:
        contenders = QuantizedContenders(task.upper(), settings.threads, Path(folder))
        for case in contenders.cases:
            floor, reference = contenders.floor(case, rates), contenders.reference(case)
            ms, errors = _times_and_errors(contenders.factories(case), reference, settings)
            figures.append(_figure(task, contenders.name, case, ms, floor, errors))
    return figures


def measure_network(task: str, batch: int, settings: Settings, rates: Rates) -> list[Figure]:
    start_libraries(settings.threads)
    network = network_of(task)
    with tempfile.TemporaryDirectory() as folder:
        contenders = NetworkContenders(network.build(), network.inputs(batch), settings.threads, Path(folder))
        ms, errors = _times_and_errors(contenders.factories(), contenders.reference(), settings)
        return [_figure(task, network.name, {"batch": batch}, ms, contenders.floor(rates), errors)]


def _figure(
    task: str, model: str, case: dict[str, int], ms: dict[str, float], floor: Floor, errors: dict[str, float]
) -> Figure:
    return Figure(task, model, case, ms, 1e3 * floor.seconds, floor.says, errors=errors)


def _times_and_errors(
    factories: Mapping[str, Factory], reference: Array, settings: Settings
) -> tuple[dict[str, float], dict[str, float]]:
    """Return each contender's median milliseconds, and its ‖output - reference‖ / ‖reference‖."""
    contenders = prepare(factories, settings.wants)
    timers = {name: settled(contender.seconds) for name, (contender, _) in contenders.items()}
    results = interleave(timers, settings.rounds, warmup=1, limit=settings.limit)
    scale = np.linalg.norm(reference)
    return (
        {name: 1e3 * result.median for name, result in results.items()},
        {name: float(np.linalg.norm(output - reference) / scale) for name, (_, output) in contenders.items()},
    )
