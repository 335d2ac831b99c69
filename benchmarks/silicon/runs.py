"""Simulations of the measured programs, their errors, and the fit of a chip's numbers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, median

from benchmarks.silicon.rows import Row
from npu_compiler import CompileOptions, compile
from npu_compiler.program.target import OpLevelTarget
from npu_model import Chip, Result, load_chip, simulate

LEAST_US = 10.0  # shorter rows are mostly the cost of a launch
FITTED = (("launch", "cost_us"), ("dram", "efficiency"), ("matrix", "efficiency"))
_EACH = 3  # every third row of a set, from the first on, is one that numbers are fitted on


@dataclass(frozen=True)
class Outcome:
    """A measurement and the simulation of its program.

    Attributes:
        row: The measurement.
        result: The simulated run.
        us: Simulated time in microseconds, of the part that was measured.
    """

    row: Row
    result: Result
    us: float

    @property
    def error(self) -> float:
        """Relative error; positive if the simulated time is too long."""
        return self.us / self.row.us - 1


def chip_of(row: Row) -> Chip:
    """Return the chip of a measurement, with the measurement's own settings."""
    chip = load_chip(row.chip)
    if row.launch_us is not None:
        chip = changed(chip, "launch", cost_us=row.launch_us)
    if row.rate and chip.matrix is not None:
        chip = changed(chip, "matrix", rates={**chip.matrix.rates, row.dtype: row.rate})
    return chip


def changed(chip: Chip, table: str, **values: object) -> Chip:
    """Return the chip with other numbers in a table of its file."""
    return dataclasses.replace(chip, **{table: dataclasses.replace(getattr(chip, table), **values)})


def run(row: Row, chip: Chip | None = None) -> Outcome:
    """Simulate a measurement's program on its own chip, or on another one if given."""
    chip = chip or chip_of(row)
    options = CompileOptions(compute_dtype=row.dtype, disabled_fusions=row.unfused)
    result = simulate(compile(row.graph(), OpLevelTarget(), options), chip)
    cycles = result.cycles
    if row.kernels:
        cycles = sum(call.cycles for call in result.calls if call.kernel.startswith(row.kernels))
    if row.is_compute_only:
        cycles = result.busy["matrix"] + round(1e3 * chip.launch.cost_us * chip.clock_ghz)
    return Outcome(row, result, 1e6 * chip.seconds(cycles))


def fitting_rows(rows: Sequence[Row]) -> list[Row]:
    """Return the third of a set's rows on which numbers may be fitted."""
    return [row for row in rows if row.us >= LEAST_US][::_EACH]


def fit(rows: Sequence[Row]) -> tuple[dict[str, float], float]:
    """Fit the numbers of `FITTED`; return them and the mean error of the logarithms of times, which they minimize.

    One number after the other is moved by a step as long as that helps; then steps become smaller. For rows with a
    launch cost of their own, only that cost is fitted.
    """
    keys = FITTED if rows[0].launch_us is None else FITTED[:1]
    best = {key: float(getattr(getattr(chip_of(rows[0]), key[0]), key[1])) for key in keys}

    def loss(numbers: dict[tuple[str, str], float]) -> float:
        total = []
        for row in rows:
            chip = chip_of(row)
            for (table, name), value in numbers.items():
                chip = changed(chip, table, **{name: value})
            total.append(abs(math.log1p(run(row, chip).error)))
        return mean(total)

    least = loss(best)
    for step in (1.2, 1.06, 1.02):
        for key in keys:
            for factor in (step, 1 / step):
                while True:
                    value = best[key] * factor
                    if key[1] == "efficiency" and value > 1:
                        break
                    trial = {**best, key: value}
                    if (now := loss(trial)) >= least:
                        break
                    best, least = trial, now
    return {".".join(key): value for key, value in best.items()}, least


def summary(outcomes: Sequence[Outcome]) -> tuple[float, float, float, float]:
    """Return the median and mean of absolute errors, their 90th percentile, and the median error with its sign."""
    errors = sorted(abs(outcome.error) for outcome in outcomes)
    ninetieth = errors[min(len(errors) - 1, math.ceil(0.9 * len(errors)) - 1)]
    return median(errors), mean(errors), ninetieth, median(outcome.error for outcome in outcomes)


def rank_correlation(outcomes: Sequence[Outcome]) -> float:
    """Return Spearman's rank correlation of simulated and measured times."""
    from scipy.stats import spearmanr

    return float(spearmanr([each.us for each in outcomes], [each.row.us for each in outcomes]).statistic)
