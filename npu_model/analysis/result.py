"""`Result`: the time, traffic, stalls and energy of a program's run on a chip."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from npu_compiler.graph.dtypes import itemsize
from npu_compiler.program.elementwise import declaration
from npu_compiler.program.kernels import KernelCall, distinct_bytes
from npu_compiler.program.plan import ExecutionPlan
from npu_model.chip import Chip
from npu_model.isa.instructions import (
    Buffer,
    Compute,
    Instruction,
    Multiply,
    Section,
    Space,
    Tile,
    TileProgram,
    Transfer,
    instructions,
)
from npu_model.machine.machine import Cause, Counts, Run, Span


@dataclass(frozen=True)
class Energy:
    """Energy of a run in joules, by component."""

    macs: float
    vector: float
    sram: float
    dram: float
    static: float
    network: float = 0.0
    l2: float = 0.0

    @property
    def total(self) -> float:
        """Energy of all components."""
        return self.macs + self.vector + self.sram + self.dram + self.static + self.network + self.l2


@dataclass(frozen=True)
class CallResult:
    """Results of one kernel call in a run.

    Attributes:
        index: Number of the call.
        counts: Its amounts of work, busy cycles of engines, and stalls.
        tiles, tile: Number of executions of its first product (else vector program, else transfer), and the sizes of
            its box.
        sram_used: Bytes of the scratchpad that it accesses.
        energy: Its energy without static energy.
    """

    index: int
    node: str
    kernel: str
    family: str
    counts: Counts
    tiles: int
    tile: str
    sram_used: int
    energy: Energy

    @property
    def joules(self) -> float:
        """Energy of all components in joules, without static energy."""
        return self.energy.total

    @property
    def start(self) -> int:
        """Cycle in which its first instruction starts; consecutive calls may overlap."""
        return max(0, self.counts.start)

    @property
    def end(self) -> int:
        """Cycle in which its last instruction ends."""
        return self.counts.end

    @property
    def cycles(self) -> int:
        """Cycles of the run attributed to this call; over all calls they add up to the run's cycles."""
        return self.counts.progress + sum(self.counts.stalls.values())

    @property
    def macs(self) -> int:
        """Multiply-accumulates of all dtypes."""
        return sum(self.counts.macs.values())

    @property
    def dram_bytes(self) -> int:
        """Bytes read from and written to DRAM."""
        return self.counts.dram_read + self.counts.dram_written

    def busy(self, engine: str) -> int:
        """Cycles in which an engine was busy with this call."""
        return self.counts.busy.get(engine, 0)


