"""PyTorch's kernels by name. A kernel is a function of its operands' tensors and parameters; it writes its outputs.

They are for calls that no native kernel handles, if PyTorch is faster than NumPy. The reference in `cpu.kernels`
defines what a kernel computes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch

from npu_runtime.cpu.bound_call import Params

Tensors: TypeAlias = Sequence[torch.Tensor]
Kernel: TypeAlias = Callable[[Tensors, Tensors, Params], None]

__all__ = ["TORCH_KERNELS", "Kernel", "Params", "Tensors", "to_float", "torch_kernel"]

TORCH_KERNELS: dict[str, Kernel] = {}


def torch_kernel(*names: str) -> Callable[[Kernel], Kernel]:
    """Return a decorator that registers a function as PyTorch's version of these kernels."""

    def add(kernel: Kernel) -> Kernel:
        TORCH_KERNELS.update(dict.fromkeys(names, kernel))
        return kernel

    return add


def to_float(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of 16-bit floats as float32; any other tensor unchanged."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
