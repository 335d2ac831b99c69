"""`npu-sim partition --npu`, `ops`, and `simulate` and `report` of models of which a host runs a part."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ir_builder import IRBuilder
from safetensors.numpy import save_file
from torch import nn
from typer.testing import CliRunner, Result

import npu_sim
from npu_runtime import Device
from npu_sim.commands.application import app
from npu_sim.module import choosing

EDGE = (files("npu_model.chip") / "chips" / "edge.toml").read_text("utf-8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, and a chip that lacks one of its ops."""
    path = tmp_path_factory.mktemp("partitioning")
    g = IRBuilder("small")
    x = g("aten.linear.default", g.input("x", 256, 256), g.weight("a", 256, 256))
    x = g("aten.linear.default", g("aten.gelu.default", x), g.weight("b", 256, 256))
    (path / "net.json").write_text(json.dumps(g.output(x).ir()))
    (path / "chip.toml").write_text(f'{EDGE}\n[ops]\nwithout = ["gelu"]\n')
    (path / "lone.toml").write_text(f'{EDGE.partition("# Assumed")[0]}\n[ops]\nwithout = ["gelu"]\n')
    return path


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(each) for each in arguments])


def facts(*arguments: object) -> Any:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_a_plan_with_prices_says_what_each_op_costs_and_would_gain(folder: Path) -> None:
    result = run("partition", folder / "net.json", "--npu", folder / "chip.toml", "--what-if", "gelu")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].startswith("small on chip edge and its host: ") and lines[0].endswith(" on the host alone")
    assert "no division takes less" in lines[0]
    (gelu,) = [line for line in lines if line.endswith("aten.gelu: chip 'edge' lacks gelu ([ops] without)")]
    assert gelu.split()[:3] == ["1", "host", "–"]
    assert any(line.split()[-3:] == ["aten.gelu", "×", "1"] for line in lines)
    assert lines[-1].startswith("with gelu: ") and " less (" in lines[-1]


def test_the_plan_is_also_data(folder: Path) -> None:
    data = facts("partition", folder / "net.json", "--npu", folder / "chip.toml", "--what-if", "aten.gelu")
    price = data["price"]
    assert [part["device"] for part in data["partitions"]] == ["npu", "cpu", "npu"]
    assert price["total_us"] == pytest.approx(
        sum(price[f"{x}_us"] for x in ("device", "host", "transfers", "launches"))
    )
    assert data["gains"] == [{"op": "aten.gelu", "nodes": 1, "gain_us": pytest.approx(data["gains"][0]["gain_us"])}]
    assert data["what_if"]["total_us"] == pytest.approx(price["total_us"] - data["gains"][0]["gain_us"])
    (unit,) = [unit for unit in price["units"] if unit["nodes"] == ["gelu"]]
    assert (unit["device"], unit["npu_us"]) == ("cpu", None) and unit["host_us"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--what-if", "gelu"], "--what-if shows times; give --npu"),
        (["--full"], "--full shows times; give --npu"),
        (["--npu", "edge", "--target", "op_level"], "leave out --target or --npu"),
        (["--npu", "absent"], "unknown chip 'absent'"),
        (
            ["--npu", "edge", "--what-if", "gelu"],
            "'aten.gelu' is no op that the chip lacks in this model; these are none",
        ),
    ],
)
def test_options_that_do_not_fit_are_refused(folder: Path, arguments: list[str], message: str) -> None:
    result = run("partition", folder / "net.json", *arguments)
    assert result.exit_code == 2 and message in result.stderr.replace("\n", " ")


def test_a_chip_without_a_host_is_refused_with_what_it_needs(folder: Path) -> None:
    for command in ("partition", "simulate"):
        result = run(command, folder / "net.json", "--npu", folder / "lone.toml")
        assert result.exit_code == 2
        assert "chip 'edge' has no [host], so nothing can be priced; its file needs [host] and [link]" in result.stderr


def test_a_divided_model_is_simulated_with_its_host_and_link(folder: Path) -> None:
    path = folder / "trace.json"
    data = facts("simulate", folder / "net.json", "--npu", folder / "chip.toml", "--trace", path)
    parts = ("device_us", "host_us", "transfers_us", "launches_us")
    assert data["latency_us"] == pytest.approx(sum(data[part] for part in parts))
    assert data["latency_us"] < data["host_alone_us"] and [s["device"] for s in data["stages"]] == ["npu", "cpu", "npu"]
    names = {
        event["args"].get("name", "") for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "M"
    }
    assert {"host", "link", "chip edge", "matrix"} <= {name.rstrip("0123456789") for name in names}
    text = run("simulate", folder / "net.json", "--npu", folder / "chip.toml").stdout
    assert text.startswith("small on chip edge and its host: ") and "host, gelu … gelu" in text


def test_a_program_that_was_compiled_without_the_chips_ops_is_refused(folder: Path) -> None:
    assert run("compile", folder / "net.json", "-o", folder / "net.npubin").exit_code == 0
    for command in (["simulate"], ["report", "-o", folder / "net.html"]):
        result = run(*command, folder / "net.npubin", "--npu", folder / "chip.toml")
        assert result.exit_code == 2
        assert (
            "'small' was compiled without the [ops] of chip 'edge'; compile it with --target npu:CHIP" in result.stderr
        )