@dataclass(frozen=True)
class Result:
    """Results of one run of a program on a chip.

    Attributes:
        cycles: Cycles of the chip's clock.
        compulsory_bytes: DRAM traffic that no schedule avoids: the parts of weights, inputs and outputs that calls
            access, once each, without resident weights.
        kept_weight_bytes: Bytes of weights that stay in the scratchpad or the L2 from run to run.
        weights: The weights' forms in DRAM, on a chip that knows others than as they are.
        spans: Time span of each instruction; empty unless they were asked for.
    """

    program: str
    chip: Chip
    cycles: int
    calls: tuple[CallResult, ...]
    energy: Energy
    compulsory_bytes: int
    kept_weight_bytes: int
    weights: tuple[Buffer, ...] = ()
    spans: tuple[Span, ...] = ()

    @property
    def seconds(self) -> float:
        """Time of the run in seconds."""
        return self.chip.seconds(self.cycles)

    @property
    def macs(self) -> int:
        """Multiply-accumulates of all calls."""
        return sum(call.macs for call in self.calls)

    @property
    def dram_bytes(self) -> int:
        """Bytes read from and written to DRAM."""
        return sum(call.dram_bytes for call in self.calls)

    @property
    def sram_bytes(self) -> int:
        """Bytes read from and written to the scratchpad."""
        return sum(call.counts.sram_bytes for call in self.calls)

    @property
    def network_bytes(self) -> int:
        """Bytes moved between cores."""
        return sum(call.counts.network_bytes for call in self.calls)

    @property
    def l2_bytes(self) -> int:
        """Bytes read from and written to the shared L2."""
        return sum(call.counts.l2_read + call.counts.l2_written for call in self.calls)

    @property
    def sram_used(self) -> int:
        """Maximum number of scratchpad bytes that a call accesses."""
        return max((call.sram_used for call in self.calls), default=0)

    @property
    def stalls(self) -> dict[Cause, int]:
        """Cause → cycles in which no engine computed."""
        causes = [cause for cause in Cause if cause is not Cause.L2 or self.chip.l2 is not None]
        return {cause: sum(call.counts.stalls.get(cause, 0) for call in self.calls) for cause in causes}

    @property
    def busy(self) -> dict[str, int]:
        """Engine → cycles in which it was busy."""
        names = sorted({name for call in self.calls for name in call.counts.busy})
        return {name: sum(call.busy(name) for call in self.calls) for name in names}

    @property
    def compute_cycles(self) -> float:
        """Cycles that the program's multiply-accumulates would take at the matrix engine's peak."""
        return sum(least_cycles(call.counts, self.chip) for call in self.calls)

    @property
    def utilization(self) -> float:
        """Achieved share of the matrix engine's peak, from 0 to 1."""
        return self.compute_cycles / self.cycles if self.cycles else 0.0

    @property
    def bandwidth_utilization(self) -> float:
        """Achieved share of the peak DRAM bandwidth, from 0 to 1."""
        return self.dram_bytes / self.chip.dram_bytes_per_cycle / self.cycles if self.cycles else 0.0

    @property
    def roofline_cycles(self) -> float:
        """Lower bound of the cycles: the longer of compulsory traffic at peak bandwidth and products at peak rate."""
        return max(self.compulsory_bytes / self.chip.dram_bytes_per_cycle, self.compute_cycles)

    def to_dict(self, *, calls: bool = True) -> dict[str, Any]:
        """The result as JSON data; times in microseconds, energy in microjoules.

        Args:
            calls: Whether to include the results of each kernel call.
        """
        chip, way = self.chip, self.chip.outside_name.lower()
        data: dict[str, Any] = {
            "program": self.program,
            "chip": chip.name,
            "latency_us": 1e6 * self.seconds,
            "cycles": self.cycles,
            "roofline_us": 1e6 * chip.seconds(self.roofline_cycles),
            "instructions": sum(call.counts.instructions for call in self.calls),
            "macs": self.macs,
            "utilization": self.utilization,
            "bandwidth_utilization": self.bandwidth_utilization,
            "busy_us": _microseconds(self.busy, chip),
            "stall_us": _microseconds(self.stalls, chip),
            f"{way}_bytes": self.dram_bytes,
            f"compulsory_{way}_bytes": self.compulsory_bytes,
            "kept_weight_bytes": self.kept_weight_bytes,
            **({"weights": [_form_dict(own) for own in self.weights]} if self.weights else {}),
            "sram_bytes": self.sram_bytes,
            **({"network_bytes": self.network_bytes} if chip.cores else {}),
            **({"l2_bytes": self.l2_bytes} if chip.l2 else {}),
            "tile_sram_bytes": self.sram_used,
            "energy_uj": {
                "total": 1e6 * self.energy.total,
                **{name: 1e6 * value for name, value in vars(self.energy).items()},
            },
        }
        if calls:
            data["calls"] = [_call_dict(call, chip) for call in self.calls]
        return data


def _microseconds(cycles: Mapping[Any, float], chip: Chip) -> dict[str, float]:
    return {str(name): 1e6 * chip.seconds(value) for name, value in cycles.items()}


def _form_dict(weight: Buffer) -> dict[str, Any]:
    form = weight.pattern or ("compressed" if weight.stored else "as it is")
    return {"name": weight.name, "bytes": weight.size, "stored_bytes": weight.dram_bytes, "form": form}


def _call_dict(call: CallResult, chip: Chip) -> dict[str, Any]:
    counts = call.counts
    return {
        "node": call.node,
        "kernel": call.kernel,
        "start_us": 1e6 * chip.seconds(call.start),
        "end_us": 1e6 * chip.seconds(call.end),
        "own_us": 1e6 * chip.seconds(call.cycles),
        "busy_us": _microseconds(counts.busy, chip),
        "stall_us": _microseconds({cause: cycles for cause, cycles in counts.stalls.items() if cycles}, chip),
        "macs": call.macs,
        "dtype": ", ".join(counts.macs),
        "vector_operations": counts.operations,
        "instructions": counts.instructions,
        "tiles": call.tiles,
        "tile": call.tile,
        "dram_bytes": call.dram_bytes,
        "sram_bytes": counts.sram_bytes,
        "energy_uj": 1e6 * call.joules,
    }


def make_result(name: str, plan: ExecutionPlan, chip: Chip, tiles: TileProgram, run: Run, kept: int) -> Result:
    """Build the result of a run.

    Args:
        plan: The plan; each of its calls corresponds to a section of the tile program.
        kept: Bytes of weights that the preload sections loaded into the scratchpad or the L2.
    """
    calls = tuple(
        _call_result(index, call, section, counts, chip)
        for index, (call, section, counts) in enumerate(zip(plan.calls, tiles.sections, run.sections, strict=True))
    )
    preloaded = {
        tile.buffer
        for section in tiles.preload
        for instruction, _ in instructions(section.body)
        for tile in instruction.reads
        if tile.space.has_buffers
    }
    energy = _energy(chip, run.sections, run.cycles)
    ratios = {buffer.name: buffer.stored / buffer.size for buffer in tiles.buffers if buffer.stored}
    compulsory = compulsory_bytes(plan, preloaded, ratios)
    has_forms = chip.weights is not None or chip.sparsity is not None
    weights = tuple(
        b for b in tiles.buffers if has_forms and b.name in plan.buffers and plan.buffers[b.name].is_constant
    )
    return Result(name, chip, run.cycles, calls, energy, compulsory, kept, weights, tuple(run.spans))


