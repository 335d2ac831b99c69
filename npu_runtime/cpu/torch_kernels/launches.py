"""Launches of PyTorch's kernels."""

from __future__ import annotations

from functools import partial

import torch

from npu_compiler.program.elementwise import ELEMENTWISE_KERNELS
from npu_runtime.cpu.bound_call import ArrayCall, BoundCall, reporting
from npu_runtime.cpu.spinning_threads import takes_one_thread
from npu_runtime.cpu.torch_kernels.elementwise import elementwise_by_torch
from npu_runtime.cpu.torch_kernels.registry import TORCH_KERNELS, Kernel
from npu_runtime.hardware import Launch
from npu_runtime.torch_arrays import view_tensor


def on_tensors(call: ArrayCall) -> BoundCall[torch.Tensor]:
    """The call with its operands as torch tensors over the same memory."""
    inputs, outputs = (list(map(view_tensor, arrays)) for arrays in (call.inputs, call.outputs))
    return BoundCall(call.call, inputs, outputs, call.operands)


def torch_launch(call: ArrayCall, among_native: bool) -> Launch | None:
    """A launch of PyTorch's kernel for a call on the call's memory; None if there is none of that name.

    Args:
        among_native: As for `takes_one_thread`.
    """
    kernel = _kernel(call.call.kernel)
    if kernel is None:
        return None
    tensors = on_tensors(call)
    launch = reporting(call.call, partial(kernel, tensors.inputs, tensors.outputs, call.params))
    return on_one_thread(launch) if takes_one_thread(call, among_native) else launch


def _kernel(name: str) -> Kernel | None:
    """PyTorch's kernel of that name, which may be an element-wise op's; None if there is none."""
    if name not in TORCH_KERNELS and name in ELEMENTWISE_KERNELS:
        return elementwise_by_torch(ELEMENTWISE_KERNELS[name].op)
    return TORCH_KERNELS.get(name)


def on_one_thread(launch: Launch) -> Launch:
    """Return a launch during which PyTorch has one thread."""

    def run() -> None:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            launch()
        finally:
            torch.set_num_threads(threads)

    return run
