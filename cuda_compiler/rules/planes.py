"""Rules of products over a dimension before the last: out[b, n, s] = act(Σ weight[n, k] · x[b, k, s] + bias[n]).

`passes/plane_products.py` forms them. With few channels such a product is bound by memory, and a kernel of our own
keeps all channels of a place in registers. All others are batched products of cuBLASLt with the weight on the left;
their bias, which cuBLASLt can only add along the last dimension, becomes a matrix that it adds as a residual.
"""

from __future__ import annotations

from cuda_compiler.elementwise.grouping import Group
from cuda_compiler.elementwise.kernel_source import generate_elementwise
from cuda_compiler.rules.matmul import cublas_activates, epilogue, gemm, is_aligned
from cuda_compiler.specialization.gpu import MULTIPROCESSORS
from cuda_compiler.specialization.sizes import groups, vector_width
from cuda_compiler.specialization.specializer import Rule, Specializer
from npu_compiler.graph.dtypes import itemsize
from npu_compiler.program.kernels import KernelCall
from npu_compiler.program.views import View

PLANE_PRODUCT = "plane_product_kernel"
FEW_CHANNELS = 16  # of x and of the result, up to which a thread has room for all of a place
_VALUES = 32  # of x in the registers of a thread; more would leave too few threads for loads to overlap
_BLOCK = 128
_ENOUGH_THREADS = MULTIPROCESSORS * 256  # wider accesses do not pay until this many threads have work


def in_planes(view: View) -> bool:
    """Whether neighbouring places [b, k, s] and [b, k, s + 1] of a tensor lie side by side in memory."""
    return view.strides[2] == 1


def keeps_in_registers(weight: View) -> bool:
    """Whether a product has so few channels [n, k] that a thread can keep all those of a place."""
    return max(weight.shape[:2]) <= FEW_CHANNELS


def _plane_product(make: Specializer, call: KernelCall) -> list[KernelCall]:
    x, weight, *biases = call.inputs
    (out,) = call.outputs
    bias = biases[0] if biases else None
    if keeps_in_registers(weight) and in_planes(x) and in_planes(out):
        return [_in_registers(make, call, bias)]
    return _by_cublas(make, call, bias)


def _by_cublas(make: Specializer, call: KernelCall, bias: View | None) -> list[KernelCall]:
    """The calls of a batched product, with what its operands and its epilogue need before and after it."""
    x, weight, (out,) = call.inputs[0], call.inputs[1], call.outputs
    before: list[KernelCall] = []
    if not is_aligned(weight):
        before, weight = _stored(make, call, weight, weight.dtype)
    left = weight.unsqueeze(0).expand((out.shape[0], *weight.shape))
    activation = call.params["activation"]
    inside = activation if cublas_activates(activation, out.dtype) else "none"
    if bias is None or not in_planes(out):
        a, b, result = (view.transpose(1, 2) for view in (x, left, out))
        product = gemm(call, a, b, result, bias=bias, activation=inside)
    else:
        copies, matrix = _stored(make, call, bias.unsqueeze(1).expand(out.shape[1:]), out.dtype)
        product = gemm(call, left, x, out, residual=matrix.unsqueeze(0).expand(out.shape), activation=inside)
        before += copies
    if product is not None:
        return [*before, product, *([] if inside == activation else [_activated(make, call, out)])]
    between = out if bias is None else make.temporary(call.node, out.shape, "float32")
    product = gemm(call, left, x, between)
    assert product is not None, f"cuBLASLt does not take the operands of '{call.node}'"
    after = [] if bias is None else [_sum(make, call, between, bias)]
    return [*before, product, *after, *([] if activation == "none" else [_activated(make, call, out)])]


def _stored(make: Specializer, call: KernelCall, source: View, dtype: str) -> tuple[list[KernelCall], View]:
    """The calls that copy a matrix to rows that begin at multiples of 16 bytes, and the copy.

    A constant is copied ahead of all runs, once for all its readers.
    """
    rows, columns = source.shape
    step = columns + -columns % max(1, 16 // itemsize(dtype))
    subject, is_constant = (source, ("rows", dtype)), make.is_constant(source)
    known = make.cached(subject) if is_constant else None
    if known is not None:
        return [], known
    whole = (make.constant if is_constant else make.temporary)(f"{call.node}.rows", (rows, step), dtype)
    target = whole.slice(1, 0, columns)
    copy = KernelCall("copy_broadcast_kernel", "", (source,), (target,), {"scalars": [None]}, call.node)
    copying = generate_elementwise(Group([copy], [source], [target]), [target], make)
    if not is_constant:
        return [copying], target
    make.ahead.append(copying)
    make.cache(subject, target)
    return [], target


def _sum(make: Specializer, call: KernelCall, product: View, bias: View) -> KernelCall:
    """The call of a kernel for out = product + bias."""
    (out,) = call.outputs
    operands = [product, bias.unsqueeze(1).expand(out.shape)]
    params = {"scalars": [None, None], "alpha": 1.0}
    adding = KernelCall("add_broadcast_kernel", "", tuple(operands), (out,), params, call.node)
    return generate_elementwise(Group([adding], operands, [out]), [out], make)


def _activated(make: Specializer, call: KernelCall, out: View) -> KernelCall:
    """The call of a kernel that activates the result where it lies."""
    rows = out if in_planes(out) else out.transpose(1, 2)
    matrix = rows.reshape((rows.shape[0] * rows.shape[1], rows.shape[2]))
    assert matrix is not None
    return epilogue(make, call, matrix, None, None, matrix)


def _in_registers(make: Specializer, call: KernelCall, bias: View | None) -> KernelCall:
    x, weight, *_ = call.inputs
    (out,) = call.outputs
    pack = min(vector_width(x), vector_width(out), 16 // max(itemsize(x.dtype), itemsize(out.dtype)))
    while pack > 1 and (
        out.shape[2] % pack or pack * x.shape[1] > _VALUES or out.shape[0] * out.shape[2] // pack < _ENOUGH_THREADS
    ):
        pack //= 2
    return make.kernel(
        call,
        "matmul/planes.cu",
        function="plane_product",
        inputs={"x": x, "weight": weight, "bias": bias},
        outputs={"out": out},
        grid=(groups(out.shape[0] * out.shape[2] // pack, _BLOCK), 1, 1),
        block=(_BLOCK, 1, 1),
        constants={"pack": pack, "ahead": all(view is None or make.never_written(view) for view in (weight, bias))},
    )


RULES: dict[str, Rule] = {PLANE_PRODUCT: _plane_product}
