"""Choices of experts, and the weighted sums of their rows, on the GPU: those of PyTorch, each in one kernel."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from cuda_gpu import cuda_backends, need_gpu
from torch import Tensor, nn

import npu_compiler
from npu_compiler import CompileOptions
from npu_runtime import Executor
from npu_sim.module.trace import export, plain_ir, trace

need_gpu()
pytestmark = pytest.mark.gpu


class Router(nn.Module):
    def __init__(self, choices: int, form: str) -> None:
        super().__init__()
        self.choices, self.form = choices, form

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.form == "after":
            values, chosen = x.topk(self.choices, dim=-1)
            return values.softmax(-1), chosen + 1
        values, chosen = (x.softmax(-1, dtype=torch.float32) if self.form != "plain" else x).topk(self.choices, dim=-1)
        if self.form == "divided":
            values = values / values.sum(-1, keepdim=True)
        return values.to(torch.bfloat16), chosen + 1


@pytest.mark.parametrize("form", ["plain", "before", "divided", "after"])
@pytest.mark.parametrize(("rows", "experts", "choices"), [(1, 128, 8), (5, 32, 4), (70, 7, 7), (3, 1000, 32)])
def test_a_choice_is_that_of_pytorch(form: str, rows: int, experts: int, choices: int) -> None:
    (backend,) = cuda_backends()
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, experts, generator=generator)
    x[0, experts // 2] = x[0, 0]  # of equal ones the first
    x = x.bfloat16()
    module = Router(choices, form)
    ir = plain_ir(trace(export(module, (x,)), "router"))
    program = npu_compiler.compile(ir, backend.target, CompileOptions("bfloat16"))
    assert "route" in [call.kernel for call in program.kernels]
    (spec,) = program.input_specs
    results = Executor(program, backend).run({spec.name: x.float().numpy().astype(ml_dtypes.bfloat16)}, {}).values()
    weights, chosen = (torch.from_numpy(y.to_numpy().astype(np.float32)) for y in results)
    order = x.float().sort(dim=-1, descending=True, stable=True)[1][:, :choices]
    values = (x if form in ("plain", "after") else x.softmax(-1, dtype=torch.float32)).gather(1, order).float()
    expected = {"divided": values / values.sum(-1, keepdim=True), "after": values.softmax(-1)}.get(form, values)
    torch.testing.assert_close(chosen.long() - 1, order)
    torch.testing.assert_close(weights, expected, atol=1e-5, rtol=2.0**-8)


class WeightedSum(nn.Module):
    def forward(self, x: Tensor, weights: Tensor, residual: Tensor) -> Tensor:
        return residual + (x * weights.reshape(-1, 1)).view(*weights.shape, -1).sum(1)


@pytest.mark.parametrize(("rows", "choices", "width"), [(1, 8, 2048), (5, 3, 56), (70, 4, 7)])
def test_a_weighted_sum_is_that_of_pytorch(rows: int, choices: int, width: int) -> None:
    (backend,) = cuda_backends()
    generator = torch.Generator().manual_seed(rows)
    shapes = (rows * choices, width), (rows, choices), (rows, width)
    given = [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]
    ir = plain_ir(trace(export(WeightedSum(), tuple(given)), "sum"))
    program = npu_compiler.compile(ir, backend.target, CompileOptions("bfloat16"))
    assert [call.kernel for call in program.kernels] == ["weighted_sum"]
    names = [spec.name for spec in program.input_specs]
    values = {name: x.float().numpy().astype(ml_dtypes.bfloat16) for name, x in zip(names, given, strict=True)}
    (found,) = Executor(program, backend).run(values, {}).values()
    x, weights, residual = (value.float() for value in given)
    expected = WeightedSum()(x, weights, residual)
    torch.testing.assert_close(torch.from_numpy(found.to_numpy().astype(np.float32)), expected, atol=1e-2, rtol=2.0**-8)
