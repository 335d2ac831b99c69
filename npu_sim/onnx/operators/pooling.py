"""Converters of pooling over windows and over whole images."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from npu_sim.onnx.operators.convolutions import ones, padded, spatial_function, window_pads
from npu_sim.onnx.rows import Call, converts, numbered

_MAX: dict[int, Any] = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
_AVERAGE: dict[int, Any] = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}


class _Windows:
    """The windows of a pooling node.

    Attributes:
        before, after: Padding of each axis according to the node.
        whole: Padding after each axis with which the last window just fits: less or more than `after`.
        counts: Number of windows along each axis.
    """

    def __init__(self, call: Call, sizes: Sequence[int]) -> None:
        axes = len(sizes)
        self.kernel = list(call.attr("kernel_shape"))
        self.strides, self.dilations = ones(call, "strides", axes), ones(call, "dilations", axes)
        self.before, self.after = window_pads(call, sizes, self.kernel, self.strides, self.dilations)
        rounds_up = call.attr("ceil_mode", 0) and call.attr("auto_pad", "NOTSET") in ("NOTSET", "")
        self.whole, self.counts = [], []
        for axis, size in enumerate(sizes):
            span = (self.kernel[axis] - 1) * self.dilations[axis] + 1
            room = size + self.before[axis] + self.after[axis] - span
            count = (-(-room // self.strides[axis]) if rounds_up else room // self.strides[axis]) + 1
            if rounds_up and (count - 1) * self.strides[axis] >= size + self.before[axis]:
                count -= 1  # a window that begins in the padding after the input
            self.counts.append(count)
            self.whole.append((count - 1) * self.strides[axis] + span - size - self.before[axis])

    @property
    def is_plain(self) -> bool:
        """Whether PyTorch's pooling, whose padding is equal on both sides, has the same windows."""
        same = self.before == self.after and self.is_inside
        return same and all(2 * pad <= width for pad, width in zip(self.before, self.kernel, strict=True))

    @property
    def is_inside(self) -> bool:
        """Whether no window extends beyond the padding."""
        return all(whole <= after for whole, after in zip(self.whole, self.after, strict=True))


def _lowest(dtype: torch.dtype) -> float:
    return -math.inf if dtype.is_floating_point else torch.iinfo(dtype).min


@converts("MaxPool")
def _max_pool(call: Call, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
    windows = _Windows(call, x.shape[2:])
    pool = spatial_function(_MAX, x.ndim - 2)
    source, pads = x, windows.before
    if not windows.is_plain:
        source, pads = padded(x, windows.before, windows.whole, _lowest(x.dtype)), [0] * len(pads)
    arguments = (windows.kernel, windows.strides, pads, windows.dilations)
    if call.outputs < 2:
        if x.dtype in (torch.int8, torch.uint8):
            return pool(source.float(), *arguments).to(x.dtype)  # type: ignore[no-any-return]
        return pool(source, *arguments)  # type: ignore[no-any-return]
    values, indices = pool(source, *arguments, return_indices=True)
    return values, _flat_indices(call, indices, x.shape, source.shape, windows)


def _flat_indices(
    call: Call, indices: Tensor, shape: Sequence[int], padded: Sequence[int], windows: _Windows
) -> Tensor:
    """Convert PyTorch's indices, which count within one (padded) image, to indices into the whole input."""
    shifts = [0] * len(windows.before) if list(shape) == list(padded) else windows.before
    places = []
    rest = indices
    for size, shift in zip(reversed(padded[2:]), reversed(shifts), strict=True):
        places.append(rest % size - shift)
        rest = rest // size
    sizes = list(shape[2:])
    if call.attr("storage_order", 0):
        places, sizes = places[::-1], sizes[::-1]
    flat, factor = torch.zeros_like(indices), 1
    for place, size in zip(places, reversed(sizes), strict=True):
        flat = flat + place * factor
        factor *= size
    images = torch.arange(shape[0] * shape[1]).reshape(shape[0], shape[1], *[1] * (len(shape) - 2))
    return flat + images * factor


@converts("AveragePool")
def _average_pool(call: Call, x: Tensor) -> Tensor:
    windows = _Windows(call, x.shape[2:])
    counts_padding = bool(call.attr("count_include_pad", 0))
    pool = spatial_function(_AVERAGE, x.ndim - 2)
    if windows.is_plain and set(windows.dilations) == {1}:
        return pool(x, windows.kernel, windows.strides, windows.before, False, counts_padding)  # type: ignore[no-any-return]
    total = _window_sums(x, windows)
    shown = torch.ones_like(x[:1, :1])
    if counts_padding:
        rest = [min(a, w) for a, w in zip(windows.after, windows.whole, strict=True)]
        shown = padded(shown, windows.before, rest, 1.0)
        beyond = [w - r for w, r in zip(windows.whole, rest, strict=True)]
        return total / _sums(padded(shown, [0] * len(rest), beyond), windows)
    return total / _window_sums(shown, windows)


def _window_sums(x: Tensor, windows: _Windows) -> Tensor:
    """Return the sum of each window, with padding counted as 0."""
    return _sums(padded(x, windows.before, windows.whole), windows)


def _sums(x: Tensor, windows: _Windows) -> Tensor:
    for axis in range(x.ndim - 2):
        dim, count, stride = axis + 2, windows.counts[axis], windows.strides[axis]
        terms = []
        for offset in numbered(windows.kernel[axis], "elements in a window"):
            start = offset * windows.dilations[axis]
            index = [slice(None)] * x.ndim
            index[dim] = slice(start, start + (count - 1) * stride + 1, stride)
            terms.append(x[tuple(index)])
        x = torch.stack(terms).sum(0)
    return x


@converts("LpPool")
def _lp_pool(call: Call, x: Tensor) -> Tensor:
    p = call.attr("p", 2)
    return torch.pow(_window_sums(torch.pow(torch.abs(x), p), _Windows(call, x.shape[2:])), 1 / p)


@converts("GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool")
def _global_pool(call: Call, x: Tensor) -> Tensor:
    dims = list(range(2, x.ndim))
    if call.op == "GlobalMaxPool":
        return torch.amax(x, dims, keepdim=True)
    if call.op == "GlobalLpPool":
        p = call.attr("p", 2)
        return torch.pow(torch.pow(torch.abs(x), p).sum(dims, keepdim=True), 1 / p)
    return F.adaptive_avg_pool2d(x, 1) if x.ndim == 4 else torch.mean(x, dims, keepdim=True)


@converts("MaxUnpool", static=(2,))
def _max_unpool(call: Call, x: Tensor, indices: Tensor, shape: list[int] | None = None) -> Tensor:
    kernel = list(call.attr("kernel_shape"))
    axes = len(kernel)
    strides, pads = ones(call, "strides", axes), call.attr("pads", [0] * 2 * axes)
    sizes = [
        (x.shape[axis + 2] - 1) * strides[axis] - pads[axis] - pads[axis + axes] + kernel[axis] for axis in range(axes)
    ]
    inner = [*x.shape[:2], *sizes]
    flat = torch.zeros(math.prod(inner), dtype=x.dtype).scatter(0, indices.reshape(-1), x.reshape(-1))
    missing = [0] * x.ndim if shape is None else [whole - size for whole, size in zip(shape, inner, strict=True)]
    return padded(flat.reshape(inner), [0] * x.ndim, missing)
