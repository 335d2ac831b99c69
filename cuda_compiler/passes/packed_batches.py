"""Copies the operands of batched products that cuBLASLt does not take as they are.

It goes through the matrices of a batch at one stride, and multiplies operands of one dtype: if only one of them is
float32 and the result is not, that one is rounded. Sums of two float32 operands are rounded by a copy after it.

Given:   y = batched_matmul(q, k), heads of a joint projection: [16, 32, 256, 128] at strides (3145728, 128, 12288, 1)
Result:  q' = copy(q);  k' = copy(k);  y = batched_matmul(q', k'), all of whose matrices are one stride apart

Without it such products are left to a kernel of our own, which takes any strides and is faster where sums are short.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, combinations

from cuda_compiler.passes.packed_operands import copy
from cuda_compiler.rules.batched_halves import beats_copies
from cuda_compiler.rules.matmul import TILE, gemm, has_few_rows
from cuda_compiler.specialization.sizes import groups
from npu_compiler.graph.dtypes import HALF_DTYPES
from npu_compiler.program.kernels import KernelCall, distinct_bytes
from npu_compiler.program.plan import BufferAllocation, ExecutionPlan
from npu_compiler.program.views import View, contiguous_strides, numel

_PRODUCT = "batched_matmul_kernel"
_LEAST = 3e7  # operations of the general kernel's whole tiles, from which on it takes longer than the copies' launches


def pack_batches(plan: ExecutionPlan) -> ExecutionPlan:
    """The plan with batched products over copies of the fewest bytes with which cuBLASLt takes them."""
    calls: list[KernelCall] = []
    buffers = dict(plan.buffers)
    for call in plan.calls:
        views = (*call.inputs, *call.outputs)
        moved = _moved(call, views, f"{call.node}.packed{len(calls)}") if _takes_long(call) else {}
        copied = sum(distinct_bytes(views[place]) for place in moved)
        if not moved or beats_copies(call, copied, len(moved)):
            calls.append(call)
            continue
        for place, packed in moved.items():
            buffers[packed.buffer] = BufferAllocation(packed.buffer, "arena", (packed.numel,), packed.dtype)
            if place < len(call.inputs):
                calls.append(copy(views[place], packed, call.node))
        *inputs, out = (moved.get(place, view) for place, view in enumerate(views))
        calls.append(replace(call, inputs=tuple(inputs), outputs=(out,)))
        if out is not views[-1]:
            calls.append(copy(out, views[-1], call.node))
    return replace(plan, calls=calls, buffers=buffers)


def _takes_long(call: KernelCall) -> bool:
    """Whether a call is a batched product for which the general kernel would take longer than copies."""
    if call.kernel != _PRODUCT or has_few_rows(call):
        return False
    *batch, m, n = call.outputs[0].shape
    return 2 * numel(batch) * TILE**2 * groups(m, TILE) * groups(n, TILE) * call.inputs[0].shape[-1] >= _LEAST


def _moved(call: KernelCall, views: Sequence[View], stem: str) -> dict[int, View]:
    """The operands to replace by packed copies, by their number; none if cuBLASLt takes the product or never would.

    Args:
        stem: Beginning of the new buffers' names.
    """
    dtypes = _dtypes(*views)
    for places in sorted(_subsets(len(views)), key=lambda places: sum(distinct_bytes(views[i]) for i in places)):
        moved = {place: _packed(views[place], f"{stem}.{place}", dtypes[place]) for place in places}
        a, b, out = (moved.get(place, view) for place, view in enumerate(views))
        if gemm(call, a, b, out, call.params["scale"]) is not None:
            return moved
    return {}


def _dtypes(a: View, b: View, out: View) -> tuple[str, str, str]:
    """The dtypes that copies of a product's operands should have."""
    if a.dtype == b.dtype:
        return a.dtype, b.dtype, out.dtype if out.dtype in (a.dtype, "float32") else a.dtype
    if out.dtype in HALF_DTYPES and {a.dtype, b.dtype} == {out.dtype, "float32"}:
        return out.dtype, out.dtype, out.dtype
    return a.dtype, b.dtype, out.dtype


def _subsets(count: int) -> Iterator[tuple[int, ...]]:
    return chain.from_iterable(combinations(range(count), size) for size in range(count + 1))


def _packed(view: View, buffer: str, dtype: str) -> View:
    """The view over a new buffer without gaps, with the last two dimensions in the same order in memory.

    Args:
        dtype: Dtype of the buffer.
    """
    if view.strides[-2] == 1 < view.strides[-1]:
        return _packed(view.transpose(-1, -2), buffer, dtype).transpose(-1, -2)
    return View(buffer, view.shape, contiguous_strides(view.shape), 0, dtype)
