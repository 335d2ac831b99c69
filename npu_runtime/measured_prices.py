"""`MeasuredPrices`: the time of nodes on a real device and in PyTorch beside it, measured on zeros."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from npu_compiler.compiled_program import CompiledProgram
from npu_compiler.errors import DeviceError
from npu_compiler.graph.dtypes import numpy_dtype
from npu_compiler.graph.model import IRGraph, OpNode, TensorSpec
from npu_compiler.ops.registry import find_op
from npu_compiler.partitioning.lone_nodes import alone, signature
from npu_compiler.partitioning.prices import Estimate, Link, Prices
from npu_runtime.cpu_fallback import CPUPartition
from npu_runtime.executor import Executor
from npu_runtime.hardware import Hardware
from npu_runtime.profiler import Profiler
from npu_runtime.weight_loader import load_weights

_REPEATS = 5
_SMALL, _LARGE = (64,), (1 << 20,)  # float32 elements of the transfers that are timed


class MeasuredPrices(Prices):
    """The measured times of a device, of PyTorch, and of copies between the two.

    Args:
        weights: Checkpoint key → tensor, for all weights of the graphs that are priced.
        torch_device: The torch device of tensors; a backend that shares its memory needs no copies.
    """

    def __init__(self, backend: Hardware, weights: Mapping[str, Any], torch_device: str = "cpu") -> None:
        self._backend, self._weights, self._torch = backend, weights, torch.device(torch_device)
        self._nodes: dict[Hashable, float] = {}
        self.device = backend.device
        self.link = self._measured_link()

    def calls(self, program: CompiledProgram) -> Sequence[float]:
        if not program.kernels:
            return []
        executor, profiler = Executor(program, self._backend), Profiler()
        loaded = load_weights(self._weights, program, self._backend, strict=False)
        inputs = {spec.name: self._backend.allocate_buffer(_zeros(spec), spec=spec) for spec in program.input_specs}

        def run() -> None:
            executor.run(inputs, loaded)
            self._backend.synchronize()

        total = max(0.0, shortest(run) - self.link.launch)
        executor.run(inputs, loaded, profiler)
        times = profiler.seconds_per_call(program.kernels)
        spent = sum(times) or 1.0
        return [total * seconds / spent for seconds in times]

    def if_supported(self, node: OpNode, graph: IRGraph, compute_dtype: str) -> Estimate:
        """The time of the node in PyTorch, as an assumption: the time of a kernel that does not exist is unknown."""
        return Estimate(self.host(node, graph), True)

    def host(self, node: OpNode, graph: IRGraph) -> float:
        op = find_op(node.op_type)
        if node.base == "getitem" or (op is not None and op.view is not None):
            return 0.0
        key = signature(node, graph)
        if key not in self._nodes:
            self._nodes[key] = self._measured_node(node, graph)
        return self._nodes[key]

    def _measured_node(self, node: OpNode, graph: IRGraph) -> float:
        part = alone(node, graph)
        try:
            partition = CPUPartition(part, self._weights, str(self._torch))
            inputs = torch_zeros(part, self._torch)
            return shortest(lambda: self._run_in_pytorch(partition, inputs))
        except (DeviceError, RuntimeError):  # it does not take zeros
            return 0.0

    def _run_in_pytorch(self, partition: CPUPartition, inputs: Mapping[str, torch.Tensor]) -> None:
        partition.run_tensors(inputs)
        wait_for(self._torch)

    def _measured_link(self) -> Link:
        backend = self._backend

        def copied(shape: tuple[int, ...]) -> float:
            array = np.zeros(shape, np.float32)
            buffer = backend.allocate_buffer(array)

            def there_and_back() -> None:
                buffer.write(array)
                buffer.to_numpy()

            return shortest(there_and_back) / 2

        small, large = copied(_SMALL), copied(_LARGE)
        return Link(4 * (_LARGE[0] - _SMALL[0]) / max(1e-9, large - small), small, small)


def torch_zeros(graph: IRGraph, device: torch.device) -> dict[str, torch.Tensor]:
    """A tensor of zeros for every input of a graph, by name."""
    specs = [graph.tensors[name] for name in graph.inputs]
    return {spec.name: torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype), device=device) for spec in specs}


def wait_for(device: torch.device) -> None:
    """Wait until PyTorch's work on a device has ended."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def shortest(run: Callable[[], object]) -> float:
    """The shortest of a few runs in seconds; the first run, which prepares, does not count."""
    run()
    times = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def _zeros(spec: TensorSpec) -> np.ndarray:
    return np.zeros(spec.shape, numpy_dtype(spec.dtype))


__all__ = ["MeasuredPrices", "shortest", "torch_zeros", "wait_for"]
