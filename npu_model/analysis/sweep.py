"""Sweeps: a program simulated on many chips that differ in a few parameters, in parallel processes.

A sweep is written `sram=256K..8M,arrays=1..8`: each parameter doubles from its first value up to its last.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from itertools import product as combinations
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from npu_compiler.compiled_program import CompiledProgram
from npu_compiler.errors import ConstraintError, InputError
from npu_compiler.files import write_atomically
from npu_model.analysis.simulation import simulate_for
from npu_model.chip import Chip
from npu_model.chip.description import check_number
from npu_model.lowering.mapper import Mapper
from npu_model.lowering.shared import Shared
from npu_runtime.cpu.native.threads import usable_threads

MOST_CHIPS = 4096
_NEIGHBOURS = 16  # chips that a process takes at a time: those next to each other have the most in common
_UNITS = {"": 1, "K": 1024, "M": 1024**2, "G": 1024**3}
_NUMBER = re.compile(r"(\d+(?:\.\d+)?)([KMG]?)")
# What can be swept: name → table of the chip file and key.
KNOBS = {
    "sram": ("sram", "size"),
    "banks": ("sram", "banks"),
    "l2": ("l2", "size"),
    "arrays": ("matrix", "arrays"),
    "rows": ("matrix", "rows"),
    "columns": ("matrix", "columns"),
    "lanes": ("vector", "lanes"),
    "bandwidth": ("dram", "bandwidth_gb_s"),
    "latency": ("dram", "latency_ns"),
    "channels": ("dma", "channels"),
    "clock": (None, "clock_ghz"),
}
# A rough area in a 16 nm process: 0.5 mm² for a thousand processing elements of 8 bits, 3 mm² for a thousand lanes, and
# 1 mm² for a MiB of SRAM (cells of 0.074 µm² that take 60 % of it).
_MM2_PER_ELEMENT, _MM2_PER_LANE, _MM2_PER_MIB = 0.0005, 0.003, 1.0


@dataclass(frozen=True)
class Point:
    """One chip of a sweep, with the results of the program on it.

    Attributes:
        values: Name of a swept parameter (`KNOBS`) → its value.
        area: Estimated area in square millimetres (see `area`).
        problem: Reason why the program does not run on the chip, whose results are 0 then; empty if it runs.
        is_best: Whether the chip is on the Pareto front: no other one is at least as good in both latency and area, and
            better in one of them.
    """

    values: Mapping[str, float]
    seconds: float
    joules: float
    dram_bytes: int
    utilization: float
    area: float
    problem: str = ""
    is_best: bool = False

    def to_dict(self) -> dict[str, Any]:
        """The chip and its results as a row of a table."""
        return {
            **self.values,
            "latency_us": 1e6 * self.seconds,
            "energy_uj": 1e6 * self.joules,
            "dram_bytes": self.dram_bytes,
            "utilization": self.utilization,
            "area_mm2": self.area,
            "pareto": self.is_best,
            "problem": self.problem,
        }


def as_csv(points: Sequence[Point]) -> str:
    """The chips and their results as comma-separated values, with a header."""
    text = io.StringIO()
    rows = [point.to_dict() for point in points]
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({name: _cell(value) for name, value in row.items()})
    return text.getvalue()


def _cell(value: Any) -> Any:
    """A table cell: whole numbers with all digits, others with six significant ones."""
    if not isinstance(value, float):
        return value
    return int(value) if value.is_integer() else f"{value:.6g}"


def write_csv(points: Sequence[Point], path: Path) -> None:
    """Write `as_csv` to a file, atomically. Raises `InputError` if the file cannot be written."""
    try:
        write_atomically(path, as_csv(points).encode())
    except OSError as error:
        raise InputError(f"cannot write '{path}': {error.strerror or error}") from error


def area(chip: Chip) -> float:
    """A rough estimate of a chip's area in square millimetres, for comparing chips."""
    matrix = chip.matrix
    elements = 0 if matrix is None else matrix.arrays * matrix.rows * matrix.columns
    mib = (chip.sram.size + (0 if chip.l2 is None else chip.l2.size)) / 1024**2
    return elements * _MM2_PER_ELEMENT + chip.vector.lanes * _MM2_PER_LANE + mib * _MM2_PER_MIB


