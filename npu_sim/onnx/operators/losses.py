"""Converters of loss functions."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from npu_sim.onnx.rows import Call, converts


@converts("NegativeLogLikelihoodLoss")
def _nll_loss(call: Call, x: Tensor, target: Tensor, weight: Tensor | None = None) -> Tensor:
    return _loss(call, x, target, weight)


@converts("SoftmaxCrossEntropyLoss")
def _cross_entropy(
    call: Call, x: Tensor, target: Tensor, weight: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    log = F.log_softmax(x, 1)
    loss = _loss(call, log, target, weight)
    return (loss, log) if call.outputs > 1 else loss


def _loss(call: Call, x: Tensor, target: Tensor, weight: Tensor | None) -> Tensor:
    ignored = call.attr("ignore_index")
    counts = torch.ones_like(target, dtype=torch.bool) if ignored is None else target != ignored
    classes = torch.where(counts, target, 0).to(torch.int64)
    picked = -torch.gather(x, 1, classes.unsqueeze(1)).squeeze(1)
    factors = counts.to(x.dtype)
    if weight is not None:
        factors = factors * torch.index_select(weight, 0, classes.reshape(-1)).reshape(classes.shape)
    losses = picked * factors
    reduction = call.attr("reduction", "mean")
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / factors.sum()
