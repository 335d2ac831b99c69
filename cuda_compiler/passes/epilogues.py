"""Fuses element-wise calls into the products, convolutions and group norms that precede them, as their epilogue.

Given:   y = matmul(x, w) + b;  z = gelu(y);  c = conv2d(u, v);  d = leaky_relu(c, slope) + r
Result:  z = gelu(matmul(x, w) + b);  d = leaky_relu(conv2d(u, v), slope) + r

Fusions of the graph find these only where no node stands between the two. Here, the reshapes and transposes between
them have become views, so that only memory counts: the element-wise call must walk the result in its order in memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from cuda_compiler.elementwise.grouping import place_of
from cuda_compiler.rules.channel_packs import single_pixels, single_taps
from cuda_compiler.rules.conv import RESIDUAL_LAST
from cuda_compiler.rules.matmul import VECTOR_ROWS
from cuda_compiler.specialization.activations import activation_of
from npu_compiler.graph.dtypes import HALF_DTYPES
from npu_compiler.program.elementwise import elementwise_kernel
from npu_compiler.program.kernels import KERNELS, KernelCall
from npu_compiler.program.plan import BufferAllocation, ExecutionPlan
from npu_compiler.program.views import View, contiguous_strides

_PRODUCTS = ("matmul_kernel", "matmul_notrans_kernel")
_CONVOLUTION, _GROUP_NORM = "conv2d_kernel", "groupnorm_kernel"
_REACH = 24  # calls to look ahead for the reader of a result


def absorb_epilogues(plan: ExecutionPlan) -> ExecutionPlan:
    """The plan with element-wise calls moved into the calls whose results they change."""
    calls: list[KernelCall | None] = list(plan.calls)
    uses = _Uses.of(plan)
    for index, call in enumerate(plan.calls):
        if not _may_grow(call):
            continue
        grown = call
        while (following := _next(grown, index, calls, uses)) is not None:
            at, after = following
            joined = _joined(grown, after)
            if joined is None or not _may_move(joined, grown, index, at, calls, plan.buffers):
                break
            grown, calls[at] = joined, None
        calls[index] = grown
    return replace(plan, calls=[call for call in calls if call is not None])


@dataclass(frozen=True)
class _Uses:
    """Number of calls that read and that write each buffer; being a program output counts as two reads."""

    reads: Mapping[str, int]
    writes: Mapping[str, int]

    @staticmethod
    def of(plan: ExecutionPlan) -> _Uses:
        reads: dict[str, int] = {view.buffer: 2 for view in plan.output_views.values()}
        writes: dict[str, int] = {}
        for call in plan.calls:
            for name in {view.buffer for view in call.inputs}:
                reads[name] = reads.get(name, 0) + 1
            for name in {view.buffer for view in call.outputs}:
                writes[name] = writes.get(name, 0) + 1
        return _Uses(reads, writes)


def _may_grow(call: KernelCall) -> bool:
    """Whether a call's kernel can take an epilogue: a convolution, a group norm, or a product of many rows.

    Products of up to `VECTOR_ROWS` rows are fused by other passes.
    """
    if call.kernel in _PRODUCTS:
        return bool(call.params["m"] > VECTOR_ROWS)
    return call.kernel in (_CONVOLUTION, _GROUP_NORM)


def _next(
    call: KernelCall, index: int, calls: Sequence[KernelCall | None], uses: _Uses
) -> tuple[int, KernelCall] | None:
    """The index and call of the only reader of a call's result, if it is element-wise and at most `_REACH` calls later.

    None otherwise, also if the result is written by several calls.
    """
    name = call.outputs[0].buffer
    if uses.reads.get(name) != 1 or uses.writes.get(name) != 1:
        return None
    for at in range(index + 1, min(index + 1 + _REACH, len(calls))):
        after = calls[at]
        if after is not None and any(view.buffer == name for view in after.inputs):
            return (at, after) if elementwise_kernel(after) is not None else None
    return None


def _joined(call: KernelCall, after: KernelCall) -> KernelCall | None:
    """The call with the element-wise call `after` as its epilogue; None if its kernel cannot do that."""
    product, out = call.outputs[0], after.outputs[0]
    if not _is_dense(product) or product.dtype != out.dtype or not _is_run(out, product.numel):
        return None
    decl = elementwise_kernel(after)
    assert decl is not None
    own = [view for view in after.inputs if view.buffer == product.buffer]
    others = [view for view in after.inputs if view.buffer != product.buffer]
    if len(own) != 1 or not _is_run(own[0], product.numel) or own[0].offset != product.offset:
        return None
    target = replace(product, buffer=out.buffer, offset=out.offset)
    activation, params = activation_of(after), call.params
    has_residual, is_activated = bool(params.get("has_residual")), params.get("activation", "none") != "none"
    if activation is not None:
        if is_activated or has_residual and (call.kernel in _PRODUCTS or RESIDUAL_LAST in params):
            return None
        return replace(call, outputs=(target,), params={**params, "activation": activation}, node=after.node)
    adds = decl.op.name == "add" and list(after.params["scalars"]) == [None, None] and len(others) == 1
    if not adds or has_residual or call.kernel == _GROUP_NORM or is_activated and call.kernel in _PRODUCTS:
        return None
    (other,) = others
    if other.dtype != product.dtype or not _is_run(other, product.numel):
        return None
    residual = replace(product, buffer=other.buffer, offset=other.offset)
    if not _takes(call, residual):
        return None
    return replace(
        call,
        inputs=(*call.inputs, residual),
        outputs=(target,),
        params={**params, "has_residual": 1, **({RESIDUAL_LAST: 1} if is_activated else {})},
        node=after.node,
    )


def _takes(call: KernelCall, residual: View) -> bool:
    """Whether the call's kernel can add `residual`: its declaration asks for packed inner dimensions."""
    (operand,) = [each for each in KERNELS[call.kernel].inputs if each.name == "residual"]
    packed = operand.packed
    return packed is None or residual.strides[packed:] == tuple(contiguous_strides(residual.shape[packed:]))


