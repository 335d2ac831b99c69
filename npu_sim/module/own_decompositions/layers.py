"""Decompositions of normalization, activations and the gradient of softmax."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from npu_sim.module.own_decompositions.table import decomposes


@decomposes("aten.native_group_norm.default")
def native_group_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    batch: int,
    channels: int,
    pixels: int,
    groups: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the normalized input, and the mean and reciprocal standard deviation of each group."""
    if pixels == 0 and batch != 0:
        raise NotImplementedError("PyTorch does not promise statistics of no elements")
    variance, mean = torch.var_mean(x.reshape(batch, groups, channels // groups * pixels).float(), -1, correction=0)
    out = F.group_norm(x, groups, weight, bias, eps)
    return out, mean.to(x.dtype), torch.rsqrt(variance + eps).to(x.dtype)


@decomposes("aten.rrelu.default")
def rrelu(
    x: Tensor,
    lower: float = 0.125,
    upper: float = 1 / 3,
    training: bool = False,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Apply a leaky ReLU whose slope is the mean of `lower` and `upper`; random slopes in training are refused."""
    if training:
        raise NotImplementedError("its slopes are random numbers")
    return F.leaky_relu(x, (lower + upper) / 2)


@decomposes("aten._softmax_backward_data.default")
def softmax_backward_data(grad: Tensor, output: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """Return the gradient of softmax with respect to its input.

    The sum is subtracted before the multiplication, in PyTorch's order, so that infinities propagate in the same way.
    """
    return ((grad - (grad * output).sum(dim, keepdim=True)) * output).to(dtype)
