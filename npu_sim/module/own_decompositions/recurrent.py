"""Decompositions of recurrent layers, step by step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch._decomp.decompositions import _rnn_helper, gather_params, one_layer_lstm

from npu_sim.module.own_decompositions.table import decomposes


@decomposes("aten.lstm.input")
def lstm(
    x: torch.Tensor,
    states: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    has_biases: bool,
    layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """PyTorch's own decomposition, without its choice of a library's kernel for a whole layer."""
    parameters = gather_params(weights, has_biases, states[0].size(2) != states[1].size(2))
    initial = list(zip(states[0], states[1], strict=True))
    out, last = _rnn_helper(
        x, initial, parameters, has_biases, layers, dropout, train, bidirectional, batch_first, one_layer_lstm
    )
    hidden, cells = zip(*last, strict=True)
    return out, torch.stack(hidden), torch.stack(cells)
