"""Converters of sums, means and other reductions; of softmax, sorting and cumulative sums."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from npu_sim.onnx.rows import Call, Refusal, converts, number

_REDUCTIONS = (
    "ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare"
)


@converts(*_REDUCTIONS.split(), static=(1,))
def _reduce(call: Call, x: Tensor, axes: list[int] | None = None) -> Tensor:
    axes = call.attr("axes") if axes is None else axes
    if not axes:
        if call.attr("noop_with_empty_axes", 0):
            return _without_axes(call, x)
        axes = list(range(x.ndim))
    dims, keep = [axis % max(x.ndim, 1) for axis in axes], bool(call.attr("keepdims", 1))
    if x.ndim == 0:
        return _without_axes(call, x)
    return _reduced(call.op, x, dims, keep).to(x.dtype)


def _without_axes(call: Call, x: Tensor) -> Tensor:
    """Apply a reduction to each element by itself, for a node whose list of axes is empty."""
    return _reduced(call.op, x.unsqueeze(-1), [x.ndim], False).to(x.dtype)


def _reduced(op: str, x: Tensor, dims: list[int], keep: bool) -> Tensor:
    if op in ("ReduceMax", "ReduceMin"):
        empty = any(not x.shape[axis] for axis in dims)
        if empty:
            return _extreme_of_nothing(op, x, dims, keep)
        if x.dtype == torch.bool:
            return torch.any(x, dims, keep) if op == "ReduceMax" else torch.all(x, dims, keep)
        return torch.amax(x, dims, keep) if op == "ReduceMax" else torch.amin(x, dims, keep)
    if op == "ReduceProd":
        for axis in sorted(dims, reverse=True):
            x = torch.prod(x, axis, keepdim=keep)
        return x
    if op == "ReduceMean":
        return torch.mean(x, dims, keep) if x.is_floating_point() else torch.mean(x.float(), dims, keep)
    if op == "ReduceLogSumExp":
        return torch.logsumexp(x if x.is_floating_point() else x.float(), dims, keep)
    terms = {"ReduceL1": torch.abs, "ReduceL2": torch.square, "ReduceSumSquare": torch.square}.get(op)
    total = torch.sum(x if terms is None else terms(x), dims, keep)
    if op == "ReduceL2":
        return torch.sqrt(total if total.is_floating_point() else total.float())
    return torch.log(total if total.is_floating_point() else total.float()) if op == "ReduceLogSum" else total


def _extreme_of_nothing(op: str, x: Tensor, dims: list[int], keep: bool) -> Tensor:
    """Return the maximum or minimum over no elements: the dtype's lowest or highest value."""
    if x.is_floating_point():
        value = float("-inf") if op == "ReduceMax" else float("inf")
    elif x.dtype == torch.bool:
        value = op == "ReduceMin"
    else:
        value = torch.iinfo(x.dtype).min if op == "ReduceMax" else torch.iinfo(x.dtype).max
    sizes = [1 if axis in dims else size for axis, size in enumerate(x.shape) if keep or axis not in dims]
    return torch.full(sizes, value, dtype=x.dtype)


@converts("ArgMax", "ArgMin")
def _arg_extreme(call: Call, x: Tensor) -> Tensor:
    axis, keep = call.attr("axis", 0), bool(call.attr("keepdims", 1))
    find: Callable[..., Tensor] = torch.argmax if call.op == "ArgMax" else torch.argmin
    if call.attr("select_last_index", 0):
        last: Tensor = x.shape[axis] - 1 - find(torch.flip(x, (axis,)), axis, keepdim=keep)
        return last
    return find(x, axis, keepdim=keep)


@converts("Softmax")
def _softmax(call: Call, x: Tensor) -> Tensor:
    return F.softmax(x, call.attr("axis", -1))


@converts("LogSoftmax")
def _log_softmax(call: Call, x: Tensor) -> Tensor:
    return F.log_softmax(x, call.attr("axis", -1))


@converts("Hardmax")
def _hardmax(call: Call, x: Tensor) -> Tensor:
    axis = call.attr("axis", -1)
    shape = [1] * x.ndim
    shape[axis] = x.shape[axis]
    is_first: Tensor = torch.arange(x.shape[axis]).reshape(shape) == torch.argmax(x, axis, keepdim=True)
    return is_first.to(x.dtype)


@converts("CumSum", "CumProd", static=(1,))
def _cumulative(call: Call, x: Tensor, axis: Any) -> Tensor:
    axis = number(axis) % x.ndim
    backwards = call.attr("reverse", 0)
    x = torch.flip(x, (axis,)) if backwards else x
    if call.attr("exclusive", 0):
        first = torch.full_like(x.narrow(axis, 0, 1), 0 if call.op == "CumSum" else 1)
        x = torch.cat((first, x.narrow(axis, 0, x.shape[axis] - 1)), axis)
    accumulate: Callable[..., Tensor] = torch.cumsum if call.op == "CumSum" else torch.cumprod
    total = accumulate(x, axis, dtype=x.dtype)
    return torch.flip(total, (axis,)) if backwards else total


@converts("TopK", static=(1,))
def _top_k(call: Call, x: Tensor, k: Any) -> tuple[Tensor, ...]:
    axis, largest = call.attr("axis", -1), bool(call.attr("largest", 1))
    count = number(k)
    if count > x.shape[axis]:
        raise Refusal(f"takes {count} of {x.shape[axis]} elements")
    values, indices = torch.sort(x, dim=axis, descending=largest, stable=True)
    return values.narrow(axis, 0, count), indices.narrow(axis, 0, count)


@converts("Det")
def _det(call: Call, x: Tensor) -> Tensor:
    determinant: Tensor = torch.linalg.det(x)
    return determinant
