"""The family of a call (element-wise, convolution, …), which its kernel's declaration states."""

from __future__ import annotations

from npu_compiler.program.elementwise import declaration, elementwise_kernel
from npu_compiler.program.kernels import Family, KernelCall


def classify(call: KernelCall) -> Family:
    """The family of an op-level call, such as element-wise or convolution."""
    return declaration(call).family


def is_elementwise(call: KernelCall) -> bool:
    """Whether each output element depends only on the inputs' elements with the same index."""
    return elementwise_kernel(call) is not None
