"""Kernels that fill, rearrange and select elements, in NumPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from npu_runtime.cpu.arrays import BFLOAT16
from npu_runtime.cpu.bound_call import Params
from npu_runtime.cpu.kernels.registry import Arrays, cpu_kernel, in_range, is_float, to_float

# How `scatter_kernel` joins elements, and what it begins with.
_JOINS: dict[str, tuple[np.ufunc, Callable[[np.dtype], Any]]] = {
    "sum": (np.add, lambda dtype: 0),
    "mean": (np.add, lambda dtype: 0),
    "prod": (np.multiply, lambda dtype: 1),
    "amax": (np.maximum, lambda dtype: -np.inf if is_float(dtype) else np.iinfo(dtype).min),
    "amin": (np.minimum, lambda dtype: np.inf if is_float(dtype) else np.iinfo(dtype).max),
}
_PADDING = {"reflect": "reflect", "replicate": "edge", "circular": "wrap"}


def _fill(out: np.ndarray, value: float) -> None:
    if out.dtype == BFLOAT16:  # of which NumPy converts a value for each element
        out.view(np.uint16)[...] = np.asarray(value, BFLOAT16).view(np.uint16)
    else:
        out[...] = value


@cpu_kernel("fill_kernel")
def fill(inputs: Arrays, outputs: Arrays, params: Params) -> None:
    _fill(outputs[0], params["value"])


@cpu_kernel("arange_kernel")
def arange(inputs: Arrays, outputs: Arrays, params: Params) -> None:
    """out[i] = start + i · step."""
    out = outputs[0]
    steps = np.arange(out.size, dtype=np.float64 if is_float(out.dtype) else np.int64)
    out[...] = params["start"] + steps * params["step"]


@cpu_kernel("pad_kernel")
def pad(inputs: Arrays, outputs: Arrays, params: Params) -> None:
    """Pad the trailing dimensions; `pads` lists (before, after) from the last dimension on."""
    x, out, pads = inputs[0], outputs[0], params["pads"]
    grown = list(zip(pads[::2], pads[1::2], strict=True))[: x.ndim]
    pairs = [(0, 0)] * (x.ndim - len(grown)) + grown[::-1]
    if params["mode"] == "constant":
        _fill(out, params["value"])
        out[tuple(slice(before, before + size) for size, (before, _) in zip(x.shape, pairs, strict=True))] = x
    else:
        out[...] = np.pad(x, pairs, _PADDING[params["mode"]])  # type: ignore[call-overload]


@cpu_kernel("triangle_kernel")
def triangle(inputs: Arrays, outputs: Arrays, params: Params) -> None:
    x, out, diagonal = inputs[0], outputs[0], params["diagonal"]
    rows, columns = x.shape[-2:]
    below = np.tri(rows, columns, diagonal - params["upper"], dtype=bool)  # the triangle, or all that is not in it
    out[...] = 0
    np.copyto(out, x, where=~below if params["upper"] else below)


@cpu_kernel("flip_kernel")
def flip(inputs: Arrays, outputs: Arrays, params: Params) -> None:
    outputs[0][...] = np.flip(inputs[0], tuple(dim for dim, flag in enumerate(params["dims"]) if flag))


@cpu_kernel("embedding_kernel")
def embedding(inputs: Arrays, outputs: Arrays, params: Params) -> None:
    table, ids = inputs
    outputs[0][...] = table[in_range(ids, len(table))]


@cpu_kernel("index_select_kernel")
def index_select(inputs: Arrays, outputs: Arrays, params: Params) -> None:
    source, index = inputs
    # Of an index within range, "clip" changes nothing, and spares a copy of the result.
    source.take(in_range(index, source.shape[params["dim"]]), params["dim"], outputs[0], mode="clip")


@cpu_kernel("gather_kernel")
def gather(inputs: Arrays, outputs: Arrays, params: Params) -> None:
    """out = source at `index` along `dim`; along other dimensions the index may be shorter than the source."""
    source, index = inputs
    dim = params["dim"]
    in_range(index, source.shape[dim])
    front = tuple(slice(None) if d == dim else slice(size) for d, size in enumerate(index.shape))
    outputs[0][...] = np.take_along_axis(source[front], index, dim)


@cpu_kernel("index_kernel")
def index(inputs: Arrays, outputs: Arrays, params: Params) -> None:
    """NumPy's advanced indexing on adjacent dimensions from `first` on; negative indices count from the back."""
    source, *indices = inputs
    outputs[0][...] = source[(slice(None),) * params["first"] + tuple(indices)]


@cpu_kernel("index_copy_kernel", "index_copy_pair_kernel")
def index_copy(inputs: Arrays, outputs: Arrays, params: Params) -> None:
    """out[…, index[i], …] = source[…, i, …], in place, for each pair of source and out."""
    positions, *sources = inputs
    for source, out in zip(sources, outputs, strict=True):
        rows = in_range(positions.reshape(-1), out.shape[params["dim"]])
        out[(slice(None),) * params["dim"] + (rows,)] = source


@cpu_kernel("scatter_kernel")
def scatter(inputs: Arrays, outputs: Arrays, params: Params) -> None:
    """out = base, with each element of `source` stored at its index within a row, or reduced with the element there."""
    base, index, source = inputs
    mode, joins = params["reduce"], params["include_self"]
    places: tuple[np.ndarray, ...] = (*np.indices(index.shape, sparse=True)[:-1], in_range(index, base.shape[-1]))
    value, old = to_float(source), to_float(base)
    if mode == "last":
        out = old.copy()
        for k in range(index.shape[-1]):
            out[tuple(x[..., 0] for x in places[:-1]) + (index[..., k],)] = value[..., k]
        outputs[0][...] = out
        return
    count = np.zeros(base.shape, np.int32)
    np.add.at(count, places, 1)
    join, identity = _JOINS[mode]
    start = identity(old.dtype)
    out = np.where((count == 0) | joins, old, start).astype(np.result_type(old, value))
    with np.errstate(all="ignore"):
        join.at(out, places, value)
        if mode == "mean":
            out = out / np.maximum(count + (1 if joins else 0), 1)
    outputs[0][...] = out


@cpu_kernel("argsort_kernel")
def argsort(inputs: Arrays, outputs: Arrays, params: Params) -> None:
    """Positions of each row's elements in sorted order; equal elements keep their order."""
    x = to_float(inputs[0])
    if params[
        "descending"
    ]:  # read from behind, an ascending order is a descending one in which equal ones are reversed
        outputs[0][...] = x.shape[-1] - 1 - x[..., ::-1].argsort(-1, kind="stable")[..., ::-1]
    else:
        outputs[0][...] = x.argsort(-1, kind="stable")
