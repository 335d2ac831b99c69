"""`DAGExecutor`: runs a partition plan, with device partitions on a backend and the others on the CPU."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from npu_compiler.errors import WeightError
from npu_compiler.graph.dtypes import (
    INT32_MAX,
    INT32_MIN,
    SignedInt,
    misfit,
    numpy_dtype,
    saturating_cast,
    stands_for_infinity,
)
from npu_compiler.graph.model import TensorSpec
from npu_compiler.partitioner import Partition, PartitionPlan
from npu_runtime.buffer import DeviceBuffer, Opened, as_backend
from npu_runtime.executor import Executor
from npu_runtime.hardware import Hardware
from npu_runtime.named_values import Outputs, inputs_by_name
from npu_runtime.numerics import warn_of_doubtful_values
from npu_runtime.packing import as_array, check_array
from npu_runtime.profiler import Profiler, moment
from npu_runtime.pytorch import require_torch
from npu_runtime.weight_loader import check_weight, load_weights, to_numpy, weight_error

if TYPE_CHECKING:
    from npu_runtime.cpu_fallback import CPUPartition

Value = np.ndarray | DeviceBuffer


@dataclass
class _Values:
    """The values of a run on the side that computed them, host or device, and copies of them on the other side.

    Attributes:
        made: Tensor → array on the host, or buffer on the device.
        brought: Tensor → its copy on the device, and the bounds that it was checked against.
        taken: Tensor → its copy on the host.
    """

    made: dict[str, Value]
    brought: dict[str, tuple[DeviceBuffer, tuple[SignedInt, SignedInt] | None]] = field(default_factory=dict)
    taken: dict[str, np.ndarray] = field(default_factory=dict)

    def forget(self, name: str) -> None:
        """Free a value that has no more readers."""
        for values in (self.made, self.brought, self.taken):
            values.pop(name, None)


class DAGExecutor:
    """An executor of a partition plan. Device partitions are compiled once; `load_weights` uploads their weights once.

    Values stay on the side that computed them, and copies on the side they were copied to: a device buffer that the
    next device partition reads is not copied to the host, and a value that several partitions read is copied once.

    Several threads may call `execute` at once: CPU partitions run side by side, runs on the device queue (see
    `Executor`), and each thread uploads to buffers of its own.

    Args:
        check_outputs: Warn (`NumericalWarning`) of outputs with values that are not finite or at the limit of the
            compute dtype.
    """

    def __init__(
        self, plan: PartitionPlan, backend: Hardware | Opened[Hardware], *, check_outputs: bool = False
    ) -> None:
        self.plan, self.check_outputs = plan, check_outputs
        self.backend = as_backend(backend)
        self.executors: dict[int, Executor] = {}
        self._device_weights: dict[int, dict[str, DeviceBuffer]] = {}
        self._cpu: dict[int, CPUPartition] = {}
        self._threads = threading.local()
        self._last_use = self._lifetimes()
        for part in plan.partitions:
            if part.device == "npu":
                self.executors[part.index] = Executor(plan.compile(part, self.backend.target), self.backend)
        self._constants: dict[str, np.ndarray] = dict(plan.graph.constants)
        self._weights: Mapping[str, Any] = {}
        if not plan.graph.weights:
            self.load_weights({})

    @property
    def _uploads(self) -> dict[tuple[int, str], DeviceBuffer]:
        """The calling thread's buffers for uploads and copies, by partition and input."""
        own: dict[tuple[int, str], DeviceBuffer] = self._threads.__dict__.setdefault("uploads", {})
        return own

    def _lifetimes(self) -> dict[str, int]:
        last = {name: part.index for part in self.plan.partitions for name in part.graph.inputs}
        return {name: index for name, index in last.items() if name not in self.plan.graph.outputs}

    def load_weights(self, weights: Mapping[str, Any]) -> None:
        """Upload weights for every partition.

        Args:
            weights: `state_dict` key → array or torch tensor.

        Raises:
            WeightError: lists weights that are missing, misshapen or hold NaN.
            InputError: a partition runs on the CPU, and PyTorch is not installed.
        """
        self._check_weights(weights)
        cache: dict[str, DeviceBuffer] = {}
        for part in self.plan.partitions:
            if part.device == "npu":
                program = self.executors[part.index].program
                loaded = load_weights(weights, program, self.backend, strict=False, cache=cache)
                self._device_weights[part.index] = loaded
            else:
                require_torch("running ops that the device lacks on the CPU")
                from npu_runtime.cpu_fallback import CPUPartition

                self._cpu[part.index] = CPUPartition(part.graph, weights)
        self._weights = weights

    def _check_weights(self, weights: Mapping[str, Any]) -> None:
        """Check that all weights are there, and the shapes of those on the CPU.

        The others are checked when uploaded.
        """
        graph = self.plan.graph
        on_device = {name for part in self.plan.partitions if part.device == "npu" for name in part.graph.weights}
        problems = []
        for name, recipe in graph.weights.items():
            for key in recipe.keys():
                if key not in weights:
                    problems.append(f"missing: '{key}'")
                elif name not in on_device:
                    problems += check_weight(key, to_numpy(weights[key]), graph.tensors[name].shape)
        if problems:
            raise weight_error(f"plan '{graph.name}'", problems)

    def execute(self, inputs: Mapping[str, np.ndarray], profiler: Profiler | None = None) -> dict[str, np.ndarray]:
        """Run the whole graph.

        Args:
            inputs: Input name → array, torch tensor, number or nested list of numbers, of the shape and dtype that the
                graph says; `"input"` is the only one, if there is one.

        Returns:
            Output name → array in the dtype that PyTorch gives it; `["output"]` is the only one, if there is one, and
            `[0]` the first.

        Raises:
            InputError: an input is missing, unknown or does not fit.
            WeightError: `load_weights` was not called.
        """
        if len(self._device_weights) + len(self._cpu) < len(self.plan.partitions):
            raise WeightError("the plan has weights, but load_weights() was not called")
        with nullcontext() if profiler is None else profiler.run(self.plan.graph.name):
            result = self._execute(inputs, profiler)
        if self.check_outputs:
            warn_of_doubtful_values(result, self._output_specs())
        return result

    def _execute(self, inputs: Mapping[str, np.ndarray], profiler: Profiler | None) -> dict[str, np.ndarray]:
        values = _Values(dict(self._check_inputs(inputs)))
        for part in self.plan.partitions:
            if part.device == "npu":
                values.made.update(self._run_device(part, values, profiler))
            else:
                values.made.update(self._run_cpu(part, values, profiler))
            for name in part.graph.inputs:
                if self._last_use.get(name) == part.index:
                    values.forget(name)
        if self.plan.price is not None:
            self.backend.waited(self.plan.price.beside_device)
            if profiler is not None and self.backend.simulated_seconds is not None:
                profiler.add_kernel("host, transfers and launches, by price", self.plan.price.beside_device)
        return Outputs({name: self._output(tensor, values, profiler) for name, tensor in self._outputs()})

    def _output_specs(self) -> list[TensorSpec]:
        """The specs of outputs by name, with the compute dtype as storage dtype, to check their values."""
        tensors, dtype = self.plan.graph.tensors, self.plan.compute_dtype
        return [replace(tensors[tensor], name=name, storage=dtype) for name, tensor in self._outputs()]

    def _outputs(self) -> list[tuple[str, str]]:
        graph = self.plan.graph
        return list(zip(graph.output_names, graph.outputs, strict=True))

    def _output(self, tensor: str, values: _Values, profiler: Profiler | None) -> np.ndarray:
        graph = self.plan.graph
        if tensor in values.made:
            return np.array(self._to_host(tensor, values, profiler))
        if tensor in graph.weights:
            return np.array(to_numpy(self._weights[next(graph.weights[tensor].keys())]))
        return np.array(graph.constants[tensor])

    def _check_inputs(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        graph = self.plan.graph
        checked = {}
        for name, value in inputs_by_name(inputs, graph.inputs, "graph").items():
            array, spec = as_array(value, f"input '{name}'"), graph.tensors[name]
            if spec.dtype.startswith("complex"):
                checked[name] = array.astype(numpy_dtype(spec.dtype))
                continue
            check_array(array, spec)
            wanted = numpy_dtype(spec.dtype)
            checked[name] = array if array.dtype == wanted else array.astype(wanted)
        return checked

    def _run_device(self, part: Partition, values: _Values, profiler: Profiler | None) -> dict[str, Value]:
        executor = self.executors[part.index]
        inputs: dict[str, DeviceBuffer | np.ndarray] = {}
        donated = set(executor.program.plan.donations.values())
        for spec in executor.program.input_specs:
            is_donated = spec.name in donated
            inputs[spec.name] = self._to_device(part.index, spec, values, is_donated, profiler)
        return dict(executor.run(inputs, self._device_weights[part.index], profiler))

    def _run_cpu(self, part: Partition, values: _Values, profiler: Profiler | None) -> dict[str, Value]:
        inputs = {name: self._to_host(name, values, profiler) for name in part.graph.inputs}
        if profiler is None:
            return dict(self._cpu[part.index].run(inputs))
        name, start = f"cpu partition {part.index}", profiler.clock()
        with profiler.on_host(name):
            outputs = self._cpu[part.index].run(inputs, profiler.on_host)
        profiler.add_kernel(name, profiler.clock() - start)
        return dict(outputs)

    def _to_device(
        self, index: int, spec: TensorSpec, values: _Values, is_donated: bool, profiler: Profiler | None
    ) -> DeviceBuffer:
        """The buffer from which a partition reads an input.

        Copies and uploads reuse one, so that launches stay prepared.

        Args:
            index: Number of the partition.
            is_donated: Whether the partition overwrites the input by an output; a value that is read afterwards is
                copied then.
        """
        uploads, value = self._uploads, values.made[spec.name]
        buffer = uploads.get((index, spec.name))
        copy, bounds = values.brought.get(spec.name, (None, None))
        there = copy if copy is not None and bounds == spec.bounds else value
        # An index is checked on the host, and programs rely on that.
        if isinstance(there, DeviceBuffer) and _is_alike(there, spec) and (there is copy or not spec.is_index):
            # A donated input is updated in place, which must not happen to a value that is still read afterwards.
            if not is_donated or self._last_use.get(spec.name) == index:
                return there
            if buffer is None:
                buffer = uploads[index, spec.name] = there.copy()
            else:
                buffer.copy_from(there)
            return buffer
        if isinstance(value, DeviceBuffer):
            value = value.to_numpy()
        elif spec.name not in self.plan.graph.inputs:
            value = _as_the_device_makes_it(value, spec)
        start = moment(profiler)
        if buffer is None:
            buffer = uploads[index, spec.name] = self.backend.allocate_buffer(value, spec=spec)
        else:
            buffer.write(value, spec)
        if profiler is not None:
            self.backend.synchronize()
            profiler.add_transfer("host → device", profiler.clock() - start, buffer.size_bytes, spec.name)
        if not is_donated:
            values.brought[spec.name] = buffer, spec.bounds
        return buffer

    def _to_host(self, name: str, values: _Values, profiler: Profiler | None) -> np.ndarray:
        value = values.taken.get(name, values.made[name])
        if isinstance(value, np.ndarray):
            return value
        start = moment(profiler)
        array = values.taken[name] = value.to_numpy(self.plan.graph.tensors[name])
        if profiler is not None:
            profiler.add_transfer("device → host", profiler.clock() - start, value.size_bytes, name)
        return array


def _is_alike(buffer: DeviceBuffer, spec: TensorSpec) -> bool:
    return buffer.dtype == spec.storage and buffer.alloc_shape == (spec.alloc_shape or spec.shape)


def _as_the_device_makes_it(array: np.ndarray, spec: TensorSpec) -> np.ndarray:
    """A result of the CPU, converted to what the device would compute from the same operands.

    Floats beyond its dtype become infinite, except those that stand for an infinity. Integers that come from an
    infinity become the limits; others that the device cannot hold are kept, to be refused.
    """
    if array.dtype in (np.float32, np.float64) and misfit(array, spec.storage) is not None:
        with np.errstate(over="ignore"):
            cast = array.astype(numpy_dtype(spec.storage))
        return np.where(stands_for_infinity(array), saturating_cast(array, spec.storage), cast)
    if array.dtype.kind != "i" or spec.is_index:
        return array
    low, high = spec.bounds or (INT32_MIN, INT32_MAX)
    return np.where(_is_infinite(array, -1), low, np.where(_is_infinite(array, 1), high, array)).astype(array.dtype)


_NEAR = 2**20  # what arithmetic may have added since


def _is_infinite(array: np.ndarray, sign: int) -> np.ndarray:
    """A mask of the integers that come from an infinity of that sign: those near a limit of int32 or int64."""
    wide = array.astype(np.float64) * sign
    result: np.ndarray = (wide >= 2.0**63 - _NEAR) | (wide >= INT32_MAX - _NEAR) & (wide <= INT32_MAX + _NEAR)
    return result
