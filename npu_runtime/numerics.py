"""Checks of results for values that show a lack of range: not finite, or at the limit of their dtype."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

import numpy as np

from npu_compiler.errors import NumericalWarning
from npu_compiler.graph.dtypes import FLOAT_MAX, is_float
from npu_compiler.graph.model import TensorSpec


def doubtful_values(outputs: Mapping[str, np.ndarray], specs: Sequence[TensorSpec]) -> list[str]:
    """A sentence for each output with values that are not finite, or at the limit of its storage dtype.

    Args:
        outputs: Output name → array.
        specs: Specs of the outputs.
    """
    return [
        f"output '{spec.name}': {problem}"
        for spec in specs
        if is_float(spec.dtype) and (problem := _problem(np.asarray(outputs[spec.name]), spec.storage or spec.dtype))
    ]


def warn_of_doubtful_values(outputs: Mapping[str, np.ndarray], specs: Sequence[TensorSpec]) -> None:
    """Issue a `NumericalWarning` for each of `doubtful_values`."""
    for problem in doubtful_values(outputs, specs):
        warnings.warn(problem, NumericalWarning, stacklevel=3)


def _problem(values: np.ndarray, storage: str) -> str:
    wide = np.asarray(values, np.float32)
    strange = int(wide.size - np.count_nonzero(np.isfinite(wide)))
    if strange:
        problem = f"{strange} of {wide.size} values are not finite"
    elif storage == "float16" and (clamped := int(np.count_nonzero(np.abs(wide) >= FLOAT_MAX[storage]))):
        problem = f"{clamped} of {wide.size} values are at the limit of float16, {FLOAT_MAX[storage]:.0f}"
    else:
        return ""
    wider = "float32" if storage == "bfloat16" else "bfloat16 or float32"
    return problem if storage == "float32" else f"{problem}; compute dtype {wider} has a wider range"
