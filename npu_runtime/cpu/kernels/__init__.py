"""The CPU device's kernels: what each means, in torch. Native ones are in `cpu.native`."""

from npu_runtime.cpu.kernels import (
    conv,
    elementwise,
    indexing,
    integer,
    matmul,
    quantized,
    reductions,
    tensor,
    transformer,
)
from npu_runtime.cpu.kernels.reference import kernel_meaning, reference_launch
from npu_runtime.cpu.kernels.registry import CPU_KERNELS

__all__ = [
    "CPU_KERNELS",
    "conv",
    "elementwise",
    "indexing",
    "integer",
    "kernel_meaning",
    "matmul",
    "quantized",
    "reductions",
    "reference_launch",
    "tensor",
    "transformer",
]
