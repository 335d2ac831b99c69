"""Joins products of some rows with the RMSNorm before them and the gate behind them: one launch instead of three."""

from __future__ import annotations

from dataclasses import replace

from cuda_compiler.rules.matmul import operands
from cuda_compiler.rules.streamed import GATED, streamed_product, suits_streaming
from cuda_compiler.specialization.sizes import vector_width
from cuda_compiler.specialization.specializer import Specializer
from npu_compiler.program.elementwise import GATES, elementwise_kernel
from npu_compiler.program.kernels import KERNELS, KernelCall
from npu_compiler.program.plan import ExecutionPlan
from npu_compiler.program.views import View

_NORM = "rmsnorm_kernel"


def join_products(plan: ExecutionPlan, make: Specializer) -> list[KernelCall]:
    """The plan's calls, with each product that suits the streaming kernel and its neighbours as one.

    Given:  y = rmsnorm(x);  h = matmul(y, w);  z = silu_mul(first half of h, second half)
    Result: z = streamed(x, the norm's gains, w)

    Nothing else may read what lies between.
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
        if x is None or not suits_streaming(make, call, inputs):
            result.append(call)
            continue
        out, gate = call.outputs[0].buffer, None
        if index < len(plan.calls) and out in inner and readers[out] == 2 and inputs["residual"] is None:
            gate = _gate(call, plan.calls[index])
        if gate is not None and suits_streaming(make, gate, inputs):
            call = gate
            index += 1
        norm = result[-1] if result and x.buffer in inner and readers[x.buffer] == 1 else None
        if norm is not None and (not _is_norm(norm, x) or norm.inputs[0].buffer == call.outputs[0].buffer):
            norm = None
        made = streamed_product(make, call, inputs, norm)
        if norm is not None:
            result.pop()
            made = replace(made, flops=made.flops + norm.flops)
        result.append(made)
    return result


def _is_norm(call: KernelCall, x: View) -> bool:
    """Whether a call is an RMSNorm that makes `x`, and one that a product can take along.

    In float16, x times the gains might overflow before the row's scale makes it smaller.
    """
    if call.kernel != _NORM or call.outputs[0] != x or x.dtype != "bfloat16":
        return False
    source, gain, _ = KERNELS[call.kernel].bind(call)
    return (
        source is not None
        and gain is not None
        and source.dtype == gain.dtype == x.dtype
        and call.params["weight_offset"] == 0
        and min(vector_width(source), vector_width(gain)) >= 8
    )


def _gate(product: KernelCall, call: KernelCall) -> KernelCall | None:
    """The product with its gate as one call, where `call` multiplies the activated first half with the second one."""
    decl, out = elementwise_kernel(call), product.outputs[0]
    activation = GATES.get(decl.op.name) if decl is not None else None
    if activation is None or product.params["activation"] != "none" or len(call.inputs) != 2 or out.shape[1] % 2:
        return None
    half = out.shape[1] // 2
    halves = [out.slice(1, first, first + half) for first in (0, half)]
    shape = halves[0].shape
    if [view.reshape(shape) if view.numel == halves[0].numel else None for view in call.inputs] != halves:
        return None
    made = call.outputs[0].reshape(shape) if call.outputs[0].numel == halves[0].numel else None
    if made is None or made.dtype != out.dtype or made.buffer == product.inputs[0].buffer:
        return None
    params = {**product.params, "n": half, "activation": activation}
    kernel = GATED[product.kernel]
    return replace(call, kernel=kernel, inputs=product.inputs, outputs=(made,), params=params, flops=product.flops)
