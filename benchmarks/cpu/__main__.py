"""The CPU device against PyTorch, ONNX Runtime, OpenVINO and llama.cpp: SmolLM2-135M and eight networks.

    python -m benchmarks.cpu [--only decode,bert] [--contenders npu-sim,onnx] [--batch 1] [--quick] [--json FILE]
    python -m benchmarks.cpu --only densenet121,transformers.swinv2 | --draw SEED [--count 8]   other models
    python -m benchmarks.cpu --profile bert [--dtype float32]
    python -m benchmarks.cpu --pages-from docs/measurements/cpu-*.json --document docs/measurements/cpu.md

The contenders of a row are timed in turns in one process, on the same weights and the same number of threads, and their
outputs are compared with that of eager PyTorch in float32. Each task has a process of its own, so that memory stays
bounded and one library's threads are gone before the next task. The floors are from rates measured in the same run.
A long run can be split into parts: `--merge` keeps the results that the file already holds.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

from benchmarks.cpu.machine import describe, limit_threads, usable_cores
from benchmarks.cpu.page import LANGUAGE_TASKS, QUANTIZED_TASKS, document, draw, terminal_table
from benchmarks.figures import Run, load_run

NETWORK_TASKS = (
    "resnet50",
    "bert",
    "vit",
    "mobilenet-v2",
    "efficientnet-lite0",
    "efficientnet-b0",
    "regnety",
    "convnext",
)
TASKS = (*LANGUAGE_TASKS, *QUANTIZED_TASKS, *NETWORK_TASKS)

T = TypeVar("T")


def alone(function: Callable[..., T], *arguments: Any) -> T:
    """Call a function in a process of its own and return its result."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def run_all(arguments: argparse.Namespace, only: set[str], earlier: Run | None, console: Console) -> tuple[Run, int]:
    """Measure the tasks, printing and saving each result at once; a task that fails does not stop the others.

    Args:
        only: The tasks to measure.
        earlier: Results of an earlier run to merge with. None: there are none.

    Returns:
        The results, merged with the earlier ones, and the exit status.
    """
    from benchmarks.cpu.measure import (
        Settings,
        measure_language_model,
        measure_network,
        measure_quantized,
        measure_rates,
    )

    settings = Settings(
        arguments.threads,
        tuple(arguments.contenders.lower().split(",")) if arguments.contenders else (),
        ("torch.compile",) if arguments.quick else (),
        arguments.rounds or (5 if arguments.quick else 15),
        arguments.limit,
    )
    rates = alone(measure_rates, settings.threads)
    run, status = Run(describe(settings.threads, rates)), 0
    console.print(run.machine)
    merged = earlier.merged(run) if earlier else run  # before measuring, so that another machine's are refused at once
    language = [task for task in LANGUAGE_TASKS if task in only]
    others = sorted(only - {*LANGUAGE_TASKS, *QUANTIZED_TASKS, *NETWORK_TASKS})
    chosen = [*(task for task in NETWORK_TASKS if task in only), *others]
    networks = [(task, batch) for task in chosen for batch in arguments.batch]
    jobs: list[tuple[Any, ...]] = [(measure_language_model, language)] if language else []
    jobs += [(measure_quantized, task) for task in QUANTIZED_TASKS if task in only]
    jobs += [(measure_network, task, batch) for task, batch in networks]
    for function, *job in jobs:
        try:
            figures = alone(function, *job, settings, rates)
        except Exception as error:
            console.print(f"{job} failed: {type(error).__name__}: {error}", markup=False)
            status = 1
            continue
        for figure in figures:
            console.print(terminal_table(figure))
        run.figures += figures
        merged = earlier.merged(run) if earlier else run
        if arguments.json:
            merged.save(arguments.json)
    return merged, status


def batches(text: str) -> list[int]:
    return [int(batch) for batch in text.split(",")]


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add(
        "--only",
        default=",".join(TASKS),
        help="comma-separated tasks, networks of benchmarks/written.py, models of timm and transformers.MODEL_TYPE "
        "(default: %(default)s)",
    )
    add("--draw", type=int, metavar="SEED", help="measure models of timm and transformers drawn at random instead")
    add("--count", type=int, default=8, help="models to draw from each (default: %(default)s)")
    add("--contenders", default="", help="comma-separated beginnings of contenders' names (default: all)")
    add(
        "--batch",
        type=batches,
        default="1,8",
        help="comma-separated batch sizes of the networks (default: %(default)s)",
    )
    add("--quick", action="store_true", help="skip torch.compile and time fewer rounds")
    add("--rounds", type=int, default=0, help="maximum number of rounds per task (default: 15, with --quick 5)")
    add("--limit", type=float, default=120, help="begin no round after this many seconds (default: %(default)s)")
    add("--threads", type=int, default=usable_cores(), help="number of threads (default: all usable cores)")
    add("--json", type=Path, help="write the results to this file")
    add("--merge", action="store_true", help="keep the other results in the file")
    add(
        "--profile",
        metavar="TASK",
        help="print the time of each distinct kernel call of ours, and measure nothing else",
    )
    add("--dtype", default="bfloat16", help="compute dtype to profile (default: %(default)s)")
    add("--pages-from", type=Path, nargs="+", help="measure nothing; draw from these files, one per machine")
    add("--document", type=Path, help="write a Markdown page of tables")
    add("--chart", type=Path, help="draw a chart, as .svg or .png")
    return parser


def unknown_tasks(names: set[str], tasks: tuple[str, ...]) -> set[str]:
    """Return the names that are none of the tasks and no model of timm or transformers that is installed."""
    unknown = names.difference(tasks)
    if unknown:
        from benchmarks.draws import model_names

        unknown -= model_names()
    return unknown


def main() -> int:
    parser, console = make_parser(), Console()
    arguments = parser.parse_args()
    only = set(arguments.only.split(","))
    if arguments.draw is not None:
        from benchmarks.draws import LIBRARIES, drawn

        only = {name for library in LIBRARIES for name in drawn(library, arguments.draw, arguments.count)}
    names = {arguments.profile} if arguments.profile else only
    tasks = (*LANGUAGE_TASKS, *NETWORK_TASKS) if arguments.profile else TASKS
    if unknown := unknown_tasks(names, tasks):
        known = f"{', '.join(tasks)}, timm's models and transformers.MODEL_TYPE"
        parser.error(f"unknown task {', '.join(sorted(unknown))}; choose from {known}")
    try:
        limit_threads(arguments.threads)
    except ValueError as error:
        parser.error(str(error))
    if arguments.profile:
        from benchmarks.cpu.profile import profile

        print(profile(arguments.profile, arguments.batch[0], arguments.dtype, arguments.threads))
        return 0
    if arguments.pages_from:
        runs, status = [load_run(path) for path in arguments.pages_from], 0
    else:
        earlier = load_run(arguments.json) if arguments.merge and arguments.json and arguments.json.is_file() else None
        run, status = run_all(arguments, only, earlier, console)
        runs = [run]
    if arguments.chart:
        draw(runs, arguments.chart)
    if arguments.document:
        arguments.document.write_text(document(runs), encoding="utf-8")
    return status


if __name__ == "__main__":
    sys.exit(main())
