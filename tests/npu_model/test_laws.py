"""Laws of every simulation, on random programs and random chips."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from ir_builder import IRBuilder

from npu_compiler import CompiledProgram, CompileOptions, ConstraintError
from npu_compiler import compile as compile_ir
from npu_model import Chip, NPUBackend, NPUTarget, Result, load_chip, simulate
from npu_model.analysis.simulation import most_cycles
from npu_model.chip import Dataflow, DramBanks, SharedL2
from npu_model.chip.description import DRAM_KINDS
from npu_runtime import Executor, load_weights

ROUNDING = 1e-9
LAWS = settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def graphs(draw: st.DrawFn) -> dict[str, Any]:
    """One to three linear layers, with an activation after some, or a convolution and an activation."""
    g = IRBuilder("random")
    if draw(st.booleans()):
        channels, size, width = draw(st.integers(1, 40)), draw(st.integers(3, 20)), draw(st.integers(1, 70))
        x = g.input("x", 1, channels, size, size)
        y = g("aten.conv2d.default", x, g.weight("w", width, channels, 3, 3), None, [1, 1], [1, 1])
        g.output(g("aten.relu.default", y))
        return g.ir()
    rows, width = draw(st.integers(1, 64)), draw(st.integers(1, 128))
    y = g.input("x", rows, width)
    for layer in range(draw(st.integers(1, 3))):
        width = draw(st.integers(1, 128))
        y = g("aten.linear.default", y, g.weight(f"w{layer}", width, g.shape(y)[-1]))
        y = g("aten.relu.default", y) if draw(st.booleans()) else y
    g.output(y)
    return g.ir()


options = st.builds(CompileOptions, compute_dtype=st.sampled_from(("float16", "float32")))
programs = st.builds(compile_ir, graphs(), options=options)


organisations = st.builds(
    lambda kind, channels: DramBanks(kind=kind, channels=channels, **DRAM_KINDS[kind]),
    st.sampled_from(sorted(DRAM_KINDS)),
    st.integers(1, 16),
)


@st.composite
def chips(draw: st.DrawFn) -> Chip:
    """A shipped chip with other arrays, SRAM, memory, channels and launches."""
    chip = load_chip(draw(st.sampled_from(("edge", "phone", "datacenter"))))
    assert chip.matrix is not None
    changes: dict[str, Any] = {
        "matrix": {
            "arrays": draw(st.integers(1, 8)),
            "rows": draw(st.sampled_from((4, 7, 16, 64))),
            "columns": draw(st.sampled_from((4, 13, 16, 64))),
            "dataflow": draw(st.sampled_from(Dataflow)),
            "overlapped_folds": draw(st.booleans()),
            "load_rows": draw(st.sampled_from((1, 3, 64))),
            "efficiency": draw(st.sampled_from((1.0, 0.7))),
        },
        "sram": {"size": draw(st.integers(64 << 10, 4 << 20)), "banks": draw(st.sampled_from((1, 8, 64)))},
        "dram": {
            "bandwidth_gb_s": draw(st.floats(1, 1000)),
            "latency_ns": draw(st.floats(0, 500)),
            "efficiency": draw(st.sampled_from((1.0, 0.4))),
            "banks": draw(st.none() | organisations),
        },
        "dma": {"channels": draw(st.integers(1, 8)), "staged_bytes": draw(st.sampled_from((0, 20_000)))},
        "launch": {"cost_us": draw(st.floats(0, 5)), "overlapped": draw(st.booleans())},
    }
    return dataclasses.replace(
        chip, **{name: dataclasses.replace(getattr(chip, name), **x) for name, x in changes.items()}
    )


@st.composite
def chips_with_l2(draw: st.DrawFn) -> Chip:
    """A chip of `chips` with a shared L2, whose bytes cost energy."""
    l2 = draw(st.builds(SharedL2, st.integers(1024, 1 << 20), st.integers(1, 512), st.floats(0, 100)))
    return changed(dataclasses.replace(draw(chips()), l2=l2), "energy", pj_per_l2_byte=3.0)


def changed(chip: Chip, table: str, **values: Any) -> Chip:
    return dataclasses.replace(chip, **{table: dataclasses.replace(getattr(chip, table), **values)})


def simulated(program: CompiledProgram, chip: Chip) -> Result:
    """The simulation, of programs that the chip can run."""
    try:
        return simulate(program, chip)
    except ConstraintError:
        assume(False)
        raise


@LAWS
@given(programs, chips())
def test_nothing_is_faster_than_the_roofline(program: CompiledProgram, chip: Chip) -> None:
    result = simulated(program, chip)
    least = max(result.dram_bytes / chip.dram_bytes_per_cycle, result.compute_cycles, result.roofline_cycles)
    assert result.cycles >= least * (1 - ROUNDING)
    assert result.cycles >= max(result.busy.values())


@LAWS
@given(programs, chips())
def test_weights_inputs_and_outputs_move_at_least_once(program: CompiledProgram, chip: Chip) -> None:
    result = simulated(program, chip)
    constants = sum(b.size_bytes for b in program.plan.buffers.values() if b.kind == "weight")
    assert result.dram_bytes + result.kept_weight_bytes >= constants
    assert result.dram_bytes >= result.compulsory_bytes > 0


@LAWS
@given(programs, chips())
def test_time_and_energy_are_the_sums_of_their_parts(program: CompiledProgram, chip: Chip) -> None:
    result = simulated(program, chip)
    progress = sum(call.counts.progress for call in result.calls)
    assert progress + sum(result.stalls.values()) == sum(call.cycles for call in result.calls) == result.cycles
    assert max(call.end for call in result.calls) == result.cycles
    energy = result.energy
    parts = (energy.macs, energy.vector, energy.sram, energy.dram, energy.static)
    assert min(parts) >= 0 and energy.total == pytest.approx(sum(parts))
    assert sum(call.joules for call in result.calls) + energy.static == pytest.approx(energy.total)


@LAWS
@given(programs, chips_with_l2())
def test_a_shared_l2_obeys_the_roofline_and_the_sums(program: CompiledProgram, chip: Chip) -> None:
    result = simulated(program, chip)
    assert chip.l2 is not None
    least = max(result.l2_bytes / chip.l2.bytes_per_cycle, result.dram_bytes / chip.dram_bytes_per_cycle)
    assert result.cycles >= max(least, result.compute_cycles, result.roofline_cycles) * (1 - ROUNDING)
    assert result.dram_bytes >= result.compulsory_bytes > 0
    progress = sum(call.counts.progress for call in result.calls)
    assert progress + sum(result.stalls.values()) == result.cycles
    energy = result.energy
    assert energy.l2 == pytest.approx(3e-12 * result.l2_bytes)
    parts = (energy.macs, energy.vector, energy.sram, energy.dram, energy.static, energy.l2)
    assert energy.total == pytest.approx(sum(parts))


@LAWS
@given(programs, chips_with_l2(), st.integers(2, 5))
def test_more_l2_is_not_slower(program: CompiledProgram, chip: Chip, times: int) -> None:
    assert chip.l2 is not None
    without = simulated(program, dataclasses.replace(chip, l2=None))
    before = simulated(program, chip)
    assert before.cycles <= most_cycles(without) * (1 + ROUNDING)
    more = changed(chip, "l2", size=chip.l2.size * times)
    assert simulate(program, more).cycles <= most_cycles(before) * (1 + ROUNDING)


@LAWS
@given(programs, chips())
def test_every_multiply_accumulate_is_counted_once(program: CompiledProgram, chip: Chip) -> None:
    result = simulated(program, chip)
    assert [call.macs for call in result.calls] == [_macs(call) for call in program.plan.calls]


def _macs(call: Any) -> int:
    """Rows × columns × k of a product; of a convolution with its window, without the padding's share."""
    from npu_compiler.program.elementwise import declaration

    return sum(product.macs for product in declaration(call).matrix_products(call))


