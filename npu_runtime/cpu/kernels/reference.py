"""A call as its meaning in torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from npu_compiler.errors import DeviceError
from npu_compiler.program.elementwise import ELEMENTWISE_KERNELS
from npu_compiler.program.kernels import KernelCall
from npu_runtime.cpu.kernels.elementwise import elementwise_meaning
from npu_runtime.cpu.kernels.registry import CPU_KERNELS, Kernel, Tensors


def kernel_meaning(name: str) -> Kernel | None:
    """What a kernel means, in torch; an element-wise one means what the table of element-wise ops says."""
    if name not in CPU_KERNELS and name in ELEMENTWISE_KERNELS:
        return elementwise_meaning(ELEMENTWISE_KERNELS[name].op)
    return CPU_KERNELS.get(name)


def reference_launch(call: KernelCall, inputs: Tensors, outputs: Tensors) -> Callable[[], None]:
    """Bind a call to tensors: the result runs the kernel's torch meaning.

    Raises:
        DeviceError: the program names a kernel that this device does not have.
    """
    kernel = kernel_meaning(call.kernel)
    if kernel is None:
        raise DeviceError(f"the CPU device has no kernel '{call.kernel}'")
    return reporting(call, partial(kernel, inputs, outputs, call.params))


def reporting(call: KernelCall, run: Callable[[], None]) -> Callable[[], None]:
    """`run`, with torch's errors as a `DeviceError` that names the call."""
    name, node = call.kernel, call.node

    def launch() -> None:
        try:
            run()
        except (RuntimeError, IndexError, TypeError, ValueError, OverflowError) as error:
            raise DeviceError(f"kernel '{name}' (node '{node}') failed: {error}") from error

    return launch
