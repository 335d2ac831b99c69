"""Runs of a program one kernel at a time that keep a copy of every tensor that a kernel writes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from npu_compiler.compiled_program import CompiledProgram
from npu_compiler.graph.dtypes import numpy_dtype
from npu_compiler.graph.model import IRGraph, TensorSpec
from npu_compiler.program.kernels import KernelCall
from npu_compiler.program.target import CodegenTarget
from npu_compiler.program.views import View, contiguous_strides, numel
from npu_runtime import Executor, Profiler
from npu_runtime.backend import Backend, DeviceBuffer, Launch, Operand


@dataclass(frozen=True)
class Recorded:
    """The value that a kernel wrote to a tensor of the graph, and the name of that kernel."""

    tensor: str
    value: np.ndarray
    kernel: str


class RecordingBackend(Backend):
    """A wrapper of a backend that downloads, after each launch, the graph tensors that the kernel wrote."""

    def __init__(self, inner: Backend, graph: IRGraph) -> None:
        self.inner = inner
        self.config = inner.config
        self.graph = graph
        self.records: dict[str, Recorded] = {}
        self._tensors = {(node.name, out): graph.tensors[out] for node in graph.nodes for out in node.outputs}

    @property
    def runs_targets(self) -> tuple[str, ...]:
        return self.inner.runs_targets

    @property
    def device(self) -> str:
        return self.inner.device

    @property
    def target(self) -> CodegenTarget:
        return self.inner.target

    def allocate_buffer(
        self, data: np.ndarray, alloc_shape: tuple[int, ...] | None = None, spec: TensorSpec | None = None
    ) -> DeviceBuffer:
        return self.inner.allocate_buffer(data, alloc_shape, spec)

    def allocate_zeros(
        self, shape: tuple[int, ...], dtype: str, alloc_shape: tuple[int, ...] | None = None
    ) -> DeviceBuffer:
        return self.inner.allocate_zeros(shape, dtype, alloc_shape)

    def compile(self, calls: Iterable[KernelCall], sources: Mapping[str, str] = MappingProxyType({})) -> None:
        self.inner.compile(calls, sources)

    def prepare(self, call: KernelCall, inputs: Sequence[Operand], outputs: Sequence[Operand]) -> Launch:
        launch = self.inner.prepare(call, inputs, outputs)

        def recorded() -> None:
            launch()
            self.inner.synchronize()
            for operand in outputs:
                spec = self._tensors.get((call.node, operand.view.buffer))
                view = None if spec is None else _whole(operand.view, spec)
                if spec is not None and view is not None:
                    value = read(operand, view).reshape(spec.shape)
                    self.records.pop(spec.name, None)
                    self.records[spec.name] = Recorded(spec.name, value, call.kernel)

        return recorded

    def synchronize(self) -> None:
        self.inner.synchronize()


def _whole(view: View, spec: TensorSpec) -> View | None:
    """Return a view of the whole tensor of which a call writes a part; None if the strides are ambiguous."""
    if view.shape == spec.shape:
        return view
    if view.numel == numel(spec.shape):
        return view if view.is_contiguous else None
    strides = contiguous_strides(spec.shape)
    return View(view.buffer, spec.shape, strides, 0, view.dtype) if view.strides == strides else None


def read(operand: Operand, view: View) -> np.ndarray:
    """Return a copy of the elements that a view selects in an operand's buffer."""
    memory = operand.memory.guarded(lambda: True)
    memory.shape = memory.alloc_shape
    dtype = numpy_dtype(view.dtype)
    stored = np.ascontiguousarray(memory.to_numpy()).reshape(-1).view(np.uint8)[operand.byte_offset :]
    elements = stored[: stored.size // dtype.itemsize * dtype.itemsize].view(dtype)[view.offset :]
    strides = tuple(stride * dtype.itemsize for stride in view.strides)
    return np.lib.stride_tricks.as_strided(elements, view.shape, strides).copy()


def record(
    program: CompiledProgram,
    graph: IRGraph,
    backend: Backend,
    inputs: Mapping[str, np.ndarray],
    weights: Mapping[str, DeviceBuffer],
) -> dict[str, Recorded]:
    """Run a program one kernel at a time and return tensor name → the last value written to it, in launch order.

    Args:
        program: The compiled program.
        graph: The graph from which the program was generated (the last of `trace_stages`).
        backend: The device.
        inputs: Graph input name → array.
        weights: Result of `load_weights`.
    """
    recording = RecordingBackend(backend, graph)
    Executor(program, recording).run(inputs, weights, Profiler())
    return recording.records
