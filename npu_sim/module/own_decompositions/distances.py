"""Decompositions of ops that compute distances."""

from __future__ import annotations

import torch

from npu_sim.module.own_decompositions.table import decomposes

_FEW = 25  # rows up to which PyTorch computes Euclidean distances without a product of matrices, unless told otherwise
_MOST_ROWS = 64  # that `pdist` compares, with an op for each
_BY_PRODUCT, _WITHOUT_PRODUCT = 1, 2  # `compute_mode`, beside its default


@decomposes("aten.cdist.default aten._cdist_forward.default")
def cdist(x: torch.Tensor, y: torch.Tensor, p: float = 2.0, compute_mode: int | None = None) -> torch.Tensor:
    """Return the distance of every row of `x` to every row of `y`."""
    by_product = compute_mode == _BY_PRODUCT or (
        compute_mode != _WITHOUT_PRODUCT and (x.size(-2) > _FEW or y.size(-2) > _FEW)
    )
    if 0 in (x.size(-1), x.size(-2), y.size(-2)):
        return (x.unsqueeze(-2) - y.unsqueeze(-3)).sum(-1)
    if p != 2 or not by_product:
        return _length(x.unsqueeze(-2) - y.unsqueeze(-3), p)
    squares = (x * x).sum(-1, keepdim=True) + (y * y).sum(-1).unsqueeze(-2)
    return (squares - 2 * torch.matmul(x, y.mT)).clamp(min=0).sqrt()


@decomposes("aten.pdist.default aten._pdist_forward.default")
def pdist(x: torch.Tensor, p: float = 2.0) -> torch.Tensor:
    """Return the distance of every row to every later row."""
    count = x.size(0)
    if count > _MOST_ROWS:
        raise NotImplementedError(f"distances among {count} rows")
    if count < 2:
        return x.narrow(0, 0, 0).sum(-1)
    return _length(torch.cat([x.narrow(0, k, 1) - x.narrow(0, k + 1, count - k - 1) for k in range(count - 1)]), p)


def _length(differences: torch.Tensor, p: float) -> torch.Tensor:
    """Return the p-norm along the last dimension. For p = 0, NaN gives NaN, unlike in `torch.linalg`."""
    if differences.size(-1) == 0:
        return differences.sum(-1)
    if p == 0:
        return differences.abs().ceil().clamp(max=1).sum(-1)
    lengths: torch.Tensor = torch.linalg.vector_norm(differences, p, -1)
    return lengths
