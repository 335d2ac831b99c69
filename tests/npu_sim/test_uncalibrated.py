"""`--dtype int8`: the time of a quantized network from its shapes alone, which nothing can run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ir_builder import IRBuilder
from torch import nn
from typer.testing import CliRunner, Result

from npu_compiler import InputError, WeightError, compile, partition, read_ir
from npu_compiler.graph.weight_recipe import UNCALIBRATED
from npu_model import NPUTarget, load_chip, simulate
from npu_runtime import CPUBackend, DAGExecutor, load_weights
from npu_sim.cli import app
from npu_sim.extract import extract_ir
from npu_sim.quantizing.networks.quantize import quantize_network
from npu_sim.quantizing.networks.uncalibrated import quantized_from_shapes


class Network(nn.Module):
    """A stem with a batch norm, a shortcut, a pooled classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16)
        self.project, self.fc = nn.Conv2d(16, 16, 3, 1, 1), nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.max_pool2d(torch.relu(self.norm(self.stem(x))), 3, 2, 1)
        x = torch.relu(x + self.project(x))
        found: torch.Tensor = self.fc(torch.flatten(nn.functional.adaptive_avg_pool2d(x, 1), 1))
        return found


def ir_of(module: nn.Module) -> dict[str, Any]:
    return dict(extract_ir(module.eval(), (torch.zeros(1, 3, 32, 32),)))


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(each) for each in arguments])


@pytest.mark.parametrize("chip", ["edge", "ethos-u65-512", "datacenter"])
def test_an_uncalibrated_network_takes_the_time_of_a_calibrated_one(chip: str) -> None:
    torch.manual_seed(0)
    module, own = Network().eval(), load_chip(chip)
    images = [np.random.default_rng(0).normal(size=(1, 3, 32, 32)).astype(np.float32)]
    calibrated = quantize_network(ir_of(module), module.state_dict(), images).ir
    programs = [compile(ir, NPUTarget(own)) for ir in (calibrated, quantized_from_shapes(read_ir(ir_of(module))))]
    assert [call.kernel for call in programs[0].kernels] == [call.kernel for call in programs[1].kernels]
    times = [[call.cycles for call in simulate(program, own).calls] for program in programs]
    assert times[0] == times[1]


def test_an_uncalibrated_network_says_what_it_is_and_cannot_run() -> None:
    module = Network()
    graph = quantized_from_shapes(read_ir(ir_of(module)))
    assert UNCALIBRATED in graph.name and all(UNCALIBRATED in str(recipe) for recipe in graph.weights.values())
    message = r"cannot run: it is int8 as its shapes alone tell it \(uncalibrated: timing only\); quantize the network"
    with pytest.raises(WeightError, match=message):
        load_weights(dict(module.state_dict()), compile(graph), CPUBackend(tune=False))
    executor = DAGExecutor(partition(graph, lambda op: "conv" not in op), CPUBackend(tune=False))
    with pytest.raises(WeightError, match=message):
        executor.load_weights(dict(module.state_dict()))


def test_a_graph_without_layers_has_nothing_to_quantize() -> None:
    g = IRBuilder("plain")
    with pytest.raises(InputError, match="plain has no convolution or linear of float32 weights to quantize"):
        quantized_from_shapes(read_ir(g.output(g("aten.relu.default", g.input("x", 2, 3))).ir()))


def test_commands_take_int8_for_times(tmp_path: Path) -> None:
    model, page = tmp_path / "net.json", tmp_path / "page.html"
    model.write_text(json.dumps(ir_of(Network())))
    result = run("simulate", model, "--npu", "ethos-u65-512", "--dtype", "int8")
    assert result.exit_code == 0, result.output
    assert "(int8, uncalibrated: timing only) on ethos-u65-512" in result.output and "int8 100.0%" in result.output
    swept = run("simulate", model, "--npu", "ethos-u65-512", "--dtype", "int8", "--sweep", "clock=500..1000")
    assert swept.exit_code == 0 and swept.output.count("\n") >= 3, swept.output
    divided = run("partition", model, "--npu", "edge", "--dtype", "int8")
    assert divided.exit_code == 0 and UNCALIBRATED in divided.output, divided.output
    report = run("report", model, "--npu", "edge", "--dtype", "int8", "-o", page)
    assert report.exit_code == 0, report.output
    assert UNCALIBRATED in page.read_text("utf-8")


def test_commands_refuse_int8_for_values(tmp_path: Path) -> None:
    model, page = tmp_path / "net.json", tmp_path / "page.html"
    model.write_text(json.dumps(ir_of(Network())))
    compiled = run("compile", model, "-o", tmp_path / "net.npubin", "--dtype", "int8")
    assert compiled.exit_code == 2 and "unknown compute dtype 'int8'" in " ".join(compiled.output.split())
    measured = run("report", model, "--npu", "edge", "--dtype", "int8", "--device", "cpu", "-o", page)
    assert measured.exit_code == 2
    assert "--dtype int8 is for the simulated time of a network" in " ".join(measured.output.split())
    language = run("simulate", "smollm2", "--npu", "edge", "--dtype", "int8")
    assert language.exit_code == 2
    assert "of a language model, --quantization int8" in " ".join(language.output.split())
