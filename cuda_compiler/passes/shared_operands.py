"""Multiplies a matrix that several batches share once, with the single rows of all these batches as its rows.

Given:   y = batched_matmul(q: [16, 4, 256, 1, 16], k: [16, 4, 256, 16, 64]), the same k for each of the 4 heads
Result:  y = batched_matmul(q as [16, 256, 4, 16], k as [16, 256, 16, 64])

So the matrix is read once, and rows no longer waste a tile of a matrix product each.
"""

from __future__ import annotations

from dataclasses import replace

from npu_compiler.program.kernels import KernelCall
from npu_compiler.program.plan import ExecutionPlan
from npu_compiler.program.views import View

_PRODUCT = "batched_matmul_kernel"


def join_shared_operands(plan: ExecutionPlan) -> ExecutionPlan:
    """The plan with batched products of single rows, or columns, and a matrix that batches share, as fewer products."""
    return replace(plan, calls=[_joined(call) for call in plan.calls])


def _joined(call: KernelCall) -> KernelCall:
    if call.kernel != _PRODUCT:
        return call
    a, b = call.inputs
    (out,) = call.outputs
    if out.shape[-2] != 1 and out.shape[-1] == 1:
        a, b, out = b.transpose(-1, -2), a.transpose(-1, -2), out.transpose(-1, -2)
    *batch, m, n = out.shape
    shared = [dim for dim, size in enumerate(batch) if size > 1 and b.strides[dim] == 0 != a.strides[dim]]
    if m != 1 or n == 1 or not shared:
        return call
    dim = max(shared, key=lambda each: batch[each])
    rows, columns = _with_rows(a, dim), b.select(dim, 0)
    result = _with_rows(out, dim)
    sizes = {"m": batch[dim], "n": n, "batch": call.params["batch"] // batch[dim]}
    params = {**call.params, **sizes, "transpose_b": int(columns.strides[-2] == 1)}
    return replace(call, inputs=(rows, columns), outputs=(result,), params=params)


def _with_rows(view: View, dim: int) -> View:
    """A view [..., 1, n] with its dimension `dim` in the place of the one before the last."""
    single = view.select(view.rank - 2, 0)
    order = [each for each in range(single.rank) if each != dim]
    return single.permute([*order[:-1], dim, order[-1]])
