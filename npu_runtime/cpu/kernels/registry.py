"""The CPU kernels by name. A kernel is a function of its operands' tensors and parameters; it writes its outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from npu_compiler.errors import DeviceError
from npu_compiler.program.kernels import KernelCall

Params: TypeAlias = Mapping[str, Any]
Tensors: TypeAlias = Sequence[torch.Tensor]
Kernel: TypeAlias = Callable[[Tensors, Tensors, Params], None]

CPU_KERNELS: dict[str, Kernel] = {}


def cpu_kernel(*names: str) -> Callable[[Kernel], Kernel]:
    """Decorator: the function is the meaning of these kernels."""

    def add(kernel: Kernel) -> Kernel:
        for name in names:
            CPU_KERNELS[name] = kernel
        return kernel

    return add


def reference_launch(call: KernelCall, inputs: Tensors, outputs: Tensors) -> Callable[[], None]:
    """Bind a call to tensors: the result runs the kernel's torch meaning.

    Raises:
        DeviceError: the program names a kernel that this device does not have.
    """
    kernel = CPU_KERNELS.get("elementwise" if "op" in call.params else call.kernel)
    if kernel is None:
        raise DeviceError(f"the CPU device has no kernel '{call.kernel}'")
    chosen, params, name, node = kernel, call.params, call.kernel, call.node

    def launch() -> None:
        try:
            chosen(inputs, outputs, params)
        except (RuntimeError, IndexError) as error:
            raise DeviceError(f"kernel '{name}' (node '{node}') failed: {error}") from error

    return launch


def to_float(tensor: torch.Tensor) -> torch.Tensor:
    """16-bit floats as float32; everything else unchanged."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
