"""Takes a masked softmax apart where element-wise calls compute its scores or its mask, for one kernel to do both.

Given:   m = gather(table, index);  y = masked_softmax(x, m)
Result:  m = gather(table, index);  t = m + scale · x;  y = softmax(t)

The generated softmax computes t and m as it reads them (`elementwise/around_rows.py`).
"""

from __future__ import annotations

from dataclasses import replace

from cuda_compiler.elementwise.picks import is_pick
from cuda_compiler.op_classify import is_elementwise
from npu_compiler.program.elementwise import elementwise_kernel_name
from npu_compiler.program.kernels import KernelCall
from npu_compiler.program.plan import BufferAllocation, ExecutionPlan
from npu_compiler.program.views import View, contiguous_strides

_LONGEST = 4096  # elements of a row that the generated softmax surely holds in registers


def open_softmaxes(plan: ExecutionPlan) -> ExecutionPlan:
    """The plan with masked softmaxes replaced by a sum and a softmax, where calls of their own make operands."""
    kept = {view.buffer for view in plan.output_views.values()}
    readers: dict[str, int] = {}
    for call in plan.calls:
        for name in {view.buffer for view in call.inputs}:
            readers[name] = readers.get(name, 0) + 1
    computed = {
        call.outputs[0].buffer
        for call in plan.calls
        if (is_elementwise(call) or is_pick(call)) and readers.get(call.outputs[0].buffer) == 1
    }
    calls: list[KernelCall] = []
    buffers = dict(plan.buffers)
    for call in plan.calls:
        is_masked = call.kernel == "masked_softmax_kernel" and call.outputs[0].shape[-1] <= _LONGEST
        if not is_masked or computed.isdisjoint({view.buffer for view in call.inputs} - kept):
            calls.append(call)
            continue
        x, mask = call.inputs
        name = f"{call.node}.logits{len(calls)}"
        buffers[name] = BufferAllocation(name, "arena", x.shape, "float32")
        logits = View(name, x.shape, contiguous_strides(x.shape), 0, "float32")
        calls += [
            _sum(call, mask, x, logits),
            replace(call, kernel="softmax_kernel", inputs=(logits,), params={"scale": 1.0}),
        ]
    return replace(plan, calls=calls, buffers=buffers)


def _sum(call: KernelCall, mask: View, x: View, logits: View) -> KernelCall:
    """The call of mask + scale · x."""
    kernel = elementwise_kernel_name("add", has_scalars=False, is_strided=not (mask.is_contiguous and x.is_contiguous))
    params = {"scalars": [None, None], "alpha": float(call.params["scale"])}
    return replace(call, kernel=kernel, inputs=(mask, x), outputs=(logits,), params=params, flops=2 * logits.numel)
