"""Matrix products fused with the norm before and the gate after them, as in a language model's feed-forward part."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

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


def with_gate(
    product: KernelCall, call: KernelCall, readers: Counter[str], gated: Mapping[str, str] = GATED
) -> KernelCall | None:
    """The product fused with its gate: `call` multiplies the product's activated first half with its second half.

    None unless `call` is such a gate and the only reader of the product, which has no activation or residual of its
    own.

    Args:
        readers: Buffer → how many operands of calls and program outputs read it.
        gated: The products that can have a gate, each with its name with one.
    """
    decl, out = elementwise_kernel(call), product.outputs[0]
    activation = GATES.get(decl.op.name) if decl is not None else None
    if (
        activation is None
        or product.kernel not in gated
        or product.params.get("activation", "none") != "none"
        or product.params.get("has_residual")
        or len(call.inputs) != 2
        or out.shape[1] % 2
        or readers[out.buffer] != len(call.inputs)
        or not reads_halves(call, out)
    ):
        return None
    half = out.shape[1] // 2
    result = call.outputs[0].reshape((out.shape[0], half)) if call.outputs[0].numel == out.shape[0] * half else None
    if result is None or result.dtype != out.dtype or result.buffer == product.inputs[0].buffer:
        return None
    params = {**product.params, "n": half, "activation": activation}
    kernel = gated[product.kernel]
    return replace(call, kernel=kernel, inputs=product.inputs, outputs=(result,), params=params, flops=product.flops)


def reads_halves(call: KernelCall, product: View) -> bool:
    """Whether the inputs of a call are the first and the second half of a product's columns."""
    half = product.shape[1] // 2
    halves = [product.slice(1, first, first + half) for first in (0, half)]
    return [view.reshape(halves[0].shape) if view.numel == halves[0].numel else None for view in call.inputs] == halves


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
