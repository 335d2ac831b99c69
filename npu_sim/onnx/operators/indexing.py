"""Converters of operators that read or write elements by indices."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from npu_sim.onnx.rows import Call, Refusal, converts, number


def _from_the_end(indices: Tensor, size: int) -> Tensor:
    """Convert negative indices, which count from the end, to indices from the start."""
    return torch.where(indices < 0, indices + size, indices).to(torch.int64)


@converts("Gather", hints=(1,))
def _gather(call: Call, x: Tensor, indices: Any) -> Tensor:
    axis = call.attr("axis", 0) % x.ndim
    size = x.shape[axis]
    if isinstance(indices, int):
        if not -size <= indices < size:
            raise Refusal(f"reads index {indices} of an axis of {size}")
        return torch.select(x, axis, indices)
    wanted = torch.tensor(indices, dtype=torch.int64) if isinstance(indices, list) else indices.to(torch.int64)
    return x[(*[slice(None)] * axis, wanted)]


@converts("GatherElements")
def _gather_elements(call: Call, x: Tensor, indices: Tensor) -> Tensor:
    axis = call.attr("axis", 0)
    return torch.gather(x, axis, _from_the_end(indices, x.shape[axis]))


@converts("GatherND")
def _gather_nd(call: Call, x: Tensor, indices: Tensor) -> Tensor:
    batch, depth = call.attr("batch_dims", 0), indices.shape[-1]
    lead = list(x.shape[:batch])
    count, sizes, rest = math.prod(lead), list(x.shape[batch : batch + depth]), list(x.shape[batch + depth :])
    flat = x.reshape(count * math.prod(sizes), *rest)
    places = _flat_places(indices.reshape(count, -1, depth), sizes)
    places = places + (torch.arange(count) * math.prod(sizes))[:, None]
    picked = torch.index_select(flat, 0, places.reshape(-1))
    return picked.reshape(*lead, *indices.shape[batch:-1], *rest)


def _flat_places(indices: Tensor, sizes: list[int]) -> Tensor:
    """Return the flat position of each index tuple [..., depth] in an array of these sizes."""
    places = torch.zeros_like(indices[..., 0], dtype=torch.int64)
    for axis, size in enumerate(sizes):
        places = places * size + _from_the_end(indices[..., axis], size)
    return places


_REDUCE = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}


def _scattered(x: Tensor, axis: int, indices: Tensor, updates: Tensor, reduction: str) -> Tensor:
    if reduction == "none":
        return torch.scatter(x, axis, indices, updates)
    if reduction not in _REDUCE:
        raise Refusal(f"has the reduction '{reduction}'; known are none, {', '.join(_REDUCE)}")
    return torch.scatter_reduce(x, axis, indices, updates, _REDUCE[reduction])


@converts("ScatterElements", "Scatter")
def _scatter_elements(call: Call, x: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    axis = call.attr("axis", 0)
    return _scattered(x, axis, _from_the_end(indices, x.shape[axis]), updates, call.attr("reduction", "none"))


@converts("ScatterND")
def _scatter_nd(call: Call, x: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    depth = indices.shape[-1]
    sizes, rest = list(x.shape[:depth]), list(x.shape[depth:])
    flat = x.reshape(math.prod(sizes), math.prod(rest))
    places = _flat_places(indices, sizes).reshape(-1, 1)
    rows = updates.reshape(places.shape[0], math.prod(rest))
    return _scattered(flat, 0, places.expand(rows.shape), rows, call.attr("reduction", "none")).reshape(x.shape)


@converts("OneHot", static=(1,))
def _one_hot(call: Call, indices: Tensor, depth: Any, values: Tensor) -> Tensor:
    count = int(number(depth))
    axis = call.attr("axis", -1) % (indices.ndim + 1)
    shape = [1] * (indices.ndim + 1)
    shape[axis] = count
    wanted = indices.unsqueeze(axis)
    hot = torch.where(wanted < 0, wanted + count, wanted) == torch.arange(count).reshape(shape)
    return torch.where(hot, values[1], values[0])


@converts("ReverseSequence")
def _reverse_sequence(call: Call, x: Tensor, lengths: Tensor) -> Tensor:
    batch, time = call.attr("batch_axis", 1), call.attr("time_axis", 0)
    lines = x if (batch, time) == (0, 1) else x.transpose(0, 1)
    place = torch.arange(lines.shape[1])[None, :]
    ends = lengths[:, None]
    places = torch.where(place < ends, ends - 1 - place, place).reshape(*lines.shape[:2], *[1] * (x.ndim - 2))
    turned = torch.gather(lines, 1, places.expand(lines.shape))
    return turned if (batch, time) == (0, 1) else turned.transpose(0, 1)


@converts("Compress", static=(1,))
def _compress(call: Call, x: Tensor, condition: list[bool]) -> Tensor:
    axis = call.attr("axis")
    places = torch.tensor([index for index, keep in enumerate(condition) if keep], dtype=torch.int64)
    return x.reshape(-1).index_select(0, places) if axis is None else x.index_select(axis, places)


@converts("Unique", static=(0,))
def _unique(call: Call, x: Any) -> tuple[Tensor, ...]:
    axis, array = call.attr("axis"), np.asarray(x)
    _, first, inverse, counts = np.unique(array, True, True, True, axis=axis)
    order = np.arange(len(first)) if call.attr("sorted", 1) else np.argsort(first)
    places = np.empty_like(order)
    places[order] = np.arange(len(order))
    values = array.reshape(-1)[first[order]] if axis is None else np.take(array, first[order], axis)
    results = (first[order], places[inverse.reshape(-1)], counts[order])
    return (torch.tensor(values, dtype=call.dtypes[0]), *(torch.tensor(x, dtype=torch.int64) for x in results))


@converts("NonZero", static=(0,))
def _non_zero(call: Call, x: Any) -> Tensor:
    return torch.nonzero(torch.atleast_1d(torch.tensor(x))).T.contiguous()


@converts("TensorScatter")
def _tensor_scatter(call: Call, past: Tensor, update: Tensor, start: Tensor | None = None) -> Tensor:
    axis = call.attr("axis", -2) % past.ndim
    size, count = past.shape[axis], update.shape[axis]
    begin = torch.zeros(past.shape[0], dtype=torch.int64) if start is None else start.to(torch.int64)
    places = begin[:, None] + torch.arange(count)[None, :]
    places = places % size if call.attr("mode", "linear") == "circular" else places
    shape = [1] * past.ndim
    shape[0], shape[axis] = past.shape[0], count
    return torch.scatter(past, axis, places.reshape(shape).expand(update.shape), update)


@converts("GridSample")
def _grid_sample(call: Call, x: Tensor, grid: Tensor) -> Tensor:
    mode = {"linear": "bilinear", "bilinear": "bilinear", "cubic": "bicubic", "bicubic": "bicubic"}.get(
        call.attr("mode", "linear"), "nearest"
    )
    if x.ndim not in (4, 5) or x.ndim == 5 and mode == "bicubic":
        raise Refusal(f"samples {x.ndim - 2} spatial axes in mode {mode}")
    return F.grid_sample(x, grid, mode, call.attr("padding_mode", "zeros"), bool(call.attr("align_corners", 0)))


@converts("AffineGrid", static=(1,))
def _affine_grid(call: Call, theta: Tensor, size: list[int]) -> Tensor:
    return F.affine_grid(theta, size, bool(call.attr("align_corners", 0)))
