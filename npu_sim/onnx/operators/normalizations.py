"""Converters of normalizations."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from npu_sim.onnx.dtypes import torch_dtype
from npu_sim.onnx.rows import Call, Refusal, converts, numbered


@converts("BatchNormalization")
def _batch_norm(call: Call, x: Tensor, scale: Tensor, bias: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    if call.attr("training_mode", 0) or call.outputs > 1:
        raise Refusal("computes statistics of the batch (training_mode), which is for training")
    return F.batch_norm(x, mean, variance, scale, bias, eps=call.attr("epsilon", 1e-5))


@converts("InstanceNormalization")
def _instance_norm(call: Call, x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    return F.group_norm(x, x.shape[1], scale, bias, call.attr("epsilon", 1e-5))


@converts("GroupNormalization")
def _group_norm(call: Call, x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    groups = call.attr("num_groups")
    if call.opset < 21:
        each = x.shape[1] // groups
        scale, bias = scale.repeat_interleave(each), bias.repeat_interleave(each)
    return F.group_norm(x, groups, scale, bias, call.attr("epsilon", 1e-5))


@converts("LayerNormalization")
def _layer_norm(
    call: Call, x: Tensor, scale: Tensor, bias: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    axis, eps = call.attr("axis", -1), call.attr("epsilon", 1e-5)
    axis = axis % x.ndim
    shape = x.shape[axis:]
    if scale.shape == shape and (bias is None or bias.shape == shape):
        result = F.layer_norm(x, shape, scale, bias, eps)
    else:
        result = F.layer_norm(x, shape, None, None, eps) * scale
        result = result if bias is None else result + bias
    if call.outputs < 2:
        return result
    stash = torch_dtype(call.attr("stash_type", 1))
    dims, wide = list(range(axis, x.ndim)), x.to(stash)
    mean = torch.mean(wide, dims, keepdim=True)
    variance = torch.mean(torch.square(wide - mean), dims, keepdim=True)
    return result, mean, torch.rsqrt(variance + eps)


@converts("RMSNormalization")
def _rms_norm(call: Call, x: Tensor, scale: Tensor) -> Tensor:
    axis, eps = call.attr("axis", -1), call.attr("epsilon", 1e-5)
    wide = x.to(torch_dtype(call.attr("stash_type", 1)))
    dims = list(range(axis % x.ndim, x.ndim))
    normal = wide * torch.rsqrt(torch.mean(torch.square(wide), dims, keepdim=True) + eps)
    return (normal.to(x.dtype) * scale).to(scale.dtype)


@converts("LRN")
def _lrn(call: Call, x: Tensor) -> Tensor:
    size, alpha, beta, bias = (
        call.attr("size"),
        call.attr("alpha", 1e-4),
        call.attr("beta", 0.75),
        call.attr("bias", 1.0),
    )
    rest = [1] * (x.ndim - 2)
    squares = torch.square(x)
    below = (size - 1) // 2
    around = F.pad(squares, [0, 0] * len(rest) + [below, size - 1 - below])
    total = torch.stack(
        [around.narrow(1, offset, x.shape[1]) for offset in numbered(size, "channels in a window")]
    ).sum(0)
    return x / torch.pow(bias + alpha / size * total, beta)


@converts("LpNormalization")
def _lp_norm(call: Call, x: Tensor) -> Tensor:
    axis, p = call.attr("axis", -1), call.attr("p", 2)
    length = torch.abs(x).sum(axis, keepdim=True) if p == 1 else torch.sqrt(torch.square(x).sum(axis, keepdim=True))
    return torch.where(length == 0, torch.zeros_like(x), x / length)


@converts("MeanVarianceNormalization")
def _mean_variance(call: Call, x: Tensor) -> Tensor:
    axes = call.attr("axes", [0, 2, 3])
    centered = x - torch.mean(x, axes, keepdim=True)
    return centered / (torch.sqrt(torch.mean(torch.square(centered), axes, keepdim=True)) + 1e-9)
