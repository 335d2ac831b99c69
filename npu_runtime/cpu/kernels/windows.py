"""Convolutions, pooling and resampling over NCHW in NumPy, in float32."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from npu_runtime.cpu.bound_call import Params
from npu_runtime.cpu.kernels.products import activated
from npu_runtime.cpu.kernels.registry import Arrays, as_float32, cpu_kernel, is_float, to_float
from npu_runtime.cpu.window_lengths import window_lengths


@cpu_kernel("conv2d_kernel")
def conv2d(inputs: Arrays, outputs: Arrays, params: Params) -> None:
    """out = act(conv(x, w) + bias + residual); padding is top, bottom, left, right."""
    x, weight, *rest = map(as_float32, inputs)
    pairs = [(0, 0), (0, 0), params["padding"][:2], params["padding"][2:]]
    x = np.pad(x, [(max(before, 0), max(after, 0)) for before, after in pairs])
    within = (slice(max(-before, 0), n - max(-after, 0)) for n, (before, after) in zip(x.shape, pairs, strict=True))
    x = x[tuple(within)]
    if weight.shape[1] == 1:
        result = _depthwise(x, weight, outputs[0].shape, params)
    else:
        result = by_columns(x, weight, params, np.empty(outputs[0].shape, np.float32))
    if params["has_bias"]:
        result += rest.pop(0)[:, None, None]
    if params["has_residual"]:
        result += rest.pop(0)
    outputs[0][...] = activated(result, params["activation"])


def _depthwise(x: np.ndarray, weight: np.ndarray, shape: tuple[int, ...], params: Params) -> np.ndarray:
    """The convolution of padded images in which each output channel reads one input channel, tap by tap."""
    x = np.repeat(x, shape[1] // x.shape[1], 1)
    result = np.zeros(shape, np.float32)
    for (row, column), place in _taps(weight.shape[2:], shape[2:], params["stride"], params["dilation"]):
        result += x[place] * weight[:, :, row, column, None]
    return result


def by_columns(x: np.ndarray, weight: np.ndarray, params: Params, result: np.ndarray) -> np.ndarray:
    """Write the convolution of padded images to `result`, as a product with the contents of windows, and return it."""
    groups, kernel = params["groups"], weight.shape[2:]
    (down, right), (below, beside) = params["stride"], params["dilation"]
    spans = [(count - 1) * apart + 1 for count, apart in zip(kernel, params["dilation"], strict=True)]
    windows = sliding_window_view(x, spans, (2, 3))[:, :, ::down, ::right, ::below, ::beside]  # [n, c, p, q, kh, kw]
    weights = weight.reshape(groups, result.shape[1] // groups, -1)
    for item, target in zip(windows, result, strict=True):  # one at a time: its columns are many times its size
        columns = item.transpose(0, 3, 4, 1, 2).reshape(groups, weights.shape[2], -1)
        target[...] = (weights @ columns).reshape(target.shape)
    return result


@cpu_kernel("conv_transpose2d_kernel")
def conv_transpose2d(inputs: Arrays, outputs: Arrays, params: Params) -> None:
    x, weight, *bias = map(as_float32, inputs)
    groups, (top, left), out = params["groups"], params["padding"], outputs[0]
    (batch, channels, *size), kernel = x.shape, weight.shape[2:]
    weights = weight.reshape(groups, channels // groups, -1).swapaxes(1, 2)
    taps = (weights @ x.reshape(batch, groups, channels // groups, -1)).reshape(batch, out.shape[1], *kernel, *size)
    spread = [
        max((count - 1) * step + (taps_ - 1) * apart + 1, before + wanted)
        for count, step, taps_, apart, before, wanted in zip(
            size, params["stride"], kernel, params["dilation"], (top, left), out.shape[2:], strict=True
        )
    ]
    result = np.zeros((*out.shape[:2], *spread), np.float32)
    for (row, column), place in _taps(kernel, size, params["stride"], params["dilation"]):
        result[place] += taps[:, :, row, column]
    result = result[:, :, top : top + out.shape[2], left : left + out.shape[3]]
    out[...] = result + bias[0][:, None, None] if bias else result


Place = tuple[slice, ...]


def _taps(
    kernel: Sequence[int], size: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> Iterator[tuple[tuple[int, int], Place]]:
    """Each tap of a window, with the slices of an image that the windows (`size` of them) multiply with it."""
    for row, column in np.ndindex(*kernel):
        starts = (row * dilation[0], column * dilation[1])
        ends = (start + (count - 1) * step + 1 for start, count, step in zip(starts, size, stride, strict=True))
        place = tuple(slice(start, end, step) for start, end, step in zip(starts, ends, stride, strict=True))
        yield (row, column), (slice(None), slice(None), *place)


def _padded(x: np.ndarray, out: np.ndarray, params: Params, dilation: Sequence[int], value: float) -> np.ndarray:
    """The images, padded with `value` as far as windows reach beyond them."""
    pads = [(0, 0), (0, 0)]
    axes = zip(x.shape[2:], out.shape[2:], params["window"], params["stride"], params["padding"], dilation, strict=True)
    for size, count, taps, step, before, apart in axes:
        touched = (count - 1) * step + (taps - 1) * apart + 1
        pads.append((before, max(touched - before - size, 0)))
    return np.pad(x, pads, constant_values=value)


@cpu_kernel("max_pool2d_kernel", "integer_max_pool2d_kernel")
def max_pool2d(inputs: Arrays, outputs: Arrays, params: Params) -> None:
    x, out = to_float(inputs[0]), outputs[0]
    least = -np.inf if is_float(x.dtype) else np.iinfo(x.dtype).min
    padded = _padded(x, out, params, params["dilation"], least)
    result = np.full(out.shape, least, x.dtype)
    for _, place in _taps(params["window"], out.shape[2:], params["stride"], params["dilation"]):
        np.maximum(result, padded[place], out=result)
    out[...] = result


@cpu_kernel("max_pool2d_index_kernel")
def max_pool2d_index(inputs: Arrays, outputs: Arrays, params: Params) -> None:
    """Compute the position of each maximum in its plane, counted by rows: of the first one, or of the last NaN."""
    x, out = as_float32(inputs[0]), outputs[0]
    height, width = x.shape[2:]
    padded = _padded(x, out, params, params["dilation"], -np.inf)
    places = np.full((1, 1, *padded.shape[2:]), -1, np.int64)
    top, left = params["padding"]
    places[:, :, top : top + height, left : left + width] = np.arange(height * width).reshape(height, width)
    highest = np.full(out.shape, -np.inf, np.float32)
    index = np.full(out.shape, -1, np.int64)
    for _, tap in _taps(params["window"], out.shape[2:], params["stride"], params["dilation"]):
        values, at = padded[tap], np.broadcast_to(places[tap], out.shape)
        better = (at >= 0) & ((values > highest) | np.isnan(values) | (index < 0))
        highest, index = np.where(better, values, highest), np.where(better, at, index)
    out[...] = index


@cpu_kernel("avg_pool2d_kernel")
def avg_pool2d(inputs: Arrays, outputs: Arrays, params: Params) -> None:
    x, out = as_float32(inputs[0]), outputs[0]
    padded = _padded(x, out, params, (1, 1), 0.0)
    total = np.zeros(out.shape, np.float32)
    for _, place in _taps(params["window"], out.shape[2:], params["stride"], (1, 1)):
        total += padded[place]
    axes = zip(x.shape[2:], out.shape[2:], params["window"], params["stride"], params["padding"], strict=True)
    rows, columns = (
        window_lengths(size, count, taps, step, pad, pad, bool(params["count_include_pad"]))
        for size, count, taps, step, pad in axes
    )
    out[...] = total / (np.float32(params["divisor"]) if params["divisor"] else rows[:, None] * columns)


@cpu_kernel("adaptive_avg_pool2d_kernel")
def adaptive_avg_pool2d(inputs: Arrays, outputs: Arrays, params: Params) -> None:
    x, out = as_float32(inputs[0]), outputs[0]
    for axis in (2, 3):
        bins = (
            (i * x.shape[axis] // count, -(-(i + 1) * x.shape[axis] // count))
            for count in [out.shape[axis]]
            for i in range(count)
        )
        x = np.stack([x.take(range(start, end), axis).mean(axis) for start, end in bins], axis)
    out[...] = x


@cpu_kernel("upsample_nearest_kernel")
def upsample_nearest(inputs: Arrays, outputs: Arrays, params: Params) -> None:
    """Resample: output pixel i reads input pixel floor(i · scale), or floor((i + ½) · scale) in the exact form."""
    x, out = inputs[0], outputs[0]
    shift = np.float32(0.5 if params["exact"] else 0.0)
    rows, columns = (
        np.minimum(((np.arange(size, dtype=np.float32) + shift) * np.float32(scale)).astype(np.int64), source - 1)
        for size, source, scale in zip(out.shape[2:], x.shape[2:], params["scale"], strict=True)
    )
    out[...] = x[:, :, rows[:, None], columns]


@cpu_kernel("upsample_bilinear_kernel")
def upsample_bilinear(inputs: Arrays, outputs: Arrays, params: Params) -> None:
    result = as_float32(inputs[0])
    for axis in (2, 3):
        source, count = result.shape[axis], outputs[0].shape[axis]
        place = np.arange(count, dtype=np.float32)
        if params["align_corners"]:
            place *= np.float32((source - 1) / (count - 1) if count > 1 else 0.0)
        else:
            place = np.maximum((place + np.float32(0.5)) * np.float32(params["scale"][axis - 2]) - np.float32(0.5), 0)
        first = np.minimum(place.astype(np.int64), source - 1)
        second = np.minimum(first + 1, source - 1)
        share = (place - first.astype(np.float32)).reshape([-1 if d == axis else 1 for d in range(4)])
        result = result.take(first, axis) * (1 - share) + result.take(second, axis) * share
    outputs[0][...] = result
