"""Fuses element-wise calls into the products, convolutions and group norms that precede them, as their epilogue.

Given:   y = matmul(x, w) + b;  z = gelu(y);  c = conv2d(u, v);  d = leaky_relu(c, slope) + r
Result:  z = gelu(matmul(x, w) + b);  d = leaky_relu(conv2d(u, v), slope) + r

The kernels of products and convolutions have an activation and a residual. Those of convolutions compute further
element-wise calls too, as the steps of an `Epilogue`, for which products become convolutions.

Fusions of the graph find these only where no node stands between the two. Here, the reshapes and transposes between
them have become views, so that only memory counts: the element-wise call must walk the result in its order in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from cuda_compiler.passes.epilogue_steps import is_run, residual_of, with_residual_computed, with_step
from cuda_compiler.rules.channel_packs import single_pixels, single_taps
from cuda_compiler.rules.conv import RESIDUAL_LAST
from cuda_compiler.rules.linear_wgmma import MOST_ROWS
from cuda_compiler.rules.matmul import VECTOR_ROWS
from cuda_compiler.rules.norms import ROW_KERNELS
from cuda_compiler.specialization.activations import activation_of
from npu_compiler.graph.dtypes import HALF_DTYPES
from npu_compiler.program.elementwise import elementwise_kernel
from npu_compiler.program.kernels import KERNELS, KernelCall
from npu_compiler.program.plan import BufferAllocation, ExecutionPlan
from npu_compiler.program.views import View, contiguous_strides

_PRODUCTS = ("matmul_kernel", "matmul_notrans_kernel")
_CONVOLUTION, _GROUP_NORM = "conv2d_kernel", "groupnorm_kernel"
_REACH = 24  # calls to look ahead for the reader of a result, or back for the writer of a residual


def absorb_epilogues(plan: ExecutionPlan) -> ExecutionPlan:
    """The plan with element-wise calls moved into the calls whose results they change."""
    calls: list[KernelCall | None] = list(plan.calls)
    uses = _Uses.of(plan)
    for index, call in enumerate(plan.calls):
        if not _may_grow(call):
            continue
        around = _Surroundings(index, calls, uses, plan.buffers)
        grown, taken = around.grown(call, _joined)
        stepped, further = _with_steps(grown, around)
        calls[index] = stepped
        for at in (*taken, *further):
            calls[at] = None
    return replace(plan, calls=[call for call in calls if call is not None])


def absorb_steps(plan: ExecutionPlan, kernel: str) -> ExecutionPlan:
    """The plan with element-wise calls as steps of the epilogues of the calls of one kernel that precede them."""
    calls: list[KernelCall | None] = list(plan.calls)
    uses = _Uses.of(plan)
    for index, call in enumerate(plan.calls):
        if call.kernel == kernel:
            around = _Surroundings(index, calls, uses, plan.buffers)
            grown, taken = around.grown(call, with_step)
            if _is_end(grown, around, is_product=False):
                calls[index] = grown
                for at in taken:
                    calls[at] = None
    return replace(plan, calls=[call for call in calls if call is not None])


@dataclass(frozen=True)
class _Surroundings:
    """A call's place in a plan.

    Attributes:
        index: The call's number.
        calls: All calls; None where another call now computes what one did.
    """

    index: int
    calls: Sequence[KernelCall | None]
    uses: _Uses
    buffers: Mapping[str, BufferAllocation]

    def grown(
        self, call: KernelCall, join: Callable[[KernelCall, KernelCall], KernelCall | None]
    ) -> tuple[KernelCall, list[int]]:
        """The call with the element-wise calls that follow it as its epilogue, as far as `join` allows.

        Returns:
            It, and the numbers of the calls that it now computes.
        """
        taken: list[int] = []
        while (following := _next(call, self.index, self.calls, self.uses)) is not None:
            at, after = following
            joined = join(call, after)
            if joined is None or not _may_move(joined, call, self.index, at, self.calls, self.buffers):
                break
            call = joined
            taken.append(at)
        return call, taken

    def readers(self, view: View) -> list[KernelCall]:
        """The calls that read a view's buffer."""
        return [call for call in self.calls if call and any(each.buffer == view.buffer for each in call.inputs)]

    def writer(self, view: View) -> int | None:
        """The number of the element-wise call before this one that writes a view, if nothing else reads that.

        None otherwise, or if the call could not be moved here.
        """
        name, written = view.buffer, set[str]()
        if self.uses.reads.get(name) != 1 or self.uses.writes.get(name) != 1 or self.buffers[name].kind != "arena":
            return None
        for at in range(self.index - 1, max(-1, self.index - 1 - _REACH), -1):
            before = self.calls[at]
            outputs = {each.buffer for each in before.outputs} if before is not None else set()
            if before is not None and name in outputs:
                may_move = elementwise_kernel(before) and written.isdisjoint(each.buffer for each in before.inputs)
                return at if may_move else None
            written |= outputs
        return None


