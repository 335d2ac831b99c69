"""Small language models, and the plans that the CUDA target makes of their steps."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from traces import traced
from transformers import (
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

import npu_compiler
from cuda_compiler import CUDACodegenTarget
from npu_compiler.program.plan import ExecutionPlan
from npu_sim.llm import Checkpoint, extract_graph
from npu_sim.llm.graph import PagedShape, extract_paged

CACHE = 512


def config(kind: type[PretrainedConfig], **changes: Any) -> PretrainedConfig:
    sizes: dict[str, Any] = {
        "hidden_size": 192,
        "intermediate_size": 640,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 1000,
        "max_position_embeddings": CACHE,
        "tie_word_embeddings": True,
    }
    return kind(**{**sizes, **changes})


CONFIGS = {
    "llama": config(LlamaConfig),
    "llama with biases": config(
        LlamaConfig, attention_bias=True, mlp_bias=True, hidden_size=256, num_attention_heads=4
    ),
    "llama of wide heads": config(
        LlamaConfig, hidden_size=256, head_dim=128, num_attention_heads=16, num_key_value_heads=1
    ),
    # More parts of keys than blocks, and a head of more units than a block hands over at a time, three times over.
    "llama of many heads": config(
        LlamaConfig,
        hidden_size=280,
        head_dim=16,
        num_attention_heads=140,
        num_key_value_heads=140,
        vocab_size=20_000,
    ),
    # Two units of two chunks for a block, the second one of which is a part.
    "llama of long rows": config(
        LlamaConfig, hidden_size=1280, intermediate_size=4000, num_attention_heads=8, num_hidden_layers=1
    ),
    "llama of odd sizes": config(LlamaConfig, hidden_size=240, intermediate_size=328, head_dim=40, vocab_size=501),
    # Heads whose dimensions two warps share, norms behind the parts of a layer, and windows.
    "gemma3": config(
        Gemma3TextConfig,
        head_dim=256,
        num_attention_heads=4,
        sliding_window=128,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "qwen2": config(Qwen2Config),
    "qwen3": config(Qwen3Config),
    "qwen3 of odd sizes": config(
        Qwen3Config, hidden_size=240, intermediate_size=328, head_dim=40, num_key_value_heads=1, vocab_size=501
    ),
    "qwen3 with experts": config(
        Qwen3MoeConfig, num_experts=48, num_experts_per_tok=4, moe_intermediate_size=192, norm_topk_prob=True
    ),
    # Sinks, windows, and experts with biases whose gates alternate with what they gate. All are chosen, since another
    # rounding may choose others where two are rated nearly alike.
    "gpt-oss": config(GptOssConfig, intermediate_size=192, num_local_experts=16, num_experts_per_tok=16),
}


def checkpoint(name: str, dtype: str, state: dict[str, torch.Tensor] | None = None) -> Checkpoint:
    return Checkpoint(name, CONFIGS[name], state or {}, dtype, load_tokenizer=lambda: None)


@cache
def step_of(name: str, tokens: int, dtype: str = "bfloat16") -> dict[str, Any]:
    return traced(f"{name} {tokens} {dtype}", lambda: extract_graph(checkpoint(name, dtype), tokens, CACHE))


def plan_of(name: str, tokens: int, dtype: str = "bfloat16") -> ExecutionPlan:
    return npu_compiler.compile(step_of(name, tokens, dtype), target=CUDACodegenTarget()).plan


def paged_plan_of(name: str, tokens: int, dtype: str = "bfloat16") -> ExecutionPlan:
    """Return the plan of a step of `tokens` tokens, each of a sequence of its own."""
    shape = PagedShape(tokens, tokens, tokens, blocks_per_sequence=4, blocks=4 * tokens + 1, block_size=16, history=64)
    ir = traced(f"{name} paged {tokens} {dtype}", lambda: extract_paged(checkpoint(name, dtype), shape))
    return npu_compiler.compile(ir, target=CUDACodegenTarget()).plan
