"""Simulations of programs on chips: what makes one faster, what costs, and what is refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from drawn import drawn
from ir_builder import IRBuilder

from npu_compiler import CompiledProgram, CompileOptions, ConstraintError
from npu_compiler import compile as compile_ir
from npu_compiler.errors import InputError
from npu_model import Cause, Chip, NPUTarget, load_chip, simulate
from npu_model.analysis.simulation import most_cycles

EDGE = load_chip("edge")


def changed(chip: Chip, table: str, **values: Any) -> Chip:
    return dataclasses.replace(chip, **{table: dataclasses.replace(getattr(chip, table), **values)})


def network(size: int = 56, channels: int = 32, quantization: str | None = None) -> CompiledProgram:
    """Two convolutions and two linear layers."""
    g = IRBuilder("network")
    x = g.input("x", 1, channels, size, size)
    y = g("aten.conv2d.default", x, g.weight("a", channels, channels, 3, 3), None, [1, 1], [1, 1])
    y = g("aten.conv2d.default", g("aten.relu.default", y), g.weight("b", 4, channels, 1, 1), None, [2, 2])
    y = g("aten.linear.default", g("aten.flatten.using_ints", y, 1), g.weight("c", 128, size * size))
    g.output(g("aten.linear.default", y, g.weight("d", 64, 128)))
    return compile_ir(g.ir(), options=CompileOptions(compute_dtype="float16", quantization=quantization))


def linear(m: int, k: int, n: int, **options: Any) -> CompiledProgram:
    g = IRBuilder("linear")
    g.output(g("aten.linear.default", g.input("x", m, k), g.weight("w", n, k)))
    return compile_ir(g.ir(), options=CompileOptions(compute_dtype="float16", **options))


def test_a_product_that_computes_much_comes_near_the_peak() -> None:
    assert simulate(linear(1024, 1024, 1024), EDGE).utilization > 0.9


def test_a_product_of_one_row_comes_near_the_bandwidth() -> None:
    result = simulate(linear(1, 4096, 4096), EDGE)
    assert result.bandwidth_utilization > 0.97
    assert result.stalls[Cause.DRAM_BANDWIDTH] > 0.5 * result.cycles


def test_weights_in_fewer_bits_take_less_traffic() -> None:
    traffic = [simulate(linear(1, 4096, 4096, quantization=name), EDGE).dram_bytes for name in (None, "int8", "int4")]
    assert traffic[0] >= 2 * 4096 * 4096 and traffic[1] < 0.52 * traffic[0] and traffic[2] < 0.56 * traffic[1]


MORE = {
    ("sram", "size"): [2**15, 2**16, 100_000, 2**17, 3 * 2**16, 2**18, 2**20, 2**22],
    ("dram", "bandwidth_gb_s"): [1, 2, 3, 5, 8, 13, 21, 100],
    ("matrix", "arrays"): [1, 2, 3, 4, 5, 7, 8, 16, 128],
    ("matrix", "accumulator_bytes"): [2**13, 2**14, 2**16, 2**20],
    ("output", "lanes"): [1, 8, 16, 64, 100, 1024],
    ("dma", "channels"): [1, 2, 3, 8],
}


@pytest.mark.parametrize("what", drawn(MORE, 1 / 3, ".".join))
def test_more_of_anything_is_not_slower(what: tuple[str, str]) -> None:
    program, (table, key) = network(), what
    results = [simulate(program, changed(EDGE, table, **{key: value})) for value in MORE[what]]
    best = results[0]
    for result in results[1:]:
        assert result.cycles <= most_cycles(best)
        best = min(best, result, key=lambda each: each.cycles)
    assert results[-1].cycles < results[0].cycles or key in ("channels", "accumulator_bytes")


@pytest.mark.parametrize("calls", [1, 3])
def test_a_launch_costs_what_the_chip_says(calls: int) -> None:
    g = IRBuilder("chain")
    x = g.input("x", 8, 64)
    for index in range(calls):
        x = g("aten.linear.default", x, g.weight(f"w{index}", 64, 64))
    g.output(x)
    program = compile_ir(g.ir())
    free, hidden, apart = (
        simulate(program, changed(EDGE, "launch", cost_us=cost, overlapped=overlapped))
        for cost, overlapped in ((0.0, False), (50.0, True), (50.0, False))
    )
    cost = 50_000
    assert free.stalls[Cause.LAUNCH] < 0.05 * cost and apart.cycles == free.cycles + calls * cost
    assert apart.stalls[Cause.LAUNCH] == pytest.approx(calls * cost, rel=0.05)
    assert calls * cost < hidden.cycles < apart.cycles or calls == 1


def test_few_ports_of_sram_hold_the_arrays_up() -> None:
    narrow = simulate(linear(512, 512, 512), changed(EDGE, "sram", banks=1, bytes_per_cycle=2))
    assert narrow.stalls[Cause.SRAM_PORTS] > 0.3 * narrow.cycles
    assert simulate(linear(512, 512, 512), EDGE).stalls[Cause.SRAM_PORTS] == 0


def test_calls_that_pass_a_result_on_depend_on_each_other() -> None:
    g = IRBuilder("pair")
    y = g("aten.linear.default", g.input("x", 64, 1024), g.weight("a", 1024, 1024))
    g.output(y, g("aten.linear.default", y, g.weight("b", 1024, 1024)))
    first, second = simulate(compile_ir(g.ir()), changed(EDGE, "dram", bandwidth_gb_s=1e6)).calls
    assert second.counts.start < first.end <= second.end, "weights are loaded while the call before computes"


def test_a_chip_without_a_matrix_engine_multiplies_nothing() -> None:
    with pytest.raises(ConstraintError, match="'matmul_kernel' cannot run on chip 'edge': it has no matrix engine"):
        simulate(linear(64, 256, 256), dataclasses.replace(EDGE, matrix=None))


def test_a_dtype_that_the_chip_lacks_is_refused() -> None:
    bytes_only = changed(EDGE, "matrix", rates={"int8": 1.0})
    with pytest.raises(ConstraintError, match="its matrix engine multiplies int8, not float16"):
        simulate(linear(64, 256, 256), bytes_only)


def test_a_program_is_simulated_as_it_is_compiled_for_the_chip() -> None:
    g = IRBuilder("linear")
    g.output(g("aten.linear.default", g.input("x", 8, 256), g.weight("w", 64, 256)))
    plain, own = compile_ir(g.ir()), compile_ir(g.ir(), NPUTarget(EDGE))
    assert simulate(plain, EDGE).to_dict() == simulate(own, EDGE).to_dict()


def test_a_program_without_calls_is_refused() -> None:
    program = linear(1, 8, 8)
    idle = dataclasses.replace(program, plan=dataclasses.replace(program.plan, calls=[]))
    with pytest.raises(InputError, match="'linear' has no kernel calls"):
        simulate(idle, EDGE)


def test_a_program_of_another_target_is_refused() -> None:
    from cuda_compiler import CUDACodegenTarget

    g = IRBuilder()
    g.output(g("aten.softmax.int", g.input("x", 4, 64), -1))
    with pytest.raises(InputError, match="--target op_level"):
        simulate(compile_ir(g.ir(), CUDACodegenTarget()), EDGE)


def streamed(m: int, k: int, n: int) -> CompiledProgram:
    """A product of two inputs, so that no weight stays on the chip."""
    g = IRBuilder("streamed")
    g.output(g("aten.linear.default", g.input("x", m, k), g.input("w", n, k)))
    return compile_ir(g.ir(), options=CompileOptions(compute_dtype="float16"))


@pytest.mark.parametrize(("room", "whole"), [(0, 0), (2 * 256 * 512, 1), (2 * (256 + 256) * 512, 2)])
def test_operands_that_fit_are_staged_before_a_product_begins(room: int, whole: int) -> None:
    """The weight first, then the rows; what does not fit is streamed."""
    chip = changed(EDGE, "dma", staged_bytes=room)
    result = simulate(streamed(256, 512, 256), chip, spans=True)
    assert result.dram_bytes == result.compulsory_bytes
    begin = min(span.start for span in result.spans if span.name == "multiply")
    loads = sum(span.end <= begin for span in result.spans if span.name == "transfer")
    moved = 1e-9 * begin / chip.clock_ghz * chip.dram.bandwidth_gb_s * 1e9
    assert loads >= whole and moved > whole * 2 * 256 * 512
    assert whole or begin < simulate(streamed(256, 512, 256), changed(chip, "dma", staged_bytes=2**20)).cycles / 2


@pytest.mark.parametrize(("room", "overlaps"), [(500_000, True), (250_000, False)])
def test_operands_of_two_products_are_staged_at_once_only_if_both_fit(room: int, overlaps: bool) -> None:
    g = IRBuilder("layers")
    y = g("aten.linear.default", g.input("x", 64, 256), g.input("a", 256, 256))  # of 131,072 bytes, as the other
    g.output(g("aten.linear.default", y, g.input("b", 256, 256)))
    program = compile_ir(g.ir(), options=CompileOptions(compute_dtype="float16"))
    result = simulate(program, changed(EDGE, "dma", staged_bytes=room), spans=True)
    first, second = ([span for span in result.spans if span.section == section] for section in range(2))
    ended = max(span.end for span in first if span.name == "multiply")
    assert (min(span.start for span in second if span.name == "transfer") < ended) is overlaps


def test_a_product_enters_the_array_while_the_one_before_leaves() -> None:
    chip = changed(changed(EDGE, "matrix", arrays=1), "sram", bytes_per_cycle=1024)
    folds, rate, depth = 2 * 2, 0.25, 32 + 32 + 32 - 2
    result = simulate(streamed(256, 64, 64), chip)
    assert result.busy["matrix"] == folds * 256 / rate
    assert result.stalls[Cause.DEPENDENCY] >= depth / rate
    alone = simulate(streamed(256, 64, 64), changed(chip, "matrix", overlapped_folds=False))
    assert alone.busy["matrix"] >= folds * (256 + depth) / rate


def test_arrays_share_what_is_summed_where_nothing_else_can_be_shared() -> None:
    chips = [changed(changed(EDGE, "matrix", arrays=n), "sram", bytes_per_cycle=1024) for n in (1, 8)]
    one, eight = (simulate(streamed(1, 8192, 32), chip).busy["matrix"] for chip in chips)
    assert one == pytest.approx(8 * eight, rel=0.01)
