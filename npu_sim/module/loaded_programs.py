"""Programs of a loaded module on a device, which take and return NumPy arrays or device buffers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from npu_compiler.compiled_program import CompiledProgram
from npu_compiler.graph.model import TensorSpec
from npu_compiler.graph.quantization import QuantizedArray
from npu_runtime.buffer import DeviceBuffer
from npu_runtime.executor import Executor
from npu_runtime.hardware import Hardware
from npu_runtime.program_run import Arena
from npu_runtime.weight_loader import load_weights

if TYPE_CHECKING:
    from npu_compiler.partitioner import PartitionPlan

Value: TypeAlias = np.ndarray | DeviceBuffer


class Memory:
    """Memory on a device that all programs of a module share: weights and intermediate values.

    Attributes:
        backend: The device.
        weights: Key → array, or a matrix quantized to few bits.
    """

    def __init__(self, backend: Hardware, weights: Mapping[str, np.ndarray | QuantizedArray]) -> None:
        self.backend, self.weights = backend, weights
        self.arena = Arena(backend)
        self._cache: dict[str, DeviceBuffer] = {}

    def load(self, program: CompiledProgram) -> dict[str, DeviceBuffer]:
        """Upload a program's weights, unless they are on the device already, and return them by name."""
        return load_weights(self.weights, program, self.backend, strict=False, cache=self._cache)

    def forget(self, buffers: Iterable[DeviceBuffer]) -> None:
        """Drop cached weights, so that the next `load` uploads them again."""
        stale = {id(buffer) for buffer in buffers}
        self._cache = {key: buffer for key, buffer in self._cache.items() if id(buffer) not in stale}


class DeviceProgram:
    """One program that runs a whole graph. One call at a time: the caller holds the backend's lock.

    Args:
        program: The compiled program.
        outputs: The program's names for the graph's outputs, in order; some may be inputs.
        others: The values of outputs that are neither computed by the program nor inputs.
        memory: The module's weights and intermediate memory.
        updated: The inputs whose memory the program may change.

    Attributes:
        made: The compiled program.
        specs: Shapes and dtypes of the graph's outputs.
        unknown: Outputs that are inputs of the graph which the program does not read; the caller must pass them.
    """

    def __init__(
        self,
        program: CompiledProgram,
        outputs: Sequence[str],
        others: Mapping[str, np.ndarray],
        memory: Memory,
        updated: Collection[str],
    ) -> None:
        self.made, self._names, self._others, self._memory = program, outputs, others, memory
        specs = {spec.name: spec for spec in (*program.input_specs, *program.output_specs)}
        self.input_specs = program.input_specs
        self.unknown = set(outputs) - specs.keys() - others.keys()
        self.specs = [specs.get(name) for name in outputs]
        self._kept = set(program.plan.donations.values()) - set(updated)
        self._executor = Executor(program, memory.backend, arena=memory.arena)
        self._weights = memory.load(program)

    def reads(self, keys: Collection[str]) -> list[DeviceBuffer]:
        """Return the weight buffers on the device that are computed from any of these checkpoint keys."""
        specs = self.made.weight_specs
        return [self._weights[name] for name, spec in specs.items() if not set(keys).isdisjoint(spec.recipe.keys())]

    def refresh(self) -> None:
        """Load the weights again, of which `Memory` uploads those that it has dropped."""
        self._weights = self._memory.load(self.made)

    def __call__(self, inputs: Mapping[str, Value]) -> list[Value]:
        """Run the program and return the graph's outputs; the next call may overwrite returned buffers."""
        given = {spec.name: self._own(spec, inputs[spec.name]) for spec in self.input_specs}
        computed = self._executor.run(given, self._weights)
        values = {**inputs, **self._others, **computed}
        return [values[name] for name in self._names]

    def _own(self, spec: TensorSpec, value: Value) -> Value:
        """Return an input in a form that the executor accepts.

        An array stays as it is. A buffer is downloaded if it must be cast or checked, and copied if the program would
        change it.
        """
        if isinstance(value, np.ndarray):
            return value
        is_alike = value.dtype == spec.storage and value.alloc_shape == (spec.alloc_shape or spec.shape)
        if not is_alike or spec.bounds is not None:
            return value.to_numpy()  # to be cast, or checked: programs rely on the bounds of integers
        return value.copy() if spec.name in self._kept else value


class MixedPlan:
    """A plan in which PyTorch runs some nodes on the CPU; used like `DeviceProgram`.

    Attributes:
        made: The plan.
    """

    def __init__(self, plan: PartitionPlan, memory: Memory) -> None:
        from npu_runtime.dag_executor import DAGExecutor

        graph = plan.graph
        self.made = plan
        self.unknown: set[str] = set()
        self._memory, self._executor = memory, DAGExecutor(plan, memory.backend)
        self.input_specs = [graph.tensors[name] for name in graph.inputs]
        self.specs: list[TensorSpec | None] = [replace(graph.tensors[name], storage="") for name in graph.outputs]
        self.refresh()

    def reads(self, keys: Collection[str]) -> list[DeviceBuffer]:
        return []

    def refresh(self) -> None:
        self._executor.load_weights(self._memory.weights)

    def __call__(self, inputs: Mapping[str, Value]) -> list[Value]:
        arrays = {name: x if isinstance(x, np.ndarray) else x.to_numpy() for name, x in inputs.items()}
        return list(self._executor.execute(arrays).values())


__all__ = ["DeviceProgram", "Memory", "MixedPlan", "Value"]
