"""`SimulatedPrograms`: time and energy of a model's step programs on a chip, from the simulator."""

from __future__ import annotations

import gc
import pickle
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import asdict, astuple, dataclass
from functools import cached_property, lru_cache
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any

from npu_compiler.errors import NPUError
from npu_sim.cache import Entry, cached_facts
from npu_sim.llm.checkpoint import Checkpoint
from npu_sim.llm.graph import (
    ContiguousShape,
    compiling,
    contiguous_key,
    contiguous_options,
    contiguous_sizes,
    symbolic_contiguous,
)

if TYPE_CHECKING:
    from npu_compiler import CodegenTarget, CompiledProgram, CompileOptions
    from npu_model import Chip, Result


@dataclass(frozen=True)
class ProgramCost:
    """Time and energy of one run of a step program on a chip. Energy is without the static power.

    Attributes:
        attention_seconds, attention_joules: The part that attention takes.
        other_seconds, other_joules: The part that all other calls take.
        reload_seconds, reload_joules: Cost of loading those weights that then stay in the scratchpad from run to run.
        roofline_seconds: Lower bound on the time of the program; see `npu_model.Result`.
    """

    attention_seconds: float
    attention_joules: float
    other_seconds: float
    other_joules: float
    reload_seconds: float = 0.0
    reload_joules: float = 0.0
    roofline_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        """Time of the whole run, without loading the weights that stay in the scratchpad."""
        return self.attention_seconds + self.other_seconds


class SimulatedPrograms:
    """Costs of a model's step programs on a chip. Each program is simulated once; its cost is then kept on disk.

    Args:
        workers: Number of processes that simulate the programs given to `prepare`. With one, none is started.
        likely: Names programs whose costs will probably be requested. Processes simulate these too, once there is some
            program to simulate.

    Attributes:
        used: The programs whose costs have been requested.
        simulated: Number of them that were simulated, since their costs were not on disk.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        chip: Chip,
        workers: int = 1,
        likely: Callable[[StepGraph], Iterable[ContiguousShape]] | None = None,
    ) -> None:
        self.checkpoint, self.chip, self._likely = checkpoint, chip, likely
        self.simulated = 0
        self.used: dict[ContiguousShape, ProgramCost] = {}
        self._workers = Workers(workers) if workers > 1 else None

    def close(self) -> None:
        """End the processes; `cost` then simulates in this one."""
        if self._workers is not None:
            self._workers.close()
            self._workers = None

    def prepare(self, shapes: Iterable[ContiguousShape]) -> None:
        """Begin to simulate the programs for these shapes, if there are processes for it; `cost` waits for them.

        Raises:
            InputError: the model cannot be traced.
        """
        if self._workers is not None and self._submit(shapes, self._workers) and self._likely is not None:
            likely, self._likely = self._likely(self._steps), None
            self._submit(likely, self._workers)

    def _submit(self, shapes: Iterable[ContiguousShape], workers: Workers) -> bool:
        """Let processes simulate the programs for these shapes; return whether there are new ones among them."""
        new = [
            shape
            for shape in shapes
            if shape not in self.used and shape not in workers and not self._entry(shape).is_there()
        ]
        if new:
            workers.start()  # their imports take as long as tracing takes here
        for shape in new:
            workers.submit(shape, self._steps)
        return bool(new)

    def cost(self, shape: ContiguousShape) -> ProgramCost:
        """The cost of one run of the program for that shape.

        Raises:
            InputError: the model cannot be traced, or the chip cannot run it.
        """
        if shape not in self.used:
            entry = self._entry(shape)
            facts = cached_facts(entry.name, entry.key, lambda: asdict(self._simulated(shape)))
            self.used[shape] = ProgramCost(**facts)
        return self.used[shape]

    def _entry(self, shape: ContiguousShape) -> Entry:
        return Entry(f"{self.checkpoint.config.model_type}-step-cost", [*astuple(shape), *self._key], "json")

    @cached_property
    def _key(self) -> list[Any]:
        from npu_model.target import UnassembledTarget

        return contiguous_key(self.checkpoint, UnassembledTarget(self.chip))

    @cached_property
    def _steps(self) -> StepGraph:
        return StepGraph.of(self.checkpoint, self.chip)

    @cached_property
    def _simulator(self) -> StepSimulator:
        return StepSimulator(self._steps)

    def _simulated(self, shape: ContiguousShape) -> ProgramCost:
        self.simulated += 1
        cost = None if self._workers is None else self._workers.cost(shape)
        if cost is not None:
            return cost
        with compiling(self.checkpoint):
            return self._simulator.cost(shape)


@dataclass(frozen=True)
class StepGraph:
    """The graph of a model's steps, and the chip for which it is compiled.

    Attributes:
        ir: IR with symbols for sizes, from `symbolic_contiguous`.
        options: Options to compile it with.
    """

    ir: dict[str, Any]
    options: CompileOptions
    chip: Chip

    @staticmethod
    def of(checkpoint: Checkpoint, chip: Chip) -> StepGraph:
        """The graph of a checkpoint's steps. Raises InputError if the model cannot be traced."""
        return StepGraph(symbolic_contiguous(checkpoint), contiguous_options(checkpoint), chip)

    def compiled(self, shape: ContiguousShape, target: CodegenTarget) -> CompiledProgram:
        """The program for a shape; it is not cached. Raises `NPUError` if the target cannot run it."""
        from npu_compiler import compile as compile_ir
        from npu_compiler.graph.symbolic import specialize

        return compile_ir(specialize(self.ir, contiguous_sizes(self.ir, shape)), target, self.options)

    @cached_property
    def pickled(self) -> bytes:
        """The graph in the form in which other processes take it."""
        return pickle.dumps(self)


