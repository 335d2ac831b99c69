"""The device `npu:CHIP`: runs tile programs on a simulated chip; its clock shows the simulated time."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from weakref import WeakValueDictionary

import numpy as np

from npu_compiler.compiled_program import CompiledProgram
from npu_compiler.program.kernels import KernelCall
from npu_compiler.program.plan import ExecutionPlan
from npu_model.analysis.result import Result
from npu_model.analysis.simulation import result_of
from npu_model.chip import Chip
from npu_model.isa.instructions import TileProgram
from npu_model.loading import load_tiles
from npu_model.lowering.forms import Form, with_counted_forms
from npu_model.lowering.program import ARENA
from npu_model.machine.machine import Machine, Run
from npu_model.machine.memory import Memory
from npu_model.target import NPUTarget
from npu_runtime.backend import Backend, DeviceBuffer, Launch, Operand, Shape
from npu_runtime.cpu.backend import CPUBackend


@dataclass(eq=False)
class TileLaunch:
    """A kernel call bound to memory, which runs on the host or, within a program, as a section of the tile program.

    Calls that prepare weights run on the host.

    Attributes:
        call: The call.
        operands: Its views and their memory.
        on_host: Computes the call on the host.
        section: Runs the call's section on the simulated chip; None until the launch is part of a program.
        seconds: Returns the time of the section on the chip; 0 before the launch is part of a program.
    """

    call: KernelCall
    operands: Sequence[Operand]
    on_host: Launch
    section: Callable[[], None] | None = None
    seconds: Callable[[], float] = float

    def __call__(self) -> None:
        (self.section or self.on_host)()


@dataclass(eq=False)
class _Loaded:
    """A loaded program and its timing; None until it is known.

    Of data, it depends on the bytes that compressed weights take in DRAM alone.
    """

    tiles: TileProgram
    timing: Run | None = field(default=None)


class NPUBackend(Backend):
    """Backend of a simulated chip.

    Args:
        chip: The chip.
        checked: Whether to detect reads of bytes that were never written, and races. None: if `NPU_SIM_CHECKED=1` is
            set.
        forms: Forms of the weights in DRAM, as `forms_of` measures them. None: programs are compiled for weights of
            which only shapes are known.

    Attributes:
        simulated_seconds: Simulated time of all runs so far.
    """

    def __init__(self, chip: Chip, checked: bool | None = None, forms: Mapping[str, Form] | None = None) -> None:
        self.chip = chip
        self.checked = os.environ.get("NPU_SIM_CHECKED") == "1" if checked is None else checked
        self.npu_target = NPUTarget(chip, forms)
        self.config = self.npu_target.config
        self.simulated_seconds: float = 0.0
        self._host = CPUBackend(tune=False)
        self._loaded: WeakValueDictionary[bytes, _Loaded] = WeakValueDictionary()

    @property
    def device(self) -> str:
        return f"simulated chip {self.chip.name}"

    @property
    def target(self) -> NPUTarget:
        return self.npu_target

    def allocate(self, shape: Shape, dtype: str, alloc_shape: Shape | None = None) -> DeviceBuffer:
        return self._host.allocate(shape, dtype, alloc_shape)

    def prepare(self, call: KernelCall, inputs: Sequence[Operand], outputs: Sequence[Operand]) -> Launch:
        def on_host() -> None:
            self._host.prepare(call, inputs, outputs)()

        return TileLaunch(call, [*inputs, *outputs], on_host)

    def sequence(self, launches: Sequence[Launch], plan: ExecutionPlan) -> Launch:
        own = [launch for launch in launches if isinstance(launch, TileLaunch)]
        if not own:
            return super().sequence(launches, plan)
        loaded, memory = self._load(plan), _memory(own, plan)
        weights = {
            name: own.data for name, own in memory.items() if name in plan.buffers and plan.buffers[name].is_constant
        }
        tiles = with_counted_forms(loaded.tiles, plan, self.chip, weights)
        if tiles is not loaded.tiles:
            loaded.tiles, loaded.timing = tiles, None
        machine = Machine(self.chip, loaded.tiles, memory, self.checked)
        machine.preload()
        for index, launch in enumerate(own):
            launch.section = partial(machine.run_section, index)
            launch.seconds = partial(self._seconds, loaded, index)
        first, last = launches.index(own[0]), launches.index(own[-1])
        before, after = launches[:first], launches[last + 1 :]

        def run() -> None:
            for launch in before:
                launch()
            loaded.timing = machine.run()
            for launch in after:
                launch()

        return run

    def _load(self, plan: ExecutionPlan) -> _Loaded:
        loaded = self._loaded.get(plan.machine_code)
        if loaded is None:
            loaded = self._loaded[plan.machine_code] = _Loaded(load_tiles(plan, self.chip))
        return loaded

    def timing(self, program: CompiledProgram) -> Run:
        """Simulated timing of a run of a program."""
        return self._timing(self._load(program.plan))

    def _timing(self, loaded: _Loaded) -> Run:
        if loaded.timing is None:
            loaded.timing = Machine(self.chip, loaded.tiles).run()
        return loaded.timing

    def result(self, program: CompiledProgram, *, spans: bool = False) -> Result:
        """The time, traffic and energy of a run of the program, equal to those of `simulate`.

        Args:
            spans: Whether to record the time span of each instruction.
        """
        loaded = self._load(program.plan)
        run = Machine(self.chip, loaded.tiles).run(spans=True) if spans else self._timing(loaded)
        return result_of(program, self.chip, loaded.tiles, run)

    def _seconds(self, loaded: _Loaded, index: int) -> float:
        counts = self._timing(loaded).sections[index]
        return self.chip.seconds(counts.progress + sum(counts.stalls.values()))

    def clock(self) -> float:
        return self.simulated_seconds

    @property
    def makes_trials(self) -> bool:
        return False  # the prices of a simulated chip are simulated

    def waited(self, seconds: float) -> None:
        with self.lock:
            self.simulated_seconds += seconds

    def timed(self, launch: Launch) -> float:
        launch()
        return launch.seconds() if isinstance(launch, TileLaunch) else 0.0

    def ran(self, program: CompiledProgram) -> None:
        if program.kernels:
            self.simulated_seconds += self.chip.seconds(self.timing(program).cycles)


def _memory(launches: Sequence[TileLaunch], plan: ExecutionPlan) -> dict[str, Memory]:
    memory: dict[str, Memory] = {}
    for launch in launches:
        for operand in launch.operands:
            name = operand.view.buffer
            name = ARENA if plan.buffers[name].kind == "arena" else plan.donations.get(name, name)
            if name not in memory:
                memory[name] = Memory(f"buffer '{name}'", operand.memory.native_handle.view(np.uint8), False)
    return memory


__all__ = ["NPUBackend", "TileLaunch"]
