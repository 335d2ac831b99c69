"""`Executor`: runs a compiled program on any backend. What is costly happens once, not in every run.

A device may run asynchronously. What holds on all of them:

1. A backend does uploads, copies, launches and downloads in the order in which it is asked for them. So an input may be
   copied or overwritten right after the launches of the run before.
2. Launches are prepared for fixed memory. `_memory` holds that memory for as long as they may be launched, and a change
   of `_memory` discards the launches of the calls concerned, and with them the sequence.
3. An output handle stands for the run that returned it. It is read only while `_generation` is still that run's.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from npu_compiler.compiled_program import CompiledProgram
from npu_compiler.deferred_import import deferred
from npu_compiler.errors import DeviceError, InputError, WeightError
from npu_compiler.graph.model import TensorSpec
from npu_compiler.program.kernels import KernelCall
from npu_compiler.program.plan import BufferAllocation
from npu_compiler.program.views import View
from npu_compiler.target_config import TargetConfig
from npu_runtime.buffer import DeviceBuffer, Opened, as_backend
from npu_runtime.dispatch import DispatchStrategy
from npu_runtime.executor_inputs import InputPlaces, check_fits
from npu_runtime.hardware import Hardware, Launch, Operand
from npu_runtime.named_values import Outputs, inputs_by_name
from npu_runtime.profiler import Profiler

if TYPE_CHECKING:
    from npu_runtime.metal.dispatch import MetalDispatchStrategy

# Imported when used: it needs the op table.
__getattr__ = deferred("npu_runtime", {"MetalDispatchStrategy": "metal.dispatch"})


class Executor:
    """One program on one device.

    Buffers that the executor owns (arena, constants, outputs) are made here. A kernel call is prepared when all its
    buffers are known, at the first run, and stays prepared when inputs come in other buffers (see `InputPlaces`); only
    a donated input in another buffer has the calls that touch it prepared again. Outputs belong to the executor and
    hold until its next run.

    Args:
        config: The target's parameters, as a check: the device has to run that target's programs.

    Attributes:
        counters: How often buffers were allocated, calls prepared, launch lists rebuilt and runs made.

    Raises:
        DeviceError: the device does not run programs for that target.
        UntrustedProgramError: such programs are code, and nobody whom this user trusts vouches for this one.
    """

    def __init__(
        self, program: CompiledProgram, device: Hardware | Opened[Hardware], config: TargetConfig | None = None
    ) -> None:
        self.program = program
        self.backend = as_backend(device)
        self.counters: Counter[str] = Counter()
        known = self.backend.runs_targets
        for target in (program.target, *([] if config is None else [config.name])):
            if target not in known:
                listed = "' and '".join(known)
                raise DeviceError(f"the program was compiled for '{target}', but this device runs '{listed}'")
        if self.backend.config.programs_are_code:
            program.trust.check(program.name)
        plan = program.plan
        self._specs = {spec.name: spec for spec in plan.inputs}
        self._inputs = InputPlaces(self._specs, set(plan.donations.values()), self.backend, self.counters)
        self.backend.compile([*plan.prologue, *plan.calls], plan.sources)
        self._memory: dict[str, DeviceBuffer] = {}
        self._allocate_owned()
        self._weights: Mapping[str, DeviceBuffer] | None = None
        self._versions: dict[str, int] = {}  # of the weights
        self._launches: list[Launch | None] = [None] * len(plan.calls)
        self._users: dict[str, list[int]] = {name: [] for name in (*self._specs, *plan.weights)}
        for index, call in enumerate(plan.calls):
            for name in {view.buffer for view in (*call.inputs, *call.outputs)} & self._users.keys():
                self._users[name].append(index)
        self._sequence: Launch | None = None
        self._generation = 0

    def _allocate_owned(self) -> None:
        plan = self.program.plan
        if plan.arena_bytes:
            self._arena = self._zeros((plan.arena_bytes,), "uint8")
        for name, buffer in plan.buffers.items():
            if buffer.kind == "arena":
                self._memory[name] = self._arena
            elif buffer.kind in ("output", "persistent"):
                self._memory[name] = self._zeros(buffer.alloc_shape, buffer.dtype)
            elif buffer.kind == "constant":
                value = plan.constants[name]
                spec = TensorSpec(name, value.shape, str(value.dtype), buffer.dtype, buffer.alloc_shape)
                self._memory[name] = self.backend.allocate_buffer(value, spec=spec)
                self.counters["buffers"] += 1
        self._outputs = {
            spec.name: self._output_handle(spec) for spec in plan.outputs if spec.name not in plan.donations
        }

    def _zeros(self, shape: tuple[int, ...], dtype: str) -> DeviceBuffer:
        self.counters["buffers"] += 1
        return self.backend.allocate_zeros(shape, dtype)

    def _output_handle(self, spec: TensorSpec) -> DeviceBuffer:
        memory = self._memory[self.program.plan.output_views[spec.name].buffer]
        handle = memory.guarded(lambda: True)
        handle.shape, handle.alloc_shape = spec.shape, spec.alloc_shape or spec.shape
        return handle

    def run(
        self,
        inputs: Mapping[str, DeviceBuffer | np.ndarray],
        weights: Mapping[str, DeviceBuffer] | None = None,
        profiler: Profiler | None = None,
    ) -> dict[str, DeviceBuffer]:
        """Run the program once.

        Args:
            inputs: Input name → buffer (or array, which is uploaded); `"input"` is the only one, if there is one.
            weights: What `load_weights` returned; may be left out when the program has none.

        Returns:
            Output name → buffer, valid until the next run; `["output"]` is the only one, if there is one. A donated
            input comes back as its output, updated.

        Raises:
            InputError: an input is missing, unknown, or does not fit its spec.
            WeightError: a weight is missing or does not fit its spec.
            DeviceError: the device failed.
        """
        start = time.perf_counter()
        bound = self._bind(self._checked(inputs), weights if weights is not None else {})
        self._generation += 1
        self.counters["runs"] += 1
        if profiler is None:
            assert self._sequence is not None
            self._sequence()
        else:
            self._run_profiled(profiler)
            profiler.add_run(time.perf_counter() - start)
        return self._results(bound)

    def _results(self, inputs: Mapping[str, DeviceBuffer]) -> dict[str, DeviceBuffer]:
        generation, plan = self._generation, self.program.plan
        results: dict[str, DeviceBuffer] = Outputs()
        for spec in plan.outputs:
            donor = plan.donations.get(spec.name)
            if donor is not None:
                results[spec.name] = inputs[donor]
            else:  # invariant 3
                results[spec.name] = self._outputs[spec.name].guarded(lambda: self._generation == generation)
        return results

    def _run_profiled(self, profiler: Profiler) -> None:
        for call, launch in zip(self.program.plan.calls, self._launches, strict=True):
            assert launch is not None
            profiler.add_kernel(call.kernel, self.backend.timed(launch))

    def _checked(self, inputs: Mapping[str, DeviceBuffer | np.ndarray]) -> Mapping[str, DeviceBuffer | np.ndarray]:
        """The inputs by the program's names for them; buffers are checked here, arrays when they are uploaded."""
        named = inputs_by_name(inputs, self._specs, "program")
        for name, value in named.items():
            if isinstance(value, DeviceBuffer):
                value.check_current()
                check_fits(value, self._specs[name], f"input '{name}'", InputError)
            elif not isinstance(value, np.ndarray):
                raise InputError(f"input '{name}' is a {type(value).__name__}; give a device buffer or a NumPy array")
        return named

    def _bind(
        self, inputs: Mapping[str, DeviceBuffer | np.ndarray], weights: Mapping[str, DeviceBuffer]
    ) -> dict[str, DeviceBuffer]:
        """Make the launches ready for these inputs and weights; returns the memory that holds each input."""
        bound, moved = dict[str, DeviceBuffer](), dict[str, DeviceBuffer | np.ndarray]()
        for name, value in inputs.items():
            if isinstance(value, DeviceBuffer) and not self._is_elsewhere(name, value):
                bound[name] = value
            else:
                moved[name] = value
        if moved:
            self._check_sharing({name: value for name, value in inputs.items() if isinstance(value, DeviceBuffer)})
        if self._weights != weights or self._versions != _versions(weights):
            self._bind_weights(weights)
        for name, value in moved.items():
            buffer = bound[name] = self._inputs.place(name, value, self._memory.get(name))
            if self._is_elsewhere(name, buffer):
                self._memory[name] = buffer
                self._forget(self._users[name])
        if self._sequence is None:
            for index, launch in enumerate(self._launches):
                if launch is None:
                    self._launches[index] = self._prepare(self.program.plan.calls[index])
            self._sequence = self.backend.sequence([launch for launch in self._launches if launch is not None])
            self.counters["sequences"] += 1
        return bound

    def _forget(self, calls: Iterable[int]) -> None:
        """Have calls prepared again before the next launch (invariant 2)."""
        for index in calls:
            self._launches[index] = None
            self._sequence = None

    def _is_elsewhere(self, name: str, buffer: DeviceBuffer) -> bool:
        known = self._memory.get(name)
        return known is None or known.native_handle is not buffer.native_handle

    def _check_sharing(self, inputs: Mapping[str, DeviceBuffer]) -> None:
        """Refuse memory that the program would write while it still has to read it under another name."""
        outputs = {id(buffer.native_handle): name for name, buffer in self._outputs.items()}
        names: dict[int, str] = {}
        donated = set(self.program.plan.donations.values())
        for name, buffer in sorted(inputs.items(), key=lambda item: item[0] not in donated):
            handle = id(buffer.native_handle)
            if handle in outputs:
                raise InputError(
                    f"input '{name}' is this executor's own output '{outputs[handle]}', which the run overwrites; "
                    "copy() it first"
                )
            if names.setdefault(handle, name) != name and names[handle] in donated:
                raise InputError(
                    f"inputs '{names[handle]}' and '{name}' are the same buffer, but the program updates "
                    f"'{names[handle]}' in place; give each a buffer of its own"
                )

    def _bind_weights(self, weights: Mapping[str, DeviceBuffer]) -> None:
        """Check and bind weights, and run the prologue if any of them is another buffer, or written, since before."""
        plan = self.program.plan
        missing = sorted(plan.weights.keys() - weights.keys())
        if missing:
            raise WeightError(f"missing weights: {', '.join(missing)}; load them with load_weights()")
        for name, weight in plan.weights.items():
            check_fits(weights[name], weight.spec, f"weight '{name}'", WeightError)
        changed = {
            name
            for name in plan.weights
            if self._is_elsewhere(name, weights[name]) or self._versions.get(name) != weights[name].version
        }
        if self._weights is None or changed:
            self._weights, self._versions = None, {}
            changed |= {view.buffer for call in plan.prologue for view in call.outputs}
            self._memory.update({name: weights[name] for name in plan.weights})
            self._forget(i for i, call in enumerate(plan.calls) if any(view.buffer in changed for view in call.inputs))
            for call in plan.prologue:
                self._prepare(call)()
            self.backend.synchronize()
        self._weights = dict(weights)
        self._versions = _versions(weights)

    def _prepare(self, call: KernelCall) -> Launch:
        self.counters["prepared"] += 1
        inputs, outputs = ([self._operand(view) for view in views] for views in (call.inputs, call.outputs))
        return self.backend.prepare(call, inputs, outputs)

    def _operand(self, view: View) -> Operand:
        buffer: BufferAllocation = self.program.plan.buffers[view.buffer]
        offset = buffer.offset if buffer.kind == "arena" else 0
        return Operand(self._memory[view.buffer], view, offset, buffer.is_constant)


def _versions(weights: Mapping[str, DeviceBuffer]) -> dict[str, int]:
    return {name: buffer.version for name, buffer in weights.items()}


__all__ = ["DispatchStrategy", "Executor", "MetalDispatchStrategy"]
