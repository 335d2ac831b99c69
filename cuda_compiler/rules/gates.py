"""Matrix products fused with the norm before and the gate after them, as in a language model's feed-forward part."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from cuda_compiler.elementwise.grouping import place_of
from cuda_compiler.specialization.activations import activation_text
from npu_compiler.program.elementwise import GATES, elementwise_kernel
from npu_compiler.program.kernels import KERNELS, KernelCall
from npu_compiler.program.views import View

# A product → the same with a gate, whose weight has the rows of the gate, then as many others.
GATED = {
    "matmul_kernel": "gated_matmul_vec_kernel",
    "quantized_matmul_kernel": "quantized_gated_matmul_vec_kernel",
}
# A product by experts → its name with such a gate.
GATED_EXPERTS = {
    "expert_matmul_kernel": "gated_expert_matmul",
    "quantized_expert_matmul_kernel": "quantized_gated_expert_matmul",
}
# Element-wise ops of two operands that are functions of both halves of a product, no product of the two.
_PAIRED = ("clamped_silu_mul",)


def with_gate(
    product: KernelCall,
    call: KernelCall,
    readers: Counter[str],
    gated: Mapping[str, str] = GATED,
    paired: bool = False,
) -> KernelCall | None:
    """The product fused with its gate: `call` multiplies the product's activated first half with its second half.

    None unless `call` is such a gate and the only reader of the product, which has no activation or residual of its
    own.

    Args:
        readers: Buffer → how many operands of calls and program outputs read it.
        gated: The products that can have a gate, each with its name with one.
        paired: Whether the halves' columns may alternate, which the result's parameter `interleaved` says then, and
            whether the gate may be a function of both halves, which is the result's activation.
    """
    out, activation = product.outputs[0], _activation(call, paired)
    interleaved = paired and len(call.inputs) == 2 and _reads_alternately(call, out)
    if (
        activation is None
        or product.kernel not in gated
        or product.params.get("activation", "none") != "none"
        or product.params.get("has_residual")
        or len(call.inputs) != 2
        or out.shape[1] % 2
        or readers[out.buffer] != len(call.inputs)
        or not (interleaved or reads_halves(call, out))
    ):
        return None
    half = out.shape[1] // 2
    result = call.outputs[0].reshape((out.shape[0], half)) if call.outputs[0].numel == out.shape[0] * half else None
    if result is None or result.dtype != out.dtype or result.buffer == product.inputs[0].buffer:
        return None
    params = {**product.params, "n": half, "activation": activation}
    params |= {"interleaved": interleaved} if paired else {}
    kernel = gated[product.kernel]
    return replace(call, kernel=kernel, inputs=product.inputs, outputs=(result,), params=params, flops=product.flops)


def _activation(call: KernelCall, paired: bool) -> str | None:
    """The activation of a call's first operand, which it multiplies with the second one; None for other calls.

    Args:
        paired: Whether a function of both operands is an activation too.
    """
    decl = elementwise_kernel(call)
    if decl is not None and paired and decl.op.name in _PAIRED:
        return activation_text(decl.op, call.params)
    return None if decl is None else GATES.get(decl.op.name)


def reads_halves(call: KernelCall, product: View) -> bool:
    """Whether the inputs of a call are the first and the second half of a product's columns."""
    half = product.shape[1] // 2
    return _reads(call, [product.slice(1, first, first + half) for first in (0, half)])


def _reads_alternately(call: KernelCall, product: View) -> bool:
    """Whether the inputs of a call are the columns of a product with even numbers, and those with odd ones."""
    (rows, columns), (row, column) = product.shape, product.strides
    even = replace(product, shape=(rows, columns // 2), strides=(row, 2 * column))
    return _reads(call, [even, replace(even, offset=product.offset + column)])


def _reads(call: KernelCall, wanted: list[View]) -> bool:
    return [place_of(view) for view in call.inputs] == [place_of(view) for view in wanted]


def template_operands(
    call: KernelCall, inputs: Mapping[str, View | None], norm: KernelCall | None
) -> tuple[dict[str, View | None], dict[str, bool | int | float]]:
    """The inputs of a product's template, and the constants that say which norm and gate it applies.

    Args:
        inputs: The product's inputs by name.
        norm: The RMSNorm that computes x, without an offset to its gains, for the kernel to apply; None for none.
    """
    x, gain = inputs["x"], None
    if norm is not None:
        x, gain = KERNELS[norm.kernel].bind(norm)[:2]
    constants: dict[str, bool | int | float] = {
        "gated": call.kernel in GATED.values(),
        "normed": norm is not None,
        "norm_eps": float(norm.params["eps"]) if norm is not None else 0.0,
    }
    return {**inputs, "x": x, "gain": gain}, constants
