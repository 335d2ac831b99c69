"""The search over tilings, and what stays in the scratchpad."""

from __future__ import annotations

import dataclasses

import pytest
from ir_builder import IRBuilder

from npu_compiler import CompiledProgram, CompileOptions
from npu_compiler import compile as compile_ir
from npu_model import Chip, load_chip, simulate
from npu_model.analysis.simulation import simulate_for
from npu_model.lowering.mapper import Mapper
from npu_model.lowering.program import link_program, trimmed
from npu_model.lowering.shared import Shared
from npu_model.machine.machine import Machine


def with_scratchpad(kib: int, name: str = "edge") -> Chip:
    chip = load_chip(name)
    return dataclasses.replace(chip, sram=dataclasses.replace(chip.sram, size=kib << 10))


def layers(count: int, width: int = 512) -> CompiledProgram:
    """Linear layers one behind the other, each with a weight of half a MiB."""
    g = IRBuilder("layers")
    y = g.input("x", 4, width)
    for layer in range(count):
        y = g("aten.relu.default", g("aten.linear.default", y, g.weight(f"w{layer}", width, width)))
    g.output(y)
    return compile_ir(g.ir(), options=CompileOptions(compute_dtype="float16"))


def test_a_larger_scratchpad_keeps_more_weights_little_by_little() -> None:
    program = layers(8)
    results = [simulate(program, with_scratchpad(kib)) for kib in (512, 1024, 2048, 3072, 4096, 5120)]
    kept = [result.kept_weight_bytes for result in results]
    assert kept == sorted(set(kept)) and kept[-1] == 8 * 512 * 512 * 2
    cycles = [result.cycles for result in results]
    assert cycles == sorted(set(cycles), reverse=True)


def test_chips_that_share_what_they_can_take_the_cycles_that_each_takes_alone() -> None:
    program, store = layers(3), Shared()
    for chip in [*map(with_scratchpad, (2048, 128, 512)), load_chip("phone"), load_chip("datacenter")]:
        shared, alone = simulate_for(program, Mapper(chip, store)), simulate(program, chip)
        assert (shared.cycles, shared.dram_bytes, shared.energy) == (alone.cycles, alone.dram_bytes, alone.energy)


@pytest.mark.parametrize("kib", [128, 1024])
def test_waits_that_are_left_out_take_no_cycles(kib: int) -> None:
    chip, plan = with_scratchpad(kib), layers(3).plan
    linked = link_program(plan, chip, Mapper(chip))
    runs = [Machine(chip, program).run() for program in (linked, trimmed(linked, chip))]
    assert runs[0].cycles == runs[1].cycles
    assert runs[0].sections[-1].instructions > runs[1].sections[-1].instructions


def test_the_bytes_that_a_tiling_needs_are_those_that_it_takes() -> None:
    chip, plan = with_scratchpad(1024), layers(3).plan
    for candidate in Mapper(chip).choices(plan.calls[0]).candidates:
        assert 0 <= candidate.needs({0, 1, 2}) <= candidate.needs({1}) < candidate.scratchpad <= chip.sram.size


def test_tiles_avoid_the_bytes_of_values_that_were_used_last_so_that_loads_overlap() -> None:
    g, half, square = IRBuilder("attention"), "bfloat16", (24, 328, 328)
    q, v = (g.input(name, 24, 328, 64, dtype=half) for name in "qv")
    k = g.input("k", 24, 64, 328, dtype=half)
    scores = g("aten.bmm.dtype", q, k, "float32", out=(square, "float32"))
    g.output(g("aten.bmm.default", g("aten.softmax.int", scores, -1, half, out=(square, half)), v))
    options = CompileOptions(disabled_fusions=("attention",))
    result = simulate(compile_ir(g.ir(), options=options), load_chip("tpu-v6e"), spans=True)
    spans = [[span for span in result.spans if span.section == section] for section in range(3)]
    assert [call.kernel.split("_")[0] for call in result.calls] == ["batched", "softmax", "batched"]
    assert {span.engine for span in spans[1]} == {"vector"}  # scores and weights stay in the scratchpad
    values = next(span for span in spans[2] if span.engine.startswith("dma"))
    assert values.end <= spans[1][0].end