def _with_steps(call: KernelCall, around: _Surroundings) -> tuple[KernelCall, list[int]]:
    """The call as a convolution that computes further element-wise calls, or as it is if that saves no kernel.

    Returns:
        It, and the numbers of the calls that it now computes.
    """
    is_product = call.kernel in _PRODUCTS
    if is_product and (call.params["m"] <= MOST_ROWS or _multiplies_faster_apart(call)):
        return call, []
    convolution = _convolution_of(call, around.buffers) if is_product else call
    if convolution is None or convolution.kernel != _CONVOLUTION:
        return call, []
    grown, taken = around.grown(convolution, with_step)
    if taken and not _is_end(grown, around, is_product):
        grown, taken = convolution, []
    grown, before = _with_residual(grown, around)
    return (grown, taken + before) if taken or before else (call, [])


def _with_residual(call: KernelCall, around: _Surroundings) -> tuple[KernelCall, list[int]]:
    """The convolution that computes its residual, or the call as it is if that saves no kernel.

    Returns:
        It, and the numbers of the calls that it now computes.
    """
    grown: KernelCall | None = call
    taken: list[int] = []
    while grown is not None and (residual := residual_of(grown)) is not None:
        at, names = around.writer(residual), [view.buffer for view in grown.inputs]
        if at is None or names.count(residual.buffer) > 1:
            return grown, taken
        before = around.calls[at]
        assert before is not None
        grown = with_residual_computed(grown, before)
        if grown is not None and grown.outputs[0].buffer in {view.buffer for view in grown.inputs}:
            break
        taken.append(at)
    return call, []  # a kernel for the first of the element-wise calls computes the others at no cost


def _is_end(call: KernelCall, around: _Surroundings, is_product: bool) -> bool:
    """Whether a chain of element-wise calls ends with a call's result.

    It does not if the next one needs a kernel anyway, which computes the others at no cost. A norm's kernel is one for
    products, which cuBLASLt can then multiply.
    """
    readers = around.readers(call.outputs[0])
    if is_product and any(reader.kernel in ROW_KERNELS for reader in readers):
        return False
    return around.uses.reads.get(call.outputs[0].buffer) != 1 or elementwise_kernel(readers[0]) is None


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
    if not product.is_dense or product.dtype != out.dtype or not is_run(out, product.numel):
        return None
    decl = elementwise_kernel(after)
    assert decl is not None
    own = [view for view in after.inputs if view.buffer == product.buffer]
    others = [view for view in after.inputs if view.buffer != product.buffer]
    if len(own) != 1 or not is_run(own[0], product.numel) or own[0].offset != product.offset:
        return None
    target = replace(product, buffer=out.buffer, offset=out.offset)
    activation, params = activation_of(after), call.params
    has_residual, is_activated = bool(params.get("has_residual")), params.get("activation", "none") != "none"
    if activation is not None:
        if is_activated or has_residual and (call.kernel in _PRODUCTS or RESIDUAL_LAST in params):
            return None
        return replace(call, outputs=(target,), params={**params, "activation": activation}, node=after.node)
    adds = decl.op.name == "add" and after.params["alpha"] == 1 and list(after.params["scalars"]) == [None, None]
    adds = adds and len(others) == 1 and call.kernel != _GROUP_NORM
    if not adds or has_residual or is_activated and call.kernel in _PRODUCTS:
        return None
    (other,) = others
    if other.dtype != product.dtype or not is_run(other, product.numel):
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
    if buffers[target].kind not in ("arena", "output"):
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


