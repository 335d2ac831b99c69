"""A whole device in one file: memory in NumPy byte arrays, kernels through the CPU reference kernels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch

from npu_compiler import OP_LEVEL, TargetConfig, TensorSpec
from npu_compiler.graph.dtypes import numpy_dtype
from npu_compiler.program.kernels import KernelCall
from npu_compiler.program.views import numel
from npu_runtime import Backend, DeviceBuffer, Operand
from npu_runtime.backend import Launch, Shape
from npu_runtime.buffer import pack_array, storage_name
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

    def allocate_buffer(
        self, data: np.ndarray, alloc_shape: Shape | None = None, spec: TensorSpec | None = None
    ) -> ToyBuffer:
        self.counters["uploads"] += 1
        spec = spec or TensorSpec("buffer", data.shape, str(data.dtype), storage_name(data), alloc_shape)
        stored = pack_array(data, spec)
        return ToyBuffer(
            spec.shape,
            spec.alloc_shape,
            spec.storage or spec.dtype,
            np.frombuffer(bytearray(stored.tobytes()), np.uint8),
        )

    def allocate_zeros(self, shape: Shape, dtype: str, alloc_shape: Shape | None = None) -> ToyBuffer:
        self.counters["zeros"] += 1
        size = numel(alloc_shape or shape) * numpy_dtype(dtype).itemsize
        return ToyBuffer(shape, alloc_shape, dtype, np.zeros(size, np.uint8))

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
