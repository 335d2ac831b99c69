"""`SimulatedPrograms`: time and energy of a model's step programs on a chip, from the simulator."""

from __future__ import annotations

import json
from collections.abc import Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import asdict, astuple, dataclass
from functools import cache, lru_cache
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any

from npu_compiler.errors import NPUError
from npu_sim.cache import Entry, cached_facts
from npu_sim.llm.checkpoint import Checkpoint
from npu_sim.llm.graph import (
    ContiguousShape,
    compile_contiguous,
    compiling,
    contiguous_key,
    contiguous_options,
    contiguous_sizes,
    symbolic_contiguous,
)

if TYPE_CHECKING:
    from npu_compiler import CompileOptions
    from npu_model import Chip, Result
    from npu_model.lowering.mapper import Mapper


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

    Attributes:
        used: The programs whose costs have been requested.
        simulated: Number of them that were simulated, since their costs were not on disk.
    """

    def __init__(self, checkpoint: Checkpoint, chip: Chip, workers: int = 1) -> None:
        from npu_model.lowering.mapper import Mapper
        from npu_model.target import UnassembledTarget

        self.checkpoint, self.chip = checkpoint, chip
        self.simulated = 0
        self.used: dict[ContiguousShape, ProgramCost] = {}
        self._target, self._mapper = UnassembledTarget(chip), Mapper(chip)
        self._key: list[Any] | None = None
        self._workers = Workers(chip, workers) if workers > 1 else None

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
        workers = self._workers
        if workers is None:
            return
        for shape in shapes:
            if shape in self.used or shape in workers or self._entry(shape).is_there():
                continue
            workers.start()  # their imports take as long as tracing takes here
            workers.submit(shape, symbolic_contiguous(self.checkpoint), contiguous_options(self.checkpoint))

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
        if self._key is None:
            self._key = contiguous_key(self.checkpoint, self._target)
        return Entry(f"{self.checkpoint.config.model_type}-step-cost", [*astuple(shape), *self._key], "json")

    def _simulated(self, shape: ContiguousShape) -> ProgramCost:
        from npu_model.analysis.simulation import simulate_for

        self.simulated += 1
        cost = None if self._workers is None else self._workers.cost(shape)
        if cost is not None:
            return cost
        with compiling(self.checkpoint):
            program = compile_contiguous(self.checkpoint, shape, self._target)
            return cost_of(simulate_for(program, self._mapper))


class Workers:
    """Processes that simulate step programs on a chip, several at a time.

    Args:
        chip: The chip.
        count: Number of processes.
    """

    def __init__(self, chip: Chip, count: int) -> None:
        self._chip, self._count = chip, count
        self._pool: ProcessPoolExecutor | None = None
        self._costs: dict[ContiguousShape, Future[ProgramCost | None]] = {}

    def __contains__(self, shape: object) -> bool:
        return shape in self._costs

    def start(self) -> None:
        """Start the processes, if they are not there yet."""
        if self._pool is None:
            spawn = get_context("spawn")  # a fork would copy the locks of threads that run here
            self._pool = ProcessPoolExecutor(self._count, spawn, initializer=_begin, initargs=(self._chip,))
            for _ in range(self._count):
                self._pool.submit(_warm_up)

    def submit(self, shape: ContiguousShape, ir: dict[str, Any], options: CompileOptions) -> None:
        """Begin to simulate the program of a shape.

        Args:
            ir: IR with symbols for sizes, from `symbolic_contiguous`.
        """
        assert self._pool is not None, "the processes have not been started"
        with suppress(BrokenProcessPool):
            self._costs[shape] = self._pool.submit(_cost, json.dumps(ir), contiguous_sizes(ir, shape), options)

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


_chips: list[Chip] = []  # the chip of a worker process


def _begin(chip: Chip) -> None:
    _chips[:] = [chip]


@cache
def _mapper() -> Mapper:
    from npu_model.lowering.mapper import Mapper

    return Mapper(_chips[0])


def _warm_up() -> None:
    """Import what `_cost` needs."""
    import npu_compiler.ops  # noqa: F401
    import npu_model.analysis.simulation  # noqa: F401

    _mapper()


@lru_cache(maxsize=1)
def _parsed(ir: str) -> Any:
    return json.loads(ir)


def _cost(ir: str, sizes: dict[str, int], options: CompileOptions) -> ProgramCost | None:
    """The cost of a program in a worker process; None if it is refused, for which the caller finds the reason."""
    from npu_compiler import compile as compile_ir
    from npu_compiler.graph.symbolic import specialize
    from npu_model.analysis.simulation import simulate_for
    from npu_model.target import UnassembledTarget

    try:
        program = compile_ir(specialize(_parsed(ir), sizes), UnassembledTarget(_chips[0]), options)
        return cost_of(simulate_for(program, _mapper()))
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
