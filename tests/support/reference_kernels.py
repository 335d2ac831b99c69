"""The CPU device's reference kernels on torch tensors, for tests that keep a device's memory in tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from native_on_tensors import memory_of

from npu_compiler.program.kernels import KernelCall
from npu_runtime.cpu import kernels


def reference_launch(
    call: KernelCall, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
) -> Callable[[], None]:
    """`cpu.kernels.reference_launch` on the tensors' memory."""
    return kernels.reference_launch(call, [memory_of(x) for x in inputs], [memory_of(x) for x in outputs])
