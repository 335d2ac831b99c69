"""`npu-sim calibrate`: a chip file from measurements."""

from __future__ import annotations

from pathlib import Path

import pytest

from npu_compiler.errors import InputError
from npu_model.chip import parse_chip
from npu_runtime import Device
from npu_sim import calibration
from npu_sim.calibration import Measured, Shape, cache_share, chip_text, measure, shape_of

MEASURED = Measured("cpu", 20.5, 80.0, {"float32": 96.0, "bfloat16": 48.0}, 14.0, 0.07)


def test_a_chip_has_the_measured_ceilings() -> None:
    chip = parse_chip(chip_text(MEASURED, Shape(2, 6, 16, 64, 8 << 20), 'a "name"'), "chip.toml")
    assert chip.name == 'a "name"' and chip.sram.size == 8 << 20
    assert chip.peak_macs("float32") * chip.clock_ghz == pytest.approx(96)
    assert chip.peak_macs("bfloat16") * chip.clock_ghz == pytest.approx(48)
    assert chip.vector_rate("float32") * chip.clock_ghz == pytest.approx(14)
    assert chip.dram.bandwidth_gb_s == 20.5 and chip.launch.cost_us == 0.07
    assert chip.sram.bandwidth * chip.clock_ghz == pytest.approx(80)


def test_measuring_this_cpu_finds_positive_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "SMALL_MATRIX_SIZE": 64,
        "READ_BYTES": 1 << 20,
        "CACHED_BYTES": 1 << 16,
        "CHAIN": 8,
        "ELEMENTS": 1 << 12,
        "ROUNDS": 1,
        "ROUND_SECONDS": 0.001,
    }.items():
        monkeypatch.setattr(calibration, name, value)
    found = measure(Device("cpu"))
    assert found.device == "cpu" and found.gmac_s.keys() == {"float32", "float16", "bfloat16"}
    assert min(found.read_gb_s, found.cached_gb_s, found.element_gop_s, found.launch_us, *found.gmac_s.values()) > 0
    parse_chip(chip_text(found, Shape(2, 6, 16, 64, 8 << 20), "cpu"), "chip.toml")


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
