"""Recurrent layers by PyTorch's own kernels, in float32."""

from __future__ import annotations

import torch

from npu_runtime.cpu.torch_kernels.registry import Params, Tensors, torch_kernel

_FUNCTIONS = {"gru": torch.gru, "tanh": torch.rnn_tanh, "relu": torch.rnn_relu}


def _options(params: Params) -> tuple[bool, int, float, bool, bool, bool]:
    """PyTorch's arguments for one layer in inference: biases, layers, dropout, training, bidirectional, batch first."""
    return bool(params["has_bias"]), 1, 0.0, False, bool(params["has_back_weight"]), False


@torch_kernel("lstm_kernel")
def lstm(inputs: Tensors, outputs: Tensors, params: Params) -> None:
    x, h0, c0, *weights = (tensor.float() for tensor in inputs)
    for target, result in zip(outputs, torch.lstm(x, (h0, c0), weights, *_options(params)), strict=True):
        target.copy_(result)


@torch_kernel("rnn_kernel")
def rnn(inputs: Tensors, outputs: Tensors, params: Params) -> None:
    x, h0, *weights = (tensor.float() for tensor in inputs)
    results = _FUNCTIONS[params["cell"]](x, h0, weights, *_options(params))
    for target, result in zip(outputs, results, strict=True):
        target.copy_(result)
