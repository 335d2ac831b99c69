"""`SimulatedPrograms`: time and energy of a model's step programs on a chip, from the simulator."""

from __future__ import annotations

from dataclasses import asdict, astuple, dataclass
from typing import TYPE_CHECKING, Any

from npu_sim.cache import cached_facts
from npu_sim.llm.checkpoint import Checkpoint
from npu_sim.llm.graph import ContiguousShape, compile_contiguous, compiling, contiguous_key

if TYPE_CHECKING:
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

    Attributes:
        used: The programs whose costs have been requested.
        simulated: Number of them that were simulated, since their costs were not on disk.
    """

    def __init__(self, checkpoint: Checkpoint, chip: Chip) -> None:
        from npu_model.lowering.mapper import Mapper
        from npu_model.target import UnassembledTarget

        self.checkpoint, self.chip = checkpoint, chip
        self.simulated = 0
        self.used: dict[ContiguousShape, ProgramCost] = {}
        self._target, self._mapper = UnassembledTarget(chip), Mapper(chip)
        self._key: list[Any] | None = None

    def cost(self, shape: ContiguousShape) -> ProgramCost:
        """The cost of one run of the program for that shape.

        Raises:
            InputError: the model cannot be traced, or the chip cannot run it.
        """
        if shape not in self.used:
            if self._key is None:
                self._key = contiguous_key(self.checkpoint, self._target)
            name = f"{self.checkpoint.config.model_type}-step-cost"
            facts = cached_facts(name, [*astuple(shape), *self._key], lambda: asdict(self._simulated(shape)))
            self.used[shape] = ProgramCost(**facts)
        return self.used[shape]

    def _simulated(self, shape: ContiguousShape) -> ProgramCost:
        from npu_model.analysis.simulation import simulate_for

        self.simulated += 1
        with compiling(self.checkpoint):
            program = compile_contiguous(self.checkpoint, shape, self._target)
            return cost_of(simulate_for(program, self._mapper))


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
