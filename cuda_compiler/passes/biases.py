"""Rounds constant biases to the dtype of their products, since cuBLASLt adds no others.

Given:   y: float16 = matmul(x, w) + b: float32
Result:  c: float16 = copy(b), once;  y = matmul(x, w) + c
"""

from __future__ import annotations

from dataclasses import replace

from cuda_compiler.rules.matmul import VECTOR_ROWS
from npu_compiler.graph.dtypes import HALF_DTYPES
from npu_compiler.program.kernels import KERNELS, KernelCall
from npu_compiler.program.plan import BufferAllocation, ExecutionPlan
from npu_compiler.program.views import View, contiguous_strides

_PRODUCTS = ("matmul_kernel", "matmul_notrans_kernel")


def round_biases(plan: ExecutionPlan) -> ExecutionPlan:
    """The plan with constant float32 biases of 16-bit products of many rows as copies in 16 bits."""
    prologue, buffers, rounded = list(plan.prologue), dict(plan.buffers), dict[tuple[View, str], View]()
    calls = []
    for call in plan.calls:
        bias = _float_bias(call)
        if bias is None or not buffers[bias.buffer].is_constant:
            calls.append(call)
            continue
        key = (bias, call.outputs[0].dtype)
        if key not in rounded:
            name = f"{bias.buffer}.{key[1]}.{len(rounded)}"
            buffers[name] = BufferAllocation(name, "persistent", bias.shape, key[1])
            rounded[key] = View(name, bias.shape, contiguous_strides(bias.shape), 0, key[1])
            prologue.append(KernelCall("copy_kernel", "", (bias,), (rounded[key],), {"scalars": [None]}, call.node))
        calls.append(replace(call, inputs=tuple(rounded[key] if view == bias else view for view in call.inputs)))
    return replace(plan, prologue=prologue, calls=calls, buffers=buffers)


def _float_bias(call: KernelCall) -> View | None:
    """The float32 bias of a product of 16-bit operands with many rows; None if the call has none."""
    if call.kernel not in _PRODUCTS or call.params["m"] <= VECTOR_ROWS or not call.params["has_bias"]:
        return None
    bias = KERNELS[call.kernel].inputs_of(call)["bias"]
    dtypes = {call.inputs[0].dtype, call.inputs[1].dtype, call.outputs[0].dtype}
    is_wide = bias is not None and bias.dtype == "float32" and len(dtypes) == 1 and dtypes <= set(HALF_DTYPES)
    return bias if is_wide else None
