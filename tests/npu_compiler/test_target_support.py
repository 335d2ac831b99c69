"""Targets that lack ops: what is refused, fused or left to the CPU for them, and how they are found by name."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ir_builder import IRBuilder
from torch import nn
from torch_ir import extract_ir

import npu_compiler
from npu_compiler import OP_LEVEL, ConstraintError, InputError, OpLevelTarget, PartitionPlan, ProgramFormatError
from npu_compiler.graph.model import base_op
from npu_compiler.program.target import load_plugin_target, plugin_targets
from npu_runtime import CPUBackend, DAGExecutor
from npu_runtime.cache_folder import source_digest
from npu_sim.cache import compile_cached, has_program
from npu_sim.commands.targets import find_target


class Chip(OpLevelTarget):
    """A target that has some ops only."""

    config = replace(OP_LEVEL, name="chip")

    def __init__(self, *has: str) -> None:
        self.has = has

    def supports(self, op_type: str, attrs: Mapping[str, Any]) -> bool:
        return base_op(op_type) in self.has and attrs.get("activation", "none") in ("none", "relu")


class ChipBackend(CPUBackend):
    """The CPU under another target."""

    def __init__(self, target: Chip) -> None:
        super().__init__(tune=False)
        self.chosen = target

    @property
    def target(self) -> Chip:
        return self.chosen

    @property
    def runs_targets(self) -> tuple[str, ...]:
        return ("chip",)


class RMSNorm(nn.Module):
    """Written out, as Llama has it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.weight = nn.Parameter(torch.rand(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        x = self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))
        return self.second(x).relu()  # type: ignore[no-any-return]


def extracted(model: nn.Module, x: torch.Tensor) -> dict[str, Any]:
    with torch.no_grad():
        ir: dict[str, Any] = extract_ir(model.to("meta"), (x.to("meta"),)).to_dict()
    return ir


def run(model: nn.Module, x: torch.Tensor, target: Chip) -> PartitionPlan:
    """The plan of a model for a target, whose answer on the device has been compared with PyTorch's."""
    model.eval()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        wanted = model(x)
    ir = extracted(model, x)
    plan = npu_compiler.partition(ir, target=target, compute_dtype="float32")
    dag = DAGExecutor(plan, ChipBackend(target))
    dag.load_weights(state)
    (got,) = dag.execute({ir["graph_inputs"][0]["name"]: x.numpy()}).values()
    np.testing.assert_allclose(got, wanted.numpy(), atol=1e-5, rtol=1e-4)
    return plan


def test_an_op_that_a_target_lacks_runs_on_the_cpu() -> None:
    plan = run(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), torch.randn(2, 4), Chip("aten.linear"))
    assert [part.device for part in plan.partitions] == ["npu", "cpu", "npu"]
    assert plan.reasons == {"tanh": "the target 'chip' does not support it"}


def test_attributes_decide_as_well() -> None:
    class Convolutions(Chip):
        def supports(self, op_type: str, attrs: Mapping[str, Any]) -> bool:
            return super().supports(op_type, attrs) and attrs.get("groups", 1) == 1

    model = nn.Sequential(nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3, groups=2))
    plan = run(model, torch.randn(1, 4, 8, 8), Convolutions("aten.conv2d", "npu.conv2d"))
    assert [part.device for part in plan.partitions] == ["npu", "cpu"]


def test_ops_that_are_fused_into_one_of_the_target_stay_on_the_device() -> None:
    plan = run(RMSNorm(), torch.randn(3, 8), Chip("aten.linear", "aten.relu", "npu.rms_norm"))
    assert [part.device for part in plan.partitions] == ["npu"]


def test_without_the_fused_op_they_run_on_the_cpu() -> None:
    plan = run(RMSNorm(), torch.randn(3, 8), Chip("aten.linear", "aten.relu", "aten.mul", "aten.add"))
    assert {"pow_1", "mean", "rsqrt"} == set(plan.reasons)


def test_a_batch_norm_that_is_folded_stays_on_the_device() -> None:
    convolution = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    assert run(convolution, torch.randn(1, 3, 8, 8), Chip("aten.conv2d")).reasons == {}
    alone = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.BatchNorm2d(4))
    plan = run(alone, torch.randn(1, 3, 8, 8), Chip("aten.conv2d", "aten.tanh"))
    assert set(plan.reasons) == {"batch_norm"}


def test_a_fusion_that_the_cpu_divides_is_no_fusion() -> None:
    """The norm's factor is made on the CPU, so that what is before it and behind it cannot become one kernel."""
    g = IRBuilder()
    x = g.input("x", 2, 8)
    mean = g("aten.mean.dim", g("aten.pow.Tensor_Scalar", x, 2), [-1], True)
    factor = g("aten.rsqrt.default", g("aten.add.Tensor", mean, 1e-6))
    weight = g("aten.erfinv.default", g.input("w", 8))
    ir = g.output(g("aten.mul.Tensor", weight, g("aten.mul.Tensor", x, factor))).ir()
    for has in (["npu.rms_norm"], ["npu.rms_norm", "aten.mul"]):
        plan = npu_compiler.partition(ir, target=Chip(*has), compute_dtype="float32")
        for part in plan.partitions:
            if part.device == "npu":
                plan.compile(part, Chip(*has))
        dag = DAGExecutor(plan, ChipBackend(Chip(*has)))
        values = {"x": np.full((2, 8), 3, np.float32), "w": np.full(8, 0.5, np.float32)}
        (got,) = dag.execute(values).values()
        np.testing.assert_allclose(got, np.full((2, 8), 0.4769363), rtol=1e-5)


