"""GPTQ: quantization in which the columns that are still to be rounded compensate each column's rounding error.

Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers" (2022),
https://arxiv.org/abs/2210.17323, algorithm 1. Columns are rounded in the order of their inputs' energy, the greatest
first, so that later columns can still compensate the errors that matter most. Scales are chosen before that, for groups
of columns in the weight's own order, so the result is stored like any other ("static groups", "actorder: weight").
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from npu_compiler.errors import InputError
from npu_compiler.graph.quantization import QuantizedArray, QuantizedFormat
from npu_sim.quantizing.rounding import Scales, assemble, check, codes, fit_rows

DAMPING = 0.01  # of the mean of the Hessian's diagonal, which is added to it
PROPAGATION = 0.5  # how much of the error of its inputs a layer makes up for
_BLOCK = 64  # columns after which all later ones are updated at once


def compensated(
    weight: torch.Tensor, hessian: torch.Tensor, format: QuantizedFormat, fractions: Sequence[float]
) -> QuantizedArray:
    """Quantize a matrix so that its product with the calibration inputs changes little.

    Args:
        weight: float32 [n, k].
        hessian: float32 [k, k], the sum of x xᵀ over the inputs x of the layer.
        format: The format to quantize to.
        fractions: Fractions of the range that the choice of scales tries; see `rounding.fit`.

    Raises:
        InputError: as `rounding.nearest`; or the calibration inputs are not finite.
    """
    check(weight, format)
    if not bool(hessian.isfinite().all()):
        raise InputError("its inputs for the calibration text are not finite")
    k = weight.shape[1]
    scales = fit_rows(weight, format, fractions)
    by_group = Scales(scales.scale.T.contiguous(), scales.zero.T.contiguous())
    order = hessian.diagonal().argsort(descending=True)
    groups = (order // (format.group or k)).tolist()
    inverse = _inverse_factor(hessian[order][:, order])
    left = weight.T[order].contiguous()  # a column of the weight is a row here
    matrix = torch.empty_like(left)
    for start in range(0, k, _BLOCK):
        end = min(start + _BLOCK, k)
        columns, factor = left[start:end], inverse[start:end, start:end]
        errors = torch.empty_like(columns)
        for place, column in enumerate(columns):
            group = groups[start + place]
            of_column = Scales(by_group.scale[group], by_group.zero[group])
            code = codes(column, of_column, format)
            matrix[start + place] = code
            errors[place] = (column - (code - of_column.zero) * of_column.scale) / factor[place, place]
            columns[place + 1 :].addr_(factor[place, place + 1 :], errors[place], alpha=-1)
        left[end:].addmm_(inverse[start:end, end:].T, errors, alpha=-1)
    in_place = torch.empty_like(matrix)
    in_place[order] = matrix
    return assemble(in_place.T.contiguous(), scales, format)


def matched(weight: torch.Tensor, hessian: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """Return a weight that, on the quantized model's inputs, better reproduces the float model's outputs.

    The least-squares solution is weight · (1 + shift · hessian⁻¹). It fits the calibration text better than other
    texts, so only the fraction `PROPAGATION` of the change is applied, as in Arai and Ichikawa, "Quantization Error
    Propagation" (2025), https://arxiv.org/abs/2504.09629.

    Args:
        weight: float32 [n, k].
        hessian, shift: Results of `layerwise.moments` for the layer's inputs.
    """
    change = torch.cholesky_solve(shift.T.double(), torch.linalg.cholesky(_damped(hessian))).T
    return weight + PROPAGATION * weight @ change.float()


def _damped(hessian: torch.Tensor) -> torch.Tensor:
    """Return the Hessian in float64, with `DAMPING` times the mean of its diagonal added to the diagonal."""
    damped = hessian.double()
    diagonal = damped.diagonal()
    diagonal += torch.where(diagonal == 0, 1.0, 0.0) + DAMPING * diagonal.mean()
    return damped


def _inverse_factor(hessian: torch.Tensor) -> torch.Tensor:
    """Return the upper Cholesky factor of the inverse of the damped Hessian."""
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(_damped(hessian)))
    factor: torch.Tensor = torch.linalg.cholesky(inverse, upper=True)
    return factor.float()
