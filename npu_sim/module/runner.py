"""Running a partition plan on torch tensors: device partitions on a backend, the others in PyTorch."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from npu_compiler.compiled_program import CompiledProgram
from npu_compiler.graph.quantization import QuantizedArray
from npu_compiler.partitioner import Partition, PartitionPlan
from npu_runtime.buffer import DeviceBuffer
from npu_runtime.cpu_fallback import CPUPartition
from npu_runtime.executor import Executor
from npu_runtime.hardware import Hardware
from npu_runtime.program_run import Arena, BoundProgram
from npu_runtime.torch_arrays import numpy_to_tensor
from npu_runtime.weight_loader import load_weights
from npu_sim.module.ports import TensorPorts

if TYPE_CHECKING:
    from npu_sim.module.gpu_ports import GPUPorts

Values = dict[str, torch.Tensor]


@dataclass
class Loaded:
    """Weights and memory that all programs of a module share on a device.

    Attributes:
        backend: The device.
        weights: Checkpoint key → the module's tensor, or a matrix quantized to few bits.
        device: The torch device of the module's tensors, inputs and results.
        arena: Memory for intermediate values.
        cache: Weights on the device (see `load_weights`).
    """

    backend: Hardware
    weights: Mapping[str, torch.Tensor | QuantizedArray]
    device: torch.device
    arena: Arena
    cache: MutableMapping[str, DeviceBuffer]


class Runner:
    """A compiled plan; calling it runs it. One call at a time: the caller holds the backend's lock.

    Args:
        plan: The division of the graph between device and PyTorch.
        loaded: Weights and memory.
        updated: Graph inputs that the plan changes in place.
        programs: Programs of the device partitions. None: they are compiled now.
    """

    def __init__(
        self,
        plan: PartitionPlan,
        loaded: Loaded,
        updated: Sequence[str] = (),
        programs: Sequence[CompiledProgram] | None = None,
    ) -> None:
        self.plan, self._loaded = plan, loaded
        self.programs: list[CompiledProgram] = []
        given = iter(programs) if programs is not None else None
        self._steps: list[DeviceStep | _TorchStep] = []
        for part in plan.partitions:
            if part.device == "npu":
                target = loaded.backend.target
                program = plan.compile(part, target) if given is None else next(given)
                self.programs.append(program)
                self._steps.append(DeviceStep(program, part, plan, loaded, updated))
            else:
                self._steps.append(_TorchStep(part, loaded))
        self._outputs = plan.graph.outputs
        self._is_simple = len(self._steps) == 1 and set(self._outputs) <= set(plan.partitions[0].graph.outputs)

    def refresh(self) -> None:
        """Load the weights of all partitions again."""
        for step in self._steps:
            step.refresh()

    def __call__(self, inputs: Values) -> list[torch.Tensor]:
        """Run the plan; return the graph's outputs, in order: new tensors, except for inputs changed in place."""
        if self._is_simple:
            results = self._steps[0](inputs)
            return [results[name] for name in self._outputs]
        values = inputs
        for step in self._steps:
            values = values | step(values)
        if self.plan.price is not None:
            self._loaded.backend.waited(self.plan.price.beside_device)
        return [self._output(name, values, inputs) for name in self._outputs]

    def _output(self, name: str, values: Values, inputs: Values) -> torch.Tensor:
        if name in inputs:
            return inputs[name].clone()
        if name in values:
            return values[name]
        graph = self.plan.graph
        if name in graph.weights:
            value = self._loaded.weights[next(graph.weights[name].keys())]
            tensor = numpy_to_tensor(value.dequantize()) if isinstance(value, QuantizedArray) else value
            return tensor.to(self._loaded.device, copy=True)
        return numpy_to_tensor(graph.constants[name]).clone().to(self._loaded.device)


class _TorchStep:
    """A partition that PyTorch runs, on the torch device of the module's tensors."""

    def __init__(self, part: Partition, loaded: Loaded) -> None:
        self._part, self._loaded = part, loaded
        self.refresh()

    def refresh(self) -> None:
        self._run = CPUPartition(self._part.graph, self._loaded.weights, str(self._loaded.device))

    def __call__(self, values: Values) -> Values:
        return self._run.run_tensors({name: values[name] for name in self._part.graph.inputs})


class DeviceStep:
    """A device partition: fills the program's inputs, launches it, and returns its outputs as tensors."""

    def __init__(
        self, program: CompiledProgram, part: Partition, plan: PartitionPlan, loaded: Loaded, updated: Sequence[str]
    ) -> None:
        self._program, self._loaded = program, loaded
        self._executor = Executor(program, loaded.backend, arena=loaded.arena)
        self.bound: BoundProgram = self._executor.bound(self._weights())
        last = {name: other.index for other in plan.partitions for name in other.graph.inputs}
        donors = set(program.plan.donations.values())
        in_place = {name for name in donors if name in updated and last[name] == part.index}
        self.ports = open_ports(program, self.bound, loaded.backend, loaded.device, set(plan.graph.outputs), in_place)
        self._names = [spec.name for spec in program.input_specs]

    def _weights(self) -> dict[str, DeviceBuffer]:
        loaded = self._loaded
        return load_weights(loaded.weights, self._program, loaded.backend, strict=False, cache=loaded.cache)

    def refresh(self) -> None:
        self._bind(self._weights())

    def _bind(self, weights: Mapping[str, DeviceBuffer] | None = None) -> None:
        """Prepare the program's launches again, with new weights if they are given."""
        self.ports.go_home()
        self.bound.bind(weights)
        self.ports.follow()

    def __call__(self, values: Values) -> Values:
        if self.bound.is_outdated:
            self._bind()
        self.ports.fill([values[name] for name in self._names])
        self.bound.launch()
        return self.ports.take(values)


def open_ports(
    program: CompiledProgram,
    bound: BoundProgram,
    backend: Hardware,
    device: torch.device,
    results: set[str],
    in_place: set[str],
) -> TensorPorts | GPUPorts:
    """Return the object that moves tensors of a torch device in and out of a program: see `TensorPorts`."""
    if device.type == "cuda" and program.contains_code:  # else the backend is another device
        from cuda_runtime import CUDABackend
        from npu_sim.module.gpu_ports import GPUPorts

        if isinstance(backend, CUDABackend) and GPUPorts.fit(program):
            return GPUPorts(program, bound, backend, device, results, in_place)
    return TensorPorts(program, bound, device, results, in_place)
