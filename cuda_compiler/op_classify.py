"""What kind of work a call is, from how its kernel is declared: no list of ops."""

from __future__ import annotations

from typing import Literal

from npu_compiler.program.kernels import KERNELS, KernelCall

Category = Literal[
    "elementwise", "reduction", "norm", "softmax", "matmul", "attention", "indexing", "tensor", "conv", "pool", "rope"
]

# By the file of the op-level kernel.
_FAMILIES: dict[str, Category] = {
    "reduce.metal": "reduction",
    "cumsum.metal": "reduction",
    "sort.metal": "indexing",
    "softmax.metal": "softmax",
    "rmsnorm.metal": "norm",
    "layernorm.metal": "norm",
    "matmul.metal": "matmul",
    "fused_decode_attention.metal": "attention",
    "rope.metal": "rope",
    "embedding.metal": "indexing",
    "index_copy.metal": "indexing",
    "tensor_ops.metal": "tensor",
    "conv_bn_relu.metal": "conv",
    "pool.metal": "pool",
    "upsample.metal": "pool",
}


def classify(call: KernelCall) -> Category:
    """The category of an op-level call."""
    return "elementwise" if is_elementwise(call) else _FAMILIES[KERNELS[call.kernel].source]


def is_elementwise(call: KernelCall) -> bool:
    """Whether each output element depends on the inputs' elements at the same place only."""
    return "op" in call.params
