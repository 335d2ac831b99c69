"""Computes reductions of images over a few elements by element-wise calls, which are fused with those before and after.

Given:   p: [16, 2, 64, 56, 56] = x * a;  s = sum(p, over the 2)
Result:  p0 = x[:, 0] * a[:, 0];  p1 = x[:, 1] * a[:, 1];  s = p0 + p1
         with p0 and p1 in float32, which no kernel writes

So a split attention reads its maps once, and writes nothing but their sum. Reductions of the innermost dimension, and
of no images, have a kernel of their own, which reads whole vectors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from npu_compiler.graph.dtypes import is_float
from npu_compiler.program.elementwise import ELEMENTWISE, elementwise_kernel, elementwise_kernel_name
from npu_compiler.program.kernels import KernelCall, distinct_bytes
from npu_compiler.program.plan import BufferAllocation, ExecutionPlan
from npu_compiler.program.views import View, contiguous_strides, numel

_MOST_TERMS = 8
_STEPS = {
    "sum_kernel": "add",
    "mean_kernel": "add",
    "prod_kernel": "mul",
    "max_kernel": "maximum",
    "min_kernel": "minimum",
}
_IMAGES = 4  # dimensions


def open_short_reductions(plan: ExecutionPlan) -> ExecutionPlan:
    """The plan with element-wise calls in place of reductions of few terms, and of the call that computes the terms."""
    readers = plan.count_readers()
    writers: dict[str, list[int]] = {}
    for index, call in enumerate(plan.calls):
        for view in call.outputs:
            writers.setdefault(view.buffer, []).append(index)
    calls: list[list[KernelCall]] = [[call] for call in plan.calls]
    opened = replace(plan, buffers=dict(plan.buffers))
    for index, call in enumerate(plan.calls):
        if not _is_short(call, plan):
            continue
        (x,), places = call.inputs, writers.get(call.inputs[0].buffer, [])
        calls[index] = _opened(call, None, [x], opened)
        if len(places) == 1 and readers[x.buffer] == 1 and plan.buffers[x.buffer].kind == "arena":
            (place,) = places
            source = plan.calls[place]
            if _may_move(source, plan.calls[place + 1 : index]) and (inputs := _in_order_of(x, source)) is not None:
                calls[place], calls[index] = [], _opened(call, source, inputs, opened)
    return replace(opened, calls=[call for each in calls for call in each])


def _is_short(call: KernelCall, plan: ExecutionPlan) -> bool:
    """Whether a call reduces few floats to each element of an image, and none that lie side by side."""
    if call.kernel not in _STEPS:
        return False
    (x,), (out,) = call.inputs, call.outputs
    kept = x.rank - call.params["reduce_dims"]
    count = numel(x.shape[kept:])
    steps = [stride for size, stride in zip(x.shape, x.strides, strict=True) if size > 1 and stride]
    reduced = [stride for size, stride in zip(x.shape[kept:], x.strides[kept:], strict=True) if size > 1]
    return (
        is_float(x.dtype)
        and is_float(out.dtype)
        and out.numel > 0
        and len(plan.buffers[out.buffer].alloc_shape) == _IMAGES
        and 1 < count <= _MOST_TERMS
        and all(stride > min(steps) for stride in reduced)
    )


def _parts(view: View, call: KernelCall) -> list[View]:
    """The view at each index of the dimensions that the reduction `call` reduces, which are the last ones."""
    kept = view.rank - call.params["reduce_dims"]
    parts = []
    for index in product(*map(range, view.shape[kept:])):
        offset = view.offset + sum(at * step for at, step in zip(index, view.strides[kept:], strict=True))
        parts.append(replace(view, shape=view.shape[:kept], strides=view.strides[:kept], offset=offset))
    return parts


def _may_move(source: KernelCall, between: Sequence[KernelCall]) -> bool:
    """Whether `source` is element-wise and may run after the calls `between`: none of them writes what it reads."""
    read = {view.buffer for view in source.inputs}
    written = {view.buffer for call in between for view in call.outputs}
    return elementwise_kernel(source) is not None and read.isdisjoint(written)


def _in_order_of(x: View, source: KernelCall) -> list[View] | None:
    """The inputs of `source` with their dimensions as in `x`, a view of all of its result; None if `x` is none."""
    (made,) = source.outputs
    own = {(size, step): dim for dim, (size, step) in enumerate(zip(made.shape, made.strides, strict=True)) if size > 1}
    wanted = [(size, step) for size, step in zip(x.shape, x.strides, strict=True) if size > 1]
    if sorted(own) != sorted(wanted) or made.offset != x.offset or made.numel != x.numel or 0 in made.strides:
        return None
    sizes = list(zip(x.shape, x.strides, strict=True))
    return [
        replace(view, shape=x.shape, strides=tuple(view.strides[own[each]] if each[0] > 1 else 0 for each in sizes))
        for view in source.inputs
    ]


def _opened(
    call: KernelCall, source: KernelCall | None, inputs: Sequence[View], plan: ExecutionPlan
) -> list[KernelCall]:
    """The element-wise calls that compute a reduction of what `source` computes of `inputs`.

    Args:
        source: None where the only input is what is reduced.
        plan: The plan to which the buffers of the terms are added.
    """
    (out,), step = call.outputs, _STEPS[call.kernel]
    calls: list[KernelCall] = []

    def temporary() -> View:
        name = f"{out.buffer}.term{len(calls)}"
        plan.buffers[name] = BufferAllocation(name, "arena", out.shape, "float32")
        return View(name, out.shape, contiguous_strides(out.shape), 0, "float32")

    def compute(op: str, operands: Sequence[View], params: Mapping[str, Any], target: View) -> View:
        has_scalars = any(scalar is not None for scalar in params["scalars"])
        views = (*operands, target)
        kernel = elementwise_kernel_name(
            op, has_scalars=has_scalars, is_strided=not all(x.is_contiguous for x in views)
        )
        moved = sum(map(distinct_bytes, views))
        calls.append(KernelCall(kernel, "", tuple(operands), (target,), params, call.node, target.numel, moved))
        return target

    values: list[View] = []
    for parts in zip(*(_parts(view, call) for view in inputs), strict=True):
        if source is None:
            values += parts
        else:
            decl = elementwise_kernel(source)
            assert decl is not None
            values.append(compute(decl.op.name, parts, source.params, temporary()))
    total, *others = values
    for number, value in enumerate(others, start=2):
        is_last = number == len(values) and call.kernel != "mean_kernel"
        params = {"scalars": [None, None], **ELEMENTWISE[step].attrs}
        total = compute(step, [total, value], params, out if is_last else temporary())
    if call.kernel == "mean_kernel":
        compute("true_divide", [total], {"scalars": [None, len(values)]}, out)
    return calls
