"""The weighted sum of experts' rows, with a residual, is one kernel on CUDA; other products and sums stay apart."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import cuda_toolchain
import pytest
import torch
from cuda_on_cpu import run_on_cpu
from drawn import drawn
from torch import Tensor, nn
from zoo_runs import extract

import npu_compiler
from cuda_compiler import CUDACodegenTarget
from npu_compiler import CompiledProgram

Function = Callable[[Tensor, Tensor, Tensor], Tensor | tuple[Tensor, ...]]


class Applied(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor, weights: Tensor, residual: Tensor) -> Tensor | tuple[Tensor, ...]:
        return self.function(x, weights, residual)


def program(function: Function, tokens: int = 3, width: int = 40) -> CompiledProgram:
    shapes = (tokens * 4, width), (tokens, 4), (1, tokens, width)
    ir = extract(Applied(function), [torch.empty(shape) for shape in shapes])
    return npu_compiler.compile(ir, CUDACodegenTarget(), npu_compiler.CompileOptions(compute_dtype="float16"))


def kernels(function: Function, tokens: int = 3) -> list[str]:
    return [call.kernel for call in program(function, tokens).plan.calls]


def alone(x: Tensor, weights: Tensor, residual: Tensor) -> Tensor:
    return (x * weights.reshape(-1, 1)).view(*weights.shape, -1).sum(1)


def added(x: Tensor, weights: Tensor, residual: Tensor) -> Tensor:
    return residual + alone(x, weights, residual).view(residual.shape)


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("function", [alone, added])
def test_a_weighted_sum_is_one_kernel(function: Function, tokens: int) -> None:
    assert kernels(function, tokens) == ["weighted_sum"]


@pytest.mark.parametrize("width", [39, 40])
@pytest.mark.parametrize("function", [alone, added])
def test_a_weighted_sum_is_that_of_pytorch(function: Function, width: int, tmp_path: Path) -> None:
    plan = program(function, 3, width).plan
    shapes = {"x": (12, width), "weights": (3, 4), "residual": (1, 3, width)}
    generator = torch.Generator().manual_seed(width)
    given = {name: torch.randn(shape, generator=generator).half() for name, shape in shapes.items()}
    memory = run_on_cpu(plan, {name: value.numpy() for name, value in given.items()}, tmp_path)
    (view,) = plan.output_views.values()
    expected = function(*(value.float() for value in given.values()))
    found = torch.from_numpy(memory[view.buffer]).reshape(view.shape).float()
    torch.testing.assert_close(found, expected, atol=4e-3, rtol=2.0**-10)


@pytest.mark.parametrize("turn", drawn(range(3), 1 / 3))
def test_the_sources_compile(turn: int) -> None:
    cuda_toolchain.architectures()
    sources = program(alone, 1).plan.sources | program(added, 3).plan.sources | program(added, 3, 39).plan.sources
    cuda_toolchain.compile_in_turn(sources.values(), turn)


def test_a_sum_that_something_else_reads_is_stored() -> None:
    def both(x: Tensor, weights: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
        total = alone(x, weights, residual)
        return residual + total, total.exp()

    assert kernels(both)[0] == "weighted_sum" and len(kernels(both)) > 1


@pytest.mark.parametrize(
    "function",
    [
        lambda x, weights, residual: (x * weights.reshape(-1, 1)).view(*weights.shape, -1).amax(1),
        lambda x, weights, residual: (x * weights.reshape(-1, 1)).view(4, len(weights), -1).sum(0),
        lambda x, weights, residual: (x * weights.reshape(-1, 1)).sum(1),
        lambda x, weights, residual: (x * x[:, :1].exp()).view(*weights.shape, -1).sum(2),
    ],
    ids=["greatest", "other-rows", "along-rows", "of-columns"],
)
def test_other_sums_stay_apart(function: Function) -> None:
    assert "weighted_sum" not in kernels(function)
