"""Running a partition plan on torch tensors: device partitions on a backend, the others in PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass

import torch
import torch.utils.dlpack

from npu_compiler.compiled_program import CompiledProgram
from npu_compiler.compiler import compile as compile_graph
from npu_compiler.errors import InputError
from npu_compiler.graph.dtypes import FLOAT_MAX, INT32_MAX, INT32_MIN, is_int
from npu_compiler.graph.model import TensorSpec
from npu_compiler.partitioner import Partition, PartitionPlan
from npu_runtime.buffer import DeviceBuffer
from npu_runtime.cpu_fallback import CPUPartition
from npu_runtime.executor import Arena, BoundProgram, Executor
from npu_runtime.hardware import Hardware
from npu_runtime.packing import beyond_range, out_of_bounds
from npu_runtime.torch_arrays import numpy_to_tensor, tensor_to_numpy
from npu_runtime.weight_loader import load_weights

Values = dict[str, torch.Tensor]


@dataclass
class Loaded:
    """What all programs of a module share on a device.

    Attributes:
        weights: Checkpoint key → the module's tensor.
        cache: Weights on the device (see `load_weights`).
        device: The torch device of the module's tensors, of its inputs and of its results.
    """

    backend: Hardware
    weights: Mapping[str, torch.Tensor]
    device: torch.device
    arena: Arena
    cache: MutableMapping[str, DeviceBuffer]


class Runner:
    """A plan, compiled and bound; calling it runs it. One call at a time: the caller holds the backend's lock.

    Args:
        updated: Graph inputs that the caller has the plan change in place.
        programs: Those of the device partitions, where they have been compiled before.
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
        self._steps: list[_DeviceStep | _TorchStep] = []
        for part in plan.partitions:
            if part.device == "npu":
                target = loaded.backend.target
                program = (
                    compile_graph(part.graph, target, compute_dtype=plan.compute_dtype)
                    if given is None
                    else next(given)
                )
                self.programs.append(program)
                self._steps.append(_DeviceStep(program, part, plan, loaded, updated))
            else:
                self._steps.append(_TorchStep(part, loaded))
        self._is_single = len(self._steps) == 1

    def refresh(self) -> None:
        """Load the weights again."""
        for step in self._steps:
            step.refresh()

    def __call__(self, inputs: Values) -> list[torch.Tensor]:
        """The graph's outputs, in order: new tensors, but for inputs that it changes in place."""
        values = inputs
        for step in self._steps:
            values = values | step(values)
        return [self._output(name, values, inputs) for name in self.plan.graph.outputs]

    def _output(self, name: str, values: Values, inputs: Values) -> torch.Tensor:
        if name in inputs:
            return inputs[name].clone()
        if name in values:
            return values[name]
        graph = self.plan.graph
        if name in graph.weights:
            return self._loaded.weights[next(graph.weights[name].keys())].clone()
        return numpy_to_tensor(graph.constants[name]).clone().to(self._loaded.device)


class _TorchStep:
    """What the device lacks, in PyTorch, where the module's tensors are."""

    def __init__(self, part: Partition, loaded: Loaded) -> None:
        self._part, self._loaded = part, loaded
        self.refresh()

    def refresh(self) -> None:
        self._run = CPUPartition(self._part.graph, self._loaded.weights, str(self._loaded.device))

    def __call__(self, values: Values) -> Values:
        return self._run.run_tensors({name: values[name] for name in self._part.graph.inputs})


class _DeviceStep:
    """A device partition: fills the program's inputs, launches it, and returns its outputs as tensors."""

    def __init__(
        self, program: CompiledProgram, part: Partition, plan: PartitionPlan, loaded: Loaded, updated: Sequence[str]
    ) -> None:
        self._program, self._loaded = program, loaded
        self._executor = Executor(program, loaded.backend, arena=loaded.arena)
        self._bound: BoundProgram = self._executor.bound(self._weights())
        donated = set(program.plan.donations.values())
        last = {name: other.index for other in plan.partitions for name in other.graph.inputs}
        may_change = {name for name in donated if name in updated and last[name] == part.index}
        self._inputs = [
            InputPort(spec, self._bound, loaded.device, spec.name not in donated or spec.name in may_change)
            for spec in program.input_specs
        ]
        returned = set(plan.graph.outputs)
        self._outputs = [
            OutputPort(
                spec, self._bound, loaded.device, spec.name in returned, program.plan.donations.get(spec.name, "")
            )
            for spec in program.output_specs
        ]
        self._in_place = {name for name, donor in program.plan.donations.items() if donor in may_change}

    def _weights(self) -> dict[str, DeviceBuffer]:
        loaded = self._loaded
        return load_weights(loaded.weights, self._program, loaded.backend, strict=False, cache=loaded.cache)

    def refresh(self) -> None:
        self._bound.bind(self._weights())

    def __call__(self, values: Values) -> Values:
        for port in self._inputs:
            port.fill(values[port.name])
        made: Values = {}
        for output in self._outputs:
            output.make_room()
        self._bound.launch()
        for output in self._outputs:
            made[output.name] = output.take() if output.name not in self._in_place else values[output.donor]
        return made


