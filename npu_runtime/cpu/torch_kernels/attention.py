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
    if soft_cap := params["soft_cap"]:
        outputs[0].copy_(_capped_attention(q.float(), k.float(), v.float(), mask, params, soft_cap))
        return
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


def _capped_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, params: Params, soft_cap: float
) -> torch.Tensor:
    """Attention whose scores have a soft cap; a query that attends to no key gets zeros."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = _capped(q @ k.transpose(2, 3) * params["scale"], soft_cap)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    if params["causal"]:
        scores = scores.masked_fill(torch.ones(scores.shape[2:], dtype=torch.bool).triu(1), -torch.inf)
    weights = torch.softmax(scores, -1).masked_fill((scores == -torch.inf).all(-1, keepdim=True), 0.0)
    return weights @ v


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
        operands = [x.float().transpose(0, 1) for x in (query[tokens], keys[rows], values[rows])]
        attended = _attended(operands, mask, scale, soft_cap, sinks)
        result[tokens] = attended.transpose(0, 1)
    return result


def _attended(
    operands: list[torch.Tensor], mask: torch.Tensor, scale: float, soft_cap: float, sinks: torch.Tensor | None
) -> torch.Tensor:
    """Attention of queries [H, N, D] over keys and values [KV, S, D] where a mask [N, S] is True: [H, N, Dv]."""
    q, k, v = operands
    if not soft_cap and sinks is None:
        return F.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=True)
    k, v = (x.repeat_interleave(len(q) // len(x), 0) for x in (k, v))
    scores = _capped(q @ k.transpose(1, 2) * scale, soft_cap).masked_fill(~mask, -torch.inf)
    if sinks is None:
        return torch.softmax(scores, -1) @ v
    beside = sinks.float()[:, None, None].expand(*scores.shape[:2], 1)
    return torch.softmax(torch.cat([scores, beside], -1), -1)[..., :-1] @ v
