"""Norms over rows, rotary embedding, attention; float32 arithmetic."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from npu_runtime.cpu.kernels.registry import Params, Tensors, cpu_kernel, to_float


@cpu_kernel("rmsnorm_kernel")
def rms_norm(inputs: Tensors, outputs: Tensors, params: Params) -> None:
    """x · rsqrt(mean(x²) + eps) · (weight + weight_offset) over rows."""
    x, *weight = (to_float(t) for t in inputs)
    result = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + params["eps"])
    outputs[0].copy_(result * (weight[0] + params["weight_offset"]) if weight else result)


@cpu_kernel("layernorm_kernel")
def layer_norm(inputs: Tensors, outputs: Tensors, params: Params) -> None:
    x, *affine = (to_float(t) for t in inputs)
    weight, bias = (*affine, None, None)[:2]
    outputs[0].copy_(F.layer_norm(x, x.shape[-1:], weight, bias, params["eps"]))


@cpu_kernel("groupnorm_kernel")
def group_norm(inputs: Tensors, outputs: Tensors, params: Params) -> None:
    x, *affine = (to_float(t) for t in inputs)
    weight, bias = (*affine, None, None)[:2]
    groups = x.reshape(x.shape[0], params["groups"], -1)
    var, mean = torch.var_mean(groups, -1, correction=0, keepdim=True)
    result = ((groups - mean) * torch.rsqrt(var + params["eps"])).reshape(x.shape)
    shape = (1, -1, *([1] * (x.dim() - 2)))
    if weight is not None:
        result = result * weight.reshape(shape)
    outputs[0].copy_(result if bias is None else result + bias.reshape(shape))


@cpu_kernel("rope_kernel")
def rope(inputs: Tensors, outputs: Tensors, params: Params) -> None:
    """x · cos + rotate_half(x) · sin over the last dimension."""
    x, cos, sin = (to_float(t) for t in inputs)
    first, second = x.chunk(2, -1)
    outputs[0].copy_(x * cos + torch.cat((-second, first), -1) * sin)


@cpu_kernel("attention_kernel")
def attention(inputs: Tensors, outputs: Tensors, params: Params) -> None:
    """softmax(scale · q·kᵀ + mask) · v over [B, H, T, D], KV heads shared by consecutive query heads."""
    q, k, v, *rest = inputs
    mask = rest[0] if rest else None
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.float()
    result = F.scaled_dot_product_attention(
        q.float(),
        k.float(),
        v.float(),
        mask,
        is_causal=bool(params["causal"]),
        scale=params["scale"],
        enable_gqa=k.shape[1] != q.shape[1],
    )
    outputs[0].copy_(result)