def shared_tensor(buffer: DeviceBuffer, device: torch.device) -> torch.Tensor | None:
    """A tensor over a buffer's memory, without padding; None where PyTorch cannot reach that memory."""
    try:
        return torch.utils.dlpack.from_dlpack(buffer)
    except (AttributeError, BufferError, NotImplementedError, RuntimeError, TypeError, ValueError):
        return None


class InputPort:
    """Brings a tensor into a program's input.

    Where the device can read the tensor's own memory, nothing is copied; else it is copied, and cast if need be.

    Args:
        may_move: Whether the program may work on the caller's memory.
    """

    def __init__(self, spec: TensorSpec, bound: BoundProgram, device: torch.device, may_move: bool) -> None:
        self.name, self._spec = spec.name, spec
        self._buffer = bound.inputs[spec.name]
        self._static = shared_tensor(self._buffer, device)
        is_dense = spec.alloc_shape is None or spec.alloc_shape == spec.shape
        self._move = bound.mover(spec.name) if may_move and is_dense and self._static is not None else None
        self._home = self._address = 0 if self._static is None else self._static.data_ptr()
        self._low, self._high = spec.bounds or (INT32_MIN, INT32_MAX)
        self._checks_integers = is_int(spec.dtype) and (spec.bounds is not None or spec.dtype == "int64")
        self._limit = FLOAT_MAX.get(spec.storage) if spec.storage != spec.dtype else None

    def fill(self, value: torch.Tensor) -> None:
        """Make the input hold this value from the next launch on; the tensor must stay until that has finished.

        Raises:
            InputError: it holds an index out of bounds, or a number that the storage dtype cannot hold.
        """
        if self._checks_integers:
            self._check_integers(value)
        elif self._limit is not None:
            self._check_floats(value, self._limit)
        static = self._static
        if static is None:
            self._buffer.write(tensor_to_numpy(value.cpu()), self._spec)
            return
        if (
            self._move is not None
            and value.dtype == static.dtype
            and value.is_contiguous()
            and value.device == static.device
        ):
            self._go_to(value.data_ptr())
            return
        if self._move is not None:
            self._go_to(self._home)
        static.copy_(value)

    def _go_to(self, address: int) -> None:
        if address != self._address:
            assert self._move is not None
            self._move(address)
            self._address = address

    def _check_integers(self, value: torch.Tensor) -> None:
        if value.device.type != "cpu" or not value.numel():
            return
        low, high = torch.aminmax(value)
        if int(low) < self._low or int(high) > self._high:
            problem = out_of_bounds(value.numpy(), self._low, self._high)
            raise InputError(f"'{self.name}' {problem}")

    def _check_floats(self, value: torch.Tensor, limit: float) -> None:
        if value.device.type != "cpu" or not value.numel() or not value.is_floating_point():
            return
        low, high = torch.aminmax(value)
        largest = max(-float(low), float(high))
        if limit < largest < float("inf"):
            lost = beyond_range(largest, self._spec.storage)
            raise InputError(f"'{self.name}' holds {lost}; compile the module with dtype bfloat16 or float32")


class OutputPort:
    """Takes a program's output as a tensor.

    Args:
        is_result: Whether the caller keeps it, so that it has to have memory of its own.
        donor: The input whose memory it is in, if it is.
    """

    def __init__(
        self, spec: TensorSpec, bound: BoundProgram, device: torch.device, is_result: bool, donor: str
    ) -> None:
        self.name, self.donor = spec.name, donor
        self._spec, self._device, self._is_result = spec, device, is_result
        self._buffer = bound.outputs[spec.name]
        self._static = shared_tensor(self._buffer, device)
        if self._static is not None:
            self._static = self._static.reshape(spec.shape)
        self._dtype: torch.dtype = getattr(torch, spec.dtype)
        is_dense = spec.alloc_shape is None or spec.alloc_shape == spec.shape
        is_plain = is_dense and self._static is not None and self._static.dtype == self._dtype
        self._move: Callable[[int], None] | None = None
        if is_result and is_plain and not donor and self._static is not None and self._static.device == device:
            self._move = bound.mover(spec.name)
        self._room: torch.Tensor | None = None

    def make_room(self) -> None:
        """Have the program write this output into a new tensor, where the device can do that."""
        if self._move is not None:
            self._room = torch.empty(self._spec.shape, dtype=self._dtype, device=self._device)
            self._move(self._room.data_ptr())

    def take(self) -> torch.Tensor:
        """The output of the launch before: a new tensor if it is a result, else one that the next launch overwrites."""
        if self._room is not None:
            room, self._room = self._room, None
            return room
        static = self._static
        if static is None:
            return numpy_to_tensor(self._buffer.to_numpy(self._spec)).to(self._device)
        if static.dtype != self._dtype or static.device != self._device:
            return static.to(self._device, self._dtype)
        return static.clone(memory_format=torch.contiguous_format) if self._is_result else static
