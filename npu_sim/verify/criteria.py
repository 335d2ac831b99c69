"""The numerical criteria by which an output, or one kernel's result, agrees with PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from npu_compiler.graph.dtypes import FLOAT_MAX, numpy_dtype, stands_for_infinity

MIN_PEARSON = 0.999
MAX_ERROR_RATIO = 1.25
# Relative rounding errors. That of float32 is above the unit roundoff, 2**-24, to allow for sums in another order.
ROUNDING = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-20}
FEW_VALUES = 256


@dataclass(frozen=True)
class OutputReport:
    """The comparison of one output.

    Attributes:
        name: The output's name.
        pearson: Pearson correlation with the float32 reference; None for a constant or integer output.
        rms_error: Root-mean-square difference between the device and the float32 reference.
        reference_error: Root-mean-square difference between PyTorch in the compute dtype and the float32 reference.
        problems: One sentence for each failed criterion; empty if the output passes.
    """

    name: str
    pearson: float | None
    rms_error: float
    reference_error: float
    problems: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether all criteria are met."""
        return not self.problems


def widen(array: np.ndarray) -> np.ndarray:
    """Convert an array of any real dtype to float64."""
    return np.asarray(array.astype(np.float32) if array.dtype == numpy_dtype("bfloat16") else array, np.float64)


def rms(values: np.ndarray) -> float:
    """Return the root mean square of an array; 0 if it is empty."""
    return float(np.sqrt(np.mean(np.square(values)))) if values.size else 0.0


def compare_output(
    name: str, ours: Sequence[np.ndarray], exact: Sequence[np.ndarray], half: Sequence[np.ndarray], dtype: str
) -> OutputReport:
    """Compare one output over several runs.

    A float output passes if its values are finite, and not clamped to the range of `dtype`, wherever PyTorch's in
    float32 are; its Pearson r is above `MIN_PEARSON`; its RMS error is at most `MAX_ERROR_RATIO` times PyTorch's own in
    `dtype` (more for fewer than `FEW_VALUES` values, whose RMS is noisy); and its argmax along the last axis equals the
    reference's except for near-ties. Other outputs must be equal. Values that stand for an infinity (`dtypes.saturate`)
    are ignored.

    Args:
        name: The output's name.
        ours: The device's values, one array for each run, all of one shape.
        exact: PyTorch's values in float32.
        half: PyTorch's values in `dtype`.
        dtype: The compute dtype: `float16`, `bfloat16` or `float32`.
    """
    is_float = ours[0].dtype.kind in "fV"
    got, want, near = (np.stack([widen(value) for value in values]) for values in (ours, exact, half))
    meant = np.isfinite(want) & ~stands_for_infinity(want) if is_float else np.isfinite(want)
    problems: list[str] = []
    strange = int(np.count_nonzero(~np.isfinite(got) & meant))
    if strange:
        problems.append(f"{strange} of {got.size} values are not finite, although PyTorch's in float32 are")
    limit = FLOAT_MAX[dtype]
    clamped = int(np.count_nonzero((np.abs(got) == limit) & meant & (np.abs(want) > limit)))
    if clamped:
        problems.append(f"{clamped} of {got.size} values are clamped to the range of {dtype}, ±{limit:.6g}")
    finite = np.isfinite(got) & meant
    ordinary = finite & np.isfinite(near)
    if not is_float:
        wrong = int(np.count_nonzero((got != want) & (near == want)))
        if wrong:
            problems.append(f"{wrong} of {got.size} values differ")
        return OutputReport(name, None, rms((got - want)[finite]), rms((near - want)[ordinary]), tuple(problems))
    error, allowed = rms((got - want)[ordinary]), rms((near - want)[ordinary])
    ratio = MAX_ERROR_RATIO + (4 / np.sqrt(got.size) if 0 < got.size < FEW_VALUES else 0)
    floor = ROUNDING[dtype] * rms(want[ordinary]) * (1 if dtype == "float32" else 0.1)
    pearson = _pearson(got[finite], want[finite])
    if pearson is not None and not pearson > MIN_PEARSON:
        problems.append(f"Pearson r is {pearson:.6f}; it must be above {MIN_PEARSON}")
    if error > ratio * allowed + floor:
        problems.append(
            f"the RMS error is {error:.3e}, more than {ratio:.2f} times PyTorch's own error in {dtype}, {allowed:.3e}"
        )
    if ordinary.all() and got.ndim > 1 and got.shape[-1] > 1:
        behind = want.max(-1) - np.take_along_axis(want, got.argmax(-1)[..., None], -1)[..., 0]
        tie = 2 * np.abs(near - want).max() + 2 * ROUNDING[dtype] * np.abs(want).max()
        if (behind > tie).any():
            problems.append(f"the argmax differs: the reference value there is {behind.max():.3e} below the maximum")
    return OutputReport(name, pearson, error, allowed, tuple(problems))


def _pearson(left: np.ndarray, right: np.ndarray) -> float | None:
    if left.size < 2 or right.std() == 0:
        return None
    return 0.0 if left.std() == 0 else float(np.corrcoef(left, right)[0, 1])


def excess_error(ours: np.ndarray, exact: np.ndarray, half: np.ndarray, dtype: str) -> float:
    """Return the error of one kernel as a multiple of what rounding explains; above 1, the kernel is wrong.

    The three results were computed from the same inputs, so errors of earlier kernels are not included. For floats, the
    larger of two multiples counts: that of the mean error and that of the largest error. For other dtypes, the number
    of wrong elements is returned.
    """
    got, want, near = widen(ours), widen(exact), widen(half)
    is_float = ours.dtype.kind in "fV"
    meant = np.isfinite(want) & ~stands_for_infinity(want) if is_float else np.isfinite(want)
    if not np.isfinite(got[meant]).all():
        return float("inf")
    usable = meant & np.isfinite(near)
    if not usable.any():
        return 0.0
    if not is_float:
        return float(np.count_nonzero((got != want) & (near == want)))
    ours_off, near_off, unit = np.abs(got - want)[usable], np.abs(near - want)[usable], ROUNDING[dtype]
    largest, typical = float(np.abs(want[usable]).max()), rms(want[usable])
    tiny = np.finfo(np.float32).tiny if dtype != "float16" else 2.0**-24
    mean = rms(ours_off) / (2 * rms(near_off) + 2 * unit * typical + tiny)
    worst = float(ours_off.max()) / (8 * float(near_off.max()) + 16 * unit * largest + tiny)
    return float(max(mean, worst))
