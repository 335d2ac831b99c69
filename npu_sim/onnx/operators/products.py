"""Converters of matrix products."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from npu_sim.onnx.rows import Call, converts


@converts("MatMul")
def _matmul(call: Call, a: Tensor, b: Tensor) -> Tensor:
    return torch.matmul(a, b)


@converts("Gemm")
def _gemm(call: Call, a: Tensor, b: Tensor, c: Tensor | None = None) -> Tensor:
    alpha, beta = call.attr("alpha", 1.0), call.attr("beta", 1.0)
    a = a.transpose(0, 1) if call.attr("transA", 0) else a
    if call.attr("transB", 0) and alpha == 1 and (c is None or beta == 1 and c.ndim == 1 and c.shape[0] == b.shape[0]):
        return F.linear(a, b, c)
    product = torch.matmul(a, b.transpose(0, 1) if call.attr("transB", 0) else b)
    product = product if alpha == 1 else alpha * product
    if c is None or beta == 0:
        return product
    return (product + (c if beta == 1 else beta * c)).to(product.dtype)


@converts("Einsum")
def _einsum(call: Call, *terms: Tensor) -> Tensor:
    return torch.einsum(call.attr("equation"), *terms)
