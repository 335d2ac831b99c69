"""Sweeps: ranges, the chips they stand for, and the Pareto front."""

from __future__ import annotations

import csv
import io
from dataclasses import replace
from pathlib import Path

import pytest
from ir_builder import IRBuilder
from quantized_networks import byte_network

from npu_compiler import CompiledProgram, CompileOptions
from npu_compiler import compile as compile_ir
from npu_compiler.errors import InputError, ProgramFormatError
from npu_model import load_chip, simulate
from npu_model.analysis.sweep import area, as_csv, parse_sweep, sweep, write_csv
from npu_model.lowering.cores import arranged
from npu_model.lowering.mapper import Mapper
from npu_model.lowering.shared import Shared

EDGE = load_chip("edge")


@pytest.fixture(scope="module")
def program() -> CompiledProgram:
    g = IRBuilder("layer")
    g.output(g("aten.linear.default", g.input("x", 256, 512), g.weight("w", 512, 512)))
    return compile_ir(g.ir())


def test_ranges_double_and_end_where_they_say() -> None:
    chips = parse_sweep("sram=256K..1M,arrays=1..6", EDGE)
    values = [tuple(point.values()) for point, _ in chips]
    assert [arrays for sram, arrays in values if sram == 2**18] == [1, 2, 4, 6]
    assert sorted({sram for sram, _ in values}) == [2**18, 2**19, 2**20]
    point, chip = chips[-1]
    assert chip.matrix is not None
    assert (chip.sram.size, chip.matrix.arrays) == (point["sram"], point["arrays"]) == (2**20, 6)


def test_a_single_value_and_fractions_can_be_swept() -> None:
    ((point, chip),) = parse_sweep("clock=1.5", EDGE)
    assert point == {"clock": 1.5} and chip.clock_ghz == 1.5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'' is no range of a sweep: write NAME=FROM..TO, NAME one of sram"),
        ("speed=1..2", "'speed=1..2' is no range of a sweep"),
        ("sram", "'sram' is no range of a sweep"),
        ("sram=1M..256K", "the range 'sram=1M..256K' ends below its begin"),
        ("sram=0..1M", "'0' in 'sram=0..1M' is no number above 0"),
        ("sram=x", "'x' in 'sram=x' is no number above 0"),
        ("sram=9999999G", "is beyond all chips"),
        ("arrays=1.5", "the sweep of 'arrays': 'arrays' is 1.5; write a whole number of at least 1"),
        ("sram=1..2", "the sweep of 'sram': 'size' is 1; it must be a whole number of at least 1024"),
        (
            "channels=1..1000000000000",
            "the sweep of 'channels': 'channels' is 2048; it must be a whole number",
        ),
        ("clock=0.5..2000", "the sweep of 'clock': 'clock_ghz' is 1024; it must be a number above 0 and at most 1000"),
        ("arrays=1..1000000,clock=0.1..2", "the sweep of 'arrays': 'arrays' is 131072"),
        ("arrays=1,arrays=2", "the sweep names 'arrays' twice"),
        ("sram=1K..1G,arrays=1..1M,bandwidth=1..1M", "the sweep has 9261 chips; at most 4096"),
    ],
)
def test_a_wrong_sweep_is_refused(text: str, message: str) -> None:
    with pytest.raises(InputError) as raised:
        parse_sweep(text, EDGE)
    assert message in str(raised.value)


def test_processes_find_what_one_finds(program: CompiledProgram) -> None:
    chips = parse_sweep("sram=64K..256K,arrays=1..4", EDGE)
    seen: list[tuple[int, int]] = []
    points = sweep(program, chips, lambda done, total: seen.append((done, total)), workers=2)
    assert points == sweep(program, chips, workers=1)
    assert seen == [(done, 9) for done in range(1, 10)]


