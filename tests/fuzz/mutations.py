"""Reads many randomly changed files and reports crashes, hangs and errors of the wrong kind.

    python tests/fuzz/mutations.py --target program --count 100000 --jobs 4 --seed 1
    python tests/fuzz/mutations.py --count 1000000

The files are read in worker processes. A change depends on the seed and its number alone, so a worker that crashes or
hangs is replaced, its file is saved, and the run goes on behind it. A file hangs if it takes longer than `--longest`
seconds of processor time, so that other processes do not matter, or 12 times as long by the clock. A worker may use
4 GiB more than it starts with. Without a target, all formats have a part of the files. Exit code 1: findings.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import resource
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
if __name__ in ("__main__", "__mp_main__"):
    sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

_SAVED_OF_A_KIND = 3  # files saved of findings that look alike
_IDLE = 12  # times as long by the clock as in processor time may a file take
_HEADROOM = 4 * 2**30  # bytes of address space that a worker may use beyond what it starts with


def mutation(name: str, seed: int, number: int) -> bytes:
    """The file of that number."""
    from targets import TARGETS, corpus

    rng = Random(f"{seed} {number}")
    return TARGETS[name].mutate(rng.choice(corpus(name)), rng)


def _work(name: str, seed: int, numbers: range, results: Connection) -> None:
    """Read the files of these numbers, as a worker; send "ready", then (outcome, place of an error, `Cost`) of each."""
    from targets import TARGETS, corpus

    warnings.simplefilter("ignore")
    target, files = TARGETS[name], corpus(name)
    with tempfile.TemporaryDirectory() as folder:
        check = target.prepare(Path(folder))
        for data in files:
            check(data)
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
        _limit_memory()
        results.send("ready")
        for number in numbers:
            rng = Random(f"{seed} {number}")
            data = target.mutate(rng.choice(files), rng)
            outcome: tuple[str, str | None]
            begun = time.process_time()
            try:
                outcome = check(data), None
            except target.refusal as error:
                outcome = f"refused: {type(error).__name__}", None
            except Exception as error:
                outcome = f"raw error: {type(error).__name__}", _place(error)
            results.send((*outcome, Cost(time.process_time() - begun, _peak())))


class Cost(NamedTuple):
    """The processor time that a file took in seconds, and the most memory in MiB that its worker ever had."""

    seconds: float
    mebibytes: float


def _peak() -> float:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20


def processor_seconds(process: int) -> float:
    """The processor time that a process has taken until now; 0 if it has ended."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _limit_memory() -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + _HEADROOM, used + _HEADROOM))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _place(error: Exception) -> str:
    """The innermost line of ours that an error passed, and the error."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if frame.filename.startswith(str(ROOT)) and "/.venv/" not in frame.filename]
    frame = ours[-1] if ours else frames[-1]
    file = Path(frame.filename)
    where = file.relative_to(ROOT) if file.is_relative_to(ROOT) else file
    return f"{where}:{frame.lineno} {str(error)[:200]}"


@dataclass
class Report:
    """Outcomes of reading the files.

    Attributes:
        outcomes: Outcome → number of files.
        findings: What and where, → the numbers of the files.
        most: The highest cost of a file that was read to its end.
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    findings: dict[str, list[int]] = field(default_factory=dict)
    most: Cost = Cost(0.0, 0.0)

    def note(self, cost: Cost) -> None:
        self.most = Cost(*map(max, self.most, cost))

    def add(self, outcome: str, place: str | None, number: int) -> None:
        self.outcomes[outcome] += 1
        if place is not None:
            self.findings.setdefault(f"{outcome} in {place.split(' ')[0]}", []).append(number)

    def __str__(self) -> str:
        lines = [f"{count:9}  {outcome}" for outcome, count in self.outcomes.most_common()]
        lines += [f"finding, {len(numbers)} times: {what}" for what, numbers in self.findings.items()]
        kinds = ("crash", "hang", "raw error")
        totals = {kind: sum(n for outcome, n in self.outcomes.items() if outcome.startswith(kind)) for kind in kinds}
        summary = f"{totals['crash']} crashes, {totals['hang']} hangs, {totals['raw error']} raw errors"
        most = f"at most {self.most.seconds:.3f} s of processor time a file, {self.most.mebibytes:.0f} MiB a worker"
        return "\n".join([*lines, f"{self.outcomes.total()} files: {summary}; {most}"])


