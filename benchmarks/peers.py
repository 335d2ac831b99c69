"""PyTorch as it is used without us: eager and `torch.compile`, with a static KV cache, on the same weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

Step = Callable[[], object]


def language_model(config: Any, state: Mapping[str, torch.Tensor], dtype: torch.dtype) -> torch.nn.Module:
    """The Hugging Face module with a checkpoint's weights, cast to `dtype`."""
    from transformers import AutoModelForCausalLM

    config._attn_implementation = "sdpa"
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.load_state_dict({key: state[key].to(dtype) for key in model.state_dict() if key in state}, strict=False)
    model.tie_weights()
    return model.eval()


def generation_step(model: torch.nn.Module, tokens: int, position: int, cache_length: int, compiled: bool) -> Step:
    """One forward of `tokens` tokens from `position` on, over a static cache of `cache_length`; last logits only."""
    from transformers import StaticCache

    cache = StaticCache(config=model.config, max_cache_len=cache_length)
    positions = torch.arange(position, position + tokens)
    ids = torch.ones(1, tokens, dtype=torch.long)

    def forward(ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = model(
            input_ids=ids, position_ids=positions[None], cache_position=positions, past_key_values=cache,
            use_cache=True, logits_to_keep=1,
        ).logits  # fmt: skip
        return hidden

    with torch.no_grad():
        forward(ids, positions)  # the cache allocates itself at its first, eager, use
    call = torch.compile(forward) if compiled else forward

    def step() -> object:
        with torch.no_grad():
            for layer in cache.layers:
                layer.cumulative_length.fill_(position)
            return call(ids, positions)

    return step


def module_step(model: torch.nn.Module, x: torch.Tensor, compiled: bool) -> Step:
    call = torch.compile(model) if compiled else model

    def step() -> object:
        with torch.no_grad():
            return call(x)

    return step
