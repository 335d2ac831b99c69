"""Converter of the ONNX operator `Attention`."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from npu_sim.onnx.rows import Call, converts

_PLAIN = {"q_num_heads", "kv_num_heads", "scale", "is_causal", "softmax_precision"}


@converts("Attention")
def _attention(
    call: Call, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *rest: Tensor | None
) -> Tensor | None:
    """Compute attention by PyTorch's function; None if the call needs a feature that it lacks, such as a cache."""
    others = {name: value for name, value in call.attrs.items() if name not in _PLAIN and value}
    causal = bool(call.attr("is_causal", 0))
    if others or call.outputs > 1 or any(x is not None for x in rest) or causal and mask is not None:
        return None
    precise = q.dtype == torch.float32 and call.attr("softmax_precision", 1) == 1
    if not precise or mask is not None and (mask.dtype == torch.bool or mask.ndim == 3 and q.ndim == 3):
        return None
    flat = q.ndim == 3
    if flat:
        q, k, v = (_heads(x, call.attr(f"{kind}_num_heads")) for x, kind in ((q, "q"), (k, "kv"), (v, "kv")))
    if k.shape[1] != q.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    if mask is not None and mask.shape[-1] != k.shape[-2]:
        return None
    out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=call.attr("scale"))
    return out.transpose(1, 2).flatten(2) if flat else out


def _heads(x: Tensor, count: int) -> Tensor:
    """Reshape [batch, length, heads · size] to [batch, heads, length, size]."""
    return x.reshape(*x.shape[:2], count, -1).transpose(1, 2)