def products_as_convolutions(plan: ExecutionPlan, has_warpgroups: bool) -> ExecutionPlan:
    """The plan with products whose epilogue cuBLASLt lacks as 1 × 1 convolutions, whose kernels have any epilogue.

    Given:   y = gelu(matmul(x: [4096, 320], w: [1280, 320]) + b)
    Result:  y = gelu(conv2d(x: [1, 320, 4096, 1], w: [1280, 320, 1, 1]) + b)

    A separate kernel for the activation would write and read the product once more. Only on GPUs without warpgroups do
    large products stay with cuBLASLt and such a kernel, since cuBLASLt multiplies so much faster there that this pays.
    Short products become convolutions too, for which the runtime tries both.

    Args:
        has_warpgroups: Whether the GPU has the warpgroups that our fastest kernel for products needs.
    """
    return replace(plan, calls=[_as_convolution(call, plan.buffers, has_warpgroups) for call in plan.calls])


_BY_CUBLAS = ("none", "relu", "gelu_tanh")
# Of a large GPU: FLOP/s of cuBLASLt and of our kernels, bytes/s of memory and of the cache, and bytes that stay there.
_CUBLAS_RATE, _OWN_RATE = 720e12, 400e12
_MEMORY_RATE, _CACHE_RATE, _CACHED = 4.0e12, 8.0e12, 30e6
_LAUNCH, _SHORT = 2e-6, 5e-6  # seconds
_MOST_SHORT_ROWS = 1024


def _pays_apart(m: int, n: int, k: int) -> bool:
    """Whether a cuBLASLt product and a separate activation kernel should be faster than one kernel for both."""
    flops, result = 2 * m * n * k, 2 * m * n
    moved = (2 * (m * k + n * k) + result) / _MEMORY_RATE
    again = 2 * result / (_CACHE_RATE if result < _CACHED else _MEMORY_RATE)
    return max(flops / _CUBLAS_RATE, moved) + again + _LAUNCH < max(flops / _OWN_RATE, moved)


def _multiplies_faster_apart(call: KernelCall) -> bool:
    """Whether cuBLASLt takes a product, and with a separate kernel for what follows is estimated to be faster."""
    x, out = call.inputs[0], call.outputs[0]
    return out.shape[1] % 8 == 0 and _pays_apart(out.shape[0], out.shape[1], x.shape[1])


def _is_short(call: KernelCall) -> bool:
    """Whether a product is so short that launching it apart from the kernel before it costs as much as it gains.

    The runtime tries our kernels, which begin while the kernel before ends, beside cuBLASLt.
    """
    x, out = call.inputs[0], call.outputs[0]
    rows, terms, columns = *x.shape, out.shape[1]
    moved = rows * (terms + columns) + terms * columns
    alike = 2 * rows * terms * columns / _OWN_RATE < _SHORT and 2 * moved / _CACHE_RATE < _SHORT
    takes = call.params["activation"] == "none" or not call.params["has_residual"]
    return bool(alike and takes and MOST_ROWS < rows <= _MOST_SHORT_ROWS)


def _as_convolution(call: KernelCall, buffers: Mapping[str, BufferAllocation], has_warpgroups: bool) -> KernelCall:
    if call.kernel not in _PRODUCTS:
        return call
    activation = call.params["activation"]
    if activation in _BY_CUBLAS and call.outputs[0].shape[1] % 8 == 0 and not _is_short(call):
        return call
    if activation != "none" and call.params["has_residual"]:
        return call
    if activation not in _BY_CUBLAS and not has_warpgroups and _multiplies_faster_apart(call):
        return call
    return _convolution_of(call, buffers) or call


def _convolution_of(call: KernelCall, buffers: Mapping[str, BufferAllocation]) -> KernelCall | None:
    """A product of many rows as a 1 × 1 convolution; None if tensor cores cannot compute it as one."""
    if call.kernel != "matmul_kernel" or call.params["m"] <= VECTOR_ROWS:
        return None
    x, weight, bias, residual, out = KERNELS[call.kernel].bind(call)
    assert x is not None and weight is not None and out is not None
    activation = call.params["activation"]
    if not x.dtype == weight.dtype == out.dtype or x.dtype not in HALF_DTYPES or x.shape[1] % 8:
        return None
    rows = [view for view in (x, weight, out, residual) if view is not None]
    if any(view.strides[1] != 1 or view.offset % 8 for view in rows) or x.strides[0] % 8 or weight.strides[0] % 8:
        return None
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
        **({RESIDUAL_LAST: 1} if residual is not None and activation != "none" else {}),
    }
    inputs = tuple(view for view in operands if view is not None)
    return replace(call, kernel=_CONVOLUTION, source="", inputs=inputs, outputs=(single_pixels(out),), params=params)
