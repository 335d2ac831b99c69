"""A whole device in one file: memory in NumPy byte arrays, kernels through the CPU reference kernels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch

from npu_compiler import OP_LEVEL, TargetConfig
from npu_compiler.graph.dtypes import itemsize, numpy_dtype
from npu_compiler.program.kernels import KernelCall
from npu_compiler.program.views import numel
from npu_runtime import Backend, DeviceBuffer, Operand
from npu_runtime.backend import Launch, Shape
from npu_runtime.cpu.kernels import reference_launch


class ToyBuffer(DeviceBuffer):
    """`native_handle` is a flat array of bytes."""

    native_handle: np.ndarray

    def _download(self) -> np.ndarray:
        return self.native_handle.view(numpy_dtype(self.dtype)).reshape(self.alloc_shape).copy()

    def _upload(self, data: np.ndarray) -> None:
        self.native_handle[:] = np.frombuffer(data.tobytes(), np.uint8)

    def _clone(self) -> ToyBuffer:
        return ToyBuffer(self.shape, self.alloc_shape, self.dtype, self.native_handle.copy())


class ToyBackend(Backend):
    """Counts what the executor asks for, so that tests can hold it to asking once."""

    config: TargetConfig = OP_LEVEL

    def __init__(self) -> None:
        self.counters: Counter[str] = Counter()

    @property
    def device(self) -> str:
        return "toy"

    def allocate(self, shape: Shape, dtype: str, alloc_shape: Shape | None = None) -> ToyBuffer:
        self.counters["buffers"] += 1
        size = numel(shape if alloc_shape is None else alloc_shape) * itemsize(dtype)
        return ToyBuffer(shape, alloc_shape, dtype, np.empty(size, np.uint8))

    def prepare(self, call: KernelCall, inputs: Sequence[Operand], outputs: Sequence[Operand]) -> Launch:
        self.counters["prepared"] += 1
        launch = reference_launch(call, [window(x) for x in inputs], [window(x) for x in outputs])

        def counted() -> None:
            self.counters["launched"] += 1
            launch()

        return counted


def window(operand: Operand) -> torch.Tensor:
    """The operand's view as a torch tensor over the buffer's own bytes."""
    view = operand.view
    dtype: torch.dtype = getattr(torch, view.dtype)
    raw = torch.from_numpy(operand.memory.native_handle)[operand.byte_offset :]
    typed = raw[: raw.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
    return typed.as_strided(view.shape, view.strides, typed.storage_offset() + view.offset)
