"""A whole device in one file: memory in NumPy byte arrays, kernels through the CPU reference kernels.

    python examples/toy_device.py

Shows what a new device has to define, and that weights, executor and channel padding work on it unchanged. Prints how
often the executor asked the device for what in three runs (everything is prepared once), and that the outputs are those
of the CPU device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from npu_compiler import OP_LEVEL, TargetConfig, compile
from npu_compiler.graph.dtypes import itemsize, numpy_dtype
from npu_compiler.program.kernels import KernelCall
from npu_compiler.program.views import numel
from npu_runtime import Backend, Device, DeviceBuffer, Executor, Operand, load_weights, register_device
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


def window(operand: Operand) -> np.ndarray:
    """The operand's view as an array over the buffer's own bytes."""
    view, dtype = operand.view, numpy_dtype(operand.view.dtype)
    start = operand.byte_offset + view.offset * dtype.itemsize
    strides = [step * dtype.itemsize for step in view.strides]
    return np.ndarray(view.shape, dtype, operand.memory.native_handle, start, strides)


def main() -> None:
    from npu_sim.extract import extract_ir

    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 6 * 6, 10)).eval()
    program = compile(extract_ir(model, (torch.empty(1, 3, 8, 8),)))
    image = np.random.default_rng(0).standard_normal((1, 3, 8, 8), np.float32)

    register_device("toy", ToyBackend)
    results = []
    for device in (Device("toy"), Device("cpu")):
        executor, weights = Executor(program, device), load_weights(model.state_dict(), program, device)
        for _ in range(3):
            outputs = executor.run({program.input_specs[0].name: image}, weights)
        results.append(outputs[program.output_specs[0].name].to_numpy())
        if isinstance(device.backend, ToyBackend):
            print(f"{len(program.kernels)} kernels, three runs:", dict(device.backend.counters))
    print("largest difference from the CPU device:", np.abs(np.subtract(*results, dtype=np.float32)).max())


if __name__ == "__main__":
    main()
