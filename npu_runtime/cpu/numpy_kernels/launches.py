"""A call as its kernel in NumPy."""

from __future__ import annotations

import numpy as np

from npu_compiler.errors import DeviceError
from npu_compiler.program.elementwise import elementwise_kernel
from npu_compiler.program.kernels import KERNELS, Family
from npu_runtime.cpu.arrays import HALVES
from npu_runtime.cpu.bound_call import ArrayCall, reporting
from npu_runtime.cpu.numpy_kernels.elementwise import bound_elementwise
from npu_runtime.cpu.numpy_kernels.registry import NUMPY_KERNELS, Kernel, as_float32
from npu_runtime.hardware import Launch
from npu_runtime.pytorch import INSTALL

_HEAVY = (Family.MATMUL, Family.CONV)


def numpy_launch(call: ArrayCall) -> Launch:
    """Bind a call to its memory: the result runs its kernel in NumPy.

    Raises:
        DeviceError: the program names a kernel that has no form in NumPy.
    """
    name = call.call.kernel
    if name in NUMPY_KERNELS:
        run = _bound(NUMPY_KERNELS[name], call)
    elif (elementwise := elementwise_kernel(call.call)) is not None:
        run = bound_elementwise(elementwise.op, call.inputs, call.out, call.params)
    else:
        raise DeviceError(f"the CPU device has no kernel '{name}' without PyTorch: {INSTALL}, if that has it")
    return reporting(call.call, run)


def _bound(kernel: Kernel, call: ArrayCall) -> Launch:
    declared = KERNELS.get(call.call.kernel)
    widens = declared is not None and declared.family in _HEAVY
    inputs = [_widened(call, i) if widens and call.is_constant(i) else x for i, x in enumerate(call.inputs)]

    def run() -> None:
        with np.errstate(all="ignore"):
            kernel(inputs, call.outputs, call.params)

    return run


def _widened(call: ArrayCall, index: int) -> np.ndarray:
    """A constant 16-bit operand in float32, made once."""
    array = call.inputs[index]
    if array.dtype not in HALVES:
        return array
    wide: np.ndarray = call.prepared(index, "float32 array", as_float32)
    return wide
