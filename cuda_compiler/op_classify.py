"""The family of a call (element-wise, convolution, …), which its kernel's declaration states."""

from __future__ import annotations

from npu_compiler.program.elementwise import ELEMENTWISE_KERNELS, elementwise_kernel
from npu_compiler.program.kernels import KERNELS, Family, KernelCall


def classify(call: KernelCall) -> Family | None:
    """The family of an op-level call, such as element-wise; None for a call that only this target makes."""
    decl = ELEMENTWISE_KERNELS.get(call.kernel) or KERNELS.get(call.kernel)
    return None if decl is None else decl.family


def is_elementwise(call: KernelCall) -> bool:
    """Whether each output element depends only on the inputs' elements with the same index."""
    return elementwise_kernel(call) is not None
