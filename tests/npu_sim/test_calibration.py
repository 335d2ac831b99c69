"""`npu-sim calibrate`: a chip file from measurements."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from npu_compiler import compile as compile_ir
from npu_compiler.errors import InputError
from npu_model import simulate
from npu_model.chip import Chip, parse_chip
from npu_model.measured import KINDS
from npu_runtime import Device
from npu_sim import calibration
from npu_sim.calibration import Measured, Shape, cache_share, chip_text, factors, measure, shape_of
from npu_sim.probes import probes

MEASURED = Measured("cpu", 20.5, 80.0, {"float32": 96.0, "bfloat16": 48.0}, 14.0, 0.07, 1.5, ())


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
        "CACHED_BYTES": 1 << 16,
        "MOST_MACS": 2 * 10**6,
        "BLOCK_ROUNDS": 1,
        "BLOCK_SECONDS": 0.001,
        "ELEMENTS": 1 << 12,
        "ROUNDS": 1,
        "ROUND_SECONDS": 0.001,
    }.items():
        monkeypatch.setattr(calibration, name, value)
    found = measure(Device("cpu"))
    assert found.device == "cpu" and found.gmac_s.keys() == {"float32", "float16", "bfloat16"}
    assert min(found.read_gb_s, found.cached_gb_s, found.element_gop_s, found.launch_us, *found.gmac_s.values()) > 0
    chip = parse_chip(chip_text(found, Shape(2, 6, 16, 64, 8 << 20), "cpu"), "chip.toml")
    assert chip.measured.keys() == {probe.kind for probe, _ in found.blocks} and found.blocks


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
    program = compile_ir(probe.ir(2))
    half = len(program.kernels) // 2

    def block(described: Chip) -> float:
        return sum(described.seconds(call.cycles) for call in simulate(program, described).calls[half:])

    measured = slower * block(chip)
    table = factors(chip, [(probe, measured)], "float32")
    assert block(dataclasses.replace(chip, measured=table)) == pytest.approx(measured, rel=0.1)


def test_a_shared_cache_is_divided_among_its_cores(tmp_path: Path) -> None:
    for index, size, shared in ((0, "32K", "0"), (2, "512K", "0-1"), (3, "32768K", "0-5,8,9")):
        entry = tmp_path / f"index{index}"
        entry.mkdir()
        (entry / "size").write_text(f"{size}\n")
        (entry / "shared_cpu_list").write_text(f"{shared}\n")
    assert cache_share(tmp_path, 2) == 8 << 20
    assert cache_share(tmp_path, 64) == 32 << 20
    assert cache_share(tmp_path / "absent", 2) is None


def test_what_nothing_tells_is_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(calibration, "_CACHES", tmp_path)
    with pytest.raises(InputError, match=r"cache size of cpu: give it in bytes \(--sram\)"):
        shape_of(Device("cpu"))
    assert shape_of(Device("cpu"), 3, 4096) == Shape(3, 6, 16, 64, 4096)
