"""Each fusion fires on what PyTorch and Hugging Face export, changes no result, and keeps off values read elsewhere."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from drawn import drawn
from ir_builder import IRBuilder
from torch import nn
from torch_ir import extract_ir

from npu_compiler import CompileOptions, IRGraph, NPUError, compile, read_ir, trace_stages
from npu_compiler.fusion_patterns import FUSIONS, INTEGER_KERNELS, fuse
from npu_compiler.graph.model import OpNode, TensorSpec
from npu_runtime import Backend, Executor, load_weights

pytest.importorskip("transformers", reason="the exported forms come from Hugging Face's modules")
from transformers.activations import ACT2FN
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.gpt_oss.modeling_gpt_oss import apply_rotary_pos_emb as apply_halves_pos_emb
from transformers.models.llama.modeling_llama import (
    LlamaRMSNorm,
    apply_rotary_pos_emb,
    eager_attention_forward,
    repeat_kv,
)


class Calls(nn.Module):
    """A function as a module, over parameters given as submodules."""

    def __init__(self, function: Callable[..., Any], **parts: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, *args: torch.Tensor) -> Any:
        parts = [part for name, part in self.named_children() if name != "function"]
        return self.function(*parts, *args)


def op(name: str, **attrs: Any) -> Callable[[IRGraph], int]:
    """Return a function that counts a graph's nodes of an op (with these attributes)."""
    return lambda graph: sum(
        node.base == name and all(node.attrs.get(key) == value for key, value in attrs.items()) for node in graph
    )


@dataclass(frozen=True)
class Case:
    """A module, and a count of the nodes that the fusion makes of it.

    Attributes:
        fired: Function that counts the firings of the fusion in a graph.
        count: The expected number.
    """

    fusion: str
    fired: Callable[[IRGraph], int]
    module: Callable[[], nn.Module]
    inputs: tuple[tuple[int, ...], ...]
    count: int = 1


