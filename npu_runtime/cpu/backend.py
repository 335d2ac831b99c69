"""`CPUBackend`: any CPU as a device. Kernels mean what `kernels` says; native ones take over where they exist."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from npu_compiler.errors import DeviceError
from npu_compiler.graph.model import TensorSpec
from npu_compiler.program.kernels import KernelCall
from npu_compiler.program.views import numel
from npu_compiler.target_config import METAL_GPU, OP_LEVEL, TargetConfig
from npu_runtime.backend import Backend, DeviceBuffer, Launch, Operand, Shape
from npu_runtime.buffer import pack_array, storage_name
from npu_runtime.cpu.kernels import native_launch, reference_launch
from npu_runtime.cpu.native import NativeLaunch, NativeSequence
from npu_runtime.cpu.native import available as native_available

TORCH_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int32": torch.int32,
    "bool": torch.bool,
    "uint8": torch.uint8,
}


class CPUBuffer(DeviceBuffer):
    """Memory in a torch tensor; `native_handle` is the flat tensor of `alloc_shape`'s elements."""

    native_handle: torch.Tensor

    def _download(self) -> np.ndarray:
        return tensor_to_numpy(self.native_handle).reshape(self.alloc_shape).copy()

    def _upload(self, data: np.ndarray) -> None:
        self.native_handle.copy_(numpy_to_tensor(data).reshape(-1))

    def _clone(self) -> CPUBuffer:
        return CPUBuffer(self.shape, self.alloc_shape, self.dtype, self.native_handle.clone())

    def tensor(self) -> torch.Tensor:
        """The data as a torch tensor of `shape` that shares this memory."""
        whole = self.native_handle.reshape(self.alloc_shape)
        return whole[tuple(slice(size) for size in self.shape)]

    def __dlpack__(self, **kwargs: Any) -> Any:
        self.check_current()
        return self.tensor().__dlpack__(**kwargs)

    def __dlpack_device__(self) -> tuple[Any, int]:
        return self.tensor().__dlpack_device__()


class CPUBackend(Backend):
    """Runs the op-level program on the CPU.

    Args:
        native: Use the native kernels where they exist; by default unless `NPU_SIM_NATIVE=0`.
    """

    config: TargetConfig = OP_LEVEL
    runs_targets = (OP_LEVEL.name, METAL_GPU.name)

    def __init__(self, native: bool | None = None) -> None:
        self.native = os.environ.get("NPU_SIM_NATIVE", "1") != "0" if native is None else native
        # The first process on a machine compiles the native kernels; that belongs here, not in a run.
        self.native = self.native and native_available()

    @property
    def device(self) -> str:
        kernels = "native and torch kernels" if self.native else "torch kernels"
        return f"CPU, {torch.get_num_threads()} threads, {kernels}"

    def allocate_buffer(
        self, data: np.ndarray, alloc_shape: Shape | None = None, spec: TensorSpec | None = None
    ) -> CPUBuffer:
        if spec is None:
            storage = storage_name(data)
            spec = TensorSpec("buffer", data.shape, str(data.dtype), storage, alloc_shape)
        stored = pack_array(data, spec)
        flat = numpy_to_tensor(stored).reshape(-1).clone()
        return CPUBuffer(spec.shape, spec.alloc_shape, spec.storage or spec.dtype, flat)

    def allocate_zeros(self, shape: Shape, dtype: str, alloc_shape: Shape | None = None) -> CPUBuffer:
        if dtype not in TORCH_DTYPES:
            raise DeviceError(f"the device does not store {dtype}; it stores {', '.join(sorted(TORCH_DTYPES))}")
        memory = alloc_shape if alloc_shape is not None else shape
        try:
            flat = torch.zeros(numel(memory), dtype=TORCH_DTYPES[dtype])
        except (RuntimeError, MemoryError) as error:
            raise DeviceError(f"out of memory: cannot allocate {dtype}{list(memory)}: {error}") from error
        return CPUBuffer(shape, alloc_shape, dtype, flat)

    def prepare(self, call: KernelCall, inputs: Sequence[Operand], outputs: Sequence[Operand]) -> Launch:
        sources, targets = [bind(x) for x in inputs], [bind(x) for x in outputs]
        launch = native_launch(call, inputs, sources, targets) if self.native else None
        return launch if launch is not None else reference_launch(call, sources, targets)

    def sequence(self, launches: Sequence[Launch]) -> Launch:
        """Runs of native launches become one foreign call each."""
        steps: list[Launch] = []
        run: list[NativeLaunch] = []
        for launch in (*launches, None):
            if isinstance(launch, NativeLaunch):
                run.append(launch)
                continue
            if run:
                steps.append(NativeSequence(run) if len(run) > 1 else run[0])
                run = []
            if launch is not None:
                steps.append(launch)
        fixed = tuple(steps)

        def execute() -> None:
            for step in fixed:
                step()

        return execute


def bind(operand: Operand) -> torch.Tensor:
    """The operand's view as a torch tensor over its buffer's memory."""
    view = operand.view
    flat: torch.Tensor = operand.memory.native_handle
    dtype = TORCH_DTYPES[view.dtype]
    if flat.dtype != dtype:
        flat = flat[operand.byte_offset :].view(torch.uint8)
        usable = flat.numel() // dtype.itemsize * dtype.itemsize
        flat = flat[:usable].view(dtype)
    return flat.as_strided(view.shape, view.strides, flat.storage_offset() + view.offset)


def numpy_to_tensor(array: np.ndarray) -> torch.Tensor:
    """A torch tensor that shares the array's memory; bfloat16 included."""
    array = np.asarray(array, order="C")
    if not array.flags.writeable:
        array = array.copy()
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def tensor_to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """A NumPy array that shares the tensor's memory; bfloat16 as ml_dtypes.bfloat16."""
    tensor = tensor.detach().contiguous()
    if tensor.dtype == torch.bfloat16:
        import ml_dtypes

        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    array: np.ndarray = tensor.numpy()
    return array
