"""What "right" means in numbers (design, section 6): one output against PyTorch in float32 and in 16 bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from npu_sim.reference import widen

MIN_PEARSON = 0.999
MAX_ERROR_RATIO = 1.25
ROUNDING = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-20}
FEW_VALUES = 256


@dataclass(frozen=True)
class OutputReport:
    """How one output compares.

    Attributes:
        pearson: Correlation with the float32 reference; None for a constant or integer output.
        rms_error, reference_error: Of the device, and of PyTorch in the same dtype, against float32.
        problems: What is not right, in words; empty when all is.
    """

    name: str
    pearson: float | None
    rms_error: float
    reference_error: float
    problems: tuple[str, ...]

    @property
    def passed(self) -> bool:
        return not self.problems


def rms(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(values)))) if values.size else 0.0


def compare_output(
    name: str, ours: Sequence[np.ndarray], exact: Sequence[np.ndarray], half: Sequence[np.ndarray], dtype: str
) -> OutputReport:
    """Compare one output over several runs: the device's, float32's and `dtype`'s values, run by run."""
    is_float = ours[0].dtype.kind in "fV"
    got, want, near = (np.stack([widen(value) for value in values]) for values in (ours, exact, half))
    finite = np.isfinite(got) & np.isfinite(want) & np.isfinite(near)
    problems: list[str] = []
    strange = int(np.count_nonzero(~np.isfinite(got) & np.isfinite(want) & np.isfinite(near)))
    if strange:
        problems.append(f"{strange} values are not finite")
    if not is_float:
        wrong = int(np.count_nonzero((got != want) & (near == want)))
        if wrong:
            problems.append(f"{wrong} of {got.size} values differ")
        return OutputReport(name, None, rms((got - want)[finite]), rms((near - want)[finite]), tuple(problems))
    error, allowed = rms((got - want)[finite]), rms((near - want)[finite])
    ratio = MAX_ERROR_RATIO + (4 / np.sqrt(got.size) if 0 < got.size < FEW_VALUES else 0)
    floor = ROUNDING[dtype] * rms(want[finite]) * (1 if dtype == "float32" else 0.1)
    pearson = _pearson(got[finite], want[finite])
    if pearson is not None and not pearson > MIN_PEARSON:
        problems.append(f"Pearson r is {pearson:.6f}, not above {MIN_PEARSON}")
    if error > ratio * allowed + floor:
        problems.append(f"RMS error {error:.3e} is above {ratio:.2f} x PyTorch's in {dtype}, {allowed:.3e}")
    if finite.all() and got.ndim > 1 and got.shape[-1] > 1:
        behind = want.max(-1) - np.take_along_axis(want, got.argmax(-1)[..., None], -1)[..., 0]
        tie = 2 * np.abs(near - want).max() + 2 * ROUNDING[dtype] * np.abs(want).max()
        if (behind > tie).any():
            problems.append(f"another argmax, {behind.max():.3e} behind the right one")
    return OutputReport(name, pearson, error, allowed, tuple(problems))


def _pearson(left: np.ndarray, right: np.ndarray) -> float | None:
    if left.size < 2 or right.std() == 0:
        return None
    return 0.0 if left.std() == 0 else float(np.corrcoef(left, right)[0, 1])


def departs(ours: np.ndarray, exact: np.ndarray, half: np.ndarray, dtype: str) -> float:
    """How far one kernel's result is beyond what rounding explains: above 1, it is wrong.

    Given the kernel's own inputs, so that nothing has added up: the worst element counts as well as the mean.
    """
    got, want, near = widen(ours), widen(exact), widen(half)
    usable = np.isfinite(want) & np.isfinite(near)
    if not usable.any():
        return 0.0
    if not np.isfinite(got[usable]).all():
        return float("inf")
    if ours.dtype.kind not in "fV":
        return float(np.count_nonzero((got != want) & (near == want)))
    ours_off, near_off, unit = np.abs(got - want)[usable], np.abs(near - want)[usable], ROUNDING[dtype]
    largest, typical = float(np.abs(want[usable]).max()), rms(want[usable])
    tiny = np.finfo(np.float32).tiny if dtype != "float16" else 2.0**-24
    mean = rms(ours_off) / (2 * rms(near_off) + 2 * unit * typical + tiny)
    worst = float(ours_off.max()) / (8 * float(near_off.max()) + 16 * unit * largest + tiny)
    return float(max(mean, worst))
