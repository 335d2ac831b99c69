"""Decompositions of matrix and vector products."""

from __future__ import annotations

import torch
from torch import Tensor

from npu_sim.module.own_decompositions.table import decomposes


@decomposes("aten.addbmm.default")
def addbmm(x: Tensor, batch1: Tensor, batch2: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """Return the sum of a batch of matrix products, computed as one product with a longer inner dimension."""
    batch, rows, inner = batch1.shape
    long_rows = batch1.permute(1, 0, 2).reshape(rows, batch * inner)
    return torch.addmm(x, long_rows, batch2.reshape(batch * inner, batch2.shape[2]), beta=beta, alpha=alpha)


@decomposes("aten.linalg_vecdot.default")
def vecdot(x: Tensor, y: Tensor, *, dim: int = -1) -> Tensor:
    return (x * y).sum(dim)


@decomposes("aten.bilinear.default")
def bilinear(x1: Tensor, x2: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return Σ x1[i] · weight[o, i, j] · x2[j] for each o; the sum over i is a matrix product."""
    outputs, left, right = weight.shape
    products = torch.matmul(x1, weight.permute(1, 0, 2).reshape(left, outputs * right))
    terms = products.reshape(*x1.shape[:-1], outputs, right) * x2.unsqueeze(-2)
    return terms.sum(-1) if bias is None else terms.sum(-1) + bias