@LAWS
@given(graphs(), chips() | chips_with_l2(), st.sampled_from(("float16", "float32")))
def test_a_run_on_data_counts_what_a_run_in_time_counts(graph: dict[str, Any], chip: Chip, dtype: str) -> None:
    device, rng = NPUBackend(chip, checked=True), np.random.default_rng(0)
    try:
        program = compile_ir(graph, NPUTarget(chip), CompileOptions(compute_dtype=dtype))
    except ConstraintError:
        assume(False)
    timed = device.timing(program)
    state = {name: rng.standard_normal(spec.shape, np.float32) for name, spec in _sources(program).items()}
    (spec,) = program.input_specs
    x = rng.standard_normal(spec.shape, np.float32)
    Executor(program, device).run({"x": x}, load_weights(state, program, device))
    on_data = device.timing(program)
    assert on_data is not timed and on_data == timed
    assert device.simulated_seconds == simulate(program, chip).seconds


def _sources(program: CompiledProgram) -> dict[str, Any]:
    return {key: _Shape(shape) for w in program.weight_specs.values() for key, shape in w.source_shapes.items()}


@dataclasses.dataclass
class _Shape:
    shape: tuple[int, ...]


@LAWS
@given(programs, chips())
def test_a_simulation_is_deterministic(program: CompiledProgram, chip: Chip) -> None:
    assert simulated(program, chip).to_dict() == simulated(program, chip).to_dict()


@LAWS
@given(programs, chips(), st.integers(2, 5))
def test_more_of_anything_is_not_slower(program: CompiledProgram, chip: Chip, times: int) -> None:
    assert chip.matrix is not None
    before = simulated(program, chip)
    for more in (
        changed(chip, "sram", size=chip.sram.size * times),
        changed(chip, "dram", bandwidth_gb_s=chip.dram.bandwidth_gb_s * times),
        changed(chip, "matrix", arrays=chip.matrix.arrays * times),
    ):
        assert simulate(program, more).cycles <= most_cycles(before) * (1 + ROUNDING), more
