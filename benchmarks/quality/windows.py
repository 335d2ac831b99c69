"""Windows (parts of equal length) of text, and a model's figures on them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.quality.page import Figure
from npu_sim.llm import Checkpoint

Weights = dict[str, torch.Tensor]


@torch.inference_mode()
def read_window(model: Any, weights: Weights, ids: torch.Tensor) -> torch.Tensor:
    """Return the logarithms of the probabilities of each next token, [length, vocabulary].

    Args:
        weights: Parameters that replace the model's.
    """
    for name, weight in weights.items():
        model.get_parameter(name).data = weight
    logits: torch.Tensor = model(input_ids=ids[None], use_cache=False).logits[0]
    return logits.log_softmax(-1)


@torch.inference_mode()
def add_window(figure: Figure, logits: torch.Tensor, reference: torch.Tensor, ids: torch.Tensor) -> None:
    """Add the results of a window to a figure.

    Args:
        logits, reference: Log-probabilities [length, vocabulary] of the variant and of the reference. The last row is
            not used, since it predicts a token after the window.
        ids: Token ids of the window.
    """
    logits, reference, following = logits[:-1], reference[:-1], ids[1:]
    figure.log_likelihood += float(logits.gather(1, following[:, None]).double().sum())
    figure.divergence += float((reference.exp() * (reference - logits)).sum(1).double().sum())
    figure.agreement += int((logits.argmax(1) == reference.argmax(1)).sum())
    figure.tokens += len(following)


def windows(checkpoint: Checkpoint, texts: Sequence[Path], count: int, length: int) -> torch.Tensor:
    """Return the first windows of the texts in turn: token ids [count, length].

    Raises `SystemExit` if the texts have fewer windows.
    """
    parts = []
    for path in texts:
        ids = checkpoint.tokenizer.encode(path.read_text("utf-8", "replace"))
        parts += [ids[start : start + length] for start in range(0, len(ids) - length + 1, length)]
    if len(parts) < count:
        raise SystemExit(f"the texts have {len(parts)} windows of {length} tokens, not {count}")
    return torch.tensor(parts[:count])