def function(call: Callable[..., Any], **parts: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: Calls(call, **{name: make() for name, make in parts.items()})


def linear(rows: int, columns: int, bias: bool = True) -> Callable[[], nn.Module]:
    return lambda: nn.Linear(columns, rows, bias=bias)


def conv(stride: int = 1) -> Callable[[], nn.Module]:
    return lambda: nn.Conv2d(4, 4, 3, stride=stride, padding=1)


def rotate_neighbours(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    turned = torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
    return x * cos + turned * sin


def rotate_backwards(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    turned = torch.stack([-x[..., ::2], x[..., 1::2]], -1).flatten(-2)
    return x * cos + turned * sin


def rotate_chunks(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def rotate_halves(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((cos * first - sin * second, sin * first + cos * second), -1)


def rotate_halves_backwards(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((second * cos - first * sin, first * cos + second * sin), -1)


def rotate_halves_the_other_way(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.split(x.shape[-1] // 2, -1)
    return torch.cat((first * cos + second * sin, second * cos - first * sin), -1)


def rotate_parts(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, sizes: tuple[int, ...]) -> torch.Tensor:
    first, second, *_ = x.split(sizes, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def swap_rotated_halves(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((second * cos + first * sin, first * cos - second * sin), -1)


def tables_by_layer(graph: IRGraph) -> int:
    """The number of rotations whose tables are computed once; none unless that is so."""
    rotations = [node for node in graph if node.base == "npu.rope"]
    return len(rotations) if len({node.inputs[1:] for node in rotations}) == 1 else 0


def rotate_in_layers(*args: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Rotated queries and keys of two layers, as those of gpt-oss."""
    *heads, cos, sin = args
    rotated = (apply_halves_pos_emb(q, k, cos, sin) for q, k in (heads[:2], heads[2:]))
    return tuple(x * 2 for pair in rotated for x in pair)


def written_layer_norm(norm: nn.LayerNorm, x: torch.Tensor) -> torch.Tensor:
    centered = x - x.mean(-1, keepdim=True)
    variance = centered.pow(2).mean(-1, keepdim=True)
    return norm.weight * (centered / torch.sqrt(variance + 1e-5)) + norm.bias


def t5_style_norm(x: torch.Tensor) -> torch.Tensor:
    return x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def norm_of_integers(x: torch.Tensor) -> torch.Tensor:
    whole = (4 * x).to(torch.int32).float()
    return whole * torch.rsqrt(whole.pow(2).mean(-1, keepdim=True) + 1e-6)


def explicit(groups: int, masked: bool) -> Callable[..., torch.Tensor]:
    module = SimpleNamespace(num_key_value_groups=groups, training=False)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *mask: torch.Tensor) -> torch.Tensor:
        return eager_attention_forward(module, q, k, v, mask[0] if masked else None, scaling=0.37)[0]

    return attend


def divided(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.softmax(q @ k.transpose(-1, -2) / math.sqrt(8), dim=-1) @ v


def prescaled(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return torch.bmm(F.softmax(torch.bmm(q * 0.3, k.transpose(1, 2)) + mask, dim=-1), v)


def of_windows(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """Attention in windows of several images, with a bias of each head and a mask of each window, as in Swin."""
    scores = (q * 0.3) @ k.transpose(-2, -1) + bias
    scores = (scores.unflatten(0, (-1, len(mask))) + mask[None, :, None]).flatten(0, 1)
    return F.softmax(scores, dim=-1) @ v


def channels_first(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Attention over pixels, of images [..., channels, pixels], as in LeViT."""
    weights = F.softmax(q.transpose(-2, -1) @ k * 0.3 + mask, dim=-1)
    return v @ weights.transpose(-2, -1)


def pixels_of_an_autoencoder(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    weights = F.softmax(torch.bmm(q.permute(0, 2, 1), k) * 0.25, dim=2)
    return torch.bmm(v, weights.permute(0, 2, 1))


def kv_heads_shared(graph: IRGraph) -> int:
    """Attention nodes that read keys with fewer heads than queries."""
    attention = [n for n in graph if n.base in ("aten.scaled_dot_product_attention", "npu.attention")]
    axis = {n.name: graph.tensors[n.inputs[0]].shape[1] != graph.tensors[n.inputs[1]].shape[1] for n in attention}
    return sum(axis.values())


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, repeat_kv(k, 2), repeat_kv(v, 2), attn_mask=mask, scale=0.2)


def joined(graph: IRGraph) -> int:
    return sum(node.base == "aten.linear" and "+" in node.name for node in graph)


def heads(x: torch.Tensor) -> torch.Tensor:
    """The heads of width 8 in the columns of x [B, T, H · 8]."""
    return x.view(*x.shape[:2], -1, 8).transpose(1, 2)


def rotated_attention(
    q: nn.Module, k: nn.Module, v: nn.Module, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    query, key = apply_rotary_pos_emb(heads(q(x)), heads(k(x)), cos, sin)
    return F.scaled_dot_product_attention(query, repeat_kv(key, 2), repeat_kv(heads(v(x)), 2))


def rotations_of(heads: int) -> Callable[[IRGraph], int]:
    """Return a function that counts a graph's rotations of `heads` heads."""
    return lambda graph: sum(n.base == "npu.rope" and graph.tensors[n.outputs[0]].shape[1] == heads for n in graph)


def rotate_both(q: nn.Module, k: nn.Module, *args: torch.Tensor, axis: int = 1) -> tuple[torch.Tensor, ...]:
    """Rotated queries and keys, scaled, so that they are not themselves results."""
    x, cos, sin = args
    return tuple(y * 2 for y in apply_rotary_pos_emb(heads(q(x)), heads(k(x)), cos, sin, unsqueeze_dim=axis))


def rotate_pieces(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(y * 2 for y in apply_rotary_pos_emb(q, k, cos, sin))


def clamped_gate(
    gate: torch.Tensor, up: torch.Tensor, *, alpha: float = 1.702, above: float = 0.5, within: float = 0.5
) -> torch.Tensor:
    """The gate of gpt-oss's experts, whose limits are equal there."""
    gate, up = gate.clamp(max=above), up.clamp(-within, within)
    return (up + 1) * (gate * torch.sigmoid(gate * alpha))


def clamped_gate_of_columns(x: torch.Tensor, **limits: float) -> torch.Tensor:
    return clamped_gate(x[..., ::2], x[..., 1::2], **limits)


def clamped_gate_the_other_way(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    gate, up = gate.clamp_max(0.75), up.clamp_min(-0.75).clamp_max(0.75)
    return torch.sigmoid(2 * gate) * gate * (1 + up)


def places(like: torch.Tensor, count: int = 2) -> torch.Tensor:
    return torch.arange(count, device=like.device) * 2


def update_caches(k: torch.Tensor, v: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Any:
    return k.index_copy(-2, places(k, 3), key), v.index_copy(-2, places(k, 3), value)


HEADS, KV, MASK = (2, 4, 5, 8), (2, 2, 5, 8), (1, 1, 5, 5)
IMAGE, ROWS, ROW = (1, 4, 6, 6), (2, 3, 8), (1, 1, 8)
CACHE, FRESH = (1, 2, 7, 4), (1, 2, 3, 4)
ACT = {name: ACT2FN[name] for name in ("gelu_python", "gelu_new", "gelu_fast", "gelu_accurate")}

CASES = {
    "silu": Case("silu", op("aten.silu"), function(lambda x: x * torch.sigmoid(x)), (ROWS,)),
    "gelu": Case("gelu", op("aten.gelu"), function(ACT["gelu_python"]), (ROWS,)),
    "gelu-sqrt-half": Case(
        "gelu", op("aten.gelu"), function(lambda x: 0.5 * x * (1 + torch.erf(x * 0.7071067811865475))), (ROWS,)
    ),
    "gelu-new": Case("gelu_tanh", op("aten.gelu"), function(ACT["gelu_new"]), (ROWS,)),
    "gelu-fast": Case("gelu_tanh", op("aten.gelu"), function(ACT["gelu_fast"]), (ROWS,)),
    "gelu-accurate": Case("gelu_tanh", op("aten.gelu"), function(ACT["gelu_accurate"]), (ROWS,)),
    "llama-norm": Case("rms_norm", op("npu.rms_norm", weight_offset=0.0), lambda: LlamaRMSNorm(8), (ROWS,)),
    "gemma-norm": Case("rms_norm", op("npu.rms_norm", weight_offset=1.0), lambda: GemmaRMSNorm(8), (ROWS,)),
    "norm-without-weight": Case("rms_norm", op("npu.rms_norm"), function(t5_style_norm), (ROWS,)),
    "layer-norm": Case(
        "layer_norm", op("npu.layer_norm"), function(written_layer_norm, norm=lambda: nn.LayerNorm(8)), (ROWS,)
    ),
    "attention-gqa-mask": Case("attention", op("npu.attention"), function(explicit(2, True)), (HEADS, KV, KV, MASK)),
    "attention-plain": Case("attention", op("npu.attention"), function(explicit(1, False)), (HEADS, HEADS, HEADS)),
    "attention-divided": Case("attention", op("npu.attention"), function(divided), (HEADS, HEADS, HEADS)),
    "attention-prescaled": Case(
        "attention", op("npu.attention"), function(prescaled), ((2, 5, 8), (2, 6, 8), (2, 6, 8), (5, 6))
    ),
    "attention-of-windows": Case(
        "attention", op("npu.attention"), function(of_windows), ((6, 2, 5, 8),) * 3 + ((2, 5, 5), (3, 5, 5))
    ),
    "attention-of-windows-of-one-image": Case(
        "attention", op("npu.attention"), function(of_windows), ((3, 2, 5, 8),) * 3 + ((1, 2, 5, 5), (3, 5, 5))
    ),
    "attention-channels-first": Case(
        "attention", op("npu.attention"), function(channels_first), (HEADS, HEADS, HEADS, (4, 8, 8))
    ),
    "attention-autoencoder": Case(
        "attention", op("npu.attention"), function(pixels_of_an_autoencoder), ((2, 8, 5), (2, 8, 6), (2, 8, 6))
    ),
    "attention-scales": Case(
        "attention_scales",
        op("aten.scaled_dot_product_attention", scale=0.75),
        function(lambda q, k, v: F.scaled_dot_product_attention(q * 0.5, k * 3.0, v, scale=0.5)),
        (HEADS, HEADS, HEADS),
    ),
    "kv-heads-explicit": Case("share_kv_heads", kv_heads_shared, function(explicit(2, True)), (HEADS, KV, KV, MASK)),
    "kv-heads-sdpa": Case("share_kv_heads", kv_heads_shared, function(sdpa), (HEADS, KV, KV, MASK)),
    "rope": Case("rope", op("npu.rope"), function(apply_rotary_pos_emb), (HEADS, KV, (2, 5, 8), (2, 5, 8)), 2),
    "rope-of-chunks": Case("rope", op("npu.rope"), function(rotate_chunks), (HEADS, (2, 1, 5, 8), (5, 8))),
    "rope-of-neighbours": Case(
        "rope", op("npu.rope_pairs"), function(rotate_neighbours), (HEADS, (2, 1, 5, 8), (5, 8))
    ),
    "rope-by-halves": Case(
        "rope_by_halves", op("npu.rope"), function(apply_halves_pos_emb), (HEADS, KV, (2, 5, 4), (2, 5, 4)), 2
    ),
    "rope-by-halves-in-layers": Case(
        "rope_by_halves", tables_by_layer, function(rotate_in_layers), (HEADS, KV, HEADS, KV, (1, 5, 4), (1, 5, 4)), 4
    ),
    "rope-by-slices": Case("rope_by_halves", op("npu.rope"), function(rotate_halves), (HEADS, (5, 4), (5, 4))),
    "rope-by-parts": Case(
        "rope_by_halves",
        op("npu.rope"),
        function(functools.partial(rotate_parts, sizes=(4, 4))),
        (HEADS, (2, 1, 5, 4), (4,)),
    ),
    "masked-softmax": Case(
        "masked_softmax", op("npu.masked_softmax"), function(lambda x, m: F.softmax(x + m, -1)), (HEADS, (1, 1, 5, 8))
    ),
    "clamped-gate": Case(
        "clamped_gate",
        op("npu.clamped_silu_mul", alpha=1.702, limit=0.5),
        function(clamped_gate_of_columns),
        ((2, 3, 16),),
    ),
    "clamped-gate-the-other-way": Case(
        "clamped_gate",
        op("npu.clamped_silu_mul", alpha=2.0, limit=0.75),
        function(clamped_gate_the_other_way),
        (ROWS, ROWS),
    ),
    "clamped-gate-without-alpha": Case(
        "clamped_gate",
        op("npu.clamped_silu_mul", alpha=1.0, limit=0.5),
        function(lambda x, y: (F.hardtanh(y, -0.5, 0.5) + 1) * F.silu(x.clamp(max=0.5))),
        (ROWS, ROWS),
    ),
    "quick-gelu": Case("quick_gelu", op("aten.silu"), function(ACT2FN["quick_gelu"]), (ROWS,)),
    "silu-mul": Case("gated_activation", op("npu.silu_mul"), function(lambda x, y: F.silu(x) * y), (ROWS, ROWS)),
    "geglu": Case("gated_activation", op("npu.gelu_mul"), function(lambda x, y: F.gelu(x) * y), (ROWS, ROWS)),
    "geglu-tanh": Case(
        "gated_activation",
        op("npu.gelu_tanh_mul"),
        function(lambda x, y: y * F.gelu(x, approximate="tanh")),
        (ROWS, ROWS),
    ),
    "conv-bn-relu": Case(
        "conv_epilogue",
        op("npu.conv2d", activation="relu"),
        function(lambda c, n, x: F.relu(n(c(x))), conv=conv(2), norm=lambda: nn.BatchNorm2d(4)),
        (IMAGE,),
    ),
    "conv-add-relu": Case(
        "conv_epilogue",
        op("npu.conv2d", activation="relu", has_residual=True),
        function(lambda c, x, y: F.relu(c(x) + y), conv=conv()),
        (IMAGE, IMAGE),
    ),
    "conv-add": Case(
        "conv_epilogue", op("npu.conv2d", has_residual=True), function(lambda c, x: x + c(x), conv=conv()), (IMAGE,)
    ),
    "conv-relu6": Case(
        "conv_epilogue",
        op("npu.conv2d", activation="relu6"),
        function(lambda c, x: F.relu6(c(x)), conv=conv()),
        (IMAGE,),
    ),
    "conv-hardswish": Case(
        "conv_epilogue",
        op("npu.conv2d", activation="hardswish"),
        function(lambda c, x: F.hardswish(c(x)), conv=conv()),
        (IMAGE,),
    ),
    "qkv": Case(
        "shared_input_linears",
        joined,
        function(
            lambda q, k, v, x: (q(x) * 2, k(x) * 3, v(x) * 4), q=linear(8, 8), k=linear(4, 8, False), v=linear(4, 8)
        ),
        (ROWS,),
    ),
    "gate-up": Case(
        "shared_input_linears",
        joined,
        function(lambda a, b, x: F.silu(a(x)) * b(x), a=linear(16, 8, False), b=linear(16, 8, False)),
        (ROWS,),
    ),
    "linear-relu": Case(
        "linear_activation",
        op("npu.linear", activation="relu"),
        function(lambda a, x: F.relu(a(x)), a=linear(6, 8)),
        (ROWS,),
    ),
    "linear-gelu": Case(
        "linear_activation",
        op("npu.linear", activation="gelu"),
        function(lambda a, x: F.gelu(a(x)), a=linear(6, 8)),
        (ROWS,),
    ),
    "linear-gelu-tanh": Case(
        "linear_activation",
        op("npu.linear", activation="gelu_tanh"),
        function(lambda a, x: ACT["gelu_new"](a(x)), a=linear(6, 8)),
        (ROWS,),
    ),
    "linear-residual": Case(
        "linear_residual", op("npu.linear", has_residual=True), function(lambda a, x: x + a(x), a=linear(8, 8)), (ROWS,)
    ),
    "linear-relu-residual": Case(
        "linear_residual",
        op("npu.linear", has_residual=True, activation="relu"),
        function(lambda a, x: x + F.relu(a(x)), a=linear(8, 8)),
        (ROWS,),
    ),
    "linear-cast": Case("linear_cast", op("npu.linear"), function(lambda a, x: a(x).double(), a=linear(8, 8)), (ROWS,)),
    "gated-linear": Case(
        "gated_linear",
        op("npu.gated_linear", activation="silu"),
        function(lambda a, b, x: F.silu(a(x)) * b(x), a=linear(16, 8, False), b=linear(16, 8, False)),
        (ROW,),
    ),
    "gated-linear-bias": Case(
        "gated_linear",
        op("npu.gated_linear", activation="gelu_tanh"),
        function(lambda a, b, x: F.gelu(a(x), approximate="tanh") * b(x), a=linear(5, 8), b=linear(5, 8)),
        (ROW,),
    ),
    "shared-rope": Case(
        "shared_rope",
        rotations_of(6),
        function(rotated_attention, q=linear(32, 8), k=linear(16, 8), v=linear(16, 8)),
        (ROWS, ROWS, ROWS),
    ),
    "paired-cache-update": Case(
        "paired_cache_update", op("npu.index_copy_pair"), function(update_caches), (CACHE, CACHE, FRESH, FRESH)
    ),
    "add-relu": Case("add_relu", op("npu.add_relu"), function(lambda x, y: F.relu(x + y)), (ROWS, (3, 8))),
}
# Graphs that come close to a pattern and are to be left as they are.
LOOKALIKES = {
    "gate-behind-the-other": Case(
        "gated_linear",
        op("npu.gated_linear"),
        function(lambda a, b, x: b(x) * F.silu(a(x)), a=linear(8, 8), b=linear(8, 8)),
        (ROW,),
        0,
    ),
    "gate-of-overlapping-columns": Case(
        "gated_linear",
        op("npu.gated_linear"),
        function(lambda a, x: F.silu(a(x)[..., :8]) * a(x)[..., 4:], a=linear(12, 8)),
        (ROW,),
        0,
    ),
    "gate-of-some-columns": Case(
        "gated_linear",
        op("npu.gated_linear"),
        function(lambda a, x: F.silu(a(x)[..., :8]) * a(x)[..., 8:16], a=linear(24, 8)),
        (ROW,),
        0,
    ),
    "gate-of-another-product": Case(
        "gated_linear",
        op("npu.gated_linear"),
        function(lambda a, b, x, y: F.silu(a(x)[..., :8]) * b(y)[..., 8:], a=linear(16, 8), b=linear(16, 8)),
        (ROW, ROW),
        0,
    ),
    "gate-with-weights-as-input": Case(
        "gated_linear",
        op("npu.gated_linear"),
        function(lambda x, w: F.silu(F.linear(x, w)[..., :8]) * F.linear(x, w)[..., 8:]),
        (ROW, (16, 8)),
        0,
    ),
    "gate-of-several-rows": Case(
        "gated_linear",
        op("npu.gated_linear"),
        function(lambda a, b, x: F.silu(a(x)) * b(x), a=linear(16, 8), b=linear(16, 8)),
        (ROWS,),
        0,
    ),
    "rotation-by-other-angles": Case(
        "shared_rope",
        rotations_of(4),
        function(
            lambda q, k, x, c, s: (rotate_both(q, k, x, c, s)[0], rotate_both(q, k, x, s, c)[1]),
            q=linear(16, 8),
            k=linear(16, 8),
        ),
        (ROWS, ROWS, ROWS),
        0,
    ),
    "rotation-by-angles-of-each-head": Case(
        "shared_rope",
        rotations_of(4),
        function(functools.partial(rotate_both, axis=0), q=linear(16, 8), k=linear(16, 8)),
        (ROWS, ROWS, ROWS),
        0,
    ),
    "rotated-heads-apart": Case(
        "shared_rope",
        rotations_of(4),
        function(
            lambda q, v, k, x, *angles: (queries := q(x), v(x) * 2, *rotate_both(lambda _: queries, k, x, *angles))[1:],
            q=linear(16, 8),
            v=linear(8, 8),
            k=linear(16, 8),
        ),
        (ROWS, ROWS, ROWS),
        0,
    ),
    "rotated-heads-returned": Case(
        "shared_rope",
        rotations_of(4),
        function(
            lambda q, k, x, c, s: apply_rotary_pos_emb(heads(q(x)), heads(k(x)), c, s),
            q=linear(16, 8),
            k=linear(16, 8),
        ),
        (ROWS, ROWS, ROWS),
        0,
    ),
    "rotated-batches-as-rows": Case(
        "shared_rope",
        rotations_of(4),
        function(
            lambda x, c, s: rotate_pieces(
                x[..., :8].reshape(1, 2, 2, 4).transpose(1, 2), x[..., 8:].reshape(1, 2, 2, 4).transpose(1, 2), c, s
            )
        ),
        ((2, 1, 16), (1, 2, 4), (1, 2, 4)),
        0,
    ),
    "rotated-widths-as-rows": Case(
        "shared_rope",
        rotations_of(8),
        function(
            lambda x, c, s: rotate_pieces(
                x[..., :16].view(1, 4, 4, 4).transpose(2, 3), x[..., 16:].view(1, 4, 4, 4).transpose(2, 3), c, s
            )
        ),
        ((1, 4, 32), (1, 4, 4), (1, 4, 4)),
        0,
    ),
    "rotated-blocks-of-rows": Case(
        "shared_rope",
        rotations_of(2),
        function(lambda x, c, s: rotate_pieces(heads(x[:, :8]), heads(x[:, 8:]), c, s)),
        ((1, 16, 8), (1, 8, 8), (1, 8, 8)),
        0,
    ),
    "clamped-gate-of-two-limits": Case(
        "clamped_gate",
        op("npu.clamped_silu_mul"),
        function(functools.partial(clamped_gate, above=1.0)),
        (ROWS, ROWS),
        0,
    ),
    "clamped-gate-of-limits-apart": Case(
        "clamped_gate",
        op("npu.clamped_silu_mul"),
        function(lambda x, y: (y.clamp(-1.0, 0.5) + 1) * F.silu(x.clamp(max=0.5))),
        (ROWS, ROWS),
        0,
    ),
    "gate-clamped-from-below": Case(
        "clamped_gate",
        op("npu.clamped_silu_mul"),
        function(lambda x, y: (y.clamp(-0.5, 0.5) + 1) * F.silu(x.clamp(-0.5, 0.5))),
        (ROWS, ROWS),
        0,
    ),
    "clamped-gate-of-a-row": Case("clamped_gate", op("npu.clamped_silu_mul"), function(clamped_gate), (ROW, ROWS), 0),
    "clamped-gate-by-a-negative-limit": Case(
        "clamped_gate",
        op("npu.clamped_silu_mul"),
        function(functools.partial(clamped_gate, above=-0.5, within=-0.5)),
        (ROWS, ROWS),
        0,
    ),
    "norm-of-integers": Case("rms_norm", op("npu.rms_norm"), function(norm_of_integers), (ROWS,), 0),
    "rope-of-pairs-the-other-way": Case(
        "rope", op("npu.rope_pairs"), function(rotate_backwards), (HEADS, (2, 1, 5, 8), (5, 8)), 0
    ),
    "rotation-of-swapped-halves": Case(
        "rope_by_halves", op("npu.rope"), function(rotate_halves_backwards), (HEADS, (5, 4), (5, 4)), 0
    ),
    "rotation-by-halves-the-other-way": Case(
        "rope_by_halves", op("npu.rope"), function(rotate_halves_the_other_way), (HEADS, (5, 4), (5, 4)), 0
    ),
    "rotation-whose-halves-are-swapped": Case(
        "rope_by_halves", op("npu.rope"), function(swap_rotated_halves), (HEADS, (5, 4), (5, 4)), 0
    ),
    "rotation-of-two-of-three-parts": Case(
        "rope_by_halves",
        op("npu.rope"),
        function(functools.partial(rotate_parts, sizes=(3, 3, 2))),
        (HEADS, (5, 3), (5, 3)),
        0,
    ),
    "rotation-by-halves-of-one-angle": Case(
        "rope_by_halves", op("npu.rope"), function(rotate_halves), (HEADS, (5, 1), (5, 1)), 0
    ),
    "rotation-by-halves-of-a-larger-batch": Case(
        "rope_by_halves", op("npu.rope"), function(rotate_halves), (KV, (3, 1, 1, 5, 4), (5, 4)), 0
    ),
    "rotation-of-an-odd-width": Case(
        "rope", op("npu.rope"), function(apply_rotary_pos_emb), ((2, 4, 5, 7), (2, 2, 5, 7), (2, 5, 7), (2, 5, 7)), 0
    ),
    "second-update-reads-the-first": Case(
        "paired_cache_update",
        op("npu.index_copy_pair"),
        function(lambda k, v, a: (n := k.index_copy(0, places(k), a), v.index_copy(0, places(k), n[:2] * 2))),
        ((5, 4), (5, 4), (2, 4)),
        0,
    ),
    "updates-of-two-shapes": Case(
        "paired_cache_update",
        op("npu.index_copy_pair"),
        function(lambda k, v, a, b: (k.index_copy(0, places(k), a), v.index_copy(0, places(k), b))),
        ((5, 4), (6, 4), (2, 4), (2, 4)),
        0,
    ),
    "updates-along-two-axes": Case(
        "paired_cache_update",
        op("npu.index_copy_pair"),
        function(lambda k, v, a, b: (k.index_copy(0, places(k, 3), a), v.index_copy(1, places(k, 3), b))),
        ((5, 5), (5, 5), (3, 5), (5, 3)),
        0,
    ),
    "updates-of-all-rows-and-of-all-columns": Case(
        "paired_cache_update",
        op("npu.index_copy_pair"),
        function(lambda k, v, a: (k.index_copy(0, places(k, 1), a), v.index_copy(1, places(k, 1), a))),
        ((1, 1), (1, 1), (1, 1)),
        0,
    ),
    "updates-at-two-places": Case(
        "paired_cache_update",
        op("npu.index_copy_pair"),
        function(lambda k, v, a, b: (k.index_copy(0, places(k), a), v.index_copy(0, places(k) + 1, b))),
        ((5, 4), (5, 4), (2, 4), (2, 4)),
        0,
    ),
    "updates-of-what-is-computed": Case(
        "paired_cache_update",
        op("npu.index_copy_pair"),
        function(lambda k, v, a, b: (k.neg().index_copy(0, places(k), a), v.neg().index_copy(0, places(k), b))),
        ((5, 4), (5, 4), (2, 4), (2, 4)),
        0,
    ),
}
EVERY_CASE = pytest.mark.parametrize("name", drawn(CASES, 1 / 2))


@dataclass(frozen=True)
class Exported:
    ir: dict[str, Any]
    state: dict[str, torch.Tensor]
    arrays: list[np.ndarray]
    expected: list[np.ndarray]


@functools.cache
def exported(name: str) -> Exported:
    case = CASES.get(name) or LOOKALIKES[name]
    torch.manual_seed(len(name))
    module = case.module().eval()
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    inputs = tuple(torch.randn(shape) for shape in case.inputs)
    with torch.no_grad():
        expected = module(*inputs)
        meta = copy.deepcopy(module).to("meta")
        ir = extract_ir(meta, tuple(x.to("meta") for x in inputs), strict=False).to_dict()
    expected = expected if isinstance(expected, tuple) else (expected,)
    return Exported(ir, module.state_dict(), [x.numpy() for x in inputs], [x.numpy() for x in expected])


def run(
    backend: Backend,
    ir: Any,
    state: Mapping[str, Any],
    arrays: list[np.ndarray],
    disabled: Any = (),
    dtype: str = "float32",
) -> list[np.ndarray]:
    program = compile(ir, backend.target, CompileOptions(compute_dtype=dtype, disabled_fusions=disabled))
    inputs = {spec.name: array for spec, array in zip(program.input_specs, arrays, strict=True)}
    outputs = Executor(program, backend).run(inputs, load_weights(state, program, backend, strict=False))
    return [outputs[spec.name].to_numpy(spec) for spec in program.output_specs]


def fused(ir: Any, disabled: Any = ()) -> IRGraph:
    return dict(trace_stages(ir, options=CompileOptions(disabled_fusions=disabled)))["fuse"]


def close(actual: list[np.ndarray], wanted: list[np.ndarray]) -> None:
    assert len(actual) == len(wanted)
    for a, w in zip(actual, wanted, strict=True):
        np.testing.assert_allclose(a, w, rtol=1e-5, atol=1e-5 * max(1.0, float(np.abs(w).max())))


@EVERY_CASE
def test_it_fires_on_the_exported_form_and_is_switched_off_by_name(name: str) -> None:
    case, ir = CASES[name], exported(name).ir
    assert case.fired(fused(ir)) == case.count
    assert case.fired(fused(ir, [case.fusion])) == 0


@EVERY_CASE
def test_the_result_is_pytorchs_with_the_fusion_on_and_off(backend: Backend, name: str) -> None:
    e = exported(name)
    close(run(backend, e.ir, e.state, e.arrays), e.expected)
    close(run(backend, e.ir, e.state, e.arrays, [CASES[name].fusion]), e.expected)
    close(run(backend, e.ir, e.state, e.arrays, FUSIONS), e.expected)


@pytest.mark.parametrize("name", LOOKALIKES)
def test_a_lookalike_is_left_as_it_is(backend: Backend, name: str) -> None:
    e = exported(name)
    assert LOOKALIKES[name].fired(fused(e.ir)) == 0
    close(run(backend, e.ir, e.state, e.arrays), e.expected)


def exposed(graph: IRGraph, tensor: str, *, through: str | None) -> IRGraph:
    """The graph that also returns a tensor, itself or through one more op."""
    if through is None:
        return replace(graph, outputs=[*graph.outputs, tensor], output_names=[*graph.output_names, tensor])
    reader = OpNode("reader", through, (tensor,), ("reader",))
    tensors = {"reader": TensorSpec("reader", graph.tensors[tensor].shape, graph.tensors[tensor].dtype)}
    grown = graph.with_nodes([*graph.nodes, reader], tensors)
    return replace(grown, outputs=[*graph.outputs, "reader"], output_names=[*graph.output_names, "reader"])


@pytest.mark.parametrize("through", [None, "aten.neg.default"], ids=["output", "reader"])
@EVERY_CASE
def test_a_value_that_is_read_elsewhere_is_not_fused_away(backend: Backend, name: str, through: str | None) -> None:
    e = exported(name)
    graph = dict(trace_stages(e.ir))["eliminate_common_subexpressions"]
    kept = {out for node in fused(e.ir) for out in node.outputs}
    interior = [out for node in graph for out in node.outputs if out not in kept]
    if name not in ("kv-heads-sdpa", "kv-heads-explicit", "qkv", "gate-up", "paired-cache-update"):
        assert interior, "the fusion took no value away: the case shows nothing"
    for tensor in interior:
        variant = exposed(graph, tensor, through=through)
        assert tensor in {out for node in fused(variant) for out in node.outputs}
        close(run(backend, variant, e.state, e.arrays), run(backend, variant, e.state, e.arrays, FUSIONS))


SELF_READING = {
    "conv-plus-itself": (lambda c, x: c(x) + c(x), {"c": conv()}, (IMAGE,)),
    "linear-plus-itself": (lambda a, x: a(x) + a(x), {"a": linear(8, 8)}, (ROWS,)),
    "silu-times-itself": (lambda x: F.silu(x) * F.silu(x), {}, (ROWS,)),
    "scores-as-their-own-mask": (
        lambda q, k, v: F.softmax(q @ k.transpose(-1, -2) + q @ k.transpose(-1, -2), -1) @ v,
        {},
        (HEADS, HEADS, HEADS),
    ),
    "weights-as-values": (lambda q, k: F.softmax(q @ k, -1) @ F.softmax(q @ k, -1), {}, ((2, 5, 8), (2, 8, 5))),
    "norm-as-its-own-weight": (lambda x: t5_style_norm(x) * t5_style_norm(x), {}, ((8,),)),
    "mask-with-a-larger-batch": (
        lambda q, k, v, m: F.softmax(q @ k.transpose(-1, -2) + m, -1) @ v,
        {},
        ((1, 4, 5, 8), (1, 4, 5, 8), (1, 4, 5, 8), (3, 1, 5, 5)),
    ),
    "keys-with-a-smaller-batch": (
        lambda q, k, v: F.softmax(q @ k.transpose(-1, -2), -1) @ v,
        {},
        ((2, 4, 5, 8), (1, 4, 5, 8), (1, 1, 5, 8)),
    ),
    "queries-with-a-smaller-batch": (
        lambda q, k, v: F.softmax(q @ k.transpose(-1, -2), -1) @ v,
        {},
        ((1, 4, 5, 8), (2, 4, 5, 8), (2, 4, 5, 8)),
    ),
    "residual-of-a-larger-shape": (lambda a, x, y: a(x) + y, {"a": linear(8, 8)}, ((1, 8), (3, 4, 8))),
    "relu-of-linear-plus-residual": (lambda a, x: F.relu(a(x) + x), {"a": linear(8, 8)}, (ROWS,)),
    "rotation-of-another-tensor": (
        lambda x, y, c, s: x * c + torch.cat((-y[..., 4:], y[..., :4]), -1) * s,
        {},
        (ROWS, ROWS, ROWS, ROWS),
    ),
    "rotation-with-halves-swapped": (
        lambda x, c, s: x * c + torch.cat((-x[..., :4], x[..., 4:]), -1) * s,
        {},
        (ROWS, ROWS, ROWS),
    ),
    "softmax-over-another-axis": (lambda x, m: F.softmax(x + m, 1), {}, (ROWS, ROWS)),
    "norm-over-another-axis": (lambda x: x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-6), {}, (ROWS,)),
    "scaled-addition": (lambda a, x: torch.add(a(x), x, alpha=2), {"a": linear(8, 8)}, (ROWS,)),
    "gate-that-broadcasts": (lambda x, y: F.silu(x) * y, {}, ((2, 1, 8), ROWS)),
    "one-linear-that-is-an-output": (
        lambda a, b, x: (a(x), F.relu(b(x))),
        {"a": linear(8, 8), "b": linear(8, 8)},
        (ROWS,),
    ),
    "linears-over-a-vector": (lambda a, b, x: F.relu(a(x)) + b(x), {"a": linear(8, 8), "b": linear(8, 8)}, ((8,),)),
    "one-cache-updated-twice": (
        lambda k, a, b: (k.index_copy(0, places(k), a), k.index_copy(0, places(k), b)),
        {},
        ((5, 4), (2, 4), (2, 4)),
    ),
    "shared-linear": (lambda a, x: a(x) * torch.sigmoid(a(x)), {"a": linear(8, 8)}, (ROWS,)),
}


@pytest.mark.parametrize("name", SELF_READING)
def test_a_graph_that_only_resembles_a_pattern_keeps_its_meaning(backend: Backend, name: str, seed: int) -> None:
    call, parts, shapes = SELF_READING[name]
    module = Calls(call, **{key: make() for key, make in parts.items()}).eval()
    inputs = tuple(torch.randn(shape) for shape in shapes)
    with torch.no_grad():
        expected = module(*inputs)
        ir = extract_ir(copy.deepcopy(module).to("meta"), tuple(x.to("meta") for x in inputs), strict=False).to_dict()
    wanted = [x.numpy() for x in (expected if isinstance(expected, tuple) else (expected,))]
    arrays = [x.numpy() for x in inputs]
    close(run(backend, ir, module.state_dict(), arrays), wanted)
    close(run(backend, ir, module.state_dict(), arrays, FUSIONS), wanted)


@pytest.mark.parametrize("name", ["llama-norm", "gemma-norm", "attention-gqa-mask"])
def test_the_casts_of_a_bfloat16_model_are_part_of_the_pattern(backend: Backend, name: str) -> None:
    case = CASES[name]
    torch.manual_seed(0)
    module = case.module().eval().to(torch.bfloat16)
    inputs = tuple(torch.randn(shape, dtype=torch.bfloat16) for shape in case.inputs)
    with torch.no_grad():
        expected = module(*inputs).float().numpy()
        ir = extract_ir(copy.deepcopy(module).to("meta"), tuple(x.to("meta") for x in inputs), strict=False).to_dict()
    graph = fused(ir)
    assert case.fired(graph) == 1
    assert not [node for node in graph if node.base in ("aten.to", "aten._to_copy", "aten.type_as")]
    arrays = [x.float().numpy() for x in inputs]
    for disabled in ((), FUSIONS):
        (actual,) = run(backend, ir, module.state_dict(), arrays, disabled, dtype="bfloat16")
        np.testing.assert_allclose(actual.astype(np.float32), expected, atol=2e-2 * float(np.abs(expected).max()))


def test_every_fusion_has_a_case() -> None:
    own_file = {INTEGER_KERNELS}  # its cases: tests/npu_runtime/test_integer_kernels.py
    assert {case.fusion for case in CASES.values()} == set(FUSIONS) - own_file


def test_an_unknown_fusion_name_is_an_error() -> None:
    with pytest.raises(NPUError, match="unknown fusion rmsnorm; known are integer_kernels, silu, gelu.*add_relu"):
        fuse(read_ir(IRBuilder().ir()), ["rmsnorm"])
    with pytest.raises(NPUError, match="unknown fusion a, b"):
        compile(exported("silu").ir, options=CompileOptions(disabled_fusions=["b", "a", "silu"]))


def test_a_widened_product_is_not_rounded_to_16_bits_on_the_way(backend: Backend) -> None:
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(64, 32, bias=False, dtype=torch.bfloat16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(x).float()

    torch.manual_seed(0)
    module, x = Head(), torch.randn(3, 64).bfloat16()
    with torch.no_grad():
        ir = extract_ir(copy.deepcopy(module).to("meta"), (x.to("meta"),)).to_dict()
    (result,) = run(backend, ir, module.state_dict(), [x.float().numpy()], dtype="bfloat16")
    exact = (x.float() @ module.head.weight.detach().float().T).numpy()
    np.testing.assert_allclose(result, exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_16_bit_product_in_a_float32_model_is_rounded_before_it_is_widened(
    backend: Backend, dtype: torch.dtype
) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.narrow, self.wide = nn.Linear(64, 32, dtype=dtype), nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.narrow(x.to(dtype)).float(), self.wide(x)

    torch.manual_seed(0)
    module, x = Mixed(), torch.randn(3, 64)
    with torch.no_grad():
        ir = extract_ir(copy.deepcopy(module).to("meta"), (x.to("meta"),)).to_dict()
    result, _ = run(backend, ir, module.state_dict(), [x.numpy()], dtype="float32")
    rounded = torch.from_numpy(result).to(dtype).float().numpy()
    np.testing.assert_array_equal(result, rounded)
