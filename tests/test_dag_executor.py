"""Graphs that the device cannot run whole: divided between it and the CPU, and run on both."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from npu_compiler import WeightError, is_op_supported, partition
from npu_runtime import CPUBackend, DAGExecutor, Profiler
from npu_sim.extract import extract_ir


class Mixed(nn.Module):
    """Two layers on the device with an inverse matrix between them, which only PyTorch computes."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(16, 4, dtype=dtype), nn.Linear(4, 2, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        squares = torch.relu(self.first(x)).float() + 2 * torch.eye(4)
        result: torch.Tensor = self.second(torch.linalg.inv(squares).to(x.dtype))
        return result


X = torch.rand(4, 16, generator=torch.Generator().manual_seed(0))


def test_a_plan_says_what_runs_where_and_what_crosses() -> None:
    plan = partition(extract_ir(Mixed(), (X,)), is_op_supported)
    assert [part.device for part in plan.partitions] == ["npu", "cpu", "npu"]
    assert [move.tensor for move in plan.transfers] == ["x", "add", "linalg_inv", "linear_1"]
    assert [move.bytes for move in plan.transfers] == [128, 32, 32, 16]
    assert plan.reasons == {"linalg_inv": "op 'aten.linalg_inv.default' is not in the op table"}
    assert "linalg_inv" in str(plan) and plan.to_mermaid().startswith("graph")


def test_the_parts_together_give_what_pytorch_gives() -> None:
    model = Mixed()
    dag = DAGExecutor(partition(extract_ir(model, (X,)), is_op_supported), CPUBackend())
    dag.load_weights({key: value.numpy() for key, value in model.state_dict().items()})
    for x in (X, X.flip(0)):
        (result,) = dag.execute(inputs={"x": x.numpy()}).values()
        with torch.no_grad():
            np.testing.assert_allclose(result, model(x).numpy(), atol=2e-2)


def test_bfloat16_stays_bfloat16_where_it_crosses() -> None:
    model = Mixed(torch.bfloat16)
    plan = partition(extract_ir(model, (X.bfloat16(),)), is_op_supported)
    assert plan.compute_dtype == "bfloat16"
    dag = DAGExecutor(plan, CPUBackend())
    dag.load_weights(model.state_dict())
    (result,) = dag.execute({"x": X.numpy()}).values()
    assert result.dtype.name == "bfloat16"


def test_transfers_are_timed_like_kernels() -> None:
    model, profiler = Mixed(), Profiler()
    dag = DAGExecutor(partition(extract_ir(model, (X,))), CPUBackend())
    dag.load_weights(model.state_dict())
    dag.execute({"x": X.numpy()}, profiler)
    assert len(profiler.to_dict()["transfers"]) > 0


def test_missing_weights_are_listed_before_anything_runs() -> None:
    dag = DAGExecutor(partition(extract_ir(Mixed(), (X,))), CPUBackend())
    with pytest.raises(WeightError, match="second.bias"):
        dag.load_weights({"first.weight": np.zeros((4, 16), np.float32)})
