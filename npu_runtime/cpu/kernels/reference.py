"""A call as its meaning in torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from npu_compiler.errors import DeviceError
from npu_compiler.program.elementwise import ELEMENTWISE_KERNELS
from npu_compiler.program.kernels import KernelCall
from npu_runtime.cpu.bound_call import ArrayCall, BoundCall, reporting
from npu_runtime.cpu.kernels.elementwise import elementwise_meaning
from npu_runtime.cpu.kernels.registry import CPU_KERNELS, Kernel, Tensors
from npu_runtime.hardware import Launch
from npu_runtime.torch_arrays import view_tensor

_SMALL = 2**18  # elements of all operands


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


def on_tensors(call: ArrayCall) -> BoundCall[torch.Tensor]:
    """The call with its operands as torch tensors over the same memory."""
    inputs, outputs = (list(map(view_tensor, arrays)) for arrays in (call.inputs, call.outputs))
    return BoundCall(call.call, inputs, outputs, call.operands)


def bound_reference(call: ArrayCall, among_native: bool) -> Launch:
    """The torch meaning of a call on its memory.

    Args:
        among_native: Whether native kernels run before and after it. PyTorch's threads help little with a small call,
            and keep spinning beside the native kernels' for a while: it then runs on one thread.

    Raises:
        DeviceError: the program names a kernel that this device does not have.
    """
    tensors = on_tensors(call)
    launch = reference_launch(call.call, tensors.inputs, tensors.outputs)
    is_small = sum(x.size for x in (*call.inputs, *call.outputs)) <= _SMALL
    return _on_one_thread(launch) if among_native and is_small else launch


def _on_one_thread(launch: Launch) -> Launch:
    def run() -> None:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            launch()
        finally:
            torch.set_num_threads(threads)

    return run
