"""The native kernels' functions on torch tensors, for tests that compare them with PyTorch: they take NumPy arrays."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import torch

from npu_runtime.cpu import native as _native
from npu_runtime.cpu.arrays import BFLOAT16
from npu_runtime.cpu.native import convolutions as _conv


def memory_of(value: Any) -> Any:
    """Return an array over a tensor's memory, in its strides; any other value unchanged."""
    if isinstance(value, (list, tuple)):
        return type(value)(map(memory_of, value))
    if not isinstance(value, torch.Tensor):
        return value
    return value.view(torch.int16).numpy().view(BFLOAT16) if value.dtype == torch.bfloat16 else value.numpy()


class _OnTensors:
    def __init__(self, module: ModuleType) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        if isinstance(value, type) or not callable(value):
            return value

        @functools.wraps(value)
        def on_tensors(*args: Any, **kwargs: Any) -> Any:
            return value(*map(memory_of, args), **kwargs)

        return on_tensors


native, conv = _OnTensors(_native), _OnTensors(_conv)
