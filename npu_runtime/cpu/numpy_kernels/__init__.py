"""The CPU device's kernels in NumPy, for where PyTorch is not installed and no native kernel handles a call."""

from npu_runtime.cpu.numpy_kernels import elementwise, integer, movement, products, quantized, rows, windows
from npu_runtime.cpu.numpy_kernels.launches import numpy_launch
from npu_runtime.cpu.numpy_kernels.registry import NUMPY_KERNELS

__all__ = [
    "NUMPY_KERNELS",
    "elementwise",
    "integer",
    "movement",
    "numpy_launch",
    "products",
    "quantized",
    "rows",
    "windows",
]