def test_a_row_is_what_a_simulation_of_its_chip_alone_says() -> None:
    g = IRBuilder("images")
    x = g.input("x", 1, 4, 96, 96)
    for name in ("a", "b"):
        x = g("aten.conv2d.default", x, g.weight(name, 24, g.shape(x)[1], 3, 3), None, [1, 1], [1, 1])
    g.output(x)
    program = compile_ir(g.ir(), options=CompileOptions(compute_dtype="float16"))
    chips = parse_sweep("sram=96K..192K,bandwidth=1.6..3.2", EDGE)
    striped = 0
    for point, (_, chip) in zip(sweep(program, chips, workers=1), chips, strict=True):
        alone = simulate(program, chip)
        assert (point.seconds, point.joules, point.dram_bytes) == (alone.seconds, alone.energy.total, alone.dram_bytes)
        striped += not alone.calls[0].cycles  # the last call of a cascade has the work of all
    assert striped


def test_chips_with_the_same_tilings_share_their_instructions(program: CompiledProgram) -> None:
    shared, chips = Shared(), [chip for _, chip in parse_sweep("lanes=64..128", EDGE)]
    own = [arranged(program.plan, chip, Mapper(chip, shared)) for chip in chips]
    alone = [arranged(program.plan, chip, Mapper(chip)) for chip in chips]
    assert [each.program for each in own] == [each.program for each in alone]
    assert own[0].program.sections is own[1].program.sections
    assert own[0].program.digest != own[1].program.digest
    assert alone[0].program.sections is not alone[1].program.sections


def test_processes_simulate_a_network_of_bytes() -> None:
    program = compile_ir(byte_network().ir())
    chips = parse_sweep("arrays=1..2", EDGE)
    assert sweep(program, chips, workers=2) == sweep(program, chips, workers=1)


def test_a_program_that_a_process_cannot_read_is_an_error_that_says_so(program: CompiledProgram) -> None:
    unreadable = replace(program, compute_dtype="float7")
    with pytest.raises(ProgramFormatError, match="its compute dtype is 'float7'"):
        sweep(unreadable, parse_sweep("arrays=1..2", EDGE), workers=2)


def test_the_front_holds_what_no_other_chip_beats(program: CompiledProgram) -> None:
    points = sweep(program, parse_sweep("sram=64K..1M,arrays=1..8", EDGE), workers=1)
    best = sorted((point for point in points if point.is_best), key=lambda point: point.area)
    assert best and [point.seconds for point in best] == sorted((point.seconds for point in best), reverse=True)
    for point in points:
        better = [b for b in best if b.area <= point.area and b.seconds <= point.seconds]
        assert better, "each chip is on the front or behind it"


def test_chips_on_which_the_program_does_not_run_say_why(program: CompiledProgram) -> None:
    coarse = replace(EDGE, sram=replace(EDGE.sram, alignment=1024))  # where each piece takes that much
    points = sweep(program, parse_sweep("sram=1K..4M", coarse), workers=1)
    assert "cannot run on chip 'edge': its smallest tiles do not fit 1024 bytes" in points[0].problem
    assert not points[0].is_best
    assert points[-1].problem == "" and points[-1].seconds > 0


def test_the_table_has_a_row_for_each_chip(program: CompiledProgram, tmp_path: Path) -> None:
    points = sweep(program, parse_sweep("arrays=1..4", EDGE), workers=1)
    rows = list(csv.DictReader(io.StringIO(as_csv(points))))
    assert [row["arrays"] for row in rows] == ["1", "2", "4"]
    assert float(rows[0]["latency_us"]) == pytest.approx(1e6 * points[0].seconds, rel=1e-4)
    write_csv(points, tmp_path / "sweep.csv")
    assert (tmp_path / "sweep.csv").read_text() == as_csv(points)
    with pytest.raises(InputError, match="cannot write"):
        write_csv(points, tmp_path / "absent" / "sweep.csv")


def test_area_grows_with_what_a_chip_has() -> None:
    small, large = (chip for _, chip in parse_sweep("arrays=1..2", EDGE))
    assert area(large) - area(small) == pytest.approx(32 * 32 * 0.0005)
