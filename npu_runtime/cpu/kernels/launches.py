"""Launches of reference kernels."""

from __future__ import annotations

from functools import partial

import numpy as np

from npu_compiler.errors import DeviceError
from npu_compiler.program.elementwise import elementwise_kernel
from npu_compiler.program.kernels import KERNELS, Family, KernelCall
from npu_runtime.cpu.arrays import HALVES
from npu_runtime.cpu.bound_call import ArrayCall, Params, reporting
from npu_runtime.cpu.kernels.elementwise import bound_elementwise
from npu_runtime.cpu.kernels.registry import CPU_KERNELS, Arrays, Kernel, as_float32
from npu_runtime.hardware import Launch

_HEAVY = (Family.MATMUL, Family.CONV)


def reference_launch(call: KernelCall, inputs: Arrays, outputs: Arrays) -> Launch:
    """A launch of a call's reference kernel on arrays.

    Raises:
        DeviceError: the program names a kernel that this device does not have.
    """
    if call.kernel in CPU_KERNELS:
        return reporting(call, partial(_run, CPU_KERNELS[call.kernel], inputs, outputs, call.params))
    elementwise = elementwise_kernel(call)
    if elementwise is None:
        raise DeviceError(f"the CPU device has no kernel '{call.kernel}'")
    return reporting(call, bound_elementwise(elementwise.op, inputs, outputs[0], call.params))


def _run(kernel: Kernel, inputs: Arrays, outputs: Arrays, params: Params) -> None:
    with np.errstate(all="ignore"):
        kernel(inputs, outputs, params)


def bound_reference(call: ArrayCall) -> Launch:
    """A launch of a call's reference kernel on the call's memory, with 16-bit constants widened once.

    Raises:
        DeviceError: the program names a kernel that this device does not have.
    """
    declared = KERNELS.get(call.call.kernel)
    widens = declared is not None and declared.family in _HEAVY
    inputs = [_widened(call, i) if widens and call.is_constant(i) else x for i, x in enumerate(call.inputs)]
    return reference_launch(call.call, inputs, call.outputs)


def _widened(call: ArrayCall, index: int) -> np.ndarray:
    """A constant 16-bit operand in float32, converted once; any other operand as it is."""
    array = call.inputs[index]
    if array.dtype not in HALVES:
        return array
    wide: np.ndarray = call.prepared(index, "float32 array", as_float32)
    return wide
