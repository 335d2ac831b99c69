"""Lowered programs are kept in the cache folder, and taken from there."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from ir_builder import IRBuilder

from npu_compiler import CompiledProgram, CompileOptions
from npu_compiler import compile as compile_ir
from npu_compiler.program.plan import ExecutionPlan
from npu_model import Chip, NPUTarget, kept_code, load_chip, target
from npu_model.chip.description import Cores, Network
from npu_model.lowering.cores import lower_arranged
from npu_model.lowering.mapper import Mapper


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder that keeps all programs, however soon they are lowered."""
    monkeypatch.setenv("NPU_SIM_CACHE", str(tmp_path))
    monkeypatch.setattr(kept_code, "WORTH_KEEPING", 0.0)
    return tmp_path


def images() -> dict[str, Any]:
    """Two convolutions that a slow chip computes as a cascade."""
    g = IRBuilder("images")
    x = g.input("x", 1, 4, 48, 48)
    for name in ("a", "b"):
        x = g("aten.conv2d.default", x, g.weight(name, 24, g.shape(x)[1], 3, 3), None, [1, 1], [1, 1])
    g.output(x)
    return g.ir()


def slow(kib: int = 40) -> Chip:
    chip = load_chip("edge")
    sram, dram = dataclasses.replace(chip.sram, size=kib << 10), dataclasses.replace(chip.dram, bandwidth_gb_s=1.6)
    return dataclasses.replace(chip, sram=sram, dram=dram)


def compiled(chip: Chip) -> CompiledProgram:
    return compile_ir(images(), NPUTarget(chip), CompileOptions(compute_dtype="float16"))


def test_a_program_is_lowered_once_for_a_chip(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lowered: list[int] = []

    def lower(plan: ExecutionPlan, chip: Chip, mapper: Mapper) -> Any:
        lowered.append(chip.sram.size >> 10)
        return lower_arranged(plan, chip, mapper)

    monkeypatch.setattr(target, "lower_arranged", lower)
    programs = [compiled(slow(kib)).to_bytes() for kib in (40, 40, 48, 40)]
    assert lowered == [40, 48]
    assert programs[0] == programs[1] == programs[3] != programs[2]
    assert len(list(folder.glob("edge-*.tiles"))) == 2


def test_a_damaged_entry_is_made_again(folder: Path) -> None:
    first = compiled(slow())
    (entry,) = folder.glob("edge-*.tiles")
    content = entry.read_bytes()
    entry.write_bytes(content[:200] + b"?" + content[201:])
    assert compiled(slow()).to_bytes() == first.to_bytes()
    assert entry.read_bytes() == content


def test_a_chip_of_several_cores_has_an_entry_of_its_own(folder: Path) -> None:
    cores = Cores(count=2, network=Network(bandwidth_gb_s=32.0, latency_ns=5.0))
    chips = [slow(), dataclasses.replace(slow(), cores=cores)]
    first, again = ([compiled(chip).to_bytes() for chip in chips] for _ in range(2))
    assert first == again
    assert first[0] != first[1]
    assert len(list(folder.glob("edge-*.tiles"))) == 2


def test_small_programs_are_not_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_code, "WORTH_KEEPING", 60.0)
    compiled(slow())
    assert not list(folder.glob("*.tiles"))
