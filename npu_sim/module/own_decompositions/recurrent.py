"""Decompositions of recurrent layers into ops for each time step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._decomp import decompositions
from torch._decomp.decompositions import _rnn_helper, gather_params

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
    """Run an LSTM by PyTorch's own decomposition, without the library kernels that PyTorch may choose for a layer."""
    parameters = gather_params(weights, has_biases, states[0].size(2) != states[1].size(2))
    initial = list(zip(states[0], states[1], strict=True))
    out, last = _rnn_helper(
        x, initial, parameters, has_biases, layers, dropout, train, bidirectional, batch_first, _lstm_layer
    )
    hidden, cells = zip(*last, strict=True)
    return out, torch.stack(hidden), torch.stack(cells)


_pytorchs_lstm_layer: Callable[..., Any] = decompositions.one_layer_lstm


def _lstm_layer(inp: Any, hidden: Any, params: Any, has_biases: Any, reverse: Any = False) -> Any:
    """Run PyTorch's decomposition of one LSTM layer and give the last states the shape of the first ones.

    Some versions (2.9 to 2.11 among them) return the last states with an extra dimension of size 1.
    """
    out, last = _pytorchs_lstm_layer(inp, hidden, params, has_biases, reverse)
    return out, tuple(state.reshape(first.shape) for state, first in zip(last, hidden, strict=True))


@contextmanager
def lstm_shapes() -> Iterator[None]:
    """A context in which PyTorch traces an LSTM with correct shapes of the last states, in any version."""
    decompositions.one_layer_lstm = _lstm_layer
    try:
        yield
    finally:
        decompositions.one_layer_lstm = _pytorchs_lstm_layer
