"""The configuration of Qwen2.5-1.5B without weights, which several benchmarks use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from npu_sim.llm import Checkpoint, extract_graph

if TYPE_CHECKING:
    from transformers import Qwen2Config

LAYERS = 28
CACHE_LENGTH = 2048
PROMPT = 128


def qwen(layers: int = LAYERS) -> Qwen2Config:
    """Return the configuration of Qwen2.5-1.5B with this number of layers."""
    from transformers import Qwen2Config

    return Qwen2Config(
        hidden_size=1536,
        intermediate_size=8960,
        num_hidden_layers=layers,
        num_attention_heads=12,
        num_key_value_heads=2,
        vocab_size=151936,
        max_position_embeddings=32768,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        dtype="bfloat16",
    )


def step_graph(tokens: int, layers: int = LAYERS) -> dict[str, Any]:
    """Return the IR of decode (1 token) or prefill, with a KV cache of `CACHE_LENGTH` tokens."""
    checkpoint = Checkpoint("qwen2.5-1.5b", qwen(layers), {}, "bfloat16", load_tokenizer=lambda: None)
    return extract_graph(checkpoint, tokens, CACHE_LENGTH)
