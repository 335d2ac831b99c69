"""Programs on chips: the laws that every simulation keeps, and what makes one faster."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ir_builder import IRBuilder

import npu_model.simulator
from npu_compiler import CompiledProgram, CompileOptions
from npu_compiler import compile as compile_ir
from npu_compiler.errors import InputError
from npu_compiler.program.products import Product
from npu_model import Cause, Chip, Result, load_chip, simulate
from npu_model.mapper import Tiling, _shares
from npu_model.simulation import MONOTONE_WITHIN
from npu_model.simulator import Machine

EDGE = load_chip("edge")


def changed(chip: Chip, table: str, **values: Any) -> Chip:
    return dataclasses.replace(chip, **{table: dataclasses.replace(getattr(chip, table), **values)})


def network(size: int = 56, channels: int = 32, quantization: str | None = None) -> CompiledProgram:
    """Two convolutions, an addition to the input, and a linear layer."""
    g = IRBuilder("network")
    x = g.input("x", 1, channels, size, size)
    y = g("aten.conv2d.default", x, g.weight("a", channels, channels, 3, 3), None, [1, 1], [1, 1])
    y = g("aten.conv2d.default", g("aten.relu.default", y), g.weight("b", channels, channels, 1, 1))
    y = g("aten.mean.dim", g("aten.add.Tensor", x, y), [2, 3])
    g.output(g("aten.linear.default", y, g.weight("fc", 64, channels)))
    return compile_ir(g.ir(), options=CompileOptions(compute_dtype="float16", quantization=quantization))


def linear(m: int, k: int, n: int, **options: Any) -> CompiledProgram:
    g = IRBuilder("linear")
    g.output(g("aten.linear.default", g.input("x", m, k), g.weight("w", n, k)))
    return compile_ir(g.ir(), options=CompileOptions(compute_dtype="float16", **options))


def check_laws(result: Result) -> None:
    chip = result.chip
    assert result.cycles >= result.roofline_cycles * (1 - 1e-9)
    assert result.cycles >= result.dram_bytes / chip.dram_bytes_per_cycle * (1 - 1e-9)
    assert result.dram_bytes >= result.compulsory_bytes
    progress = sum(call.progress for call in result.calls)
    assert progress + sum(result.stalls.values()) == pytest.approx(result.cycles)
    assert max(call.end for call in result.calls) == pytest.approx(result.cycles)
    energy = result.energy
    parts = energy.macs + energy.vector + energy.sram + energy.dram + energy.static
    assert energy.total == pytest.approx(parts)
    assert sum(call.joules for call in result.calls) + energy.static == pytest.approx(energy.total)


@pytest.mark.parametrize("chip", ["edge", "phone", "datacenter"])
@pytest.mark.parametrize("shape", [(1, 4096, 4096), (512, 512, 64), (3, 100, 7)])
def test_the_laws_hold_for_products(shape: tuple[int, int, int], chip: str) -> None:
    check_laws(simulate(linear(*shape), load_chip(chip)))


@pytest.mark.parametrize("chip", ["edge", "phone", "datacenter"])
@pytest.mark.parametrize("quantization", [None, "int4"])
def test_the_laws_hold_for_a_network(quantization: str | None, chip: str) -> None:
    check_laws(simulate(network(quantization=quantization), load_chip(chip)))


def test_equal_runs_are_equal() -> None:
    assert simulate(network(), EDGE).to_dict() == simulate(network(), EDGE).to_dict()


def test_weights_in_fewer_bits_take_less_traffic_and_time() -> None:
    results = [simulate(linear(1, 4096, 4096, quantization=name), EDGE) for name in (None, "int8", "int4")]
    seconds = [result.seconds for result in results]
    assert seconds == sorted(seconds, reverse=True) and seconds[0] > 1.9 * seconds[1] > 3 * seconds[2]
    weights = [result.calls[0].constant_bytes for result in results]
    assert weights[0] == 2 * 4096 * 4096 and weights[1] < 1.02 * 4096 * 4096


def test_a_product_that_computes_much_comes_near_the_peak() -> None:
    result = simulate(linear(1024, 1024, 1024), EDGE)
    assert result.utilization > 0.9


def test_a_product_of_one_row_comes_near_the_bandwidth() -> None:
    result = simulate(linear(1, 4096, 4096), EDGE)
    assert result.bandwidth_utilization > 0.98
    assert result.stalls[Cause.DRAM_BANDWIDTH] > 0.5 * result.cycles


def test_weights_stay_in_sram_that_holds_them() -> None:
    streamed, kept = simulate(linear(1, 512, 512), EDGE), simulate(linear(1, 256, 256), EDGE)
    assert kept.kept_weight_bytes == 2 * 256 * 256 and kept.calls[0].constant_bytes == 0
    assert streamed.kept_weight_bytes == 2 * 512 * 512
    larger = simulate(linear(1, 4096, 4096), EDGE)
    assert larger.kept_weight_bytes == 0 and larger.calls[0].constant_bytes == 2 * 4096 * 4096


@pytest.mark.parametrize(
    ("table", "key", "values"),
    [
        ("sram", "size", [2**15, 2**16, 100_000, 2**17, 3 * 2**16, 2**18, 2**20, 2**22]),
        ("dram", "bandwidth_gb_s", [1, 2, 3, 5, 8, 13, 21, 100]),
        ("matrix", "arrays", [1, 2, 3, 4, 5, 7, 8, 16, 128]),
        ("vector", "lanes", [8, 16, 64, 100, 1024]),
        ("dma", "channels", [1, 2, 3, 8]),
    ],
)
def test_more_of_anything_is_not_slower(table: str, key: str, values: list[int]) -> None:
    times = [simulate(network(), changed(EDGE, table, **{key: value})).seconds for value in values]
    best = times[0]
    for time in times[1:]:
        assert time <= best * (1 + MONOTONE_WITHIN)
        best = min(best, time)
    assert times[-1] < times[0]


def test_a_launch_costs_what_the_chip_says() -> None:
    program = network()
    waiting = changed(EDGE, "launch", cost_us=50.0, overlapped=False)
    hidden = changed(EDGE, "launch", cost_us=0.0)
    calls = len(program.kernels)
    apart = simulate(program, waiting)
    assert apart.stalls[Cause.LAUNCH] == pytest.approx(calls * 50.0 * 1e3 * EDGE.clock_ghz, rel=0.01)
    assert apart.seconds > simulate(program, hidden).seconds + calls * 49e-6


def test_a_product_on_the_arrays_costs_more_than_another_call() -> None:
    chip = changed(EDGE, "launch", cost_us=2.0, product_us=50.0, overlapped=False)
    program = network()
    on_arrays = sum(call.array_cycles > 0 for call in simulate(program, chip).calls)
    assert 0 < on_arrays < len(program.kernels)
    expected = (len(program.kernels) * 2.0 + on_arrays * 50.0) * 1e3 * EDGE.clock_ghz
    assert simulate(program, chip).stalls[Cause.LAUNCH] == pytest.approx(expected, rel=0.01)


def test_few_ports_of_sram_hold_the_arrays_up() -> None:
    narrow = simulate(linear(512, 512, 512), changed(EDGE, "sram", banks=1))
    assert narrow.stalls[Cause.SRAM_PORTS] > 0.3 * narrow.cycles
    check_laws(narrow)


def test_a_chip_without_arrays_multiplies_on_its_lanes() -> None:
    result = simulate(linear(64, 256, 256), dataclasses.replace(EDGE, matrix=None))
    assert result.calls[0].array_cycles == 0
    assert result.cycles >= 64 * 256 * 256 / EDGE.vector.lanes
    check_laws(result)


def test_a_row_that_fits_no_sram_is_refused() -> None:
    g = IRBuilder()
    g.output(g("aten.softmax.int", g.input("x", 2, 100_000), -1))
    program = compile_ir(g.ir())
    with pytest.raises(InputError, match="'softmax_kernel' at node .* fits no SRAM of chip 'edge': .* 65536 bytes"):
        simulate(program, changed(EDGE, "sram", size=65536))


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


TILINGS = [
    Tiling(1000, "memory", 100.0, 10.0, 4000.0, 500.0, 300.0, 1000.0, 0.0),
    Tiling(777, "compute", 900.0, 30.0, 1000.0, 200.0, 100.0, 1000.0, 0.0),
    Tiling(501, "vector", 0.0, 400.0, 0.0, 300.0, 300.0, 500.0, 0.0),
    Tiling(333, "in SRAM", 120.0, 0.0, 0.0, 0.0, 0.0, 90_000.0, 0.0),
    Tiling(900, "latency", 50.0, 5.0, 16.0, 16.0, 0.0, 100.0, 0.0),
    Tiling(3, "short", 50.0, 5.0, 16.0, 16.0, 8.0, 100.0, 0.0),
]


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_tiles_that_repeat_are_skipped_without_a_difference(channels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    chip = changed(EDGE, "dma", channels=channels)
    needed = [[], [0], [1], [0, 2], [3], [4]]
    skipping = Machine(chip).run(TILINGS, needed)
    monkeypatch.setattr(npu_model.simulator, "_common_step", lambda history, period: None)
    for quick, thorough in zip(skipping, Machine(chip).run(TILINGS, needed), strict=True):
        assert quick.progress == pytest.approx(thorough.progress)
        for cause in Cause:
            assert quick.stalls[cause] == pytest.approx(thorough.stalls[cause], rel=1e-6, abs=1.0)
        for mine, other in zip(quick.spans, thorough.spans, strict=True):
            assert (mine.start, mine.end) == pytest.approx((other.start, other.end))


@given(st.integers(1, 3000), st.integers(1, 3000), st.integers(1, 70), st.integers(1, 1024))
def test_the_shares_of_a_product_are_those_of_every_division(m: int, n: int, batch: int, arrays: int) -> None:
    each = arrays // min(batch, arrays)
    largest = -(-batch // min(batch, arrays))
    divisions = [(-(-m // along), -(-n // (each // along)), largest) for along in range(1, each + 1)]
    shares = [(share.m, share.n, share.batch) for share, _ in _shares(Product(m, n, 8, batch), arrays)]
    assert shares == list(dict.fromkeys(divisions))


def test_a_product_is_shared_among_very_many_arrays_in_few_ways() -> None:
    assert len(list(_shares(Product(10**9, 10**9, 64), 65536))) < 600
