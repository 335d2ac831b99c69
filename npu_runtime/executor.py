"""`Executor`: runs a compiled program on any backend. Costly work is done once, not in every run.

A device may run asynchronously, and several threads may run one executor. These invariants hold on all devices:

1. A backend does uploads, copies, launches and downloads in the order in which it is asked for them. So an input may be
   copied or overwritten right after the launches of the previous run.
2. Launches are prepared for fixed memory. `memory` keeps that memory for as long as they may be launched, and a change
   of `memory` discards the launches of the calls concerned, and with them the sequence. A change of the backend's
   `kernels_version` discards all; launches that were prepared before it remain valid, so a later run may notice it.
3. An output handle stands for the run that returned it. It is read only while `generation` is still that run's.
4. A run binds and launches everything while it holds the backend's lock, so no other run comes between: the arena and
   the results of the prologue are the same for all threads. Outputs and copies of inputs belong to one thread each.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from npu_compiler.compiled_program import CompiledProgram
from npu_compiler.deferred_import import deferred
from npu_compiler.errors import DeviceError, InputError
from npu_compiler.target_config import TargetConfig
from npu_runtime.buffer import DeviceBuffer, Opened, as_backend
from npu_runtime.dispatch import DispatchStrategy
from npu_runtime.executor_inputs import check_fits
from npu_runtime.hardware import Hardware, best_hardware
from npu_runtime.named_values import inputs_by_name
from npu_runtime.numerics import warn_of_doubtful_values
from npu_runtime.packing import as_array
from npu_runtime.profiler import Profiler
from npu_runtime.program_run import Arena, BoundProgram, SharedMemory, ThreadRun

if TYPE_CHECKING:
    from npu_runtime.metal.dispatch import MetalDispatchStrategy

# Imported when used: it needs the op table.
__getattr__ = deferred("npu_runtime", {"MetalDispatchStrategy": "metal.dispatch"})


class Executor:
    """One program on one device, which any number of threads may run.

    The executor allocates buffers of its own (arena, constants, outputs). A kernel call is prepared when all its
    buffers are known, at the first run, and stays prepared when inputs come in other buffers (see `InputPlaces`); only
    a donated input in another buffer has the calls that touch it prepared again. Outputs belong to the executor and
    are valid until the next run.

    Threads: calls of `run` queue, one at a time on a device. Each thread has its own outputs, which are valid until
    that thread's next run, and prepares the calls for them at its first run; arena, constants and weights are shared.
    The buffers of a thread are freed when it ends.

    Args:
        program: The program, or the path of a `.npubin`.
        device: A device or backend. None means the best one on this machine.
        config: The target's parameters, to check that the device runs that target's programs; None for no check.
        check_outputs: Check the outputs of every run, which downloads them, and warn (`NumericalWarning`) of values
            that are not finite or at the limit of float16.
        arena: Memory for intermediate values that is shared with other programs of the same device; None for its own.

    Attributes:
        counters: Counts of allocated buffers, prepared calls, rebuilt launch lists and runs.

    Raises:
        DeviceError: the device does not run programs for that target.
        ProgramFormatError: there is no valid program at that path.
        UntrustedProgramError: the program contains code that was not authenticated by anyone whom this user trusts.
    """

    def __init__(
        self,
        program: CompiledProgram | str | Path,
        device: Hardware | Opened[Hardware] | None = None,
        config: TargetConfig | None = None,
        *,
        check_outputs: bool = False,
        arena: Arena | None = None,
    ) -> None:
        if not isinstance(program, CompiledProgram):
            program = CompiledProgram.load(program)
        self.program, self.check_outputs = program, check_outputs
        self.backend = best_hardware() if device is None else as_backend(device)
        self.counters: Counter[str] = Counter()
        self._specs = {spec.name: spec for spec in program.input_specs}
        targets = self.backend.runs_targets
        for target in (program.target, *([] if config is None else [config.name])):
            if target not in targets:
                listed = "' and '".join(targets)
                raise DeviceError(f"the program was compiled for '{target}', but this device runs '{listed}'")
        if self.backend.config.programs_are_code:
            program.trust.check(program.name)
        elif program.contains_code:  # so its calls have not been checked
            raise DeviceError("the program contains code, but this device runs none")
        self.backend.compile([*program.plan.prologue, *program.plan.calls], program.plan.sources)
        with self.backend.lock:
            self._plan = self.backend.laid_out(program.plan)
            self._shared = SharedMemory(self._plan, self.backend, self.counters, arena or Arena(self.backend))
            self._threads = threading.local()
            self._threads.run = self._run_of_a_thread()

    def _run_of_a_thread(self) -> ThreadRun:
        return ThreadRun(self._plan, self.backend, self._shared, self.counters)

    def bound(
        self,
        weights: Mapping[str, DeviceBuffer] | None = None,
        inputs: Mapping[str, DeviceBuffer] | None = None,
    ) -> BoundProgram:
        """The program on fixed buffers, for a caller that fills and reads them directly.

        Args:
            inputs: The buffers of some inputs, by the program's names; those of the others are allocated.

        Raises:
            InputError: a buffer does not fit its input, or the program has no input of that name.
        """
        for name, buffer in (inputs or {}).items():
            if name not in self._specs:
                raise InputError(f"unknown input '{name}' (the program's inputs are {', '.join(self._specs)})")
            check_fits(buffer, self._specs[name], f"input '{name}'", InputError)
        run = self._run
        if run.generation:
            run = self._run_of_a_thread()
        else:  # what the calling thread has and has not used: it gets another if it runs the executor itself
            del self._threads.run
        return BoundProgram(run, self.program, self.backend, weights or {}, inputs or {})

    @property
    def _run(self) -> ThreadRun:
        """The state of the calling thread, created at its first use."""
        try:
            own: ThreadRun = self._threads.run
        except AttributeError:
            own = self._threads.run = self._run_of_a_thread()
        return own

    def run(
        self,
        inputs: Mapping[str, DeviceBuffer | np.ndarray],
        weights: Mapping[str, DeviceBuffer] | None = None,
        profiler: Profiler | None = None,
    ) -> dict[str, DeviceBuffer]:
        """Run the program once.

        Args:
            inputs: Input name → buffer, or what is uploaded: an array, a torch tensor, a number or a nested list of
                numbers. `"input"` is the only one, if there is one.
            weights: Result of `load_weights`; may be left out when the program has none.

        Returns:
            Output name → buffer, valid until this thread's next run; `["output"]` is the only one, if there is one,
            and `[0]` the first. A donated input comes back as its output, updated.

        Raises:
            InputError: an input is missing, unknown, or does not fit its spec.
            WeightError: a weight is missing or does not fit its spec.
            DeviceError: the device failed.
        """
        around = nullcontext() if profiler is None else profiler.run(self.program.name)
        with around:
            checked = self._checked(inputs)
            with self.backend.lock:
                run = self._run
                bound = run.bind(checked, weights if weights is not None else {}, profiler)
                if profiler is None:
                    run.launch()
                else:
                    run.launch_profiled(profiler)
                self.backend.ran(self.program)
                results = run.results(bound)
        if self.check_outputs:
            specs = self.program.output_specs
            warn_of_doubtful_values({spec.name: results[spec.name].to_numpy() for spec in specs}, specs)
        return results

    def _checked(self, inputs: Mapping[str, DeviceBuffer | np.ndarray]) -> Mapping[str, DeviceBuffer | np.ndarray]:
        """The inputs by the program's names; buffers are checked here, arrays when they are uploaded."""
        named = dict(inputs_by_name(inputs, self._specs, "program"))
        for name, value in named.items():
            if isinstance(value, DeviceBuffer):
                value.check_current()
                check_fits(value, self._specs[name], f"input '{name}'", InputError)
            else:
                named[name] = as_array(value, f"input '{name}'")
        return named


__all__ = ["DispatchStrategy", "Executor", "MetalDispatchStrategy"]
