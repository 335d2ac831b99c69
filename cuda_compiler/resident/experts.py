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
from cuda_compiler.rules.gates import GATED_EXPERTS, with_gate
from cuda_compiler.specialization.sizes import groups
from npu_compiler.graph.dtypes import itemsize
from npu_compiler.program.kernels import KernelCall
from npu_compiler.program.plan import ExecutionPlan
from npu_compiler.program.views import View

_EXPERTS = "expert_matmul_kernel"
EXPERT_CALLS = 7
_LARGEST_MATRIX = 2**32  # bytes, which the C struct `Stream` counts in 32 bits


def match_experts(plan: ExecutionPlan, index: int, readers: Counter[str]) -> list[Phase] | None:
    """The phases of the `EXPERT_CALLS` calls from `index` on, if they are a layer's experts for one row.

    Given:  rmsnorm(s) -> x; linear(x, r) -> a; route(a) -> e, p; expert_linear(x, w, e) -> h;
            silu_mul(halves of h) -> y; expert_linear(y, v, e) -> z; weighted_sum(z, p, s) -> out
    Result: linear(rmsnorm(s), r) -> a;  p · gated(rmsnorm(s), w of the experts that a chooses) -> y;
            linear(y, v of these experts, side by side) + s -> out

    The factors p are applied to y, which is shorter than z.

    Args:
        readers: Buffer → how many operands of calls and program outputs read it.
    """
    calls = plan.calls[index : index + EXPERT_CALLS]
    if len(calls) < EXPERT_CALLS:
        return None
    norm, rating, route, first, gate, second, total = calls
    kernels = [norm.kernel, route.kernel, first.kernel, second.kernel, total.kernel]
    if kernels != ["rmsnorm_kernel", ROUTE, _EXPERTS, _EXPERTS, WEIGHTED_SUM] or rating.kernel not in PRODUCTS:
        return None
    gated = with_gate(first, gate, readers, GATED_EXPERTS)
    if gated is None or not _are_connected(plan, (norm, rating, route, gated, second, total), readers):
        return None
    phases = [product_phase(plan, rating, InputNorms(norm)), _gated_phase(plan, norm, route, gated)]
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
        and gated.inputs[2:] == second.inputs[2:] == (chosen,)
        and second.inputs[0] == gated.outputs[0]
        and total.inputs[:2] == (second.outputs[0], weights)
    )


def _gated_phase(plan: ExecutionPlan, norm: KernelCall, route: KernelCall, gated: KernelCall) -> Phase | None:
    """The phase that chooses the experts and multiplies the normalized row with the gated matrices of each of them."""
    x, weight, _ = gated.inputs
    choices, rows = gated.outputs[0].shape
    row_bytes = x.shape[1] * itemsize(weight.dtype)
    own = own_rows(choices * rows, most_rows(choices * rows, row_bytes, gated=True), rows)
    out = gated.outputs[0].reshape((1, choices * rows))
    if out is None or not _has_matrices(plan, weight):
        return None
    stream = Stream(
        choices * rows // own,
        2 * own,
        own,
        rows,
        row_bytes,
        0,
        expert_bytes=_matrix_bytes(weight),
        expert_units=rows // own,
    )
    params = {
        "m": 1,
        "n": choices * rows,
        "k": x.shape[1],
        "activation": gated.params["activation"],
        "choices": choices,
    }
    call = replace(gated, kernel="gated_matmul_vec_kernel", inputs=(x, weight), outputs=(out,), params=params)
    phase = stream_phase(plan, call, InputNorms(norm), stream)
    if phase is None:
        return None
    constants = {"expert_choices": choices, "softmax_before": route.params["before"]}
    constants |= {"softmax_after": route.params["after"], "divides": route.params["divides"]}
    constants |= {"rounds_factors": route.outputs[1].dtype == out.dtype, "rated_by_mailbox": False}
    inputs = {**phase.inputs, "ratings": route.inputs[0]}
    return replace(phase, inputs=inputs, constants={**phase.constants, **constants}, choices=choices)


def _sum_phase(plan: ExecutionPlan, second: KernelCall, total: KernelCall) -> Phase | None:
    """The phase that adds up the products of the experts' results, side by side in one row, with their matrices."""
    y, weight, _ = second.inputs
    x = y.reshape((1, y.numel))
    row_bytes = y.shape[1] * itemsize(weight.dtype)
    if x is None or not _has_matrices(plan, weight) or row_bytes % LINE_BYTES or row_bytes * UNIT_ROWS > SLOT_BYTES:
        return None
    n, residual = weight.shape[1], total.inputs[2:]
    own = own_rows(n, UNIT_ROWS)
    stream = Stream(
        groups(n, own), own, own, n, row_bytes, 0, expert_bytes=_matrix_bytes(weight), row_experts=y.shape[0]
    )
    params = {"m": 1, "n": n, "k": y.numel, "activation": "none", "has_bias": 0, "has_residual": len(residual)}
    call = replace(total, kernel="matmul_vec_kernel", inputs=(x, weight, *residual), params=params)
    return stream_phase(plan, call, InputNorms(), stream)


def _has_matrices(plan: ExecutionPlan, weight: View) -> bool:
    """Whether a weight [experts, rows, columns] is constant and contiguous."""
    return plan.buffers[weight.buffer].is_constant and weight.is_contiguous and _matrix_bytes(weight) < _LARGEST_MATRIX


def _matrix_bytes(weight: View) -> int:
    return weight.strides[0] * itemsize(weight.dtype)
