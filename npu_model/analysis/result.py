"""`Result`: what a simulation found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from npu_compiler.compiled_program import CompiledProgram
from npu_compiler.program.elementwise import declaration
from npu_model.chip import Chip
from npu_model.mapper import Tiling, least_cycles
from npu_model.residency import Residency
from npu_model.simulator import CallTimes, Cause
from npu_model.work import Work


@dataclass(frozen=True)
class Energy:
    """Joules of a run by part."""

    macs: float
    vector: float
    sram: float
    dram: float
    static: float

    @property
    def total(self) -> float:
        return self.macs + self.vector + self.sram + self.dram + self.static


@dataclass(frozen=True)
class CallResult:
    """A kernel call on the chip.

    Attributes:
        start, end: Cycles, from its first transfer or computation to its last; calls overlap.
        progress: Cycles by which it moved on the end of all computing. With `stalls`, over all calls, it adds up to the
            cycles of the program.
        stalls: Cycles that it waited, by cause.
        array_cycles, vector_cycles: In which those units worked, without stalls.
        least_cycles: Cycles of its multiply-accumulates at the chip's peak; fewer where the chip is known to compute a
            convolution with less of them.
        dtype: What it multiplies; empty where it multiplies nothing.
        shape: Its tiles.
        constant_bytes, input_bytes, output_bytes: Moved from and to DRAM.
        joules: Static energy left out.
    """

    index: int
    node: str
    kernel: str
    family: str
    start: float
    end: float
    progress: float
    stalls: Mapping[Cause, float]
    array_cycles: float
    vector_cycles: float
    macs: int
    least_cycles: float
    dtype: str
    vector_operations: int
    tiles: int
    shape: str
    constant_bytes: int
    input_bytes: int
    output_bytes: int
    sram_bytes: int
    joules: float
    times: CallTimes

    @property
    def dram_bytes(self) -> int:
        return self.constant_bytes + self.input_bytes + self.output_bytes

    @property
    def cycles(self) -> float:
        """The part of the program's cycles that is this call's."""
        return self.times.cycles


@dataclass(frozen=True)
class Result:
    """One run of a program on a chip.

    Attributes:
        cycles: Of the chip's clock.
        compulsory_bytes: The DRAM traffic that no chip avoids: what calls touch of weights, inputs and outputs, once
            each; weights that stay in SRAM (`kept_weight_bytes`) left out.
        sram_used: Bytes of intermediate results in SRAM, call by call; `tile_bytes` more are for tiles.
    """

    program: str
    chip: Chip
    cycles: float
    calls: tuple[CallResult, ...]
    energy: Energy
    compulsory_bytes: int
    kept_weight_bytes: int
    tile_bytes: int
    sram_used: tuple[int, ...]

    @property
    def seconds(self) -> float:
        return self.chip.seconds(self.cycles)

    @property
    def macs(self) -> int:
        return sum(call.macs for call in self.calls)

    @property
    def dram_bytes(self) -> int:
        return sum(call.dram_bytes for call in self.calls)

    @property
    def sram_bytes(self) -> int:
        return sum(call.sram_bytes for call in self.calls)

    @property
    def stalls(self) -> dict[Cause, float]:
        """Cycles in which neither arrays nor vector unit got on, by cause."""
        return {cause: sum(call.stalls[cause] for call in self.calls) for cause in Cause}

    @property
    def compute_cycles(self) -> float:
        """Cycles that the program's multiply-accumulates take at the chip's peak."""
        return sum(call.least_cycles for call in self.calls)

    @property
    def utilization(self) -> float:
        """The share of the peak at which the program multiplies, 0 to 1."""
        return self.compute_cycles / self.cycles if self.cycles else 0.0

    @property
    def bandwidth_utilization(self) -> float:
        """The share of DRAM's bandwidth in use, 0 to 1."""
        return self.dram_bytes / self.chip.dram_bytes_per_cycle / self.cycles if self.cycles else 0.0

    @property
    def roofline_cycles(self) -> float:
        """The least that the program can take: its compulsory traffic at full bandwidth, its products at the peak."""
        return max(self.compulsory_bytes / self.chip.dram_bytes_per_cycle, self.compute_cycles)

    def to_dict(self, *, calls: bool = True) -> dict[str, Any]:
        """The result as JSON data; times in microseconds, energy in microjoules."""
        chip = self.chip
        data: dict[str, Any] = {
            "program": self.program,
            "chip": chip.name,
            "latency_us": 1e6 * self.seconds,
            "cycles": self.cycles,
            "roofline_us": 1e6 * chip.seconds(self.roofline_cycles),
            "macs": self.macs,
            "utilization": self.utilization,
            "bandwidth_utilization": self.bandwidth_utilization,
            "stall_us": {str(cause): 1e6 * chip.seconds(cycles) for cause, cycles in self.stalls.items()},
            "dram_bytes": self.dram_bytes,
            "compulsory_dram_bytes": self.compulsory_bytes,
            "kept_weight_bytes": self.kept_weight_bytes,
            "sram_bytes": self.sram_bytes,
            "tile_sram_bytes": self.tile_bytes,
            "energy_uj": {
                "total": 1e6 * self.energy.total,
                **{name: 1e6 * value for name, value in vars(self.energy).items()},
            },
        }
        if calls:
            data["calls"] = [_call_dict(call, chip) for call in self.calls]
        return data


