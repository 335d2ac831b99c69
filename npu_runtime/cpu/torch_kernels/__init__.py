"""The CPU device's kernels by PyTorch, if it is installed."""

from npu_runtime.cpu.torch_kernels import attention, elementwise, indexing, products, recurrent, rows, windows
from npu_runtime.cpu.torch_kernels.launches import on_one_thread, torch_launch
from npu_runtime.cpu.torch_kernels.registry import TORCH_KERNELS

__all__ = [
    "TORCH_KERNELS",
    "attention",
    "elementwise",
    "indexing",
    "on_one_thread",
    "products",
    "recurrent",
    "rows",
    "torch_launch",
    "windows",
]
