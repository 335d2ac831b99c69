"""Joins products of some rows with the RMSNorm before them and the gate behind them: one launch instead of three."""

from __future__ import annotations

from dataclasses import replace

from cuda_compiler.rules.gates import GATED, with_gate
from cuda_compiler.rules.linear_wgmma import MOST_NORMED_ROWS, suits_warpgroups, warpgroup_product
from cuda_compiler.rules.matmul import operands
from cuda_compiler.rules.streamed import streamed_product, suits_streaming
from cuda_compiler.specialization.sizes import vector_width
from cuda_compiler.specialization.specializer import Specializer
from npu_compiler.program.kernels import KERNELS, KernelCall
from npu_compiler.program.plan import ExecutionPlan
from npu_compiler.program.views import View

_NORM = "rmsnorm_kernel"
# Which products a kernel suits, and what makes its call; the best first.
_KERNELS = ((suits_warpgroups, warpgroup_product), (suits_streaming, streamed_product))


def join_products(plan: ExecutionPlan, make: Specializer) -> ExecutionPlan:
    """The plan with products of a few rows fused with their RMSNorm and gate, where one kernel can do all of it.

    Given:  y = rmsnorm(x);  h = matmul(y, w);  z = silu_mul(first half of h, second half)
    Result: z = streamed(x, the norm's gains, w), or the kernel of `rules/linear_wgmma` for more rows

    The intermediate results y and h must have no other readers.
    """
    readers = plan.count_readers()
    inner = {name for name, buffer in plan.buffers.items() if buffer.kind == "arena"}
    result: list[KernelCall] = []
    index = 0
    while index < len(plan.calls):
        call = plan.calls[index]
        index += 1
        inputs = operands(call) if call.kernel in GATED else {}
        x = inputs.get("x")
        kernel = next((each for each in _KERNELS if x is not None and each[0](make, call, inputs)), None)
        if x is None or kernel is None:
            result.append(call)
            continue
        suits, product = kernel
        gate = None
        if index < len(plan.calls) and call.outputs[0].buffer in inner:
            gate = with_gate(call, plan.calls[index], readers)
        if gate is not None and suits(make, gate, inputs):
            call = gate
            index += 1
        norm = result[-1] if result and x.buffer in inner and readers[x.buffer] == 1 else None
        if norm is not None and (not _is_norm(norm, x) or norm.inputs[0].buffer == call.outputs[0].buffer):
            norm = None
        joined = product(make, call, inputs, norm)
        if norm is not None:
            result.pop()
            joined = replace(joined, flops=joined.flops + norm.flops)
        result.append(joined)
    return replace(plan, calls=result)


def _is_norm(call: KernelCall, x: View) -> bool:
    """Whether a call is an RMSNorm that computes `x`, in a dtype in which the product's kernel can apply it.

    In float16, x times the gains might overflow before the row's scale makes it smaller.
    """
    if call.kernel != _NORM or call.outputs[0] != x or x.dtype != "bfloat16" or x.shape[0] > MOST_NORMED_ROWS:
        return False
    source, gain, _ = KERNELS[call.kernel].bind(call)
    return (
        source is not None
        and gain is not None
        and source.dtype == gain.dtype == x.dtype
        and call.params["weight_offset"] == 0
        and min(vector_width(source), vector_width(gain)) >= 8
    )
