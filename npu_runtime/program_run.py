"""A program on its buffers: those that all threads share, those of one thread, and the launches prepared for them.

The invariants that are numbered here are those of `executor.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from npu_compiler.compiled_program import CompiledProgram
from npu_compiler.errors import InputError, WeightError
from npu_compiler.graph.model import TensorSpec
from npu_compiler.program.kernels import KernelCall
from npu_compiler.program.plan import BufferAllocation, ExecutionPlan
from npu_compiler.program.views import View
from npu_runtime.buffer import DeviceBuffer
from npu_runtime.executor_inputs import InputPlaces, check_fits
from npu_runtime.hardware import Hardware, Launch, Operand
from npu_runtime.named_values import Outputs
from npu_runtime.profile_trace import CallTime
from npu_runtime.profiler import Profiler, moment


class Arena:
    """Memory for the intermediate values of any number of programs, which run one at a time; it grows as needed.

    Attributes:
        memory: The current memory; None until a program needs some.
        generation: Number of moves to larger memory.
    """

    def __init__(self, backend: Hardware) -> None:
        self.memory: DeviceBuffer | None = None
        self.generation = 0
        self._backend = backend

    def reserve(self, size: int) -> DeviceBuffer:
        """Memory of at least `size` bytes; programs that use the previous memory have to bind the new one."""
        if self.memory is None or self.memory.size_bytes < size:
            self.memory = self._backend.allocate_arena(size)
            self.generation += 1
        return self.memory


class BoundProgram:
    """A program prepared on fixed buffers: the caller writes `inputs`, launches and reads `outputs`.

    All of this requires the backend's lock, since several programs may share an arena; `run` takes it by itself.

    Attributes:
        inputs: Input name → buffer, with undefined content at first.
        outputs: Output name → buffer; that of a donated input if the output overwrites it.
    """

    def __init__(
        self,
        run: ThreadRun,
        program: CompiledProgram,
        backend: Hardware,
        weights: Mapping[str, DeviceBuffer],
        inputs: Mapping[str, DeviceBuffer],
    ) -> None:
        self._run, self._program, self._backend, self._weights = run, program, backend, weights
        self._plan = program.plan
        self.inputs = {
            spec.name: inputs[spec.name]
            if spec.name in inputs
            else backend.allocate_zeros(spec.shape, spec.storage, spec.alloc_shape)
            for spec in program.input_specs
        }
        self.bind()

    def bind(
        self, weights: Mapping[str, DeviceBuffer] | None = None, inputs: Mapping[str, DeviceBuffer] | None = None
    ) -> None:
        """Prepare the program again, for other weights, other input buffers, or an arena that has moved."""
        with self._backend.lock:
            self.inputs.update(inputs or {})
            self._weights = self._weights if weights is None else weights
            self._run.bind(self.inputs, self._weights)
            self.outputs: dict[str, DeviceBuffer] = {
                spec.name: self.inputs[donor]
                if (donor := self._plan.donations.get(spec.name)) is not None
                else self._run.memory[self._plan.output_views[spec.name].buffer]
                for spec in self._plan.outputs
            }

    def surround(self, before: Sequence[Launch], after: Sequence[Launch]) -> None:
        """Set launches that run together with the program, before and after it."""
        self._run.surround(before, after)

    @property
    def is_outdated(self) -> bool:
        """Whether `bind` must be called before the next launch: the arena has moved, or better kernels are there."""
        return self._run.is_outdated

    def launch(self) -> None:
        """Launch the program without waiting for its end.

        The caller holds the backend's lock, and has called `bind` again if `is_outdated`.
        """
        self._run.launch()
        self._backend.ran(self._program)

    def run(self) -> None:
        """Launch the program on the contents of `inputs` without waiting for its end; bind it again if needed."""
        with self._backend.lock:
            if self.is_outdated:
                self.bind()
            self.launch()

    def result(self, name: str) -> DeviceBuffer:
        """A handle of an output of the last run, which refuses to be read after a later run."""
        return self._run.result(name, self.inputs)

    def mover(self, name: str) -> Callable[[int], None] | None:
        """A function that makes launches use memory at another address for an input or output from now on.

        The memory there must be dense, in the buffer's layout, and stay valid. None if the device cannot do that for
        all launches concerned.
        """
        buffer = self._plan.output_views[name].buffer if name in self.outputs else name
        memory = self.outputs[name] if name in self.outputs else self.inputs[name]
        return self._backend.mover(self._run.launches_of(buffer), memory)


class SharedMemory:
    """The buffers that all threads share. `bind_weights` sets the weights, and runs the prologue if they changed.

    Attributes:
        arena: The memory of the arena's buffers, which can move.
        memory: Buffer name → memory, for constants, results of the prologue and bound weights; not for the arena.
        versions: Versions of the weights when they were bound.
        prologue_runs: Number of runs of the prologue, each of which replaces its results.
    """

    def __init__(self, plan: ExecutionPlan, backend: Hardware, counters: Counter[str], arena: Arena) -> None:
        self.memory: dict[str, DeviceBuffer] = {}
        self.arena = arena
        self.versions: dict[str, int] = {}
        self.prologue_runs = 0
        self._plan, self._backend, self._counters = plan, backend, counters
        self._weights: Mapping[str, DeviceBuffer] | None = None
        if any(buffer.kind == "arena" for buffer in plan.buffers.values()):
            arena.reserve(plan.arena_bytes)
            counters["buffers"] += 1
        for name, buffer in plan.buffers.items():
            if buffer.kind == "persistent":
                self.memory[name] = self.zeros(buffer.alloc_shape, buffer.dtype)
            elif buffer.kind == "constant":
                value = plan.constants[name]
                spec = TensorSpec(name, value.shape, str(value.dtype), buffer.dtype, buffer.alloc_shape)
                self.memory[name] = backend.allocate_buffer(value, spec=spec)
                counters["buffers"] += 1

    def zeros(self, shape: tuple[int, ...], dtype: str) -> DeviceBuffer:
        self._counters["buffers"] += 1
        return self._backend.allocate_zeros(shape, dtype)

    def bind_weights(self, weights: Mapping[str, DeviceBuffer]) -> None:
        """Check and bind weights.

        Run the prologue if a weight is another buffer, or was written, since the last time.
        """
        if self._weights == weights and self.versions == _versions(weights):
            return
        plan = self._plan
        missing = sorted(plan.weights.keys() - weights.keys())
        if missing:
            raise WeightError(f"missing weights: {', '.join(missing)}; load them with load_weights()")
        for name, weight in plan.weights.items():
            check_fits(weights[name], weight.spec, f"weight '{name}'", WeightError)
        is_same = self._weights is not None and all(
            weights[name].native_handle is self.memory[name].native_handle
            and weights[name].version == self.versions.get(name)
            for name in plan.weights
        )
        if not is_same:
            self._weights, self.versions = None, {}
            self.memory.update({name: weights[name] for name in plan.weights})
            memory = dict(self.memory)
            if self.arena.memory is not None:
                memory |= {name: self.arena.memory for name, x in plan.buffers.items() if x.kind == "arena"}
            for call in plan.prologue:
                prepare(call, plan, memory, self._backend, self._counters)()
                for view in call.outputs:
                    memory[view.buffer].prepared.clear()
            self._backend.synchronize()
            self.prologue_runs += 1
        self._weights, self.versions = dict(weights), _versions(weights)


class ThreadRun:
    """State of one thread: outputs, copies of inputs, and the launches that are prepared for them.

    Attributes:
        memory: Buffer name → memory that the launches are prepared for.
        generation: Number of the thread's runs (invariant 3).
    """

    def __init__(self, plan: ExecutionPlan, backend: Hardware, shared: SharedMemory, counters: Counter[str]) -> None:
        self.generation = 0
        self._plan, self._backend, self._shared, self._counters = plan, backend, shared, counters
        specs = {spec.name: spec for spec in plan.inputs}
        self._inputs = InputPlaces(specs, set(plan.donations.values()), backend, counters)
        self.memory = dict(shared.memory)
        for name, buffer in plan.buffers.items():
            if buffer.kind == "output":
                self.memory[name] = shared.zeros(buffer.alloc_shape, buffer.dtype)
        self._outputs = {spec.name: self._handle(spec) for spec in plan.outputs if spec.name not in plan.donations}
        self._versions: dict[str, int] = {}  # of the weights that the launches are prepared for
        self._prologue_runs = shared.prologue_runs
        self._arena_generation = self._kernels_version = -1
        self._launches: list[Launch | None] = [None] * len(plan.calls)
        self._sequence: Launch | None = None
        self._around: tuple[Sequence[Launch], Sequence[Launch]] = ((), ())
        self._users: dict[str, list[int]] = {}
        for index, call in enumerate(plan.calls):
            for name in {view.buffer for view in (*call.inputs, *call.outputs)}:
                self._users.setdefault(name, []).append(index)

    def _handle(self, spec: TensorSpec) -> DeviceBuffer:
        memory = self.memory[self._plan.output_views[spec.name].buffer]
        handle = memory.guarded(lambda: True)
        handle.shape, handle.alloc_shape = spec.shape, spec.alloc_shape or spec.shape
        return handle

    def bind(
        self,
        inputs: Mapping[str, DeviceBuffer | np.ndarray],
        weights: Mapping[str, DeviceBuffer],
        profiler: Profiler | None = None,
    ) -> dict[str, DeviceBuffer]:
        """Prepare the launches for these inputs and weights; returns the memory that holds each input."""
        bound, moved = dict[str, DeviceBuffer](), dict[str, DeviceBuffer | np.ndarray]()
        for name, value in inputs.items():
            if isinstance(value, DeviceBuffer) and not self._is_elsewhere(name, value):
                bound[name] = value
            else:
                moved[name] = value
        if moved:
            self._check_sharing({name: value for name, value in inputs.items() if isinstance(value, DeviceBuffer)})
        if self.is_outdated:
            self._follow_kernels()
            self._follow_arena()
        self._shared.bind_weights(weights)
        if self._prologue_runs != self._shared.prologue_runs:
            self._follow_weights()
        for name, value in moved.items():
            start = moment(profiler)
            buffer = bound[name] = self._inputs.place(name, value, self.memory.get(name))
            if profiler is not None and buffer is not value:
                self._backend.synchronize()
                way = f"{'host' if isinstance(value, np.ndarray) else 'device'} → device"
                profiler.add_transfer(way, profiler.clock() - start, buffer.size_bytes, name)
            if self._is_elsewhere(name, buffer):
                self.memory[name] = buffer
                self._forget([name])
        if self._sequence is None:
            for index, launch in enumerate(self._launches):
                if launch is None:
                    call = self._plan.calls[index]
                    self._launches[index] = prepare(call, self._plan, self.memory, self._backend, self._counters)
            self._make_sequence()
        return bound

    def _make_sequence(self) -> None:
        before, after = self._around
        own = [launch for launch in self._launches if launch is not None]
        self._sequence = self._backend.sequence([*before, *own, *after], self._plan)
        self._counters["sequences"] += 1

    def surround(self, before: Sequence[Launch], after: Sequence[Launch]) -> None:
        self._around = before, after
        self._make_sequence()

    @property
    def is_outdated(self) -> bool:
        """Whether the arena has moved, or better kernels have become available, since the launches were prepared."""
        return (
            self._arena_generation != self._shared.arena.generation
            or self._kernels_version != self._backend.kernels_version
        )

    def _follow_kernels(self) -> None:
        version = self._backend.kernels_version  # read first: kernels that come later are followed at the next run
        if self._kernels_version != version:
            self._launches, self._sequence = [None] * len(self._plan.calls), None
            self._kernels_version = version

    def _follow_arena(self) -> None:
        memory = self._shared.arena.memory
        moved = [name for name, buffer in self._plan.buffers.items() if buffer.kind == "arena"]
        if memory is not None:
            self.memory.update(dict.fromkeys(moved, memory))
        self._forget(moved)
        self._arena_generation = self._shared.arena.generation

    def launches_of(self, buffer: str) -> list[tuple[Launch, int]]:
        """The prepared launches that touch a buffer, and how many of their operands are in it."""
        uses = []
        for index in self._users.get(buffer, ()):
            call, launch = self._plan.calls[index], self._launches[index]
            assert launch is not None
            uses.append((launch, sum(view.buffer == buffer for view in (*call.inputs, *call.outputs))))
        return uses

    def _follow_weights(self) -> None:
        """Mark the calls that read a replaced weight, or a result of the prologue, to be prepared again."""
        plan, shared = self._plan, self._shared
        changed = {view.buffer for call in plan.prologue for view in call.outputs}
        for name in plan.weights:
            if self._is_elsewhere(name, shared.memory[name]) or self._versions.get(name) != shared.versions[name]:
                changed.add(name)
        self.memory.update({name: shared.memory[name] for name in plan.weights})
        self._forget(changed)
        self._versions, self._prologue_runs = shared.versions, shared.prologue_runs

    def _forget(self, buffers: Iterable[str]) -> None:
        """Mark the calls that touch these buffers to be prepared again before the next launch (invariant 2)."""
        for name in buffers:
            for index in self._users.get(name, ()):
                self._launches[index] = None
                self._sequence = None

    def _is_elsewhere(self, name: str, buffer: DeviceBuffer) -> bool:
        bound = self.memory.get(name)
        return bound is None or bound.native_handle is not buffer.native_handle

    def _check_sharing(self, inputs: Mapping[str, DeviceBuffer]) -> None:
        """Refuse an input whose memory the program overwrites, as an output or as another input that is updated."""
        outputs = {id(buffer.native_handle): name for name, buffer in self._outputs.items()}
        names: dict[int, str] = {}
        donated = set(self._plan.donations.values())
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

    def launch(self) -> None:
        assert self._sequence is not None
        self._begin()
        self._sequence()

    def _begin(self) -> None:
        self.generation += 1
        self._counters["runs"] += 1

    def launch_profiled(self, profiler: Profiler) -> None:
        self._begin()
        backend = self._backend
        for index, (call, launch) in enumerate(zip(self._plan.calls, self._launches, strict=True)):
            assert launch is not None
            seconds = backend.timed(launch)
            ended = profiler.clock()
            phases = () if profiler.runs else backend.phases(call, self.memory)
            profiler.add_call(CallTime(self._plan, index, backend, ended, seconds, phases))

    def results(self, inputs: Mapping[str, DeviceBuffer]) -> dict[str, DeviceBuffer]:
        """Output name → handle, for the run that was just launched on these inputs."""
        return Outputs({spec.name: self.result(spec.name, inputs) for spec in self._plan.outputs})

    def result(self, name: str, inputs: Mapping[str, DeviceBuffer]) -> DeviceBuffer:
        """The handle of an output, or the donated input that it has overwritten."""
        donor = self._plan.donations.get(name)
        if donor is not None:
            return inputs[donor]
        generation = self.generation
        return self._outputs[name].guarded(lambda: self.generation == generation)  # invariant 3


def prepare(
    call: KernelCall,
    plan: ExecutionPlan,
    memory: Mapping[str, DeviceBuffer],
    backend: Hardware,
    counters: Counter[str],
) -> Launch:
    """A launch of a call on its buffers' memory."""

    def operand(view: View) -> Operand:
        buffer: BufferAllocation = plan.buffers[view.buffer]
        offset = buffer.offset if buffer.kind == "arena" else 0
        return Operand(memory[view.buffer], view, offset, buffer.is_constant)

    counters["prepared"] += 1
    return backend.prepare(call, list(map(operand, call.inputs)), list(map(operand, call.outputs)))


def _versions(weights: Mapping[str, DeviceBuffer]) -> dict[str, int]:
    return {name: buffer.version for name, buffer in weights.items()}
