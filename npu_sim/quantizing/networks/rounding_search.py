"""Rounding of the weights of depthwise convolutions, and of other layers with few weights for each output element.

A channel has a scale of its own and, for example, 9 or 25 weights, so many scales can be tried: for each one, the
weights are rounded with GPTQ's compensation, and the scale that changes the channel's output least is kept. Then single
codes (the rounded integers) move up or down by one as long as that helps, and finally the scale is fitted to the codes
by least squares.
"""

from __future__ import annotations

import torch

FEW = 64  # weights of a result for which the search is fast
_SHARES = torch.linspace(0.8, 1.25, 64)  # of the scale that maps the largest weight to 127
_DAMPING = 1e-3  # of the mean of a Hessian's diagonal, which is added to it


def searched(weight: torch.Tensor, hessian: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Search for the integer codes, in -127..127, and scales of weights that change the outputs least.

    Args:
        weight: float32 [groups, n, k]: each group has n channels, whose results are sums of k products.
        hessian: float32 [groups, k, k]: for each group the sum of x xᵀ over its inputs x.

    Returns:
        Codes [groups, n, k] and scales [groups, n].
    """
    groups, n, k = weight.shape
    wanted, curvature = weight.double(), damped(hessian)
    largest = wanted.abs().amax(2) / 127
    largest[largest == 0] = 1.0
    scales = (largest[..., None] * _SHARES.double()).reshape(groups, -1)
    repeated = wanted.repeat_interleave(len(_SHARES), dim=1)
    codes = _compensated(repeated, curvature, scales)
    errors = _error(codes * scales[..., None] - repeated, curvature).reshape(groups, n, -1)
    best = errors.argmin(2, keepdim=True)
    scale = scales.reshape(groups, n, -1).gather(2, best)[..., 0]
    codes = codes.reshape(groups, n, -1, k).gather(2, best[..., None].expand(-1, -1, -1, k))[:, :, 0]
    codes = _descended(codes, scale, wanted, curvature)
    return codes.float(), best_scales(codes, wanted, curvature, scale).float()


def damped(hessian: torch.Tensor) -> torch.Tensor:
    """Return the Hessians in float64, with `_DAMPING` times the mean of each diagonal added to it."""
    result = hessian.double().clone()
    diagonal = result.diagonal(dim1=1, dim2=2)
    mean = diagonal.mean(1, keepdim=True)
    diagonal += torch.where(mean == 0, 1.0, _DAMPING * mean)
    return result


def best_scales(codes: torch.Tensor, wanted: torch.Tensor, hessian: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the scales [groups, n] that minimize the error in the output for given codes.

    Args:
        codes: Integer codes, [groups, n, k].
        wanted: The original weights, [groups, n, k].
        hessian: [groups, k, k].
        scales: Scales to keep for channels in which all codes are 0.
    """
    weighted = codes @ hessian
    length = (weighted * codes).sum(2)
    best = (weighted * wanted).sum(2) / length.where(length > 0, 1.0)
    return best.where((length > 0) & (best > 0), scales)


def _compensated(weight: torch.Tensor, hessian: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Round weights of small groups by GPTQ, the columns with the largest inputs first; return the codes."""
    order = hessian.diagonal(dim1=1, dim2=2).argsort(dim=1, descending=True)
    index = order[:, None].expand_as(weight)
    left = weight.gather(2, index)
    size = hessian.shape[1]
    sorted_rows = hessian.gather(1, order[:, :, None].expand(-1, -1, size))
    in_order = sorted_rows.gather(2, order[:, None].expand(-1, size, -1))
    factor = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(in_order)), upper=True)
    codes = torch.empty_like(left)
    for column in range(size):
        codes[..., column] = (left[..., column] / scales).round().clamp(-127, 127)
        error = (left[..., column] - codes[..., column] * scales) / factor[:, column, column, None]
        left[..., column + 1 :] -= error[..., None] * factor[:, None, column, column + 1 :]
    return torch.empty_like(codes).scatter(2, index, codes)


def _error(difference: torch.Tensor, hessian: torch.Tensor) -> torch.Tensor:
    return ((difference @ hessian) * difference).sum(2)


def _descended(codes: torch.Tensor, scales: torch.Tensor, wanted: torch.Tensor, hessian: torch.Tensor) -> torch.Tensor:
    """Improve codes until no change of a single code by one lowers the error.

    Each step changes, in each row, the code whose change helps most.
    """
    step, diagonal = scales[..., None], hessian.diagonal(dim1=1, dim2=2)[:, None]
    for _ in range(2 * codes.shape[2]):
        slope = 2 * step * ((codes * step - wanted) @ hessian)
        gain = slope.abs() - step.square() * diagonal
        moved = codes - slope.sign()
        gain[moved.abs() > 127] = -1
        most, at = gain.max(2, keepdim=True)
        if not bool((most > 0).any()):
            break
        codes = torch.where(most > 0, codes.scatter(2, at, moved.gather(2, at)), codes)
    return codes
