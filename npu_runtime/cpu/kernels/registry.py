"""The CPU kernels by name. A kernel is a function of its operands' tensors and parameters; it writes its outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch

from npu_runtime.cpu.bound_call import Params

Tensors: TypeAlias = Sequence[torch.Tensor]
Kernel: TypeAlias = Callable[[Tensors, Tensors, Params], None]

__all__ = ["CPU_KERNELS", "Kernel", "Params", "Tensors", "cpu_kernel", "to_float"]

CPU_KERNELS: dict[str, Kernel] = {}


def cpu_kernel(*names: str) -> Callable[[Kernel], Kernel]:
    """Decorator: the function is the meaning of these kernels."""

    def add(kernel: Kernel) -> Kernel:
        for name in names:
            CPU_KERNELS[name] = kernel
        return kernel

    return add


def to_float(tensor: torch.Tensor) -> torch.Tensor:
    """16-bit floats as float32; everything else unchanged."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
