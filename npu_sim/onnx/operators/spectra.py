"""Converters of discrete Fourier transforms, as products with constant matrices of cosines and sines."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from npu_sim.onnx.dtypes import torch_dtype
from npu_sim.onnx.rows import ALL, Call, Refusal, converts, number, numbered

MOST_POINTS = 4096


def _transformed(real: Tensor, imaginary: Tensor | None, length: int, outputs: int, sign: float) -> list[Tensor]:
    """Return the real and imaginary parts of the transform of the last axis.

    Args:
        imaginary: Imaginary part of the input. None: the input is real.
        sign: Sign of the exponent: -1 for the forward transform, 1 for the inverse.
    """
    if not 0 < length <= MOST_POINTS:
        raise Refusal(f"transforms {length} points; known are 1 to {MOST_POINTS}")
    angles = sign * 2 * np.pi / length * (np.outer(np.arange(length), np.arange(outputs)) % length)
    cos, sin = (torch.from_numpy(table(angles)).to(real.dtype) for table in (np.cos, np.sin))
    parts = [F.pad(x, [0, length - x.shape[-1]]) for x in (real, imaginary) if x is not None]
    if len(parts) == 1:
        return [parts[0] @ cos, parts[0] @ sin]
    return [parts[0] @ cos - parts[1] @ sin, parts[0] @ sin + parts[1] @ cos]


@converts("DFT", static=(1, 2))
def _dft(call: Call, x: Tensor, length: Any = None, axis: Any = None) -> Tensor:
    length, axis = number(length), number(axis)
    axis = (call.attr("axis", 1) if call.opset < 20 else -2) if axis is None else axis
    inverse, onesided = call.attr("inverse", 0), call.attr("onesided", 0)
    parts = x.movedim(axis % x.ndim, -2)
    real, imaginary = parts[..., 0], parts[..., 1] if parts.shape[-1] == 2 else None
    size = real.shape[-1]
    if inverse and onesided:
        length = 2 * (size - 1) if length is None else length
        rest = torch.flip(real[..., 1 : length - size + 1], (-1,))
        real = torch.cat((real, rest), -1)
        if imaginary is not None:
            imaginary = torch.cat((imaginary, -torch.flip(imaginary[..., 1 : length - size + 1], (-1,))), -1)
        signal: Tensor = _transformed(real, imaginary, length, length, 1.0)[0] / length
        return signal.unsqueeze(-1).movedim(-2, axis)
    length = size if length is None else length
    outputs = length // 2 + 1 if onesided else length
    result = torch.stack(_transformed(real, imaginary, length, outputs, 1.0 if inverse else -1.0), -1)
    return (result / length if inverse else result).movedim(-2, axis % x.ndim)


@converts("STFT", static=(1, 3))
def _stft(
    call: Call,
    x: Tensor,
    step: Any,
    window: Tensor | None = None,
    length: Any = None,
) -> Tensor:
    step, length = number(step), number(length)
    width = window.shape[0] if window is not None else length
    if width is None:
        raise Refusal("has neither a window nor a frame length")
    length = width if length is None else length
    x = x if x.ndim == 3 else x.unsqueeze(-1)
    frames = x.transpose(1, 2).unfold(2, width, step)
    frames = frames if window is None else frames * window
    imaginary = frames[:, 1] if frames.shape[1] == 2 else None
    outputs = length // 2 + 1 if call.attr("onesided", 1) else length
    return torch.stack(_transformed(frames[:, 0], imaginary, length, outputs, -1.0), -1)


@converts("MelWeightMatrix", static=ALL)
def _mel_weights(call: Call, *settings: Any) -> Tensor:
    bins, length, rate, lowest, highest = map(number, settings)
    low, high = (2595 * np.log10(1 + edge / 700) for edge in (lowest, highest))
    numbered(length, "points in a window")
    bands = numbered(bins, "bands")
    mels = np.arange(bins + 2) * (high - low) / (bins + 2) + low
    edges = np.floor((length + 1) * 700 * (10 ** (mels / 2595) - 1) / rate).astype(int)
    weights = np.zeros((length // 2 + 1, bins))
    for index in bands:
        left, center, right = edges[index : index + 3]
        if left == center:
            weights[center, index] = 1
        for place in range(left, center + (left < center)):
            weights[place, index] = (place - left) / (center - left)
        for place in range(center, right):
            weights[place, index] = (right - place) / (right - center)
    return torch.from_numpy(weights).to(torch_dtype(call.attr("output_datatype", 1)))
