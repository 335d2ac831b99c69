"""Decompositions of element-wise ops."""

from __future__ import annotations

import torch
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND, elementwise_dtypes

from npu_sim.module.own_decompositions.table import decomposes


@decomposes("aten.hypot.default")
def hypot(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the larger of |x| and |y| times √(1 + ratio²), which does not overflow where the squares would."""
    wide, result = elementwise_dtypes(x, y, type_promotion_kind=ELEMENTWISE_TYPE_PROMOTION_KIND.DEFAULT)
    a, b = torch.abs(x.to(wide)), torch.abs(y.to(wide))
    high, low = torch.maximum(a, b), torch.minimum(a, b)
    ratio = torch.where(high == low, torch.ones_like(high), low / high)
    ratio = torch.where(high == 0, torch.zeros_like(high), ratio)
    return (high * torch.sqrt(1 + ratio * ratio)).to(result)


@decomposes("aten.real.default aten.resolve_conj.default aten.resolve_neg.default")
def itself(x: torch.Tensor) -> torch.Tensor:
    """Return a real tensor as it is; complex tensors are not supported by the device."""
    return x


@decomposes("aten.frexp.Tensor")
def frexp(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Split each number into a mantissa in [0.5, 1) and an exponent of two.

    The exponent guessed from the logarithm is off by one at most and is corrected.
    """
    is_number = torch.isfinite(x) & (x != 0)
    number = torch.where(is_number, x, 1.0)
    exponent = torch.floor(torch.log2(torch.abs(number))) + 1
    half = torch.floor(exponent / 2)  # a float may not hold two to the whole power
    mantissa = number * torch.exp2(-half) * torch.exp2(half - exponent)
    size = torch.abs(mantissa)
    correction = torch.where(size >= 1, 1.0, torch.where(size < 0.5, -1.0, 0.0)).to(x.dtype)
    mantissa = mantissa * torch.exp2(-correction)
    whole = torch.where(is_number, exponent + correction, 0.0).to(torch.int32)
    return torch.where(is_number, mantissa, x), whole