@dataclass
class _Worker:
    """A process, and the numbers of the files for which it has not yet sent an outcome.

    Attributes:
        since: The time by the clock, and the processor time of the process, at which its file was begun at the latest.
    """

    process: Any
    results: Connection
    numbers: range
    is_ready: bool = False
    since: tuple[float, float] = (math.inf, math.inf)

    def begin(self) -> None:
        self.since = time.monotonic(), processor_seconds(self.process.pid)

    def hangs(self, longest: float, idle: float) -> bool:
        clock, processor = self.since
        return time.monotonic() - clock > idle or processor_seconds(self.process.pid) - processor > longest


def run(name: str, count: int, jobs: int, seed: int, longest: float, idle: float | None = None) -> Report:
    """Read that many changed files.

    Args:
        longest: Seconds of processor time after which a file counts as one that hangs.
        idle: Seconds by the clock after which it does so, whatever it computes; default: 12 times as many.
    """
    idle = _IDLE * longest if idle is None else idle
    report, context = Report(), multiprocessing.get_context("spawn")

    def start(numbers: range) -> _Worker:
        receiving, sending = context.Pipe(duplex=False)
        process = context.Process(target=_work, args=(name, seed, numbers, sending), daemon=True)
        process.start()
        sending.close()
        return _Worker(process, receiving, numbers)

    workers = [start(range(first, count, jobs)) for first in range(min(jobs, count))]
    while workers:
        wait([worker.results for worker in workers], timeout=0.2)
        for worker in list(workers):
            ended = _receive(worker, report, longest)
            hangs = worker.is_ready and not ended and worker.hangs(longest, idle)
            if not (ended or hangs):
                continue
            worker.process.kill() if hangs else None
            worker.process.join()
            workers.remove(worker)
            if not worker.numbers:
                continue
            if not worker.is_ready:
                raise RuntimeError(f"a worker ends with code {worker.process.exitcode} before it reads a changed file")
            outcome = "hang" if hangs else f"crash: exit code {worker.process.exitcode}"
            report.add(outcome, f"number {worker.numbers[0]}", worker.numbers[0])
            if worker.numbers[1:]:
                workers.append(start(worker.numbers[1:]))
    return report


def _receive(worker: _Worker, report: Report, longest: float) -> bool:
    """Take in what a worker has sent; returns whether it has ended."""
    try:
        while worker.results.poll():
            message = worker.results.recv()
            worker.begin()
            if message == "ready":
                worker.is_ready = True
                continue
            outcome, place, cost = message
            report.note(cost)
            if cost.seconds > longest:
                outcome, place = "hang", f"number {worker.numbers[0]}"
            report.add(outcome, place, worker.numbers[0])
            worker.numbers = worker.numbers[1:]
    except EOFError:
        return True
    return False


def main(arguments: Sequence[str] | None = None) -> int:
    from targets import TARGETS

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", choices=TARGETS, help="a format (default: all of them)")
    parser.add_argument("--count", type=int, default=10_000, help="number of files (default: 10000)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="worker processes (default: one per CPU)")
    parser.add_argument("--seed", type=int, default=None, help="default: a new one, which is printed")
    parser.add_argument(
        "--longest", type=float, default=5.0, metavar="SECONDS", help="of processor time; a hang is longer (default: 5)"
    )
    parser.add_argument("--findings", type=Path, default=Path("build/findings"), help="folder for files that fail")
    options = parser.parse_args(arguments)
    seed = options.seed if options.seed is not None else Random().randrange(2**32)
    totals = Report()
    for name, count in _parts(options.target, options.count).items():
        begun = time.monotonic()
        print(f"{name}: {count} files, seed {seed}", flush=True)
        report = run(name, count, options.jobs, seed, options.longest)
        for numbers in report.findings.values():
            for number in numbers[:_SAVED_OF_A_KIND]:
                options.findings.mkdir(parents=True, exist_ok=True)
                (options.findings / f"{name}-{seed}-{number}").write_bytes(mutation(name, seed, number))
        print(f"{report}; {time.monotonic() - begun:.0f} s", flush=True)
        totals.outcomes += report.outcomes
        totals.note(report.most)
        totals.findings |= {f"{name}: {what}": numbers for what, numbers in report.findings.items()}
    if options.target is None:
        print(f"all formats\n{totals}")
    if totals.findings:
        print(f"the first files of each finding are in {options.findings}")
    return 1 if totals.findings else 0


def _parts(target: str | None, count: int) -> dict[str, int]:
    """Target → how many of the files it has: more, the faster it reads them."""
    if target is not None:
        return {target: count}
    from targets import TARGETS

    whole = sum(target.share for target in TARGETS.values())
    return {name: max(1, round(count * target.share / whole)) for name, target in TARGETS.items()}


if __name__ == "__main__":
    sys.exit(main())
