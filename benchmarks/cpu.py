"""The CPU device against PyTorch, ONNX Runtime, OpenVINO and llama.cpp: SmolLM2-135M and six networks.

    python -m benchmarks.cpu [--only decode,bert,…] [--contenders npu-sim,onnx] [--batch 1] [--quick] [--json FILE]

All contenders of a row are timed in turns in one process, on the same weights and the same number of threads. Each task
has a process of its own, so that memory stays bounded and one library's threads are gone before the next task. The
output of every contender is compared with that of eager PyTorch in float32.

The floor is a lower bound of the time: a decode step must read every weight once, at the bandwidth that PyTorch's sum
reads; the rest must do their FLOP, at the rate of PyTorch's float32 matrix product. Both are measured in the same run.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table

from benchmarks.cpu_machine import Rates, describe, limit_threads, measure_rates
from benchmarks.figures import EAGER, OURS, Figure, Run, load_run

LANGUAGE_TASKS = ("decode", "prefill")
NETWORK_TASKS = ("resnet50", "bert", "vit", "mobilenet-v2", "efficientnet-lite0", "convnext")
WRONG = 0.1  # relative error

T = TypeVar("T")


@dataclass(frozen=True)
class Settings:
    """How to measure.

    Attributes:
        contenders: Lower-case beginnings of the names of contenders to time; empty for all.
        leave_out: The same for contenders not to time.
        rounds: At most this many per task; fewer when `limit` seconds have passed.
    """

    threads: int
    contenders: tuple[str, ...]
    leave_out: tuple[str, ...]
    rounds: int
    limit: float

    def wants(self, name: str) -> bool:
        name = name.lower()
        return (not self.contenders or name.startswith(self.contenders)) and not name.startswith(self.leave_out)


def start_libraries(threads: int) -> None:
    import torch
    import transformers

    torch.set_num_threads(threads)
    transformers.logging.set_verbosity_error()
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(tempfile.gettempdir()) / "npu-sim-inductor"))


def measure_language_model(tasks: Sequence[str], settings: Settings, rates: Rates) -> list[Figure]:
    from benchmarks.cpu_llm import CACHE_LENGTH, NAME, PROMPT, LanguageContenders

    start_libraries(settings.threads)
    cases = {"decode": {"cache": CACHE_LENGTH, "position": PROMPT}, "prefill": {"tokens": PROMPT}}
    with tempfile.TemporaryDirectory() as folder:
        contenders = LanguageContenders(settings.threads, Path(folder))
        floors = {"decode": contenders.weight_bytes, "prefill": contenders.flops}
        return [
            measure(
                task,
                NAME,
                cases[task],
                contenders.factories(task),
                contenders.reference(task),
                settings,
                *(byte_floor(floors[task](), rates) if task == "decode" else flop_floor(floors[task](), rates)),
            )
            for task in tasks
        ]


def measure_network(task: str, batch: int, settings: Settings, rates: Rates) -> list[Figure]:
    from benchmarks.cpu_models import NETWORKS
    from benchmarks.cpu_peers import NetworkContenders

    start_libraries(settings.threads)
    network = NETWORKS[task]
    with tempfile.TemporaryDirectory() as folder:
        contenders = NetworkContenders(network.build(), network.inputs(batch), settings.threads, Path(folder))
        floor = flop_floor(contenders.flops(), rates)
        reference = contenders.reference()
        return [measure(task, network.name, {"batch": batch}, contenders.factories(), reference, settings, *floor)]


def byte_floor(size: int, rates: Rates) -> tuple[float, str]:
    """Seconds, and how they are derived."""
    return size / rates.bandwidth, f"{size / 1e6:.0f} MB of weights at {rates.bandwidth / 1e9:.1f} GB/s"


def flop_floor(flops: int, rates: Rates) -> tuple[float, str]:
    """Seconds, and how they are derived."""
    return flops / rates.matrix, f"{flops / 1e9:.1f} GFLOP at {rates.matrix / 1e9:.0f} GFLOP/s"


def measure(
    task: str,
    model: str,
    case: dict[str, int],
    factories: Any,
    reference: Any,
    settings: Settings,
    floor: float,
    says: str,
) -> Figure:
    import numpy as np

    from benchmarks.cpu_peers import prepare
    from benchmarks.timing import interleave

    contenders = prepare(factories, settings.wants)
    results = interleave(
        {name: contender.seconds for name, contender in contenders.items()}, settings.rounds, 1, settings.limit
    )
    scale = float(np.linalg.norm(reference))
    errors = {name: float(np.linalg.norm(c.output() - reference)) / scale for name, c in contenders.items()}
    ms = {name: 1e3 * result.median for name, result in results.items()}
    return Figure(task, model, case, ms, 1e3 * floor, says, errors=errors)


def alone(function: Callable[..., T], *arguments: Any) -> T:
    """Call a function in a process of its own."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def print_figure(figure: Figure, console: Console) -> None:
    case = ", ".join(f"{name} {value}" for name, value in figure.case.items())
    table = Table(title=f"{figure.model} {figure.task} ({case}): floor {figure.floor_ms:.1f} ms ({figure.floor})")
    best = min((ms for name, ms in figure.ms.items() if name.startswith(OURS)), default=None)
    for heading in ("contender", "median ms", "× ours", "× floor", "relative error"):
        table.add_column(heading, justify="left" if heading == "contender" else "right")
    for name, ms in figure.ms.items():
        error = figure.errors[name]
        ratio = "" if best is None else f"{ms / best:.2f}"
        mark = "" if error <= WRONG else " WRONG"
        table.add_row(name, f"{ms:.2f}", ratio, f"{ms / figure.floor_ms:.2f}", f"{error:.1e}{mark}")
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    tasks = (*LANGUAGE_TASKS, *NETWORK_TASKS)
    parser.add_argument("--only", default=",".join(tasks), help="comma-separated tasks, or none (default: %(default)s)")
    parser.add_argument(
        "--contenders", default="", help="comma-separated beginnings of contenders' names (default: all)"
    )
    parser.add_argument(
        "--batch", default="1,8", help="comma-separated batch sizes of the networks (default: %(default)s)"
    )
    parser.add_argument("--quick", action="store_true", help="skip torch.compile and time fewer rounds")
    parser.add_argument("--rounds", type=int, default=0, help="rounds per task (default: 15, with --quick 5)")
    parser.add_argument("--limit", type=float, default=120, help="seconds per task after which no further round begins")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="default: all usable cores")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--merge", action="store_true", help="keep the other results in the file")
    arguments = parser.parse_args()
    only = set(arguments.only.split(",")) - {"none"}
    if unknown := only - set(tasks):
        parser.error(f"unknown task {', '.join(sorted(unknown))}; choose from {', '.join(tasks)}")
    found = load_run(arguments.json) if arguments.merge and arguments.json and arguments.json.is_file() else None
    settings = Settings(
        arguments.threads,
        tuple(arguments.contenders.lower().split(",")) if arguments.contenders else (),
        ("torch.compile",) if arguments.quick else (),
        arguments.rounds or (5 if arguments.quick else 15),
        arguments.limit,
    )
    limit_threads(settings.threads)
    rates = alone(measure_rates, settings.threads)
    run, console, status = Run(describe(settings.threads, rates)), Console(), 0
    console.print(run.machine)
    jobs: list[tuple[Any, ...]] = []
    if language := [task for task in LANGUAGE_TASKS if task in only]:
        jobs.append((measure_language_model, language))
    batches = [int(batch) for batch in arguments.batch.split(",")]
    jobs += [(measure_network, task, batch) for task in NETWORK_TASKS if task in only for batch in batches]
    for function, *job in jobs:
        try:
            figures = alone(function, *job, settings, rates)
        except Exception as error:
            console.print(f"{job}: {type(error).__name__}: {error}")
            status = 1
            continue
        run.figures += figures
        for figure in figures:
            print_figure(figure, console)
        if arguments.json:
            (found.merged(run) if found else run).save(arguments.json)
    return status


if __name__ == "__main__":
    sys.exit(main())
