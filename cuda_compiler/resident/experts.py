"""A layer's experts as three phases: their ratings, a product with a gate, and the weighted sum of second products.

The experts of one row are chosen by the ratings (`passes/routing.py`). Each block chooses for itself, while its
fetching warp waits for the numbers of the experts, whose matrices the two products behind it then stream.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from cuda_compiler.passes.routing import KERNEL as ROUTE
from cuda_compiler.passes.weighted_sums import KERNEL as WEIGHTED_SUM
from cuda_compiler.resident.layout import LINE_BYTES, SLOT_BYTES, UNIT_ROWS
from cuda_compiler.resident.phases import Phase, Stream
from cuda_compiler.resident.products import PRODUCTS, InputNorms, most_rows, own_rows, product_phase, stream_phase
from cuda_compiler.resident.quantized_products import ExpertMatrices, quantized_product_phase
from cuda_compiler.rules.gates import GATED_EXPERTS, with_gate
from cuda_compiler.specialization.sizes import groups
from npu_compiler.graph.dtypes import itemsize
from npu_compiler.program.kernels import KERNELS, KernelCall
from npu_compiler.program.plan import ExecutionPlan
from npu_compiler.program.views import View

EXPERT_CALLS = 7
_DENSE, _QUANTIZED = "expert_matmul_kernel", "quantized_expert_matmul_kernel"


def match_experts(plan: ExecutionPlan, index: int, readers: Counter[str]) -> list[Phase] | None:
    """The phases of the `EXPERT_CALLS` calls from `index` on, if they are a layer's experts for one row.

    Given:  rmsnorm(s) -> x; linear(x, r) -> a; route(a) -> e, p; expert_linear(x, w, e) -> h;
            silu_mul(halves of h) -> y; expert_linear(y, v, e) -> z; weighted_sum(z, p, s) -> out
    Result: linear(rmsnorm(s), r) -> a;  p · gated(rmsnorm(s), w of the experts that a chooses) -> y;
            linear(y, v of these experts, side by side) + s -> out

    The factors p are applied to y, which is shorter than z, and to the biases of z.

    Args:
        readers: Buffer → how many operands of calls and program outputs read it.
    """
    calls = plan.calls[index : index + EXPERT_CALLS]
    if len(calls) < EXPERT_CALLS:
        return None
    norm, rating, route, first, gate, second, total = calls
    if [norm.kernel, route.kernel, total.kernel] != ["rmsnorm_kernel", ROUTE, WEIGHTED_SUM]:
        return None
    if first.kernel not in (_DENSE, _QUANTIZED) or second.kernel != first.kernel or rating.kernel not in PRODUCTS:
        return None
    gated = with_gate(first, gate, readers, GATED_EXPERTS, paired=True)
    if gated is None or not _are_connected(plan, (norm, rating, route, gated, second, total), readers):
        return None
    if not all(_has_matrices(plan, product) for product in (first, second)):
        return None
    phases = [product_phase(plan, rating, InputNorms(norm)), _gated_phase(plan, norm, route, first, gated)]
    phases.append(_sum_phase(plan, second, total))
    return [phase for phase in phases if phase is not None] if None not in phases else None


def _are_connected(plan: ExecutionPlan, calls: Sequence[KernelCall], readers: Counter[str]) -> bool:
    """Whether the calls read each other's results as `match_experts` says, and nothing else reads what they drop."""
    norm, rating, route, gated, second, total = calls
    x, (order, weights) = norm.outputs[0], route.outputs
    inner = {x: 2, rating.outputs[0]: 1, order: 2, weights: 1, gated.outputs[0]: 1, second.outputs[0]: 1}
    chosen = order.reshape((order.numel,))
    return (
        all(
            readers[view.buffer] == count and plan.buffers[view.buffer].kind == "arena" for view, count in inner.items()
        )
        and x.shape[0] == order.shape[0] == 1
        and rating.inputs[:1] == gated.inputs[:1] == (x,)
        and route.inputs == rating.outputs
        and chosen is not None
        and chosen in gated.inputs
        and chosen in second.inputs
        and second.inputs[0] == gated.outputs[0]
        and total.inputs[:2] == (second.outputs[0], weights)
    )


def _has_matrices(plan: ExecutionPlan, product: KernelCall) -> bool:
    """Whether the weight and the biases of a product by experts are constant and contiguous."""
    operands = {name: view for name, view in KERNELS[product.kernel].inputs_of(product).items() if view is not None}
    parts = [view for name, view in operands.items() if name not in ("x", "experts")]
    return all(plan.buffers[view.buffer].is_constant and view.is_contiguous for view in parts)


