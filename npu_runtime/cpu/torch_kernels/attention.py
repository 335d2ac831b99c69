"""Attention by PyTorch's own kernel, in float32 arithmetic."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from npu_runtime.cpu.torch_kernels.registry import Params, Tensors, torch_kernel


@torch_kernel("attention_kernel")
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
    """Paged attention as `npu_compiler.ops.transformer.lower_paged_attention` defines it, in float32: [N, H, D]."""
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