class StepSimulator:
    """Compiles step programs and simulates them, in this process."""

    def __init__(self, steps: StepGraph) -> None:
        from npu_model.lowering.mapper import Mapper
        from npu_model.target import UnassembledTarget

        self._steps, self._mapper, self._target = steps, Mapper(steps.chip), UnassembledTarget(steps.chip)

    def cost(self, shape: ContiguousShape) -> ProgramCost:
        """The cost of one run of the program for a shape. Raises `NPUError` if the chip cannot run it."""
        from npu_model.analysis.simulation import simulate_for

        return cost_of(simulate_for(self._steps.compiled(shape, self._target), self._mapper))


class Workers:
    """Processes that simulate step programs, several at a time.

    Args:
        count: Number of processes.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._pool: ProcessPoolExecutor | None = None
        self._costs: dict[ContiguousShape, Future[ProgramCost | None]] = {}

    def __contains__(self, shape: object) -> bool:
        return shape in self._costs

    def start(self) -> None:
        """Start the processes, if they are not there yet."""
        if self._pool is None:
            spawn = get_context("spawn")  # a fork would copy the locks of threads that run here
            self._pool = ProcessPoolExecutor(self._count, spawn, initializer=_warm_up)
            for _ in range(self._count):  # a process is started for a task, if none is idle
                self._pool.submit(int)

    def submit(self, shape: ContiguousShape, steps: StepGraph) -> None:
        """Begin to simulate the program of a shape."""
        assert self._pool is not None, "the processes have not been started"
        with suppress(BrokenProcessPool):
            self._costs[shape] = self._pool.submit(_cost, steps.pickled, shape)

    def cost(self, shape: ContiguousShape) -> ProgramCost | None:
        """The cost of a program that was submitted; None if it was not, or no process can find it."""
        future = self._costs.pop(shape, None)
        with suppress(BrokenProcessPool):  # such as in a script that runs again when it is imported
            return None if future is None else future.result()
        return None

    def close(self) -> None:
        """End the processes."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)


def _warm_up() -> None:
    """Import what `_cost` needs, and turn the garbage collector off, since a program leaves only ten megabytes."""
    gc.disable()
    import npu_compiler.ops  # noqa: F401
    import npu_model.analysis.simulation
    import npu_model.target  # noqa: F401


@lru_cache(maxsize=1)
def _simulator(steps: bytes) -> StepSimulator:
    return StepSimulator(pickle.loads(steps))


def _cost(steps: bytes, shape: ContiguousShape) -> ProgramCost | None:
    """The cost of a program in a worker process; None if it is refused, for which the caller finds the reason."""
    try:
        return _simulator(steps).cost(shape)
    except NPUError:
        return None


def cost_of(result: Result) -> ProgramCost:
    """The result of a simulation as a `ProgramCost`."""
    from npu_compiler.program.kernels import Family

    chip = result.chip
    attention = [call for call in result.calls if call.family == Family.ATTENTION.value]
    cycles, joules = sum(call.cycles for call in attention), sum(call.joules for call in attention)
    return ProgramCost(
        attention_seconds=chip.seconds(cycles),
        attention_joules=joules,
        other_seconds=chip.seconds(result.cycles - cycles),
        other_joules=sum(call.joules for call in result.calls) - joules,
        reload_seconds=chip.seconds(result.kept_weight_bytes / chip.dram_bytes_per_cycle),
        reload_joules=result.kept_weight_bytes * chip.energy.pj_per_dram_byte * 1e-12,
        roofline_seconds=chip.seconds(result.roofline_cycles),
    )