def _parts(product: KernelCall) -> tuple[tuple[View, ...], tuple[View, ...]]:
    """The weight of a product by experts, as the operand or the operands that it has, and its biases if it has any."""
    operands = KERNELS[product.kernel].inputs_of(product)
    weight = (view for name in ("weight", "data", "scales", "offset") if (view := operands.get(name)) is not None)
    bias = operands.get("bias")
    return tuple(weight), () if bias is None else (bias,)


def _gated_phase(
    plan: ExecutionPlan, norm: KernelCall, route: KernelCall, first: KernelCall, gated: KernelCall
) -> Phase | None:
    """The phase that chooses the experts and multiplies the normalized row with the gated matrices of each of them.

    Args:
        first: The product without its gate.
        gated: The product with its gate.
    """
    x, (weight, bias) = gated.inputs[0], _parts(first)
    choices, rows = gated.outputs[0].shape
    out = gated.outputs[0].reshape((1, choices * rows))
    if out is None:
        return None
    params = dict(gated.params)
    interleaved = bool(params.pop("interleaved"))
    params |= {"m": 1, "n": choices * rows, "k": x.shape[1], "has_bias": len(bias), "choices": choices}
    call = replace(gated, inputs=(x, *weight, *bias), outputs=(out,), params=params)
    if first.kernel == _QUANTIZED:
        call = replace(call, kernel="quantized_gated_matmul_vec_kernel")
        experts = ExpertMatrices(rows, choices, interleaved=interleaved)
        phase = quantized_product_phase(plan, call, InputNorms(norm), experts)
    else:
        call = replace(call, kernel="gated_matmul_vec_kernel")
        row_bytes = x.shape[1] * itemsize(weight[0].dtype)
        own = own_rows(choices * rows, most_rows(choices * rows, row_bytes, gated=True), rows)
        run, matrix = (2 * own, 2 * rows) if interleaved else (own, rows)
        units, each = choices * rows // own, rows // own
        stream = Stream(units, 2 * own, run, matrix, row_bytes, 0, expert_rows=2 * rows, expert_units=each)
        phase = stream_phase(plan, call, InputNorms(norm), stream)
        if phase is not None:
            phase = replace(phase, constants={**phase.constants, "interleaved": interleaved})
    if phase is None:
        return None
    constants = {"softmax_before": route.params["before"], "softmax_after": route.params["after"]}
    constants |= {"divides": route.params["divides"], "rounds_factors": route.outputs[1].dtype == out.dtype}
    constants |= {"expert_choices": choices, "rated_by_mailbox": False}
    inputs = {**phase.inputs, "ratings": route.inputs[0]}
    return replace(phase, inputs=inputs, constants={**phase.constants, **constants}, choices=choices)


def _sum_phase(plan: ExecutionPlan, second: KernelCall, total: KernelCall) -> Phase | None:
    """The phase that adds up the products of the experts' results, side by side in one row, with their matrices."""
    y, (weight, bias) = second.inputs[0], _parts(second)
    choices, width = y.shape
    x, residual = y.reshape((1, y.numel)), total.inputs[2:]
    if x is None:
        return None
    n = total.outputs[0].shape[-1]
    params = {**second.params, "m": 1, "n": n, "k": y.numel, "activation": "none"}
    params |= {"has_bias": len(bias), "has_residual": len(residual)}
    inputs = (x, *weight, *bias, *residual)
    if second.kernel == _QUANTIZED:
        params["groups"] = choices * second.params["groups"]
        call = replace(total, kernel="quantized_matmul_vec_kernel", inputs=inputs, params=params)
        return quantized_product_phase(plan, call, InputNorms(), ExpertMatrices(n, choices, side_by_side=True))
    row_bytes = width * itemsize(weight[0].dtype)
    if row_bytes % LINE_BYTES or row_bytes * UNIT_ROWS > SLOT_BYTES:
        return None
    own = own_rows(n, UNIT_ROWS)
    stream = Stream(groups(n, own), own, own, n, row_bytes, 0, expert_rows=n, row_experts=choices)
    call = replace(total, kernel="matmul_vec_kernel", inputs=inputs, params=params)
    return stream_phase(plan, call, InputNorms(), stream)
