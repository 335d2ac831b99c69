"""The CPU device's reference kernels, which define the meaning of each kernel, in NumPy.

Faster ones are in `cpu.native` and `cpu.torch_kernels`.
"""

from npu_runtime.cpu.kernels import elementwise, integer, movement, products, quantized, recurrent, rows, windows
from npu_runtime.cpu.kernels.launches import bound_reference, reference_launch
from npu_runtime.cpu.kernels.registry import CPU_KERNELS

__all__ = [
    "CPU_KERNELS",
    "bound_reference",
    "elementwise",
    "integer",
    "movement",
    "products",
    "quantized",
    "recurrent",
    "reference_launch",
    "rows",
    "windows",
]
