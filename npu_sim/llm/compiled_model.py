"""`CompiledModel`: the programs of a language model on a device, which share the weights and the state (KV cache).

With several devices, this process leads and there is one more process for each other device: it makes the same model
with its part of weights and state, and loads and runs the programs that this process names (see `ranks`).
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from npu_compiler.graph.mesh import Mesh
from npu_sim.llm.checkpoint import Checkpoint, vocabulary_size
from npu_sim.llm.generation_config import check_generation
from npu_sim.llm.graph import layer_states, state_form, state_with_buffers
from npu_sim.llm.ranks import start_group
from npu_sim.llm.state import state_inputs
from npu_sim.llm.step_program import ProgramName, StepProgram
from npu_sim.parallel.group import LocalWorker, RankGroup, StartWorker

if TYPE_CHECKING:
    from npu_compiler import CompiledProgram
    from npu_runtime import Device, DeviceBuffer

Report = Callable[[int, int], None]

_log = logging.getLogger(__name__)


class CompiledModel(ABC):
    """A language model on a device, or on the devices of a group. One thread at a time may use it.

    Attributes:
        state: Name → input buffer that all programs share: the layers' state (KV cache and recurrent states), and the
            tokens that steps have chosen (`history`).
        group: The processes for the other devices; None where there is one device.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        device: "Device | str | None",
        settings: Mapping[str, Any],
        *,
        tensor_parallel: int = 1,
        rank: int = 0,
        start_worker: StartWorker = LocalWorker,
    ) -> None:
        """Check the checkpoint, open the device and start the processes for the other devices.

        Args:
            device: A device or its name. Default: the best one on this machine.
            settings: Arguments with which the other processes make their part of this model.
            tensor_parallel: Divide the model among this many devices: this process starts a process for each of the
                others. On GPUs they are those from `device` on.
            rank: Number of this process in the group: 0 for the leading process. In the others, `device` has joined the
                group.
            start_worker: Starts the other processes.

        Raises:
            InputError: the model cannot be divided among so many devices, or its generation config asks for something
                that is not supported.
            DeviceError: the device is unknown, cannot be used, or cannot share a model with other devices.
        """
        from npu_runtime import Device
        from npu_runtime.program_run import Arena

        check_generation(checkpoint)
        self.checkpoint = checkpoint
        self.vocab_size = vocabulary_size(checkpoint)
        self.device = device if isinstance(device, Device) else Device(device) if device else Device()
        self.group: RankGroup | None = None
        if tensor_parallel != 1 and rank == 0:
            self.group = start_group(checkpoint, self.device, tensor_parallel, type(self), settings, start_worker)
        self._mesh = None if tensor_parallel == 1 else Mesh(tensor_parallel)
        self._rank = rank
        self._tensors = state_with_buffers(checkpoint)  # before seconds of compiling: it may refuse the files
        self._arena = Arena(self.device.backend)
        self._weights: dict[str, DeviceBuffer] = {}
        self._programs: dict[ProgramName, StepProgram] = {}
        self.state: dict[str, DeviceBuffer] = {}

    @abstractmethod
    def compile(self, name: ProgramName) -> "CompiledProgram":
        """Compile the program of that name, or read it from the cache of programs.

        Raises InputError if that fails.
        """

    def _begin(self, name: ProgramName, history: int, progress: Report | None) -> None:
        """Load the weights and the program `name`, and allocate the state that its inputs describe.

        Args:
            history: Number of chosen tokens that are kept on the device.
            progress: Called with (weights loaded, total weights).
        """
        from npu_runtime import NPUBuffer

        if state_form(self.checkpoint).is_whole:
            _log.warning(
                "%s has no state that steps can continue: each computes the whole context", self.checkpoint.name
            )
        program, names = self.compile(name), state_inputs(layer_states(self.checkpoint))
        for spec in program.input_specs:
            # A cache in few bits is two inputs, of codes and of scales, for each of the traced module's.
            if spec.name in names or spec.name.rpartition(".")[0] in names:
                self.state[spec.name] = NPUBuffer.zeros(spec.shape, self.device, spec.storage, spec.alloc_shape)
        self.state["history"], self._look = self.device.backend.allocate_visible((history,), "int32")
        self._load(name, program, progress)
        if self.group is not None:
            with self.group.asking("prepare", name):  # waits until the others have their parts
                pass

    def program(self, name: ProgramName) -> StepProgram:
        """The program of that name, loaded on all devices of the group if it has not been used before."""
        if name not in self._programs:
            with self.group.asking("prepare", name) if self.group else nullcontext():
                self._load(name, self.compile(name))
        return self._programs[name]

    def loaded_programs(self) -> "dict[ProgramName, CompiledProgram]":
        """The programs that have been loaded so far, by name."""
        return {name: program.executor.program for name, program in self._programs.items()}

    def _load(self, name: ProgramName, program: "CompiledProgram", progress: Report | None = None) -> None:
        from npu_runtime import Executor, load_weights

        weights = (
            {}
            if not program.weight_specs
            else load_weights(
                self._tensors, program, self.device, cache=self._weights, progress=progress, rank=self._rank
            )
        )
        executor = Executor(program, self.device, arena=self._arena)
        shared = self._shared_inputs(name, program)
        self._programs[name] = StepProgram(name, executor, weights, shared, self.group)

    def _shared_inputs(self, name: ProgramName, program: "CompiledProgram") -> "dict[str, DeviceBuffer]":
        """Name → buffer of those inputs of a program that lie in `state`."""
        return {spec.name: self.state[spec.name] for spec in program.input_specs if spec.name in self.state}

    def wait_for(self, marker: Callable[[], None]) -> None:
        """Wait until the device reaches a marker of the backend.

        Raises `NPUError` if a process of the group has ended.
        """
        with self.group.together() if self.group else nullcontext():
            marker()

    def check(self) -> None:
        """Raise the reason (`NPUError`) if a process of this model's group has ended or does not answer."""
        if self.group is not None:
            self.group.check()

    def close(self) -> None:
        """End the processes that this model started for other devices, if any. The model cannot be used afterwards."""
        if self.group is not None:
            self.group.close()
