"""Recurrent layers in NumPy, step by step in float32."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from npu_runtime.cpu.bound_call import Params
from npu_runtime.cpu.kernels.registry import Arrays, as_float32, cpu_kernel


def _directions(weights: Sequence[np.ndarray], params: Params) -> list[Sequence[np.ndarray]]:
    """The weights and biases of each direction; biases that a layer lacks are 0."""
    each = 4 if params["has_bias"] else 2
    zeros = [np.zeros(len(weights[0]), np.float32)] * (4 - each)
    return [[*map(as_float32, weights[at : at + each]), *zeros] for at in range(0, len(weights), each)]


def _sigmoid(x: np.ndarray) -> np.ndarray:
    result: np.ndarray = 1 / (1 + np.exp(-x))
    return result


def _order(steps: int, direction: int) -> range:
    return range(steps) if direction == 0 else range(steps - 1, -1, -1)


@cpu_kernel("lstm_kernel")
def lstm(inputs: Arrays, outputs: Arrays, params: Params) -> None:
    """An LSTM layer: gates i, f, g, o; c = σ(f)·c + σ(i)·tanh(g); h = σ(o)·tanh(c)."""
    x, h0, c0, *weights = inputs
    out, last_h, last_c = outputs
    size = h0.shape[2]
    for direction, (weight, hidden_weight, bias, hidden_bias) in enumerate(_directions(weights, params)):
        given = as_float32(x) @ weight.T + (bias + hidden_bias)
        h, c = as_float32(h0[direction]), as_float32(c0[direction])
        result = out[..., direction * size : (direction + 1) * size]
        for step in _order(len(x), direction):
            i, f, g, o = np.split(given[step] + h.astype(out.dtype).astype(np.float32) @ hidden_weight.T, 4, axis=-1)
            c = _sigmoid(f) * c + _sigmoid(i) * np.tanh(g)
            h = result[step] = _sigmoid(o) * np.tanh(c)
        last_h[direction], last_c[direction] = h, c


@cpu_kernel("rnn_kernel")
def rnn(inputs: Arrays, outputs: Arrays, params: Params) -> None:
    """A GRU layer (gates r, z, n: n = tanh(x + r·h'), h = (1 - z)·n + z·h) or a plain one (h = act(x + h'))."""
    x, h0, *weights = inputs
    out, last = outputs
    size, gated = h0.shape[2], params["cell"] == "gru"
    for direction, (weight, hidden_weight, bias, hidden_bias) in enumerate(_directions(weights, params)):
        given = as_float32(x) @ weight.T + bias
        h = as_float32(h0[direction])
        result = out[..., direction * size : (direction + 1) * size]
        for step in _order(len(x), direction):
            h = as_float32(h.astype(out.dtype))
            recalled = h @ hidden_weight.T + hidden_bias
            if gated:
                (xr, xz, xn), (hr, hz, hn) = (np.split(each, 3, axis=-1) for each in (given[step], recalled))
                z = _sigmoid(xz + hz)
                h = (1 - z) * np.tanh(xn + _sigmoid(xr + hr) * hn) + z * h
            else:
                total = given[step] + recalled
                h = np.tanh(total) if params["cell"] == "tanh" else np.maximum(total, 0)
            result[step] = h
        last[direction] = h
