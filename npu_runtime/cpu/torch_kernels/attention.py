"""Attention by PyTorch's own kernel, in float32 arithmetic."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from npu_runtime.cpu.torch_kernels.registry import Params, Tensors, torch_kernel


@torch_kernel("attention_kernel")
def attention(inputs: Tensors, outputs: Tensors, params: Params) -> None:
    """softmax(scale · q·kᵀ + mask) · v over [B, H, T, D], KV heads shared by consecutive query heads."""
    q, k, v, *rest = inputs
    mask = rest.pop(0) if params["has_mask"] else None
    sinks = rest.pop(0) if params["has_sinks"] else None
    outputs[0].copy_(attend(q, k, v, mask, sinks, params["scale"], params["soft_cap"], bool(params["causal"])))


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    scale: float,
    soft_cap: float = 0.0,
    causal: bool = False,
) -> torch.Tensor:
    """Attention as `npu_compiler.ops.transformer.lower_attention` defines it, in float32: [B, H, T, Dv].

    A query that attends to no key gets zeros.
    """
    q, k, v = (x.float() for x in (q, k, v))
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.float()
    if not soft_cap and sinks is None:
        shared = k.shape[1] != q.shape[1]
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=scale, enable_gqa=shared)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = _capped(q @ k.transpose(2, 3) * scale, soft_cap)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[2:], dtype=torch.bool).triu(1), -torch.inf)
    sees_none = (scores == -torch.inf).all(-1, keepdim=True)
    if sinks is not None:
        scores = torch.cat([scores, sinks.float()[:, None, None].expand(*scores.shape[:3], 1)], -1)
    return torch.softmax(scores, -1)[..., : k.shape[2]].masked_fill(sees_none, 0.0) @ v


def _capped(scores: torch.Tensor, soft_cap: float) -> torch.Tensor:
    """Scores s as c · tanh(s / c) if there is a soft cap c above 0."""
    return soft_cap * torch.tanh(scores / soft_cap) if soft_cap else scores


def paged_attention(  # noqa: PLR0913 -- operands and parameters of the kernel
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    sequences: torch.Tensor,
    positions: torch.Tensor,
    block_size: int,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Paged attention as `npu_compiler.ops.transformer.lower_paged_attention` defines it, in float32: [N, H, D]."""
    sequences = sequences.long().clamp(0, len(tables) - 1)
    positions = positions.long().clamp(0, tables.shape[1] * block_size - 1)
    tables = tables.long().clamp(0, len(keys) // block_size - 1)
    result = query.new_empty(*query.shape[:2], values.shape[2], dtype=torch.float32)
    for sequence in sequences.unique():
        tokens = (sequences == sequence).nonzero().flatten()
        first = max(0, int(positions[tokens].min()) + 1 - window) if window else 0
        places = torch.arange(first, int(positions[tokens].max()) + 1)
        rows = tables[sequence, places // block_size] * block_size + places % block_size
        mask = places <= positions[tokens, None]
        if window:
            mask &= places > positions[tokens, None] - window
        q, k, v = (x.transpose(0, 1)[None] for x in (query[tokens], keys[rows], values[rows]))
        result[tokens] = attend(q, k, v, mask, sinks, scale, soft_cap)[0].transpose(0, 1)
    return result
