"""Calls that pick elements by index tensors, as loads that an element-wise kernel does where it reads their results.

Given:  g = index(x, [rows[:, None], columns]);  y = g * w
Result: y = x[…, rows[i], columns[j]] * w[…]
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from npu_compiler.program.kernels import KERNELS, KernelCall
from npu_compiler.program.views import Shape, View


@dataclass(frozen=True)
class PickedDim:
    """A dimension of a table whose coordinate an index tensor gives.

    Attributes:
        operand: The index tensor, as the call reads it.
        walk: The same, walked in the order of the result.
        step, size: The table's stride and size along the dimension.
        wraps: Whether negative indices count from the end.
    """

    operand: View
    walk: View
    step: int
    size: int
    wraps: bool


@dataclass(frozen=True)
class Pick:
    """Elements that a call picks from a table, in the order of its result in memory.

    Element e of the result is element e of `walk`, plus the picked coordinates times their steps. Where one of them is
    out of range, the element is NaN, or 0 for integers.

    Attributes:
        table: The table, as the call reads it.
        walk: The table walked in the order of the result, at coordinate 0 of all picked dimensions.
        dims: The picked dimensions.
        checked: Whether all indices are known to be in range.
        out: The result.
    """

    table: View
    walk: View
    dims: tuple[PickedDim, ...]
    checked: bool
    out: View


def is_pick(call: KernelCall) -> bool:
    """Whether a call picks elements by index tensors, so that its reader may do so itself."""
    return call.kernel in _READERS


def pick_of(call: KernelCall) -> Pick:
    """The elements that a call picks; `is_pick` must hold for the call."""
    return _in_memory_order(_READERS[call.kernel](call))


def _gather(call: KernelCall) -> Pick:
    x, index = call.inputs
    return _along_one(call, x, index, index, call.params["dim"])


def _index_select(call: KernelCall) -> Pick:
    x, index = call.inputs
    out, dim = call.outputs[0], call.params["dim"]
    strides = tuple(index.strides[0] if at == dim else 0 for at in range(out.rank))
    return _along_one(call, x, index, _walked(index, out.shape, strides), dim)


def _along_one(call: KernelCall, x: View, index: View, walk: View, dim: int) -> Pick:
    out = call.outputs[0]
    strides = tuple(0 if at == dim else stride for at, stride in enumerate(x.strides))
    picked = PickedDim(index, walk, x.strides[dim], x.shape[dim], wraps=False)
    return Pick(x, _walked(x, out.shape, strides), (picked,), checked=False, out=out)


def _embedding(call: KernelCall) -> Pick:
    table, ids = call.inputs
    out = call.outputs[0]
    walk = _walked(table, out.shape, (*(0 for _ in ids.shape), table.strides[1]))
    picked = PickedDim(ids, _walked(ids, out.shape, (*ids.strides, 0)), table.strides[0], table.shape[0], wraps=False)
    return Pick(table, walk, (picked,), bool(call.params["checked"]), out)


def _index(call: KernelCall) -> Pick:
    x, *rest = KERNELS[call.kernel].bind(call)
    indices = [view for view in rest[:-1] if view is not None]
    out, first = call.outputs[0], call.params["first"]
    behind = first + len(indices)
    assert x is not None
    before, after = (0,) * first, (0,) * (x.rank - behind)
    strides = (*x.strides[:first], *(0 for _ in indices[0].shape), *x.strides[behind:])
    dims = tuple(
        PickedDim(
            index,
            _walked(index, out.shape, (*before, *index.strides, *after)),
            x.strides[dim],
            x.shape[dim],
            wraps=True,
        )
        for dim, index in enumerate(indices, first)
    )
    return Pick(x, _walked(x, out.shape, strides), dims, checked=False, out=out)


def _walked(view: View, shape: Shape, strides: Shape) -> View:
    return replace(view, shape=shape, strides=strides)


def _in_memory_order(pick: Pick) -> Pick:
    """A pick with the dimensions of its result from the largest stride to the smallest."""
    order = pick.out.order_in_memory
    dims = tuple(replace(each, walk=each.walk.permute(order)) for each in pick.dims)
    return replace(pick, walk=pick.walk.permute(order), dims=dims, out=pick.out.permute(order))


_READERS: dict[str, Callable[[KernelCall], Pick]] = {
    "gather_kernel": _gather,
    "index_select_kernel": _index_select,
    "index_kernel": _index,
    "embedding_kernel": _embedding,
}
