"""Kernels that move elements: strided copies, embedding rows, indexed reads and writes."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence

import numpy as np

from npu_compiler.program.views import collapse
from npu_runtime.cpu.arrays import address, expand, strides_of
from npu_runtime.cpu.native.bindings import NativeLaunch, available, launch
from npu_runtime.cpu.native.extents import ArgumentBlock, Extent, packed, prefixed, strided

_MAX_DIMS = 8
_INDEX_DTYPES = (np.int32, np.int64)


class _CopyArgs(ArgumentBlock):
    _fields_ = [
        ("source", ctypes.c_void_p),
        ("target", ctypes.c_void_p),
        ("item_size", ctypes.c_int64),
        ("size", ctypes.c_int64 * _MAX_DIMS),
        ("source_stride", ctypes.c_int64 * _MAX_DIMS),
        ("target_stride", ctypes.c_int64 * _MAX_DIMS),
    ]

    def extents(self, kernel: str) -> Iterator[Extent]:
        for name in ("source", "target"):
            yield _in_bytes(name, getattr(self, name), self.item_size, self.size, getattr(self, f"{name}_stride"))


class _IndexedArgs(ArgumentBlock):
    _fields_ = [
        ("rows", ctypes.c_void_p),
        ("indexed", ctypes.c_void_p),
        ("index", ctypes.c_void_p),
        ("index_size", ctypes.c_int64),
        ("writes", ctypes.c_int64),
        ("limit", ctypes.c_int64),
        ("checked", ctypes.c_int64),
        ("bytes", ctypes.c_int64),
        ("size", ctypes.c_int64 * 3),
        ("row_stride", ctypes.c_int64 * 3),
        ("indexed_stride", ctypes.c_int64 * 3),
    ]

    def extents(self, kernel: str) -> Iterator[Extent]:
        yield _in_bytes("rows", self.rows, self.bytes, self.size, self.row_stride)
        yield _in_bytes("indexed", self.indexed, self.bytes, (*self.size[:2], self.limit), self.indexed_stride)
        yield packed("index", self.index, self.size[2] * self.index_size)


class _GatherArgs(ArgumentBlock):
    _fields_ = [
        ("x", ctypes.c_void_p),
        ("index", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("item_size", ctypes.c_int64),
        ("index_size", ctypes.c_int64),
        ("limit", ctypes.c_int64),
        ("step", ctypes.c_int64),
        ("size", ctypes.c_int64 * 4),
        ("x_stride", ctypes.c_int64 * 4),
        ("index_stride", ctypes.c_int64 * 4),
        ("out_stride", ctypes.c_int64 * 4),
    ]

    def extents(self, kernel: str) -> Iterator[Extent]:
        yield _in_bytes("x", self.x, self.item_size, (*self.size, self.limit), (*self.x_stride, self.step))
        yield _in_bytes("index", self.index, self.index_size, self.size, self.index_stride)
        yield _in_bytes("out", self.out, self.item_size, self.size, self.out_stride)


def _in_bytes(operand: str, start: int | None, last: int, sizes: Sequence[int], strides: Sequence[int]) -> Extent:
    """The extent of runs of `last` consecutive bytes, with strides in bytes."""
    return strided(operand, start, 1, (*sizes, last), (*strides, 1))


class _IndexedPairArgs(ArgumentBlock):
    _fields_ = [("first", _IndexedArgs), ("second", _IndexedArgs)]

    def extents(self, kernel: str) -> Iterator[Extent]:
        for name in ("first", "second"):
            yield from prefixed(name, getattr(self, name).extents(kernel))


def copy(source: np.ndarray, target: np.ndarray) -> NativeLaunch | None:
    """Prepare target = source, broadcast to its shape; None without a native kernel for the operands.

    Both have one dtype and any strides, and do not overlap.
    """
    item_size = source.itemsize
    if not available() or source.dtype != target.dtype or item_size not in (1, 2, 4, 8) or target.size == 0:
        return None
    source_view = expand(source, target.shape)
    if source_view is None:
        return None
    # Walk memory in the target's order; of the other dimensions the source's fastest goes next to the last.
    source_strides, target_strides = strides_of(source_view), strides_of(target)
    dims = sorted(range(target.ndim), key=target_strides.__getitem__, reverse=True)
    size, (from_stride, to_stride) = collapse(
        [target.shape[d] for d in dims],
        [source_strides[d] for d in dims],
        [target_strides[d] for d in dims],
    )
    if len(size) > _MAX_DIMS:
        return None
    others = sorted(range(len(size) - 1), key=lambda d: from_stride[d], reverse=True)
    order = [*others, len(size) - 1] if size and from_stride[-1] != 1 else list(range(len(size)))
    missing = _MAX_DIMS - len(size)
    args = _CopyArgs(
        address(source),
        address(target),
        item_size,
        (1,) * missing + tuple(size[d] for d in order),
        (item_size,) * missing + tuple(from_stride[d] * item_size for d in order),
        (item_size,) * missing + tuple(to_stride[d] * item_size for d in order),
    )
    return launch("copy", args, source, target)


def embedding(ids: np.ndarray, table: np.ndarray, out: np.ndarray, checked: bool = True) -> NativeLaunch | None:
    """Prepare out[..., :] = table[ids[...], :] for int32 or int64 ids; None without a native kernel for them.

    Args:
        checked: Whether the ids have been checked, so that one out of range gives zeros; if not, it is a `DeviceError`.
    """
    if table.ndim != 2 or strides_of(table)[1] != 1 or not (ids.flags.c_contiguous and out.flags.c_contiguous):
        return None
    if out.shape != (*ids.shape, table.shape[1]) or out.dtype != table.dtype:
        return None
    width = table.shape[1]
    args = _indexed(
        ids,
        table,
        out,
        False,
        checked,
        table.shape[0],
        width,
        [1, 1, ids.size],
        [0, 0, width],
        [0, 0, strides_of(table)[0]],
    )
    return None if args is None else launch("copy_indexed", args, ids, table, out)


def index_copy(
    target: np.ndarray, dim: int, index: np.ndarray, source: np.ndarray, checked: bool = True
) -> NativeLaunch | None:
    """Prepare target.index_copy_(dim, index, source) for an int32 or int64 index; None without a native kernel.

    The last dimension must be contiguous in both arrays, or `dim` be the last.

    Args:
        checked: Whether the index has been checked, so that entries out of range are skipped; if not, they are a
            `DeviceError`.
    """
    args = _along(dim, index, target, source, True, checked)
    return None if args is None else launch("copy_indexed", args, index, target, source)


def index_copy_pair(
    targets: Sequence[np.ndarray], dim: int, index: np.ndarray, sources: Sequence[np.ndarray], checked: bool = True
) -> NativeLaunch | None:
    """Prepare `index_copy` of two sources into two targets with one index; None without a native kernel for both.

    Args:
        checked: As in `index_copy`.
    """
    first, second = (_along(dim, index, t, s, True, checked) for t, s in zip(targets, sources, strict=True))
    if first is None or second is None:
        return None
    return launch("copy_indexed_pair", _IndexedPairArgs(first, second), index, *targets, *sources)


def index_select(source: np.ndarray, dim: int, index: np.ndarray, out: np.ndarray) -> NativeLaunch | None:
    """Prepare out = source.index_select(dim, index) for an int32 or int64 index; None without a native kernel.

    An index out of range is a `DeviceError`. The last dimension must be contiguous in both arrays, or `dim` be the
    last.
    """
    args = _along(dim, index, source, out, False, False)
    return None if args is None else launch("copy_indexed", args, index, source, out)


def gather(x: np.ndarray, dim: int, index: np.ndarray, out: np.ndarray) -> NativeLaunch | None:
    """Prepare out = x.gather(dim, index) for an int32 or int64 index; None without a native kernel for the operands.

    An index out of range is a `DeviceError`.
    """
    if not available() or index.dtype not in _INDEX_DTYPES or x.dtype != out.dtype or out.size == 0:
        return None
    if x.ndim != index.ndim or out.shape != index.shape:
        return None
    dim %= x.ndim
    step = x.strides[dim]
    x_strides = [0 if d == dim else stride for d, stride in enumerate(x.strides)]
    size, strides = collapse(index.shape, x_strides, index.strides, out.strides)
    if len(size) > 4:
        return None
    lead = 4 - len(size)
    args = _GatherArgs(
        *map(address, (x, index, out)),
        x.itemsize,
        index.itemsize,
        x.shape[dim],
        step,
        (*[1] * lead, *size),
        *((*[0] * lead, *stride) for stride in strides),
    )
    return launch("gather", args, x, index, out)


def _along(
    dim: int, index: np.ndarray, indexed: np.ndarray, rows: np.ndarray, writes: bool, checked: bool
) -> _IndexedArgs | None:
    """The argument block for rows of `indexed` along a dimension, selected by `index`, and their copies in `rows`.

    None if the kernel does not handle the arrays.

    Args:
        writes: Whether the kernel copies from `rows` to `indexed`, rather than the other way.
        checked: Whether every index is known to be in range.
    """
    if indexed.ndim == 0 or rows.ndim != indexed.ndim or rows.dtype != indexed.dtype or index.ndim > 1:
        return None
    dim %= indexed.ndim
    count = index.size
    if rows.shape != (*indexed.shape[:dim], count, *indexed.shape[dim + 1 :]) or not index.flags.c_contiguous:
        return None
    indexed_strides, row_strides = strides_of(indexed), strides_of(rows)
    inner, strides = collapse(indexed.shape[dim + 1 :], indexed_strides[dim + 1 :], row_strides[dim + 1 :])
    if any(stride and stride[-1] != 1 for stride in strides):
        return None
    outer, (indexed_stride, row_stride) = collapse(indexed.shape[:dim], indexed_strides[:dim], row_strides[:dim])
    # Of the dimensions behind `dim` the last is copied whole, the others are walked like those before it.
    outer = [*outer, *inner[:-1]]
    indexed_stride, row_stride = (
        [*first, *rest[:-1]] for first, rest in zip((indexed_stride, row_stride), strides, strict=True)
    )
    missing = 2 - len(outer)
    if missing < 0:
        return None
    padding = [0] * missing
    return _indexed(
        index,
        indexed,
        rows,
        writes,
        checked,
        indexed.shape[dim],
        inner[-1] if inner else 1,
        [1] * missing + [*outer, count],
        padding + [*row_stride, row_strides[dim]],
        padding + [*indexed_stride, indexed_strides[dim]],
    )


def _indexed(
    index: np.ndarray,
    indexed: np.ndarray,
    rows: np.ndarray,
    writes: bool,
    checked: bool,
    limit: int,
    width: int,
    size: list[int],
    row_stride: list[int],
    indexed_stride: list[int],
) -> _IndexedArgs | None:
    if not available() or index.dtype not in _INDEX_DTYPES or rows.size == 0:
        return None
    item_size = rows.itemsize
    return _IndexedArgs(
        address(rows),
        address(indexed),
        address(index),
        index.itemsize,
        writes,
        limit,
        checked,
        width * item_size,
        tuple(size),
        tuple(s * item_size for s in row_stride),
        tuple(s * item_size for s in indexed_stride),
    )
