"""Fuses the weighted sum of what the experts of a row compute, and the residual that is added to it, into one kernel.

Given:   y = x * w, w the same along rows;  s = sum(y, over each k rows);  z = r + s
Result:  z = weighted_sum(x, w, r)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from npu_compiler.graph.dtypes import is_float
from npu_compiler.program.elementwise import elementwise_kernel
from npu_compiler.program.kernels import KernelCall, distinct_bytes
from npu_compiler.program.plan import ExecutionPlan
from npu_compiler.program.views import View

KERNEL = "weighted_sum"

_Readers = Mapping[str, Sequence[int]]


def join_weighted_sums(plan: ExecutionPlan) -> ExecutionPlan:
    """The plan with each weighted sum of rows as one call."""
    readers: dict[str, list[int]] = {view.buffer: [-1] for view in plan.output_views.values()}
    for index, call in enumerate(plan.calls):
        for name in {view.buffer for view in call.inputs}:
            readers.setdefault(name, []).append(index)
    calls: list[KernelCall | None] = list(plan.calls)
    for index in range(len(plan.calls)):
        if (found := _weighted_sum(plan.calls, index, readers)) is not None:
            places, joined = found
            for place in places:
                calls[place] = None
            calls[places[-1]] = joined
    return replace(plan, calls=[call for call in calls if call is not None])


def _weighted_sum(calls: Sequence[KernelCall], index: int, readers: _Readers) -> tuple[list[int], KernelCall] | None:
    """The indices of the calls of a weighted sum that begins at `index`, and the call that replaces them."""
    product = calls[index]
    if not _is_plain(product, "mul") or len(product.inputs) != 2 or (place := _only(product, readers)) is None:
        return None
    x, weights = sorted(product.inputs, key=lambda view: 0 in view.strides)
    total, out = calls[place], calls[place].outputs[0]
    if x.rank != 2 or x.strides[1] != 1 or weights.strides[1] != 0 or weights.numel in (0, 1):
        return None
    if total.kernel != "sum_kernel" or total.params["reduce_dims"] != 1 or not _is_rows(out, x.shape[1]):
        return None
    rows = out.numel // x.shape[1]
    choices = x.shape[0] // rows
    (read,) = total.inputs
    wanted = replace(read, shape=(rows, x.shape[1], choices), strides=(choices * x.shape[1], 1, x.shape[1]))
    if not is_float(x.dtype) or not is_float(out.dtype) or _steps(read) != _steps(wanted):
        return None
    places, inputs = [index, place], [x, _matrix(weights, rows, choices)]
    following = _only(total, readers)
    if following is not None and (residual := _residual(calls[following], out)) is not None:
        places.append(following)
        inputs.append(replace(residual, shape=(rows, x.shape[1]), strides=(x.shape[1], 1)))
        out = calls[following].outputs[0]
    written = {view.buffer for call in calls[index : places[-1]] for view in call.outputs}
    if any(view.buffer in written for view in inputs[:2]):
        return None
    out = replace(out, shape=(rows, x.shape[1]), strides=(x.shape[1], 1))
    moved = sum(distinct_bytes(view) for view in (*inputs, out))
    flops = sum(calls[each].flops for each in places)
    joined = KernelCall(KERNEL, "", tuple(inputs), (out,), {}, calls[places[-1]].node, flops, moved)
    return places, joined


def _only(call: KernelCall, readers: _Readers) -> int | None:
    """The index of the only call that reads a call's result; None if there are several, or it is an output."""
    places = readers.get(call.outputs[0].buffer, ())
    return places[0] if len(places) == 1 and places[0] >= 0 else None


def _residual(call: KernelCall, total: View) -> View | None:
    """The view that a call adds to the total, in the same order in memory; None if it does something else."""
    others = [view for view in call.inputs if view.buffer != total.buffer]
    if not _is_plain(call, "add") or len(call.inputs) != 2 or len(others) != 1 or call.params.get("alpha", 1) != 1:
        return None
    out = call.outputs[0]
    run = all(_is_rows(view, total.shape[-1]) and view.numel == total.numel for view in (*call.inputs, out))
    return others[0] if run and is_float(out.dtype) and is_float(others[0].dtype) else None


def _is_rows(view: View, width: int) -> bool:
    """Whether a view is whole rows of this width, one after the other."""
    return view.is_contiguous and view.rank > 0 and view.shape[-1] == width


def _steps(view: View) -> tuple[int, tuple[tuple[int, int], ...]]:
    sized = zip(view.shape, view.strides, strict=True)
    return view.offset, tuple((size, step) for size, step in sized if size > 1)


def _matrix(weights: View, rows: int, choices: int) -> View:
    step = weights.strides[0]
    return replace(weights, shape=(rows, choices), strides=(choices * step, step))


def _is_plain(call: KernelCall, name: str) -> bool:
    """Whether a call is an element-wise op of views alone."""
    decl = elementwise_kernel(call)
    plain = decl is not None and decl.op.name == name
    return plain and all(scalar is None for scalar in call.params["scalars"])