def test_a_fusion_that_makes_what_the_target_lacks_leaves_the_graph() -> None:
    ir = extracted(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.randn(2, 4))
    fused, plain = (npu_compiler.compile(ir, Chip("aten.linear", "aten.relu", *more)) for more in (["npu.linear"], []))
    assert [call.kernel for call in fused.kernels] == ["matmul_kernel"]
    assert [call.kernel for call in plain.kernels] == ["matmul_kernel", "relu_kernel"]


def test_a_whole_graph_with_an_op_that_the_target_lacks_is_refused() -> None:
    ir = extracted(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(2, 4))
    with pytest.raises(
        ConstraintError, match=r"node 'tanh' .*\[2, 4\].*: the target 'chip' does not support it; use par"
    ):
        npu_compiler.compile(ir, Chip("aten.linear"))


OPS = ("linear", "relu", "mul", "add", "pow", "mean", "rsqrt", "scaled_dot_product_attention", "softmax", "cat", "exp")
FUSED = ("npu.linear", "npu.rms_norm", "npu.attention", "aten.silu")


class Block(RMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        q, k, v = self.first(x), self.second(x), torch.cat([x, x.exp()], 0)[: len(x)]
        scores = (q.unflatten(1, (2, 4)) @ k.unflatten(1, (2, 4)).transpose(-1, -2)).softmax(-1)
        return (scores @ v.unflatten(1, (2, 4))).flatten(1) + x


@settings(max_examples=20, deadline=None)
@given(has=st.sets(st.sampled_from([*(f"aten.{op}" for op in OPS), *FUSED, "aten.matmul"])))
def test_answers_are_right_whatever_a_target_has(has: set[str]) -> None:
    torch.manual_seed(1)
    run(Block(), torch.randn(3, 8), Chip(*sorted(has)))


PACKAGE = """
from dataclasses import replace
from npu_compiler import OP_LEVEL, OpLevelTarget
from npu_compiler.program.kernels import KERNELS

KERNELS["plugin_matmul"] = replace(KERNELS["matmul_kernel"], name="plugin_matmul")

class Target(OpLevelTarget):
    config = replace(OP_LEVEL, name="plugin")

    def matmul_kernel(self, is_vec, transpose_b):
        return "plugin_matmul", ""
"""


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An installed package with a target of its own, and a program for it."""
    from npu_compiler.program.kernels import KERNELS

    info = tmp_path / "plugin-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin\nVersion: 1\n")
    points = "plugin = plugin_target:Target\nmisnamed = plugin_target:Target\n"
    (info / "entry_points.txt").write_text(f"[npu_simulation.targets]\n{points}")
    (tmp_path / "plugin_target").mkdir()
    (tmp_path / "plugin_target" / "__init__.py").write_text(PACKAGE)
    monkeypatch.syspath_prepend(str(tmp_path))
    target = load_plugin_target("plugin")
    assert target is not None
    program = npu_compiler.compile(extracted(nn.Linear(4, 4), torch.randn(2, 4)), target)
    program.save(tmp_path / "plugin.npubin")
    del KERNELS["plugin_matmul"]  # as in a process that has not imported the package
    del sys.modules["plugin_target"]
    yield tmp_path
    KERNELS.pop("plugin_matmul", None)
    sys.modules.pop("plugin_target", None)


def test_a_program_for_an_installed_packages_target_declares_its_kernels_when_it_is_loaded(plugin: Path) -> None:
    program = npu_compiler.CompiledProgram.load(plugin / "plugin.npubin")
    assert [call.kernel for call in program.kernels] == ["plugin_matmul"]


def test_without_the_package_its_program_is_refused(plugin: Path) -> None:
    (plugin / "plugin-1.dist-info" / "entry_points.txt").unlink()
    with pytest.raises(ProgramFormatError, match="'plugin_matmul'.*no kernel of that name is declared"):
        npu_compiler.CompiledProgram.load(plugin / "plugin.npubin")


@pytest.mark.usefixtures("plugin")
def test_an_installed_packages_targets_are_listed_and_known_by_their_own_names() -> None:
    assert {"plugin", "misnamed"} <= set(plugin_targets())
    assert find_target("plugin").config.name == "plugin"
    assert load_plugin_target("absent") is None
    with pytest.raises(InputError, match="the entry point 'misnamed' of npu_simulation.targets makes a target named"):
        load_plugin_target("misnamed")


def test_a_cached_program_is_made_again_when_the_package_of_its_target_changes(
    plugin: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NPU_SIM_CACHE", str(plugin / "cache"))
    source_digest.cache_clear()
    target, ir = find_target("plugin"), extracted(nn.Linear(4, 4), torch.randn(2, 4))
    compile_cached(ir, target=target)
    assert has_program(ir["model_name"], ir, target)
    with (plugin / "plugin_target" / "__init__.py").open("a") as source:
        source.write("# another version")
    source_digest.cache_clear()
    assert not has_program(ir["model_name"], ir, target)
