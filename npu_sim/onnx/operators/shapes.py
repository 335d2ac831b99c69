"""Converters of operators on shapes, and of those that rearrange elements without reading their values."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import _disable_current_modes

from npu_sim.onnx.dtypes import torch_dtype
from npu_sim.onnx.rows import ALL, Call, Refusal, converts, number, numbered

MOST_COUNTED = 2**24


@converts("Shape", of_shape=True)
def _shape(call: Call, x: Tensor) -> Tensor:
    sizes = list(x.shape)
    return torch.tensor(sizes[slice(call.attr("start", 0), call.attr("end"))], dtype=torch.int64)


@converts("Size", of_shape=True)
def _size(call: Call, x: Tensor) -> Tensor:
    return torch.tensor(x.numel(), dtype=torch.int64)


@converts("Reshape", static=(1,))
def _reshape(call: Call, x: Tensor, shape: list[int]) -> Tensor:
    keeps_zeros = call.attr("allowzero", 0)
    return x.reshape([x.shape[axis] if not size and not keeps_zeros else size for axis, size in enumerate(shape)])


@converts("Flatten")
def _flatten(call: Call, x: Tensor) -> Tensor:
    axis = call.attr("axis", 1)
    axis = axis + x.ndim if axis < 0 else axis
    return x.reshape(math.prod(x.shape[:axis]), math.prod(x.shape[axis:]))


@converts("Squeeze", static=(1,))
def _squeeze(call: Call, x: Tensor, axes: list[int] | int | None = None) -> Tensor:
    axes = call.attr("axes") if axes is None else axes
    axes = [axes] if isinstance(axes, int) else axes
    chosen = [axis for axis, size in enumerate(x.shape) if size == 1] if axes is None else axes
    if any(x.shape[axis] != 1 for axis in chosen):
        raise Refusal(f"removes axes {list(chosen)} of shape {list(x.shape)}, which are not all 1")
    return torch.squeeze(x, tuple(chosen))


@converts("Unsqueeze", static=(1,))
def _unsqueeze(call: Call, x: Tensor, axes: list[int] | int | None = None) -> Tensor:
    axes = call.attr("axes") if axes is None else axes
    axes = [axes] if isinstance(axes, int) else axes
    ndim = x.ndim + len(axes)
    for axis in sorted(axis % ndim for axis in axes):
        x = x.unsqueeze(axis)
    return x


@converts("Transpose")
def _transpose(call: Call, x: Tensor) -> Tensor:
    return x.permute(call.attr("perm", list(range(x.ndim))[::-1]))


@converts("Concat")
def _concat(call: Call, *parts: Tensor) -> Tensor:
    return torch.cat(parts, call.attr("axis"))


@converts("Expand", static=(1,))
def _expand(call: Call, x: Tensor, shape: list[int]) -> Tensor:
    return x.expand(torch.broadcast_shapes(x.shape, tuple(shape)))


@converts("Tile", static=(1,))
def _tile(call: Call, x: Tensor, repeats: list[int]) -> Tensor:
    return x.repeat(repeats)


@converts("Split", static=(1,))
def _split(call: Call, x: Tensor, sizes: list[int] | None = None) -> tuple[Tensor, ...]:
    axis = call.attr("axis", 0)
    sizes = call.attr("split") if sizes is None else sizes
    if sizes is None:
        count = call.attr("num_outputs", call.outputs)
        each = -(-x.shape[axis] // count)
        sizes = [each] * (count - 1) + [x.shape[axis] - each * (count - 1)]
    return torch.split(x, sizes, axis)


@converts("Slice", static=(1, 2, 3, 4))
def _slice(
    call: Call,
    x: Tensor,
    starts: list[int],
    ends: list[int],
    axes: list[int] | None = None,
    steps: list[int] | None = None,
) -> Tensor:
    axes = list(range(len(starts))) if axes is None else axes
    for start, end, axis, step in zip(starts, ends, axes, steps or [1] * len(starts), strict=True):
        size = x.shape[axis]
        begin, stop, stride = slice(start, end, step).indices(size)
        if step > 0:
            x = torch.narrow(x, axis, begin, 0) if stop <= begin else _strided(x, axis, begin, stop, stride)
        else:
            picked = torch.from_numpy(np.arange(begin, stop, stride))
            whole = stride == -1 and len(picked) == size
            x = torch.flip(x, (axis,)) if whole else x.index_select(axis, picked)
    return x


def _strided(x: Tensor, axis: int, begin: int, stop: int, stride: int) -> Tensor:
    index = [slice(None)] * x.ndim
    index[axis] = slice(begin, stop, stride)
    return x[tuple(index)]


@converts("Pad", static=(1, 2, 3))
def _pad(call: Call, x: Tensor, pads: list[int], value: Any = None, axes: list[int] | None = None) -> Tensor:
    axes = [axis % x.ndim for axis in (range(x.ndim) if axes is None else axes)]
    before, after = [0] * x.ndim, [0] * x.ndim
    for place, axis in enumerate(axes):
        before[axis], after[axis] = pads[place], pads[place + len(axes)]
    mode = call.attr("mode", "constant")
    if mode == "constant":
        amounts = [amount for axis in reversed(range(x.ndim)) for amount in (before[axis], after[axis])]
        return F.pad(x, amounts, value=number(value) or 0)
    for axis, size in enumerate(x.shape):
        if before[axis] or after[axis]:
            padded = numbered(before[axis] + size + after[axis], "places along an axis")
            places = [_padded_place(place - before[axis], size, mode) for place in padded]
            x = x.index_select(axis, torch.tensor(places, dtype=torch.int64))
    return x


def _padded_place(place: int, size: int, mode: str) -> int:
    """Return the index of the element that a padding mode puts at a position outside of the axis."""
    if mode == "edge":
        return min(max(place, 0), size - 1)
    if mode == "wrap":
        return place % size
    if mode != "reflect":
        raise Refusal(f"pads in mode '{mode}'; known are constant, edge, reflect, wrap")
    if size == 1:
        return 0
    place %= 2 * (size - 1)
    return place if place < size else 2 * (size - 1) - place


@converts("ConstantOfShape", static=(0,))
def _constant_of_shape(call: Call, shape: list[int]) -> Tensor:
    value = call.attr("value")
    if value is None:
        return torch.zeros(shape)
    with _disable_current_modes():  # the attribute has a value also where tensors have none
        fill = value.reshape(-1)[0].item()
    return torch.full(shape, fill, dtype=value.dtype)


@converts("Range", static=ALL)
def _range(call: Call, *bounds: Any) -> Tensor:
    start, limit, delta = map(number, bounds)
    count = max(math.ceil((limit - start) / delta), 0)
    if count > MOST_COUNTED:
        raise Refusal(f"makes {count} elements, which are more than {MOST_COUNTED}")
    values: Tensor = torch.arange(count) * delta + start
    return values.to(call.dtypes[0])


@converts("EyeLike")
def _eye_like(call: Call, x: Tensor) -> Tensor:
    dtype = x.dtype if call.attr("dtype") is None else torch_dtype(call.attr("dtype"))
    rows, columns = x.shape
    diagonal = torch.arange(columns)[None, :] - torch.arange(rows)[:, None]
    is_one: Tensor = diagonal == call.attr("k", 0)
    return is_one.to(dtype)


@converts("DepthToSpace")
def _depth_to_space(call: Call, x: Tensor) -> Tensor:
    n, c, h, w = x.shape
    size = call.attr("blocksize")
    if call.attr("mode", "DCR") == "CRD":
        return F.pixel_shuffle(x, size)
    parts = x.reshape(n, size, size, c // size**2, h, w).permute(0, 3, 4, 1, 5, 2)
    return parts.reshape(n, c // size**2, h * size, w * size)


@converts("SpaceToDepth")
def _space_to_depth(call: Call, x: Tensor) -> Tensor:
    n, c, h, w = x.shape
    size = call.attr("blocksize")
    parts = x.reshape(n, c, h // size, size, w // size, size)
    order = (0, 1, 3, 5, 2, 4) if call.attr("mode", "DCR") == "CRD" else (0, 3, 5, 1, 2, 4)
    return parts.permute(order).reshape(n, c * size**2, h // size, w // size)


@converts("Trilu", static=(1,))
def _trilu(call: Call, x: Tensor, k: Any = None) -> Tensor:
    diagonal = number(k) or 0
    return torch.triu(x, diagonal) if call.attr("upper", 1) else torch.tril(x, diagonal)


@converts("Col2Im", static=(1, 2))
def _col2im(call: Call, x: Tensor, image: list[int], block: list[int]) -> Tensor:
    if len(image) != 2:
        raise Refusal(f"has {len(image)} spatial axes; known are 2")
    pads = call.attr("pads", [0] * 4)
    above, left, below, right = pads
    whole = [image[0] + above + below, image[1] + left + right]
    folded = F.fold(
        x, tuple(whole), tuple(block), dilation=call.attr("dilations", [1, 1]), stride=call.attr("strides", [1, 1])
    )
    return folded[:, :, above : whole[0] - below, left : whole[1] - right]
