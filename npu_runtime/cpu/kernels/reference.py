"""A call as its meaning in torch."""

from __future__ import annotations

from collections.abc import Callable

from npu_compiler.errors import DeviceError
from npu_compiler.ops import elementwise_kernel
from npu_compiler.program.kernels import KernelCall
from npu_runtime.cpu.kernels.elementwise import elementwise_meaning
from npu_runtime.cpu.kernels.registry import CPU_KERNELS, Tensors


def reference_launch(call: KernelCall, inputs: Tensors, outputs: Tensors) -> Callable[[], None]:
    """Bind a call to tensors: the result runs the kernel's torch meaning.

    Raises:
        DeviceError: the program names a kernel that this device does not have.
    """
    elementwise = elementwise_kernel(call)
    kernel = CPU_KERNELS.get(call.kernel) if elementwise is None else elementwise_meaning(elementwise.op)
    if kernel is None:
        raise DeviceError(f"the CPU device has no kernel '{call.kernel}'")
    chosen, params, name, node = kernel, call.params, call.kernel, call.node

    def launch() -> None:
        try:
            chosen(inputs, outputs, params)
        except (RuntimeError, IndexError) as error:
            raise DeviceError(f"kernel '{name}' (node '{node}') failed: {error}") from error

    return launch
