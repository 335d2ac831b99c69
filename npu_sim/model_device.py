"""The device `npu-model:CHIP`: the CPU device's results, and the time that a simulated chip would take for them."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from npu_compiler.compiled_program import CompiledProgram
from npu_model import Chip, Result, simulate
from npu_runtime import CPUBackend

if TYPE_CHECKING:
    from npu_runtime import Device


class ModelBackend(CPUBackend):
    """The CPU backend, whose clock advances with each run by what the run takes on a chip.

    A program is simulated once, when it first runs. Work on the host takes no time.

    Attributes:
        simulated_seconds: Of all runs so far.
    """

    def __init__(self, chip: Chip) -> None:
        super().__init__()
        self.chip = chip
        self.simulated_seconds = 0.0
        self._results: dict[int, tuple[weakref.ref[CompiledProgram], Result]] = {}

    @property
    def device(self) -> str:
        return f"simulated chip {self.chip.name}, results by {super().device}"

    def clock(self) -> float:
        return self.simulated_seconds

    def ran(self, program: CompiledProgram) -> None:
        if program.kernels:
            self.simulated_seconds += self.result(program).seconds

    def result(self, program: CompiledProgram) -> Result:
        """What a run of the program takes on the chip. Raises `InputError` as `npu_model.simulate`."""
        known = self._results.get(id(program))
        if known is None or known[0]() is not program:
            known = self._results[id(program)] = weakref.ref(program), simulate(program, self.chip)
        return known[1]


def simulated(device: Device) -> ModelBackend | None:
    """The backend of a device that simulates a chip; None for all others."""
    return device.backend if isinstance(device.backend, ModelBackend) else None
