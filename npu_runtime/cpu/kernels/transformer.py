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
    # PyTorch takes the mean of squares of channels-last images, which loses digits where values are far from zero.
    outputs[0].copy_(torch.group_norm(x.contiguous(), params["groups"], weight, bias, params["eps"]))


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


@cpu_kernel("paged_attention_kernel")
def paged_attention_kernel(inputs: Tensors, outputs: Tensors, params: Params) -> None:
    q, k, v, tables, sequences, positions = inputs
    outputs[0].copy_(paged_attention(q, k, v, tables, sequences, positions, params["block_size"], params["scale"]))


def paged_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    sequences: torch.Tensor,
    positions: torch.Tensor,
    block_size: int,
    scale: float,
) -> torch.Tensor:
    """What `npu_compiler.ops.transformer.lower_paged_attention` says, in float32: [N, H, D]."""
    sequences = sequences.long().clamp(0, len(tables) - 1)
    positions = positions.long().clamp(0, tables.shape[1] * block_size - 1)
    tables = tables.long().clamp(0, len(keys) // block_size - 1)
    result = query.new_empty(*query.shape[:2], values.shape[2], dtype=torch.float32)
    for sequence in sequences.unique():
        tokens = (sequences == sequence).nonzero().flatten()
        places = torch.arange(int(positions[tokens].max()) + 1)
        rows = tables[sequence, places // block_size] * block_size + places % block_size
        attended = F.scaled_dot_product_attention(
            query[tokens].float().transpose(0, 1),
            keys[rows].float().transpose(0, 1),
            values[rows].float().transpose(0, 1),
            places <= positions[tokens, None],
            scale=scale,
            enable_gqa=True,
        )
        result[tokens] = attended.transpose(0, 1)
    return result
