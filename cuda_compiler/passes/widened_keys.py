"""Replaces float32 copies of 16-bit queries and keys, which attention reads, by the 16-bit ones themselves.

Given:   q32 = copy(q);  k32 = copy(k);  attention(q32, k32, v)
Result:  attention(q, k, v)

Products of 16-bit values are exact in float32, in which attention adds them up, so the scores are the same. GPT-J
widens its cache like that in every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from npu_compiler.graph.dtypes import HALF_DTYPES
from npu_compiler.program.elementwise import elementwise_kernel
from npu_compiler.program.kernels import KernelCall
from npu_compiler.program.plan import ExecutionPlan
from npu_compiler.program.views import View

_WIDENED = 2  # the first inputs of attention, queries and keys


def read_unwidened_keys(plan: ExecutionPlan) -> ExecutionPlan:
    """The plan in which attention reads 16-bit queries and keys where it read float32 copies of both."""
    calls = list(plan.calls)
    for index, call in enumerate(calls):
        if call.kernel == "attention_kernel":
            narrow = [_source(calls, index, view) for view in call.inputs[:_WIDENED]]
            sources = [view for view in narrow if view is not None]
            if len(sources) == _WIDENED and {view.dtype for view in sources} == {call.inputs[_WIDENED].dtype}:
                calls[index] = replace(call, inputs=(*sources, *call.inputs[_WIDENED:]))
    read = plan.count_readers()
    read.subtract(view.buffer for call in plan.calls for view in call.inputs)
    read.update(view.buffer for call in calls for view in call.inputs)
    unread = {view.buffer for call in plan.calls if _widens(call) for view in call.outputs if read[view.buffer] == 0}
    return replace(plan, calls=[call for call in calls if not unread.issuperset(view.buffer for view in call.outputs)])


def _source(calls: Sequence[KernelCall], index: int, view: View) -> View | None:
    """The 16-bit view that `view`, an input of the call at `index`, is a copy of; None if it is none or has changed."""
    makers = [at for at, call in enumerate(calls) if any(out.buffer == view.buffer for out in call.outputs)]
    if len(makers) != 1 or makers[0] >= index or not _widens(calls[makers[0]]):
        return None
    (source,), (copied,) = calls[makers[0]].inputs, calls[makers[0]].outputs
    changed = any(out.buffer == source.buffer for call in calls[makers[0] : index] for out in call.outputs)
    return source if not changed and _place(copied) == _place(view) else None


def _widens(call: KernelCall) -> bool:
    """Whether a call copies 16-bit values to float32."""
    kernel = elementwise_kernel(call)
    return (
        kernel is not None
        and kernel.op.name == "copy"
        and list(call.params["scalars"]) == [None]
        and call.inputs[0].dtype in HALF_DTYPES
        and call.outputs[0].dtype == "float32"
    )


def _place(view: View) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """The shape, strides and offset of a view; strides of dimensions of size 1 are 0."""
    strides = (stride if size > 1 else 0 for size, stride in zip(view.shape, view.strides, strict=True))
    return view.shape, tuple(strides), view.offset