def _may_move(
    joined: KernelCall,
    call: KernelCall,
    index: int,
    at: int,
    calls: Sequence[KernelCall | None],
    buffers: Mapping[str, BufferAllocation],
) -> bool:
    """Whether the work of the later call `at` may be done at `index`: no call between them touches its operands."""
    target = joined.outputs[0].buffer
    if buffers[target].kind not in ("arena", "output") or buffers[target].donor is not None:
        return False
    added = {view.buffer for view in joined.inputs} - {view.buffer for view in call.inputs}
    if target in {view.buffer for view in joined.inputs}:
        return False
    for between in calls[index + 1 : at]:
        if between is None:
            continue
        written = {view.buffer for view in between.outputs}
        if target in written or target in {view.buffer for view in between.inputs} or not written.isdisjoint(added):
            return False
    return True


def _is_dense(view: View) -> bool:
    """Whether the view's elements fill one contiguous stretch of memory, with the dimensions in any order."""
    steps = sorted((stride, size) for size, stride in zip(view.shape, view.strides, strict=True) if size > 1)
    reached = 1
    for stride, size in steps:
        if stride != reached:
            return False
        reached *= size
    return True


def _is_run(view: View, count: int) -> bool:
    """Whether the view's elements, in row-major order, are `count` consecutive elements of memory."""
    place = place_of(view)
    return place.sizes == (count,) and place.strides == (1,)


def products_as_convolutions(plan: ExecutionPlan) -> ExecutionPlan:
    """The plan with products whose epilogue cuBLASLt lacks as 1 × 1 convolutions, whose kernels have any epilogue.

    Given:   y = gelu(matmul(x: [4096, 320], w: [1280, 320]) + b)
    Result:  y = gelu(conv2d(x: [1, 320, 4096, 1], w: [1280, 320, 1, 1]) + b)

    A separate kernel for the activation would write and read the product once more. Only large products stay with
    cuBLASLt and such a kernel, since cuBLASLt multiplies so much faster that this pays.
    """
    return replace(plan, calls=[_as_convolution(call, plan.buffers) for call in plan.calls])


_BY_CUBLAS = ("none", "relu", "gelu_tanh")
# Of a large GPU: FLOP/s of cuBLASLt and of our kernels, bytes/s of memory and of the cache, and bytes that stay there.
_CUBLAS_RATE, _OWN_RATE = 720e12, 400e12
_MEMORY_RATE, _CACHE_RATE, _CACHED = 4.0e12, 8.0e12, 30e6
_LAUNCH = 2e-6  # seconds


def _pays_apart(m: int, n: int, k: int) -> bool:
    """Whether a cuBLASLt product and a separate activation kernel should be faster than one kernel for both."""
    flops, result = 2 * m * n * k, 2 * m * n
    moved = (2 * (m * k + n * k) + result) / _MEMORY_RATE
    again = 2 * result / (_CACHE_RATE if result < _CACHED else _MEMORY_RATE)
    return max(flops / _CUBLAS_RATE, moved) + again + _LAUNCH < max(flops / _OWN_RATE, moved)


def _as_convolution(call: KernelCall, buffers: Mapping[str, BufferAllocation]) -> KernelCall:
    if call.kernel != "matmul_kernel" or call.params["m"] <= VECTOR_ROWS:
        return call
    x, weight, bias, residual, out = KERNELS[call.kernel].bind(call)
    assert x is not None and weight is not None and out is not None
    activation = call.params["activation"]
    if residual is not None and activation != "none" or activation in _BY_CUBLAS and out.shape[1] % 8 == 0:
        return call
    if not x.dtype == weight.dtype == out.dtype or x.dtype not in HALF_DTYPES or x.shape[1] % 8:
        return call
    if activation not in _BY_CUBLAS and out.shape[1] % 8 == 0 and _pays_apart(out.shape[0], out.shape[1], x.shape[1]):
        return call
    rows = [view for view in (x, weight, out, residual) if view is not None]
    if any(view.strides[1] != 1 or view.offset % 8 for view in rows) or x.strides[0] % 8 or weight.strides[0] % 8:
        return call
    operands = (single_pixels(x), single_taps(weight), bias, None if residual is None else single_pixels(residual))
    params = {
        "stride": [1, 1],
        "padding": [0, 0, 0, 0],
        "dilation": [1, 1],
        "groups": 1,
        "activation": activation,
        "direct": False,
        "has_bias": int(bias is not None),
        "has_residual": int(residual is not None),
        "constant_weight": buffers[weight.buffer].is_constant,
    }
    inputs = tuple(view for view in operands if view is not None)
    return replace(call, kernel=_CONVOLUTION, source="", inputs=inputs, outputs=(single_pixels(out),), params=params)
