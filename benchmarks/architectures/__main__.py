"""Every architecture of transformers, as a tiny model with random weights, against eager PyTorch.

    python -m benchmarks.architectures --route compile --jobs 2 --results cpu.jsonl
    python -m benchmarks.architectures --route backend --device cuda --dtype float16 --jobs 8 --results cuda.jsonl
    python -m benchmarks.architectures --pages-from cpu.jsonl cuda.jsonl --document docs/measurements/architectures.md

Each model has a process of its own, with limits on time and memory. Results are JSON lines, written as they come; a
second start with the same file goes on where the first stopped.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import resource
import time
import warnings
from collections.abc import Iterable, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.architectures.page import document, histogram, summary

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

Key = tuple[str, str, str, str]


def main(arguments: Sequence[str] | None = None) -> None:
    options = _options(arguments)
    if options.pages_from:
        records = [record for path in options.pages_from for record in read_results(path)]
        options.document.write_text(document(records))
        return
    if options.results is None:
        raise SystemExit("--results says where to write the results")
    done = {_key(record) for record in read_results(options.results)}
    wanted = [(name, route, options.device, options.dtype) for name in _names(options) for route in options.route]
    pending = [key for key in wanted if key not in done]
    print(f"{len(pending)} to run, {len(wanted) - len(pending)} known", flush=True)
    with options.results.open("a") as file:
        for record in run_all(pending, options.jobs, options.timeout, options.memory):
            file.write(json.dumps(record) + "\n")
            file.flush()
            print(
                f"{record['status']:8} {record['route']:8} {record['model_type']} {record['reason'][:120]}", flush=True
            )
    records = [record for record in read_results(options.results) if _key(record) in set(wanted)]
    print("\n".join((summary(records), *histogram(records)[: options.reasons])), flush=True)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.architectures", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--route", nargs="+", default=["compile"], choices=("compile", "backend"), help="default: compile"
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--only", nargs="+", metavar="TYPE", help="these model types")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="every Nth model type")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--timeout", type=float, default=120, metavar="SECONDS", help="for each model")
    parser.add_argument("--memory", type=float, default=8, metavar="GIB", help="for each model; not for CUDA's")
    parser.add_argument("--results", type=Path, metavar="FILE", help="JSON lines; what it holds is not run again")
    parser.add_argument("--reasons", type=int, default=20, metavar="N", help="reasons for the CPU to print")
    parser.add_argument("--pages-from", type=Path, nargs="+", metavar="FILE", help="write the page from results")
    parser.add_argument("--document", type=Path, default=Path("docs/measurements/architectures.md"))
    return parser.parse_args(arguments)


def _names(options: argparse.Namespace) -> list[str]:
    from benchmarks.architectures.models import model_types

    return options.only or model_types()[:: options.every]


def read_results(path: Path) -> list[dict[str, Any]]:
    """Return the records of a file, the last one for each model, route, device and dtype; empty if there is no file."""
    if not path.exists():
        return []
    records = (json.loads(line) for line in path.read_text().splitlines() if line.strip())
    return list({_key(record): record for record in records}.values())


def _key(record: dict[str, Any]) -> Key:
    return record["model_type"], record["route"], record["device"], record["dtype"]


def run_all(keys: Sequence[Key], jobs: int, timeout: float, memory: float) -> Iterable[dict[str, Any]]:
    """Run each combination of model, route, device and dtype in a forked process; yields records as processes end.

    Args:
        keys: The combinations.
        jobs: Number of processes at a time.
        timeout: Seconds for each process; one that takes longer is ended.
        memory: GiB of address space for each, except with CUDA, which reserves far more than it uses.
    """
    os.environ.setdefault("NPU_SIM_TUNE", "0")  # models of this size are not worth trials
    _import_heavy()
    context = multiprocessing.get_context("fork")
    waiting = list(reversed(keys))
    running: dict[Connection[Any, Any], tuple[Any, Key, float]] = {}
    while waiting or running:
        while waiting and len(running) < jobs:
            key = waiting.pop()
            reader, writer = context.Pipe(duplex=False)
            process = context.Process(target=_child, args=(writer, key, memory), daemon=True)
            process.start()
            writer.close()
            running[reader] = (process, key, time.monotonic())
        ready = set(wait(list(running), timeout=1.0))
        for reader in [reader for reader in running if reader in ready]:
            process, key, _ = running.pop(reader)
            yield _received(reader, process, key)
        for reader, (process, key, start) in list(running.items()):
            if time.monotonic() - start > timeout:
                process.kill()
                process.join()
                del running[reader]
                yield _failed(key, f"it was ended after {timeout:.0f} s")


def _import_heavy() -> None:
    """Import the modules that every process needs, before the processes are forked; none of them may start threads."""
    import torch
    import torch._dynamo
    import torch.export
    import transformers.modeling_utils  # noqa: F401

    import benchmarks.architectures.routes  # noqa: F401
    import npu_sim.module.compiled  # noqa: F401

    torch.set_num_threads(1)


def _child(writer: Connection[Any, Any], key: Key, memory: float) -> None:
    from benchmarks.architectures.routes import attempt

    warnings.simplefilter("ignore")
    silence = os.open(os.devnull, os.O_WRONLY)  # PyTorch prints the graphs that it gives up on
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    logging.disable(logging.WARNING)
    if not key[2].startswith("cuda"):
        limit = int(memory * 2**30)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    try:
        writer.send(attempt(*key).to_dict())
    except MemoryError:
        writer.send(_failed(key, f"more than {memory:.0f} GiB of memory"))


def _received(reader: Connection[Any, Any], process: Any, key: Key) -> dict[str, Any]:
    try:
        record: dict[str, Any] = reader.recv()
    except EOFError:
        process.join()
        record = _failed(key, f"its process ended with exit code {process.exitcode}")
    process.join()
    return record


def _failed(key: Key, reason: str) -> dict[str, Any]:
    from benchmarks.architectures.routes import Outcome

    return Outcome(*key, reason=reason).to_dict()


if __name__ == "__main__":
    main()
