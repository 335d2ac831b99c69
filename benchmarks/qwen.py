"""The graphs of steps of Qwen2.5-1.5B, without weights, which several benchmarks use."""

from __future__ import annotations

from typing import Any

from benchmarks.configurations import qwen2_1_5b
from npu_sim.llm import Checkpoint, extract_graph

LAYERS = 28
CACHE_LENGTH = 2048
PROMPT = 128


def step_graph(tokens: int, layers: int = LAYERS) -> dict[str, Any]:
    """Return the IR of decode (1 token) or prefill, with a KV cache of `CACHE_LENGTH` tokens."""
    checkpoint = Checkpoint("qwen2.5-1.5b", qwen2_1_5b(layers), {}, "bfloat16", load_tokenizer=lambda: None)
    return extract_graph(checkpoint, tokens, CACHE_LENGTH)