def test_a_sweep_of_a_chip_that_lacks_ops_is_refused(folder: Path) -> None:
    result = run("simulate", folder / "net.json", "--npu", folder / "chip.toml", "--sweep", "lanes=64..128")
    assert result.exit_code == 2 and "chip 'edge' lacks gelu ([ops] without)" in result.stderr


def test_a_report_on_a_divided_model_says_what_it_takes(folder: Path) -> None:
    data = facts("report", folder / "net.json", "--npu", folder / "chip.toml", "-o", folder / "net.html")
    assert any(note.startswith("small on chip edge and its host: ") for note in data["notes"])
    assert len(data["programs"]) == 2 and all(program["simulated"] for program in data["programs"])


def test_a_profile_of_a_divided_model_is_in_the_time_of_chip_and_host(folder: Path) -> None:
    save_file({name: np.eye(256, dtype=np.float32) for name in "ab"}, folder / "net.safetensors")
    path, device = folder / "profile.json", f"npu:{folder / 'chip.toml'}"
    weights = ("--weights", folder / "net.safetensors")
    data = facts("profile", folder / "net.json", *weights, "--device", device, "--runs", 1, "--trace", path)
    simulated = facts("simulate", folder / "net.json", "--npu", folder / "chip.toml")
    assert 1e3 * data["median_ms"] == pytest.approx(simulated["latency_us"])
    assert "aten.gelu gelu" in {event.get("name") for event in json.loads(path.read_text())["traceEvents"]}


def test_a_saved_module_that_is_divided_is_in_the_time_of_chip_and_host(folder: Path) -> None:
    module = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256)).eval()
    device = f"npu:{folder / 'chip.toml'}"
    npu_sim.compile(module, (torch.zeros(256, 256),), device=device).save(folder / "net.npumod")
    ran = facts("run", folder / "net.npumod", "--device", device)["simulated"]
    assert [stage["device"] for stage in ran["stages"]] == ["npu", "cpu", "npu"]
    parts = ("device_us", "host_us", "transfers_us", "launches_us")
    assert ran["latency_us"] == pytest.approx(sum(ran[part] for part in parts)) and min(ran[part] for part in parts) > 0
    assert all(stage["simulated"]["cycles"] > 0 for stage in ran["stages"] if stage["device"] == "npu")


@pytest.mark.slow
def test_the_page_of_ops_is_written_to_a_file(folder: Path) -> None:
    path = folder / "ops.md"
    result = run("ops", "--npu", folder / "chip.toml", "-o", path)
    assert result.exit_code == 0 and "that the chip lacks" in result.stdout
    assert "| `aten.gelu` | chip 'edge' lacks gelu ([ops] without) |" in path.read_text("utf-8")


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(256, 256), nn.Linear(256, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(nn.functional.gelu(self.before(x)))  # type: ignore[no-any-return]


def test_a_compiled_module_on_a_chip_takes_the_plan_of_least_price(folder: Path) -> None:
    """The clock of its device holds the time of the host and of the link too."""
    torch.manual_seed(0)
    model, x = Gated().eval(), torch.randn(256, 256)
    compiled = npu_sim.compile(model, (x,), device=f"npu:{folder / 'chip.toml'}")
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x), atol=1e-3, rtol=1e-3)
    (program,) = compiled.report().programs
    assert [device for device, _ in program.partitions] == ["npu", "cpu", "npu"]
    assert [node.reason for node in program.off_device] == ["chip 'edge' lacks gelu ([ops] without)"]
    chip = facts("simulate", folder / "net.json", "--npu", folder / "chip.toml", "--dtype", "float32")
    before = compiled.backend.clock()
    compiled(x)
    assert 1e6 * (compiled.backend.clock() - before) == pytest.approx(chip["latency_us"])


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(torch.linalg.matrix_exp(self.before(x)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("fastest", [0, 1, 2])
def test_a_divided_module_runs_the_fastest_of_its_plans(fastest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials choose between all that a real device can run, the least price, and PyTorch alone."""
    tried: list[list[str]] = []

    def timed(runner: Any, loaded: Any) -> float:
        tried.append([part.device for part in runner.plan.partitions])
        return 1e-3 if len(tried) - 1 == fastest else 2e-3

    monkeypatch.setattr(choosing, "_time", timed)
    monkeypatch.setenv("NPU_SIM_TUNE", "1")
    torch.manual_seed(0)
    model, x = Mixed().eval(), torch.randn(16, 16)
    compiled = npu_sim.compile(model, (x,), device=Device("cpu"))
    with torch.no_grad():
        np.testing.assert_allclose(compiled(x), model(x), rtol=1e-3, atol=1e-3)
    assert len(tried) == 3 and tried[0] == ["npu", "cpu", "npu"] and tried[2] == ["cpu"]
    (program,) = compiled.report().programs
    assert [device for device, _ in program.partitions] == tried[fastest]
    if fastest == 2:
        reasons = {node.reason for node in program.off_device}
        assert "PyTorch alone is faster: 1 ms against 2 ms" in reasons and len(reasons) == 2


def test_without_trials_a_divided_module_has_all_on_the_device_that_it_can_run() -> None:
    model, x = Mixed().eval(), torch.randn(16, 16)
    (program,) = npu_sim.compile(model, (x,), device=Device("cpu")).report().programs
    assert [device for device, _ in program.partitions] == ["npu", "cpu", "npu"]
