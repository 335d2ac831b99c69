"""Configurations of language models, without weights, that several benchmarks use; each with a number of layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import (
        Gemma3TextConfig,
        GptOssConfig,
        LlamaConfig,
        MistralConfig,
        Qwen2Config,
        Qwen3Config,
        Qwen3MoeConfig,
    )

_ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 1_000_000.0}


def qwen2_1_5b(layers: int = 28) -> Qwen2Config:
    """Return the configuration of Qwen2.5-1.5B."""
    from transformers import Qwen2Config

    return Qwen2Config(
        hidden_size=1536,
        intermediate_size=8960,
        num_hidden_layers=layers,
        num_attention_heads=12,
        num_key_value_heads=2,
        vocab_size=151936,
        max_position_embeddings=32768,
        rope_parameters=_ROPE,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        dtype="bfloat16",
    )


def qwen3_4b(layers: int = 36) -> Qwen3Config:
    """Return the configuration of Qwen3-4B."""
    from transformers import Qwen3Config

    return Qwen3Config(
        hidden_size=2560,
        intermediate_size=9728,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=151936,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        head_dim=128,
        rope_parameters=_ROPE,
        dtype="bfloat16",
    )


def qwen3_8b(layers: int = 36) -> Qwen3Config:
    """Return the configuration of Qwen3-8B."""
    from transformers import Qwen3Config

    return Qwen3Config(
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
        max_position_embeddings=40960,
        rope_parameters=_ROPE,
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
        dtype="bfloat16",
    )


def qwen3_30b(layers: int = 48) -> Qwen3MoeConfig:
    """Return the configuration of Qwen3-30B-A3B."""
    from transformers import Qwen3MoeConfig

    fields: dict[str, Any] = {"head_dim": 128, "rope_parameters": _ROPE, "dtype": "bfloat16"}
    return Qwen3MoeConfig(
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=4,
        vocab_size=151936,
        max_position_embeddings=40960,
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        norm_topk_prob=True,
        **fields,
    )


def llama3_2_3b(layers: int = 28) -> LlamaConfig:
    """Return the configuration of Llama-3.2-3B, without the scaling of its rotary embedding."""
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=3072,
        intermediate_size=8192,
        num_hidden_layers=layers,
        num_attention_heads=24,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=128256,
        tie_word_embeddings=True,
        dtype="bfloat16",
    )


def llama3_1_8b(layers: int = 32) -> LlamaConfig:
    """Return the configuration of Llama-3.1-8B."""
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=128256,
        max_position_embeddings=131072,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500_000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        dtype="bfloat16",
    )


def mistral_7b(layers: int = 32) -> MistralConfig:
    """Return the configuration of Mistral-7B, whose layers have a window of 4,096 tokens."""
    from transformers import MistralConfig

    return MistralConfig(num_hidden_layers=layers, sliding_window=4096, max_position_embeddings=32768, dtype="bfloat16")


def gemma3_4b(layers: int = 34) -> Gemma3TextConfig:
    """Return the configuration of Gemma-3-4B; five of six layers have a window of 1,024 tokens."""
    from transformers import Gemma3TextConfig

    return Gemma3TextConfig(
        hidden_size=2560,
        intermediate_size=10240,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=256,
        query_pre_attn_scalar=256,
        vocab_size=262208,
        sliding_window=1024,
        max_position_embeddings=131072,
        dtype="bfloat16",
    )


def gpt_oss_20b(layers: int = 24) -> GptOssConfig:
    """Return the configuration of gpt-oss-20B."""
    from transformers import GptOssConfig

    return GptOssConfig(num_hidden_layers=layers, num_local_experts=32, tie_word_embeddings=False, dtype="bfloat16")