def _call_result(index: int, call: KernelCall, section: Section, counts: Counts, chip: Chip) -> CallResult:
    tiles, tile = _first_tile(section)
    energy = _energy(chip, [counts], 0)
    used, family = _scratchpad_used(section), declaration(call).family.value
    return CallResult(index, call.node, call.kernel, family, counts, tiles, tile, used, energy)


def _energy(chip: Chip, every: Sequence[Counts], cycles: int) -> Energy:
    costs, pico = chip.energy, 1e-12
    return Energy(
        macs=pico * sum(n * chip.mac_energy(dtype) for counts in every for dtype, n in counts.macs.items()),
        vector=pico * costs.pj_per_vector_operation * sum(counts.operations for counts in every),
        sram=pico * costs.pj_per_sram_byte * sum(counts.sram_bytes for counts in every),
        dram=pico * costs.pj_per_dram_byte * sum(counts.dram_read + counts.dram_written for counts in every),
        static=costs.static_watts * chip.seconds(cycles),
        network=pico * costs.pj_per_network_byte * sum(counts.network_bytes for counts in every),
        l2=pico * costs.pj_per_l2_byte * sum(counts.l2_read + counts.l2_written for counts in every),
    )


def least_cycles(counts: Counts, chip: Chip) -> float:
    """Cycles of these multiply-accumulates at the matrix engine's peak."""
    return sum(macs / chip.peak_macs(dtype) for dtype, macs in counts.macs.items())


def compulsory_bytes(
    plan: ExecutionPlan, kept: Iterable[str] = (), ratios: Mapping[str, float] = MappingProxyType({})
) -> int:
    """Compulsory DRAM traffic of a plan: for each weight, input and output, the largest part that one call accesses.

    Args:
        kept: Buffers that stay on the chip, which are left out.
        ratios: Buffer → bytes that it takes in DRAM for each byte of its values, for those that do not lie there as
            they are.
    """
    touched: dict[tuple[str, bool], int] = {}
    left_out = {*kept, *(name for name, buffer in plan.buffers.items() if buffer.kind == "arena")}
    outputs = {name for name, buffer in plan.buffers.items() if buffer.kind == "output"}
    for call in plan.calls:
        sizes = [distinct_bytes(view) for view in (*call.inputs, *call.outputs)]
        excess = max(0, sum(sizes) - call.bytes_moved)  # a lookup touches but some rows of its table
        for place in sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True):
            sizes[place], excess = max(0, sizes[place] - excess), max(0, excess - sizes[place])
        for position, (view, size) in enumerate(zip((*call.inputs, *call.outputs), sizes, strict=True)):
            key = (view.buffer, position >= len(call.inputs))
            if view.buffer not in left_out:
                touched[key] = max(touched.get(key, 0), size)
    return sum(
        int(size * ratios.get(name, 1.0))
        for (name, is_write), size in touched.items()
        if is_write or name not in outputs
    )


def _first_tile(section: Section) -> tuple[int, str]:
    """Number of executions and box of a section's first product, or vector program, or transfer if it has no other."""
    every = list(instructions(section.body))
    for kind in (Multiply, Compute, Transfer):
        for instruction, counts in every:
            if isinstance(instruction, kind):
                return math.prod(counts), "×".join(str(axis.size) for axis in instruction.axes)
    return 0, ""


def _scratchpad_used(section: Section) -> int:
    """Number of distinct scratchpad bytes that a section accesses."""
    areas = sorted(
        area_of(tile, instruction, counts)
        for instruction, counts in instructions(section.body)
        for tile in (*instruction.reads, *instruction.writes)
        if tile.space is Space.SCRATCHPAD
    )
    used = end = 0
    for first, last in areas:
        used += max(0, last - max(first, end))
        end = max(end, last)
    return used


def area_of(tile: Tile, instruction: Instruction, counts: tuple[int, ...]) -> tuple[int, int]:
    """The first byte that a tile covers over all iterations of its loops, and one past the last."""
    first, last = tile.address.bounds(counts)
    last += itemsize(tile.dtype) + tile.slot_bytes * (tile.slots - 1)
    for axis, stride in zip(instruction.axes, tile.strides, strict=False):
        first, last = first + min(0, stride * (axis.size - 1)), last + max(0, stride * (axis.size - 1))
    return max(0, first), last


__all__ = [
    "CallResult",
    "Energy",
    "Result",
    "area_of",
    "compulsory_bytes",
    "least_cycles",
    "make_result",
]
