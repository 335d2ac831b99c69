"""Laws of every simulation, on random programs and random chips."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ir_builder import IRBuilder

from npu_compiler import CompiledProgram, CompileOptions
from npu_compiler import compile as compile_ir
from npu_model import Chip, Result, load_chip, simulate
from npu_model.simulation import MONOTONE_WITHIN
from npu_model.systolic import Dataflow

ROUNDING = 1e-9
LAWS = settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def programs(draw: st.DrawFn) -> CompiledProgram:
    """One or two linear layers with an activation or an addition after each."""
    rows = draw(st.integers(1, 64))
    width = draw(st.integers(1, 128))
    g = IRBuilder("random")
    x = y = g.input("x", rows, width)
    for layer in range(draw(st.integers(1, 2))):
        width = draw(st.integers(1, 128))
        y = g("aten.linear.default", y, g.weight(f"w{layer}", width, g.shape(y)[-1]))
        y = g("aten.relu.default", y) if draw(st.booleans()) else g("aten.add.Tensor", y, y)
    g.output(y, g("aten.softmax.int", x, -1))
    return compile_ir(g.ir(), options=CompileOptions(compute_dtype=draw(st.sampled_from(("float16", "float32")))))


@st.composite
def chips(draw: st.DrawFn) -> Chip:
    """A shipped chip with other arrays, SRAM, memory, channels and launches."""
    chip = load_chip(draw(st.sampled_from(("edge", "phone", "datacenter", "h200", "cpu"))))
    assert chip.matrix is not None
    changes: dict[str, Any] = {
        "matrix": {
            "arrays": draw(st.integers(1, 8)),
            "rows": draw(st.sampled_from((4, 16, 64))),
            "columns": draw(st.sampled_from((4, 16, 64))),
            "dataflow": draw(st.sampled_from(Dataflow)),
            "held_folds": draw(st.sampled_from((1, 4))),
        },
        "sram": {"size": draw(st.integers(64 << 10, 4 << 20))},
        "dram": {"bandwidth_gb_s": draw(st.floats(1, 1000)), "latency_ns": draw(st.floats(0, 500))},
        "dma": {"channels": draw(st.integers(1, 8))},
        "launch": {"cost_us": draw(st.floats(0, 5)), "overlapped": draw(st.booleans())},
    }
    return dataclasses.replace(
        chip, **{name: dataclasses.replace(getattr(chip, name), **x) for name, x in changes.items()}
    )


def changed(chip: Chip, table: str, **values: Any) -> Chip:
    return dataclasses.replace(chip, **{table: dataclasses.replace(getattr(chip, table), **values)})


@LAWS
@given(programs(), chips())
def test_nothing_is_faster_than_the_roofline(program: CompiledProgram, chip: Chip) -> None:
    result = simulate(program, chip)
    least = max(result.dram_bytes / chip.dram_bytes_per_cycle, result.compute_cycles, result.roofline_cycles)
    assert result.cycles >= least * (1 - ROUNDING)


@LAWS
@given(programs(), chips())
def test_weights_inputs_and_outputs_move_at_least_once(program: CompiledProgram, chip: Chip) -> None:
    result = simulate(program, chip)
    constants = sum(b.size_bytes for b in program.plan.buffers.values() if b.kind == "weight")
    assert result.dram_bytes + result.kept_weight_bytes >= constants
    assert result.dram_bytes >= result.compulsory_bytes


@LAWS
@given(programs(), chips())
def test_energy_is_the_sum_of_its_parts(program: CompiledProgram, chip: Chip) -> None:
    result = simulate(program, chip)
    energy = result.energy
    parts = (energy.macs, energy.vector, energy.sram, energy.dram, energy.static)
    assert min(parts) >= 0 and energy.total == pytest.approx(sum(parts))
    assert sum(call.joules for call in result.calls) + energy.static == pytest.approx(energy.total)


@LAWS
@given(programs(), chips())
def test_a_simulation_is_deterministic(program: CompiledProgram, chip: Chip) -> None:
    first, second = simulate(program, chip), simulate(program, chip)
    assert first.to_dict() == second.to_dict()


@LAWS
@given(programs(), chips(), st.integers(2, 5))
def test_more_of_anything_is_not_slower(program: CompiledProgram, chip: Chip, times: int) -> None:
    assert chip.matrix is not None
    before = simulate(program, chip)
    for more in (
        changed(chip, "sram", size=chip.sram.size * times),
        changed(chip, "dram", bandwidth_gb_s=chip.dram.bandwidth_gb_s * times),
        changed(chip, "matrix", arrays=chip.matrix.arrays * times),
    ):
        assert _slowdown(before, simulate(program, more)) <= MONOTONE_WITHIN + ROUNDING, more


def _slowdown(before: Result, after: Result) -> float:
    return after.cycles / before.cycles - 1
