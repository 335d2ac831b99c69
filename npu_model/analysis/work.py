"""What a kernel call asks of a chip: matrix products, element operations, and the bytes that it reads and writes.

All of it is asked from the kernel's declaration; no kernel is known here by its name.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from npu_compiler.errors import InputError
from npu_compiler.graph.dtypes import itemsize
from npu_compiler.graph.quantization import CODES
from npu_compiler.program.elementwise import ACTIVATIONS, ELEMENTWISE, ElementwiseKernel, declaration
from npu_compiler.program.kernels import Family, KernelCall, KernelDecl, distinct_bytes
from npu_compiler.program.operands import Operand
from npu_compiler.program.products import Product
from npu_model.chip import WIDER

SOFTMAX_OPERATIONS = 5  # of a score: scale, compare, subtract, exponential, sum
REQUANTIZATION_OPERATIONS = 3  # of a result that is stored in 8 bits: scale, round, clamp
_COMPUTED_AS = {"uint8": "int8", "bool": "int8", "int32": "float32", "float8_e4m3": "float8"}


class Role(Enum):
    """What an operand is to the tiles of a call."""

    LEFT = "the rows of a product"
    RIGHT = "the other side of a product, which all rows share"
    ELEMENT = "an element for each result, or for each element of a call that multiplies nothing"


@dataclass(frozen=True)
class Access:
    """Bytes that a call reads from a buffer, or writes to it, each once; elements that a stride of 0 repeats too."""

    buffer: str
    bytes: int
    role: Role


@dataclass(frozen=True)
class Operations:
    """What a call computes, equal for equal layers.

    Attributes:
        kind: One of `npu_model.measured.KINDS`.
        sizes: The sizes that matter for how fast a chip computes it, as `KINDS` names them.
        products: Its matrix products, each of which reads the result of the one before.
        dtype: What is multiplied: the wider dtype of the two sides.
        left_bytes, right_bytes: Bytes of an element of each side; half a byte for 4-bit codes.
        vector_operations: Operations on single elements, multiply-accumulates of products left out.
        row_bytes: Bytes that have to be in SRAM together, such as a row of a norm.
    """

    kind: str
    sizes: tuple[int, ...]
    products: tuple[Product, ...]
    dtype: str
    left_bytes: float
    right_bytes: float
    vector_operations: int
    vector_dtype: str
    row_bytes: int

    @property
    def macs(self) -> int:
        """Multiply-accumulates."""
        return sum(product.macs for product in self.products)


@dataclass(frozen=True)
class Work:
    """What a call asks of a chip: to compute, to read and to write."""

    call: KernelCall
    operations: Operations
    reads: tuple[Access, ...]
    writes: tuple[Access, ...]


def call_work(call: KernelCall, caches: Collection[str] = ()) -> Work:
    """What a call of an op-level program asks of a chip.

    Args:
        caches: Buffers that the program updates in place. Several queries over keys in one are a prompt that begins the
            cache: its masks hide all keys but the prompt's, which devices leave out.

    Raises:
        InputError: the kernel is not an op-level one, so nothing says what it does.
    """
    try:
        kernel = declaration(call)
    except KeyError:
        raise InputError(
            f"kernel '{call.kernel}' at node '{call.node}' is a target's own, of which the NPU model knows nothing: "
            "compile with --target op_level"
        ) from None
    products = kernel.matrix_products(call)
    reads, writes = _accesses(kernel, call, bool(products))
    if len(products) > 1 and call.inputs[1].buffer in caches:
        products, reads = _of_a_prompt(call.inputs[0].shape[-2], products, reads)
    views = kernel.bind(call)
    left, right = (views[0], views[1]) if products else (None, None)
    codes = call.params.get("codes")
    rounded = call.params.get("activations")  # the kernel rounds the rows of x before it multiplies
    left_dtype = _computed_as(rounded or left.dtype) if left is not None else ""
    right_dtype = _computed_as(codes or right.dtype) if right is not None else ""
    right_bits = CODES[codes] if codes else 8 * itemsize(right.dtype) if right is not None else 0
    kind, sizes = _kind_and_sizes(kernel, call, products)
    operations = Operations(
        kind=kind,
        sizes=sizes,
        products=products,
        dtype=_wider(left_dtype, right_dtype) if products else "",
        left_bytes=float(itemsize(left.dtype)) if left is not None else 0.0,
        right_bytes=right_bits / 8,
        vector_operations=_vector_operations(kernel, call, products),
        vector_dtype=_computed_as(call.outputs[0].dtype),
        row_bytes=_row_bytes(kernel, call),
    )
    return Work(call, operations, reads, writes)


def _of_a_prompt(
    tokens: int, products: tuple[Product, ...], reads: tuple[Access, ...]
) -> tuple[tuple[Product, ...], tuple[Access, ...]]:
    """The products and reads of attention over a cache, without the keys that a prompt of so many tokens lacks."""
    scores, results = products
    if not 1 < tokens < scores.n:
        return products, reads
    queries, *others = reads
    seen = [replace(access, bytes=access.bytes * tokens // scores.n) for access in others]
    return (replace(scores, n=tokens), replace(results, k=tokens)), (queries, *seen)


def _kind_and_sizes(kernel: KernelDecl, call: KernelCall, products: Sequence[Product]) -> tuple[str, tuple[int, ...]]:
    if not products:
        largest = max((view.numel for view in (*call.inputs, *call.outputs)), default=0)
        row = call.inputs[0] if call.inputs else call.outputs[0]
        return kernel.family.value, (max(1, largest), max(1, row.shape[-1] if row.shape else 1))
    first = products[0]
    if len(products) > 1:
        return "attention", (first.m, first.n, first.k, first.batch)
    window = first.window
    if window is None:
        return "product", (first.m, first.n, first.k, first.batch, 1 + _activation_operations(call))
    if first.n == 1 < first.batch:
        images = max(1, first.m // window.width**2)
        return "depthwise", (first.batch, images, window.width, window.taps, window.stride)
    return "convolution", (first.m, first.n, first.k // window.taps, window.taps, window.stride)


def _computed_as(dtype: str) -> str:
    return _COMPUTED_AS.get(dtype, dtype)


def _wider(first: str, second: str) -> str:
    return second if second in WIDER[first] and first not in WIDER[second] else first


def _vector_operations(kernel: KernelDecl, call: KernelCall, products: Sequence[Product]) -> int:
    results = sum(view.numel for view in call.outputs)
    if isinstance(kernel, ElementwiseKernel):
        return results * kernel.op.operations
    if not products:
        written = min(results, sum(_touched(call)[1]) // itemsize(call.outputs[0].dtype))
        return max(call.flops, written)
    each = _activation_operations(call)
    each += sum(flag in (True, 1) for name, flag in call.params.items() if name in ("has_bias", "has_residual"))
    each += REQUANTIZATION_OPERATIONS * ("out_scale" in call.params)
    scores = sum(product.batch * product.m * product.n for product in products[:-1])
    return results * each + scores * SOFTMAX_OPERATIONS


def _activation_operations(call: KernelCall) -> int:
    """Element operations of the activation of each result."""
    activation = call.params.get("activation", "none")
    return 0 if activation == "none" else ELEMENTWISE[ACTIVATIONS[activation]].operations


def _row_bytes(kernel: KernelDecl, call: KernelCall) -> int:
    if kernel.family not in (Family.NORM, Family.SOFTMAX):
        return 0
    width = call.outputs[0].shape[-1] if call.outputs[0].shape else 1
    return width * sum(itemsize(view.dtype) for view in (call.inputs[0], call.outputs[0]))


def _accesses(kernel: KernelDecl, call: KernelCall, multiplies: bool) -> tuple[tuple[Access, ...], tuple[Access, ...]]:
    read, written = _touched(call)
    declared = [operand for operand, view in zip(kernel.inputs, kernel.bind(call), strict=False) if view is not None]
    roles = [_role(operand, kernel) if multiplies else Role.ELEMENT for operand in declared]
    reads = tuple(
        Access(view.buffer, size, role) for view, size, role in zip(call.inputs, read, roles, strict=True) if size
    )
    writes = tuple(
        Access(view.buffer, size, Role.ELEMENT) for view, size in zip(call.outputs, written, strict=True) if size
    )
    return reads, writes


def _role(operand: Operand, kernel: KernelDecl) -> Role:
    """By the sizes that a kernel which multiplies declares: its first input holds the rows."""
    left = kernel.inputs[0]
    if operand is left:
        return Role.LEFT
    sizes = operand.sizes or ()
    if any(sizes == output.sizes for output in kernel.outputs):
        return Role.ELEMENT
    return Role.ELEMENT if left.sizes is not None and sizes[:-1] == left.sizes[:-1] else Role.RIGHT


def _touched(call: KernelCall) -> tuple[list[int], list[int]]:
    """Bytes of each input and each output that the call touches; a lookup touches but some rows of its table."""
    read, written = ([distinct_bytes(view) for view in views] for views in (call.inputs, call.outputs))
    if sum(read) + sum(written) > call.bytes_moved:
        if sum(read) > sum(written):
            read = _scaled(read, max(0, call.bytes_moved - sum(written)))
        else:
            written = _scaled(written, max(0, call.bytes_moved - sum(read)))
    return read, written


def _scaled(sizes: Sequence[int], total: int) -> list[int]:
    """Sizes that add up to about `total`: the largest are touched in part, the others whole."""
    largest = max(sizes)
    rest = total - sum(size for size in sizes if size != largest)
    if rest < 0:
        return [size * total // sum(sizes) for size in sizes]
    return [rest // sizes.count(largest) if size == largest else size for size in sizes]
