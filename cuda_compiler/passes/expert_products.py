"""Fuses products by experts with the gate or the weighted sum behind them.

Given:   h = expert_linear(x, w, e);  y = silu_mul(first half of h, second half)
Result:  y = gated_expert_matmul(x, w, e)

Given:   h = expert_linear(y, v, e);  z = weighted_sum(h, p, r)
Result:  z = expert_sum(y, v, e, p, r)

In a decode step each of these kernels would take longer to launch than to run.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from cuda_compiler.passes.weighted_sums import KERNEL as WEIGHTED_SUM
from cuda_compiler.rules.experts import suits_sum, suits_tiles
from cuda_compiler.rules.gates import GATED_EXPERTS, with_gate
from cuda_compiler.specialization.specializer import Specializer
from npu_compiler.program.kernels import KernelCall
from npu_compiler.program.plan import ExecutionPlan

_DENSE = "expert_matmul_kernel"


def join_expert_products(plan: ExecutionPlan, make: Specializer) -> ExecutionPlan:
    """The plan with products by experts as one call with the gate or the weighted sum that directly follows."""
    readers = plan.count_readers()
    result: list[KernelCall] = []
    for call in plan.calls:
        product = result[-1] if result else None
        joined = None
        if product is not None and plan.buffers[product.outputs[0].buffer].kind == "arena":
            joined = _with_gate(product, call, readers, make) or _with_sum(result, call, readers, make)
        if joined is None:
            result.append(call)
        else:
            result[-1] = joined
    return replace(plan, calls=result)


def _with_gate(product: KernelCall, call: KernelCall, readers: Counter[str], make: Specializer) -> KernelCall | None:
    gated = with_gate(product, call, readers, GATED_EXPERTS) if product.kernel in GATED_EXPERTS else None
    return gated if gated is not None and suits_tiles(make, gated) else None


def _with_sum(
    before: list[KernelCall], call: KernelCall, readers: Counter[str], make: Specializer
) -> KernelCall | None:
    """The call that computes the last of the calls `before` and its weighted sum; None if `call` is no such sum."""
    product = before[-1]
    if product.kernel != _DENSE or call.kernel != WEIGHTED_SUM or call.inputs[0] != product.outputs[0]:
        return None
    x, weight, experts, *bias = product.inputs
    _, weights, *residual = call.inputs
    if readers[product.outputs[0].buffer] != 1 or not suits_sum(make, product, weights.shape[1]):
        return None
    # Where the product before reads the same choice, the kernel that makes the choice has ended when this one starts.
    others = (*GATED_EXPERTS, *GATED_EXPERTS.values())
    reads_choice = len(before) > 1 and before[-2].kernel in others and experts in before[-2].inputs
    ahead = reads_choice and make.never_written(weight)
    params = {**product.params, "has_residual": len(residual), "ahead": ahead}
    inputs = (x, weight, experts, weights, *bias, *residual)
    moved = product.bytes_moved + call.bytes_moved
    return replace(
        call, kernel="expert_sum", inputs=inputs, params=params, flops=product.flops + call.flops, bytes_moved=moved
    )
