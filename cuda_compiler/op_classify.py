"""What kind of work a call is, from how its kernel is declared: no list of ops."""

from __future__ import annotations

from npu_compiler.program.elementwise import declaration, elementwise_kernel
from npu_compiler.program.kernels import Family, KernelCall


def classify(call: KernelCall) -> Family:
    """The family of an op-level call."""
    return declaration(call).family


def is_elementwise(call: KernelCall) -> bool:
    """Whether each output element depends on the inputs' elements at the same place only."""
    return elementwise_kernel(call) is not None