def parse_sweep(text: str, chip: Chip) -> list[tuple[dict[str, float], Chip]]:
    """The chips of a sweep, each with the values of its swept parameters.

    Raises:
        InputError: the text is not a sweep, or the chip lacks a part that it names.
    """
    ranges: dict[str, list[float]] = {}
    for part in text.split(","):
        name, equals, values = part.partition("=")
        if not equals or name not in KNOBS:
            raise InputError(f"'{part}' is no range of a sweep: write NAME=FROM..TO, NAME one of {', '.join(KNOBS)}")
        if name in ranges:
            raise InputError(f"the sweep names '{name}' twice")
        ranges[name] = _range(part, values)
    count = 1
    for listed in ranges.values():
        count *= len(listed)
    if count > MOST_CHIPS:
        raise InputError(f"the sweep has {count} chips; at most {MOST_CHIPS} are simulated at once")
    points = [dict(zip(ranges, chosen, strict=True)) for chosen in combinations(*ranges.values())]
    return [(values, _with(chip, values)) for values in points]


def _range(part: str, text: str) -> list[float]:
    first, dots, last = text.partition("..")
    low = _value(part, first)
    high = _value(part, last) if dots else low
    if high < low:
        raise InputError(f"the range '{part}' ends below its begin")
    values = [low]
    while 2 * values[-1] <= high:
        values.append(2 * values[-1])
    return values if values[-1] == high else [*values, high]


def _value(part: str, text: str) -> float:
    match = _NUMBER.fullmatch(text)
    if match is None or float(match[1]) <= 0:
        raise InputError(f"'{text}' in '{part}' is no number above 0; sizes may end in K, M or G")
    value = float(match[1]) * _UNITS[match[2]]
    if value > 1e12:
        raise InputError(f"'{text}' in '{part}' is beyond all chips")
    return value


def _with(chip: Chip, values: Mapping[str, float]) -> Chip:
    for name, value in values.items():
        table, key = KNOBS[name]
        owner: Any = chip if table is None else getattr(chip, table)
        if owner is None:
            raise InputError(f"chip '{chip.name}' has no [{table}], so there is no '{name}' to sweep")
        number = int(value) if value == int(value) else value
        changed = dataclasses.replace(owner, **{key: check_number(owner, key, number, f"the sweep of '{name}'")})
        chip = changed if table is None else dataclasses.replace(chip, **{table: changed})
    return chip


def sweep(
    program: CompiledProgram,
    chips: Sequence[tuple[dict[str, float], Chip]],
    progress: Callable[[int, int], None] = lambda done, total: None,
    workers: int | None = None,
) -> list[Point]:
    """Lower a program for each chip and simulate it there.

    Args:
        chips: The chips, each with its swept parameters, as from `parse_sweep`.
        progress: Called with (chips done, total).
        workers: Number of processes. None: the number of cores available to this process.

    Raises:
        InputError: the program is not an op-level program.
    """
    count = min(workers or usable_threads(), len(chips))
    points = []
    for point in _simulated(program, chips, count):
        points.append(point)
        progress(len(points), len(chips))
    return [dataclasses.replace(point, is_best=_is_best(point, points)) for point in points]


def _simulated(
    program: CompiledProgram, chips: Sequence[tuple[dict[str, float], Chip]], workers: int
) -> Iterator[Point]:
    if workers < 2:
        shared = Shared()
        yield from (_point(program, *chip, shared) for chip in chips)
        return
    spawn = get_context("spawn")  # a fork would copy the locks of threads that run here
    with ProcessPoolExecutor(workers, spawn, initializer=_begin, initargs=(program.to_bytes(),)) as pool:
        share = max(1, min(_NEIGHBOURS, len(chips) // (2 * workers)))
        yield from pool.map(_point_of_process, chips, chunksize=share)


_packed: list[bytes] = []  # the program of a worker process


def _begin(program: bytes) -> None:
    _packed[:] = [program]


@cache
def _program() -> CompiledProgram:
    """The worker's program, decoded in its first task, whose errors reach the caller (those of `_begin` would not)."""
    return CompiledProgram.from_bytes(_packed[0])


@cache
def _shared() -> Shared:
    """The worker's cache of lowering results that chips have in common."""
    return Shared()


def _point_of_process(chip: tuple[dict[str, float], Chip]) -> Point:
    return _point(_program(), *chip, _shared())


def _point(program: CompiledProgram, values: dict[str, float], chip: Chip, shared: Shared) -> Point:
    try:
        result = simulate_for(program, Mapper(chip, shared))
    except ConstraintError as error:
        return Point(values, 0.0, 0.0, 0, 0.0, area(chip), problem=error.violations[0])
    return Point(values, result.seconds, result.energy.total, result.dram_bytes, result.utilization, area(chip))


def _is_best(point: Point, points: Sequence[Point]) -> bool:
    if point.problem:
        return False
    return not any(
        other.seconds <= point.seconds
        and other.area <= point.area
        and (other.seconds, other.area) != (point.seconds, point.area)
        for other in points
        if not other.problem
    )
