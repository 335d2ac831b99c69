"""Kernels that move elements: strided copies, embedding rows and indexed writes."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from npu_compiler.program.views import collapse
from npu_runtime.cpu.native.bindings import NativeLaunch, available, launch

_MAX_DIMS = 8
_INDEX_DTYPES = (torch.int32, torch.int64)


class _CopyArgs(ctypes.Structure):
    _fields_ = [
        ("source", ctypes.c_void_p),
        ("target", ctypes.c_void_p),
        ("item_size", ctypes.c_int64),
        ("size", ctypes.c_int64 * _MAX_DIMS),
        ("source_stride", ctypes.c_int64 * _MAX_DIMS),
        ("target_stride", ctypes.c_int64 * _MAX_DIMS),
    ]


class _IndexedArgs(ctypes.Structure):
    _fields_ = [
        ("rows", ctypes.c_void_p),
        ("indexed", ctypes.c_void_p),
        ("index", ctypes.c_void_p),
        ("index_size", ctypes.c_int64),
        ("writes", ctypes.c_int64),
        ("limit", ctypes.c_int64),
        ("bytes", ctypes.c_int64),
        ("size", ctypes.c_int64 * 3),
        ("row_stride", ctypes.c_int64 * 3),
        ("indexed_stride", ctypes.c_int64 * 3),
    ]


class _IndexedPairArgs(ctypes.Structure):
    _fields_ = [("first", _IndexedArgs), ("second", _IndexedArgs)]


def copy(source: torch.Tensor, target: torch.Tensor) -> NativeLaunch | None:
    """target = source, broadcast to its shape: same dtype, any strides, no overlap."""
    item_size = source.element_size()
    if not available() or source.dtype != target.dtype or item_size not in (1, 2, 4, 8) or target.numel() == 0:
        return None
    try:
        source_view = source.expand(target.shape)
    except RuntimeError:
        return None
    # Walk memory in the target's order; of the other dimensions the source's fastest goes next to the last.
    dims = sorted(range(target.dim()), key=target.stride, reverse=True)
    size, (from_stride, to_stride) = collapse(
        [target.shape[d] for d in dims],
        [source_view.stride(d) for d in dims],
        [target.stride(d) for d in dims],
    )
    if len(size) > _MAX_DIMS:
        return None
    others = sorted(range(len(size) - 1), key=lambda d: from_stride[d], reverse=True)
    order = [*others, len(size) - 1] if size and from_stride[-1] != 1 else list(range(len(size)))
    missing = _MAX_DIMS - len(size)
    args = _CopyArgs(
        source.data_ptr(),
        target.data_ptr(),
        item_size,
        (1,) * missing + tuple(size[d] for d in order),
        (item_size,) * missing + tuple(from_stride[d] * item_size for d in order),
        (item_size,) * missing + tuple(to_stride[d] * item_size for d in order),
    )
    return launch("copy", args, source, target)


def embedding(ids: torch.Tensor, table: torch.Tensor, out: torch.Tensor) -> NativeLaunch | None:
    """out[..., :] = table[ids[...], :] for int32 or int64 ids; an id out of range gives zeros."""
    if table.dim() != 2 or table.stride(1) != 1 or not (ids.is_contiguous() and out.is_contiguous()):
        return None
    if out.shape != (*ids.shape, table.shape[1]) or out.dtype != table.dtype:
        return None
    width = table.shape[1]
    args = _indexed(
        ids, table, out, False, table.shape[0], width, [1, 1, ids.numel()], [0, 0, width], [0, 0, table.stride(0)]
    )
    return None if args is None else launch("copy_indexed", args, ids, table, out)


def index_copy(target: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor) -> NativeLaunch | None:
    """target.index_copy_(dim, index, source) for an int32 or int64 index; entries out of range are left out.

    The dimensions behind `dim` must be contiguous in both tensors.
    """
    args = _index_copy_args(target, dim, index, source)
    return None if args is None else launch("copy_indexed", args, index, target, source)


def index_copy_pair(
    targets: Sequence[torch.Tensor], dim: int, index: torch.Tensor, sources: Sequence[torch.Tensor]
) -> NativeLaunch | None:
    """`index_copy` of two sources into two targets, at the same places."""
    first, second = (_index_copy_args(t, dim, index, s) for t, s in zip(targets, sources, strict=True))
    if first is None or second is None:
        return None
    return launch("copy_indexed_pair", _IndexedPairArgs(first, second), index, *targets, *sources)


def _index_copy_args(target: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor) -> _IndexedArgs | None:
    if target.dim() == 0 or source.dim() != target.dim() or source.dtype != target.dtype or index.dim() > 1:
        return None
    dim %= target.dim()
    count = index.numel()
    if source.shape != (*target.shape[:dim], count, *target.shape[dim + 1 :]) or not index.is_contiguous():
        return None
    inner, strides = collapse(target.shape[dim + 1 :], target.stride()[dim + 1 :], source.stride()[dim + 1 :])
    if len(inner) > 1 or any(stride and stride[-1] != 1 for stride in strides):
        return None
    outer, (to_stride, from_stride) = collapse(target.shape[:dim], target.stride()[:dim], source.stride()[:dim])
    missing = 2 - len(outer)
    if missing < 0:
        return None
    padding = [0] * missing
    return _indexed(
        index,
        target,
        source,
        True,
        target.shape[dim],
        inner[0] if inner else 1,
        [1] * missing + [*outer, count],
        padding + [*from_stride, source.stride(dim)],
        padding + [*to_stride, target.stride(dim)],
    )


def _indexed(
    index: torch.Tensor,
    indexed: torch.Tensor,
    rows: torch.Tensor,
    writes: bool,
    limit: int,
    width: int,
    size: list[int],
    row_stride: list[int],
    indexed_stride: list[int],
) -> _IndexedArgs | None:
    if not available() or index.dtype not in _INDEX_DTYPES or rows.numel() == 0:
        return None
    item_size = rows.element_size()
    return _IndexedArgs(
        rows.data_ptr(),
        indexed.data_ptr(),
        index.data_ptr(),
        index.element_size(),
        writes,
        limit,
        width * item_size,
        tuple(size),
        tuple(s * item_size for s in row_stride),
        tuple(s * item_size for s in indexed_stride),
    )
