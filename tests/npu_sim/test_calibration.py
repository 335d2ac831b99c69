"""`npu-sim calibrate`: a chip file from measurements."""

from __future__ import annotations

import dataclasses
import itertools
from types import SimpleNamespace

import pytest

from npu_compiler import compile as compile_ir
from npu_compiler.errors import InputError
from npu_model import simulate
from npu_model.chip import Chip, parse_chip
from npu_model.measured import KINDS
from npu_runtime import Device
from npu_sim.calibration import Block, Measured, Shape, chip_text, factors, measure, measuring, shape_of, timing
from npu_sim.calibration.probes import probes

MEASURED = Measured("cpu", 20.5, 80.0, 8 << 20, {"float32": 96.0, "bfloat16": 48.0}, 14.0, 0.07, 1.5, ())


def test_a_chip_has_the_measured_ceilings() -> None:
    chip = parse_chip(chip_text(MEASURED, Shape(2, 6, 16, 64, 8 << 20), 'a "name"'), "chip.toml")
    assert chip.name == 'a "name"' and chip.sram.size == 8 << 20
    assert chip.peak_macs("float32") * chip.clock_ghz == pytest.approx(96)
    assert chip.peak_macs("bfloat16") * chip.clock_ghz == pytest.approx(48)
    assert chip.vector_rate("float32") * chip.clock_ghz == pytest.approx(14)
    assert chip.dram.bandwidth_gb_s == 20.5 and (chip.launch.cost_us, chip.launch.product_us) == (0.07, 1.5)
    assert chip.sram.bandwidth * chip.clock_ghz == pytest.approx(80)


def test_measuring_this_cpu_finds_positive_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "SMALL_MATRIX_SIZE": 64,
        "READ_BYTES": 1 << 20,
        "CACHED_BYTES": (1 << 16, 1 << 17),
        "MOST_MACS": 2 * 10**6,
        "ELEMENTS": 1 << 12,
        "SOME_SECONDS": 0.0,
        "MOST_SECONDS": 0.001,
    }.items():
        monkeypatch.setattr(timing if name.endswith("SECONDS") else measuring, name, value)
    reported: list[tuple[int, int]] = []
    found = measure(Device("cpu"), lambda done, total: reported.append((done, total)))
    assert reported == [(done, len(reported)) for done in range(1, len(reported) + 1)]
    assert found.device == "cpu" and found.gmac_s.keys() == {"float32", "float16", "bfloat16"}
    assert min(found.read_gb_s, found.cached_gb_s, found.element_gop_s, found.launch_us, *found.gmac_s.values()) > 0
    chip = parse_chip(chip_text(found, Shape(2, 6, 16, 64, 8 << 20), "cpu"), "chip.toml")
    kinds = {block.probe.kind if block.dtype == "float32" else f"bfloat16.{block.probe.kind}" for block in found.blocks}
    assert chip.measured.keys() == kinds and "bfloat16.product" in kinds
    assert found.cache_bytes in (1 << 16, 1 << 17)
    assert found.blocks[0].to_dict().keys() == {"kind", "shape", "dtype", "seconds"}


def test_every_probe_is_of_a_kind_and_has_calls_of_it() -> None:
    from npu_model.work import call_work

    for probe in probes(2 * 10**8):
        program = compile_ir(probe.ir(2))
        kinds = [call_work(call).operations.kind for call in program.kernels]
        assert probe.kind in KINDS and probe.kind in kinds[len(kinds) // 2 :], probe
        assert len(compile_ir(probe.ir(4)).kernels) - len(kinds) == len(kinds), "blocks are alike"


@pytest.mark.parametrize("slower", [1.0, 3.0])
def test_a_block_is_predicted_to_take_what_was_measured(slower: float) -> None:
    chip = parse_chip(chip_text(MEASURED, Shape(2, 6, 16, 64, 8 << 20), "cpu"), "chip.toml")
    probe = next(probe for probe in probes(10**8) if probe.kind == "product" and probe.shape == (128, 256))
    program = compile_ir(probe.ir(6))
    last = len(program.kernels) * 5 // 6

    def block(described: Chip) -> float:
        return sum(described.seconds(call.cycles) for call in simulate(program, described).calls[last:])

    measured = slower * block(chip)
    table = factors(chip, [Block(probe, "float32", measured)])
    assert block(dataclasses.replace(chip, measured=table)) == pytest.approx(measured, rel=0.1)


def test_a_second_dtype_has_factors_of_its_own() -> None:
    chip = parse_chip(chip_text(MEASURED, Shape(2, 6, 16, 64, 8 << 20), "cpu"), "chip.toml")
    probe = next(probe for probe in probes(10**8) if probe.kind == "product" and probe.shape == (128, 256))
    table = factors(chip, [Block(probe, "float32", 1e-3), Block(probe, "bfloat16", 1e-1)])
    assert {row[-1] for row in table["bfloat16.product"]} != {row[-1] for row in table["product"]}
    assert [row[:-1] for row in table["bfloat16.product"]] == [row[:-1] for row in table["product"]]


def test_a_size_that_is_not_given_is_the_one_measured() -> None:
    chip = parse_chip(chip_text(MEASURED, shape_of(Device("cpu"), 3), "cpu"), "chip.toml")
    assert chip.sram.size == MEASURED.cache_bytes and chip.matrix is not None and chip.matrix.arrays == 3
    assert shape_of(Device("cpu"), 3, 4096) == Shape(3, 6, 16, 64, 4096)


def test_what_nothing_tells_of_a_gpu_is_asked_for() -> None:
    gpu = SimpleNamespace(name="cuda")
    with pytest.raises(InputError, match=r"number of multiprocessors of cuda \(--arrays\)"):
        shape_of(gpu)
    with pytest.raises(InputError, match=r"cache size of cuda: give it in bytes \(--sram\)"):
        shape_of(gpu, 132)


def test_runs_go_on_until_a_quarter_of_them_is_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = itertools.chain([9.0, 9.0, 9.0, 1.0, 9.0, 9.0], itertools.cycle([1.0, 9.0]))
    monkeypatch.setattr(timing, "_runner", lambda program, device: lambda times: times * next(slow))
    monkeypatch.setattr(timing, "SOME_SECONDS", 0.0)
    monkeypatch.setattr(timing, "MOST_SECONDS", 60.0)
    (samples,) = timing.samples_of([None], SimpleNamespace(name="cpu"))
    assert samples == sorted(samples) and timing.typical(samples) == 1.0
