"""Models that no step can continue: each step computes the whole sequence again, of which only the tokens are kept.

It is the only way for modules without a cache, and ours for those whose cache is no keys, values and recurrent states.
As a sequence is computed in a tensor as long as its room, the model must be causal: what stands behind a token may not
change what is computed for it. This is tried with random weights.
"""

from typing import Any

import torch

from npu_compiler.errors import InputError
from npu_sim.llm.attention import GatheredPlaces, Paging
from npu_sim.llm.context import trained_length
from npu_sim.llm.selections import Selections

MOST_PARAMETERS = 2**29
"""The largest model that is tried; the steps of a larger one would take too long as well."""
_TOKENS = 40
_CUTS = (4, 17, 31)
_TOLERANCE = 1e-3


def whole_logits(causal: Any, ids: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """The float32 logits [R, vocab] after some tokens of whole sequences.

    Args:
        ids: [S, L], the tokens of each sequence, and behind them any others.
        rows: [R], the index of each token in its sequence plus that of its sequence times L.
    """
    vocabulary = causal.get_input_embeddings().weight.shape[0]
    ids = ids.clamp(0, vocabulary - 1)
    length, longest = ids.shape[1], trained_length(causal.config.get_text_config())
    if longest is not None and longest < length:  # what is behind a context is never read
        ids, rows = ids[:, :longest], rows // length * longest + rows % length
    with Selections():
        logits: torch.Tensor = causal(input_ids=ids, use_cache=False).logits
    return logits.flatten(0, 1).index_select(0, rows).float()


def kept_tokens(tokens: torch.Tensor, positions: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """Return the contiguous tokens [1, 1, L, 1] of a sequence after writing new ones [1, T] at their positions."""
    return torch.index_copy(kept, 2, positions, tokens.reshape(1, 1, -1, 1).to(kept.dtype))


def paged_logits(causal: Any, paging: Paging, pool: torch.Tensor, outputs: torch.Tensor) -> torch.Tensor:
    """The logits [R, vocab] after the tokens of a batch at the indices `outputs`; `pool` [rows, 1, 1] holds tokens."""
    count, length = paging.tables.shape[0], paging.tables.shape[1] * paging.block_size
    ids = GatheredPlaces(paging).read(pool).reshape(count, length)
    rows = paging.sequences.index_select(0, outputs) * length + paging.positions.index_select(0, outputs)
    return whole_logits(causal, ids, rows)


def check_causal(causal: Any) -> None:
    """Raise InputError if a model on the CPU is not causal; its weights are changed, and other errors may be raised."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in causal.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                parameter.copy_(noise / max(1, parameter.shape[-1]) ** 0.5)
            else:
                parameter.add_(0.1 * noise)
        vocabulary = causal.get_input_embeddings().weight.shape[0]
        first, second = torch.randint(3, vocabulary, (2, 1, _TOKENS), generator=generator)
        plain = causal(input_ids=first, use_cache=False).logits
        for cut in _CUTS:
            ids = torch.cat((first[:, :cut], second[:, cut:]), 1)
            logits = causal(input_ids=ids, use_cache=False).logits
            near = torch.isclose(logits[:, :cut], plain[:, :cut], _TOLERANCE, _TOLERANCE)
            if not near.all():
                raise InputError("its attention is not causal, which is not supported")
            if torch.isclose(logits[:, cut:], plain[:, cut:], _TOLERANCE, _TOLERANCE).all():
                raise InputError("its logits do not depend on its tokens")
