"""Simulated chips against times that were measured on silicon.

    python -m benchmarks.silicon FOLDER --page docs/measurements/silicon.md --figure docs/images/silicon.png
    python -m benchmarks.silicon FOLDER --set "v6e GEMM" --rows
    python -m benchmarks.silicon FOLDER --fit "v4 GEMM"

FOLDER has the measurements as CSV files (tpu_v6e_gemm.csv and the others that `rows.py` reads); they are not part of
this repository. A set is simulated on the chip of its rows by `npu_model.simulate`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from benchmarks.silicon.page import document, draw
from benchmarks.silicon.rows import Row, read
from benchmarks.silicon.runs import LEAST_US, Outcome, fit, fitting_rows, rank_correlation, run, summary
from npu_compiler.files import write_atomically


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--set", nargs="*", help="only these sets")
    parser.add_argument("--chip", help="only rows of this chip")
    parser.add_argument("--rows", action="store_true", help="print every row")
    parser.add_argument("--fit", metavar="SET", help="fit a chip's three numbers on a third of a set, and print them")
    parser.add_argument("--page", type=Path)
    parser.add_argument("--figure", type=Path)
    parser.add_argument("--processes", type=int, default=2)
    given = parser.parse_args(arguments)
    wanted = [given.fit] if given.fit else given.set
    rows = [
        row
        for row in read(given.folder)
        if row.us >= LEAST_US and (not wanted or row.group in wanted) and given.chip in (None, row.chip)
    ]
    if not rows:
        parser.error("there are no such rows")
    if given.fit:
        numbers, least = fit(fitting_rows(rows))
        print(*(f"{name} = {value:.3g}" for name, value in numbers.items()), f"mean error {least:.1%}", sep="\n")
        return 0
    outcomes = simulated(rows, given.processes)
    for group, each in outcomes.items():
        middle, average, ninetieth, signed = summary(each)
        print(
            f"{group}: {len(each)} rows, median {middle:.1%}, mean {average:.1%}, 90th percentile {ninetieth:.1%}, "
            f"signed {signed:+.1%}, rank {rank_correlation(each):.3f}"
        )
        for outcome in sorted(each, key=lambda one: one.error) if given.rows else ():
            print(f"  {outcome.error:+.0%} {outcome.row.name}: {outcome.row.us:.1f} us, simulated {outcome.us:.1f}")
    if given.page:
        write_atomically(given.page, document(outcomes).encode())
    if given.figure:
        draw(outcomes, given.figure)
    return 0


def simulated(rows: Sequence[Row], processes: int) -> dict[str, list[Outcome]]:
    """Simulate the rows; return the outcomes by set, in the order of the rows."""
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        every = list(pool.map(run, rows, chunksize=8))
    groups: dict[str, list[Outcome]] = {}
    for outcome in every:
        groups.setdefault(outcome.row.group, []).append(outcome)
    return groups


if __name__ == "__main__":
    sys.exit(main())
