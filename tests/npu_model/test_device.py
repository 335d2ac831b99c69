"""The device `npu-model:CHIP`: right results, and the chip's time instead of the host's."""

from __future__ import annotations

import tomllib
from pathlib import Path

import numpy as np
import pytest
from ir_builder import IRBuilder

import npu_runtime.device
from npu_compiler import compile as compile_ir
from npu_compiler.errors import DeviceError
from npu_model import load_chip, simulate
from npu_runtime import Device, Executor, load_weights
from npu_runtime.device import find_device
from npu_sim.devices import npu_model
from npu_sim.model_device import ModelBackend

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the entry point does, which an installation that is older than the device lacks."""
    monkeypatch.setitem(npu_runtime.device._FACTORIES, "npu-model", npu_model)


def test_the_device_is_an_entry_point() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["npu_simulation.devices"]["npu-model"] == "npu_sim.devices:npu_model"


def test_it_computes_what_the_cpu_computes_in_the_chips_time() -> None:
    g = IRBuilder("layer")
    g.output(g("aten.linear.default", g.input("x", 2, 8), g.weight("w", 4, 8)))
    program = compile_ir(g.ir(), compute_dtype="float32")
    device = Device("npu-model:edge")
    assert isinstance(device.backend, ModelBackend) and "edge" in device.backend.device
    x, w = np.arange(16, dtype=np.float32).reshape(2, 8), np.ones((4, 8), np.float32)
    executor = Executor(program, device)
    weights = load_weights({"w": w}, program, device)
    before = device.backend.clock()
    for _ in range(3):
        out = executor.run({"x": x}, weights)["output"].to_numpy()
    np.testing.assert_allclose(out, x @ w.T)
    expected = 3 * simulate(program, load_chip("edge")).seconds
    assert device.backend.clock() - before == pytest.approx(expected)


def test_a_chip_file_is_named_after_the_colon(tmp_path: Path) -> None:
    (tmp_path / "my.toml").write_text((ROOT / "npu_model" / "chips" / "phone.toml").read_text())
    backend = Device(f"npu-model:{tmp_path / 'my.toml'}").backend
    assert isinstance(backend, ModelBackend) and backend.chip == load_chip("phone")


def test_a_device_without_a_chip_is_refused() -> None:
    with pytest.raises(DeviceError, match="'npu-model' is not a whole device name: write npu-model:CHIP"):
        find_device("npu-model")
    with pytest.raises(DeviceError, match="unknown chip 'nope'"):
        Device("npu-model:nope")
