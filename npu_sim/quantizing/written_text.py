"""Text that a model writes itself, for calibration and training.

A short text is of one kind, and errors that are compensated for it are larger on others. A model writes text of all
kinds that it knows (Liu et al., "LLM-QAT", 2023, https://arxiv.org/abs/2305.17888).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_AT_ONCE, _AT_ONCE_ON_A_GPU = 128, 1024  # rows; the KV cache of 128 rows of 512 tokens of SmolLM2 takes 3 GB


@torch.no_grad()
def write_text(
    model: Any, given: torch.Tensor, count: int, length: int, generator: torch.Generator | None = None
) -> torch.Tensor:
    """Return rows of text sampled from the model, each of which begins with a random token of a given text.

    Args:
        model: Model of transformers, with a language model's logits.
        given: Token ids of any shape, on the model's device.
        count: Number of rows.
        length: Length of each row in tokens, the first of which is a given one.
        generator: Random generator of that device. Default: one with seed 0.

    Returns:
        Token ids [count, length], on that device.
    """
    device = given.device.type
    generator = generator or torch.Generator(device).manual_seed(0)
    chosen = torch.randint(given.numel(), (count,), generator=generator, device=device)
    texts = []
    at_once = _AT_ONCE if device == "cpu" else _AT_ONCE_ON_A_GPU
    for first in given.flatten()[chosen][:, None].split(at_once):
        tokens, past = [first], None
        with in_16_bits(device):
            for _ in range(length - 1):
                output = model(input_ids=tokens[-1], past_key_values=past, use_cache=True)
                past = output.past_key_values
                chances = output.logits[:, -1].float().softmax(-1)
                tokens.append(torch.multinomial(chances, 1, generator=generator))
        texts.append(torch.cat(tokens, 1))
    return torch.cat(texts)


@contextmanager
def in_16_bits(device: str) -> Iterator[None]:
    """Compute matrix products in bfloat16 within this context, except on the CPU, where that is not faster."""
    with torch.autocast(device, torch.bfloat16, enabled=device != "cpu"):
        yield
