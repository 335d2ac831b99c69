"""GPTQ: each column's rounding error is compensated by the columns that are still to be rounded.

Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers" (2022),
https://arxiv.org/abs/2210.17323, algorithm 1, with the columns in the input's order, so that groups stay contiguous.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from npu_compiler.errors import InputError
from npu_compiler.graph.quantization import QuantizedArray, QuantizedFormat
from npu_sim.quantizing.rounding import Scales, assemble, check, codes, fit

DAMPING = 0.01  # of the mean of the Hessian's diagonal, which is added to it
_BLOCK = 128  # columns after which the others are updated, at once


def compensated(
    weight: torch.Tensor, hessian: torch.Tensor, format: QuantizedFormat, fractions: Sequence[float]
) -> QuantizedArray:
    """Quantize a matrix so that its product with the calibration inputs changes little.

    Args:
        weight: float32 [n, k].
        hessian: float32 [k, k], the sum of x xᵀ over the inputs x of the layer.
        fractions: As for `rounding.fit`, which sees the columns of a group with the errors of those before.

    Raises:
        InputError: as `rounding.nearest`; or the calibration inputs are not finite.
    """
    check(weight, format)
    if not bool(hessian.isfinite().all()):
        raise InputError("its inputs for the calibration text are not finite")
    k = weight.shape[1]
    group = format.group or k
    inverse = _inverse_factor(hessian)
    left, found, scales = weight.clone(), torch.empty_like(weight), list[Scales]()
    left[:, hessian.diagonal() == 0] = 0  # the input is always 0 there, so any weight is as good
    block = _BLOCK // group * group or (group if group < k else _BLOCK)  # groups do not cross the ends of blocks
    for start in range(0, k, block):
        end = min(start + block, k)
        columns, factor = left[:, start:end].clone(), inverse[start:end, start:end]
        errors = torch.empty_like(columns)
        for place in range(end - start):
            if (start + place) % group == 0:
                of_group = left if group == k else columns[:, place : place + group]
                scales.append(fit(of_group, format, fractions))
            column = columns[:, place : place + 1]
            code = codes(column, scales[-1], format)
            found[:, start + place] = code[:, 0]
            error = (column - (code - scales[-1].zero) * scales[-1].scale) / factor[place, place]
            columns[:, place:] -= error * factor[place, place:]
            errors[:, place] = error[:, 0]
        left[:, end:] -= errors @ inverse[start:end, end:]
    return assemble(found, scales, format)


def _inverse_factor(hessian: torch.Tensor) -> torch.Tensor:
    """The upper Cholesky factor of the damped Hessian's inverse."""
    damped = hessian.double()
    diagonal = damped.diagonal()
    diagonal += torch.where(diagonal == 0, 1.0, 0.0) + DAMPING * diagonal.mean()
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    factor: torch.Tensor = torch.linalg.cholesky(inverse, upper=True)
    return factor.float()