def _call_dict(call: CallResult, chip: Chip) -> dict[str, Any]:
    return {
        "node": call.node,
        "kernel": call.kernel,
        "start_us": 1e6 * chip.seconds(call.start),
        "end_us": 1e6 * chip.seconds(call.end),
        "own_us": 1e6 * chip.seconds(call.cycles),
        "stall_us": {str(cause): 1e6 * chip.seconds(cycles) for cause, cycles in call.stalls.items() if cycles},
        "macs": call.macs,
        "dtype": call.dtype,
        "vector_operations": call.vector_operations,
        "tiles": call.tiles,
        "tile": call.shape,
        "dram_bytes": call.dram_bytes,
        "sram_bytes": call.sram_bytes,
        "energy_uj": 1e6 * call.joules,
    }


def make_result(
    program: CompiledProgram,
    chip: Chip,
    works: Sequence[Work],
    tilings: Sequence[Tiling],
    times: Sequence[CallTimes],
    residency: Residency,
) -> Result:
    """Put together what mapper and simulator found for each call."""
    calls = tuple(
        _call_result(index, chip, work, tiling, time)
        for index, (work, tiling, time) in enumerate(zip(works, tilings, times, strict=True))
    )
    cycles = sum(call.cycles for call in calls)
    return Result(
        program=program.name,
        chip=chip,
        cycles=cycles,
        calls=calls,
        energy=_energy(chip, calls, cycles),
        compulsory_bytes=_compulsory_bytes(program, works, residency),
        kept_weight_bytes=residency.kept_weights,
        tile_bytes=residency.tile_bytes,
        sram_used=residency.used,
    )


def _call_result(index: int, chip: Chip, work: Work, tiling: Tiling, times: CallTimes) -> CallResult:
    moved = [
        round(size * tiling.tiles) for size in (tiling.constants, tiling.inputs, tiling.outputs, tiling.sram_bytes)
    ]
    costs = chip.energy
    picojoules = (
        work.operations.macs * chip.mac_energy(work.operations.dtype) if work.operations.macs else 0.0,
        work.operations.vector_operations * costs.pj_per_vector_operation,
        moved[3] * costs.pj_per_sram_byte,
        sum(moved[:3]) * costs.pj_per_dram_byte,
    )
    starts = [span.start for span in times.spans if span.start >= 0]
    return CallResult(
        index=index,
        node=work.call.node,
        kernel=work.call.kernel,
        family=declaration(work.call).family.value,
        start=min(starts, default=0.0),
        end=times.end,
        progress=times.progress,
        stalls=times.stalls,
        array_cycles=tiling.array_cycles * tiling.tiles,
        vector_cycles=tiling.vector_cycles * tiling.tiles,
        macs=work.operations.macs,
        least_cycles=least_cycles(work.operations, chip),
        dtype=work.operations.dtype,
        vector_operations=work.operations.vector_operations,
        tiles=tiling.tiles,
        shape=tiling.shape,
        constant_bytes=moved[0],
        input_bytes=moved[1],
        output_bytes=moved[2],
        sram_bytes=moved[3],
        joules=1e-12 * sum(picojoules),
        times=times,
    )


def _energy(chip: Chip, calls: Sequence[CallResult], cycles: float) -> Energy:
    costs, pico = chip.energy, 1e-12
    return Energy(
        macs=pico * sum(call.macs * chip.mac_energy(call.dtype) for call in calls if call.macs),
        vector=pico * costs.pj_per_vector_operation * sum(call.vector_operations for call in calls),
        sram=pico * costs.pj_per_sram_byte * sum(call.sram_bytes for call in calls),
        dram=pico * costs.pj_per_dram_byte * sum(call.dram_bytes for call in calls),
        static=costs.static_watts * chip.seconds(cycles),
    )


def _compulsory_bytes(program: CompiledProgram, works: Sequence[Work], residency: Residency) -> int:
    """What the calls touch of buffers outside the arena, the most that a call does of each, in each direction."""
    touched: dict[tuple[str, bool], int] = {}
    for work in works:
        for accesses, is_write in ((work.reads, False), (work.writes, True)):
            for access in accesses:
                if program.plan.buffers[access.buffer].kind == "arena" or access.buffer in residency.buffers:
                    continue
                key = (access.buffer, is_write)
                touched[key] = max(touched.get(key, 0), access.bytes)
    outputs = {name for name, buffer in program.plan.buffers.items() if buffer.kind == "output"}
    return sum(size for (name, is_write), size in touched.items() if is_write or name not in outputs)
