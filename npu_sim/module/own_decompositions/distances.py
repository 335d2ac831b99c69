"""Decompositions of distances."""

from __future__ import annotations

import torch

from npu_sim.module.own_decompositions.table import decomposes

_FEW = 25  # rows up to which PyTorch computes Euclidean distances without a product of matrices, unless told otherwise
_BY_PRODUCT, _WITHOUT_PRODUCT = 1, 2  # `compute_mode`, beside its default


@decomposes("aten.cdist.default aten._cdist_forward.default")
def cdist(x: torch.Tensor, y: torch.Tensor, p: float = 2.0, compute_mode: int | None = None) -> torch.Tensor:
    """The distance of every row of `x` to every row of `y`."""
    by_product = compute_mode == _BY_PRODUCT or (
        compute_mode != _WITHOUT_PRODUCT and (x.size(-2) > _FEW or y.size(-2) > _FEW)
    )
    if 0 in (x.size(-1), x.size(-2), y.size(-2)):
        return (x.unsqueeze(-2) - y.unsqueeze(-3)).sum(-1)
    if p != 2 or not by_product:
        distances: torch.Tensor = torch.linalg.vector_norm(x.unsqueeze(-2) - y.unsqueeze(-3), p, -1)
        return distances
    squares = (x * x).sum(-1, keepdim=True) + (y * y).sum(-1).unsqueeze(-2)
    return (squares - 2 * torch.matmul(x, y.mT)).clamp(min=0).sqrt()
