"""Element-wise ops over float32, int32 and booleans: small calls between large ones."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence

import numpy as np

from npu_compiler.graph.dtypes import as_int32
from npu_compiler.program.elementwise import as_float32
from npu_runtime.cpu.native.bindings import NativeLaunch, available, launch
from npu_runtime.cpu.native.extents import ArgumentBlock, Extent, View
from npu_runtime.cpu.native.numbers import ELEMENTWISE
from npu_runtime.cpu.native.rows.pointwise import in_order_of

_BOOL, _INT32, _FLOAT32 = np.dtype(np.bool_), np.dtype(np.int32), np.dtype(np.float32)
_COMPARISONS = frozenset(("eq", "ne", "lt", "le", "gt", "ge"))
_SELECTING = frozenset(("copy", "eq", "ne", "where"))  # what booleans are for, too
_FLOATS_ONLY = frozenset(("cos", "sin", "true_divide"))
_MOST = dict.fromkeys(_FLOATS_ONLY, 2**14)  # elements; more are left to libraries that compute vectors of them


class _ElementwiseArgs(ArgumentBlock):
    _fields_ = [("condition", View), ("a", View), ("b", View), ("out", View), ("op", ctypes.c_int64)]

    def extents(self, kernel: str) -> Iterator[Extent]:
        for name in ("condition", "a", "b", "out"):
            yield getattr(self, name).extent(name, self.out.size)


def elementwise(op: str, operands: Sequence[np.ndarray | float], out: np.ndarray) -> NativeLaunch | None:
    """Prepare out = op(operands…) with broadcasting, for the ops of `ELEMENTWISE`; None without a kernel for them.

    Args:
        operands: Arrays and numbers in the op's order. Except for the condition of `where`, arrays have one dtype:
            float32, int32 or, for some ops, bool.
    """
    selects = op == "where"
    condition, a, b = [*([] if selects else [None]), *operands, None][:3]
    arrays = [x for x in (a, b) if isinstance(x, np.ndarray)]
    if not available() or not arrays or out.size == 0 or out.size > _MOST.get(op, out.size):
        return None
    dtype = arrays[0].dtype
    if any(x.dtype != dtype for x in arrays) or not _takes(op, dtype, out.dtype):
        return None
    if selects and not (isinstance(condition, np.ndarray) and condition.dtype == _BOOL):
        return None
    present = {"condition": condition, "a": _as_array(a, dtype), "b": _as_array(b, dtype), "out": out}
    used = {name: x for name, x in present.items() if isinstance(x, np.ndarray)}
    if len(used) < len(operands) + 1:
        return None
    described = in_order_of(out, list(used.values()))
    if described is None:
        return None
    fields = dict(zip(used, described, strict=True))
    return launch("elementwise", _ElementwiseArgs(**fields, op=ELEMENTWISE[op]), *used.values())


def _takes(op: str, dtype: np.dtype, out: np.dtype) -> bool:
    """Whether the native kernel supports the op for operands and a result of these dtypes."""
    if op == "copy":
        return {dtype, out} <= {_BOOL, _INT32, _FLOAT32} and not (dtype == _FLOAT32 and out != _FLOAT32)
    refused = {_INT32: _FLOATS_ONLY, _BOOL: ELEMENTWISE.keys() - _SELECTING, _FLOAT32: ()}
    return dtype in refused and op not in refused[dtype] and out == (_BOOL if op in _COMPARISONS else dtype)


def _as_array(value: np.ndarray | float | None, dtype: np.dtype) -> np.ndarray | None:
    """An operand as an array; None if it is absent, or a number that would change the dtype of the op."""
    if value is None or isinstance(value, np.ndarray):
        return value
    if dtype == _FLOAT32:
        return np.array(as_float32(value), dtype)
    return np.array(as_int32(value), dtype) if dtype == _INT32 and not isinstance(value, float) else None
