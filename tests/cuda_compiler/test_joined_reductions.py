"""Reductions that share a kernel with the element-wise calls around them, on CUDA."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random

import cuda_gpu
import pytest
import torch
import torch.nn.functional as F
from cuda_on_cpu import EmulatedBackend
from drawn import drawn
from module_runs import run_module
from torch import Tensor, nn

import npu_compiler
from cuda_compiler import CUDACodegenTarget
from npu_compiler.compiled_program import CompiledProgram
from npu_runtime.backend import Backend
from npu_sim.extract import extract_ir


class Rows(nn.Module):
    """A function of tensors and of a weight for each column.

    Args:
        function: The function.
        shape: The shape of the weight.
    """

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor], *shape: int) -> None:
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.randn(shape))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight)


def compiled(module: nn.Module, example: Tensor) -> CompiledProgram:
    return npu_compiler.compile(extract_ir(module, (example,)), CUDACodegenTarget())


def centred(x: Tensor, w: Tensor) -> Tensor:
    return (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-5) * w


def shares(x: Tensor, w: Tensor) -> Tensor:
    powers = (x - x.amax(-1, keepdim=True)).exp()
    return powers / powers.sum(-1, keepdim=True)


def in_range(x: Tensor, w: Tensor) -> Tensor:
    least = x.amin(-1, keepdim=True)
    return (x - least) / (x.amax(-1, keepdim=True) - least + 1e-3)


def evolved(x: Tensor, w: Tensor, groups: int = 8) -> Tensor:
    """A norm of groups of channels by their variance only, as EvoNorm has it, of [N, C, H, W]."""
    parts = x.unflatten(1, (groups, -1))
    deviation = (parts.var(dim=(2, 3, 4), correction=0, keepdim=True) + 1e-5).sqrt().expand(parts.shape).flatten(1, 2)
    return x * (x * w[:, None, None]).sigmoid() / deviation


@pytest.mark.parametrize(
    "function",
    [
        centred,
        shares,
        in_range,
        lambda x, w: F.normalize(x, dim=-1) * w,
        lambda x, w: x / ((x * w).abs().sum(-1, keepdim=True) + 1e-3),
        lambda x, w: x * torch.sigmoid((x * w).mean(-1, keepdim=True)),
        lambda x, w: x - x.logsumexp(-1, keepdim=True),
    ],
)
def test_rows_are_reduced_and_changed_by_one_kernel(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    assert len(compiled(Rows(function, 96).half(), torch.randn(8, 50, 96).half()).plan.calls) == 1


def test_groups_of_channels_are_reduced_and_changed_by_one_kernel() -> None:
    module = nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), Rows(evolved, 64), nn.Conv2d(64, 64, 3)).half()
    found = [call.kernel for call in compiled(module, torch.randn(2, 64, 14, 14).half()).plan.calls]
    assert sum("var" in name for name in found) == 1
    assert sum(name.startswith("fused") for name in found) == 1


def test_a_result_of_other_rows_stays_apart() -> None:
    def turned(x: Tensor, w: Tensor) -> Tensor:
        return x * x.mean(-1, keepdim=True).transpose(0, 1)

    calls = compiled(Rows(turned, 1), torch.randn(48, 48, 64)).plan.calls
    assert [call.kernel for call in calls] == ["mean_kernel", "mul_kernel"]


class Drawn(nn.Module):
    """Drawn steps: each reduces the same rows of what one before it made, or changes elements by what is known.

    Args:
        source: A list, to which the steps are added in words.
    """

    def __init__(self, draw: Random, source: list[str]) -> None:
        super().__init__()
        rank = draw.randint(2, 4)
        self.shape = [draw.choice([1, 2, 3, 4, 7]) for _ in range(rank - 1)] + [draw.choice([3, 8, 16, 24, 40, 129])]
        self.order = draw.choice([list(range(rank)), draw.sample(range(rank), rank)])
        count = draw.randint(1, rank - 1)
        self.dims = draw.choice([list(range(rank - count, rank)), sorted({*draw.sample(range(rank), count), rank - 1})])
        self.steps = [self._step(draw, number) for number in range(draw.randint(2, 6))]
        self.weight = nn.Parameter(torch.randn(self.shape[-1]))
        self.also = draw.random() < 0.3
        source.append(f"{self.shape} {self.order} {self.dims} {self.steps} {self.also}")

    def _step(self, draw: Random, number: int) -> tuple[str, int, int]:
        reduces = number == 0 or draw.random() < 0.4
        names = ("sum", "mean", "amax", "amin", "var", "std", "norm", "logsumexp") if reduces else ("add", "mul", "div")
        return draw.choice(names), draw.randrange(8), draw.randrange(8)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        values, results = (
            [x.permute(self.order).contiguous().permute([self.order.index(d) for d in range(x.dim())])],
            [],
        )
        for name, first, second in self.steps:
            value = values[first % len(values)]
            if name == "norm":
                results.append(torch.linalg.vector_norm(value, 1 + second % 3, self.dims, keepdim=True))
            elif name in ("var", "std"):
                results.append(getattr(value, name)(self.dims, correction=0, keepdim=True))
            elif name not in ("add", "mul", "div"):
                results.append(getattr(value, name)(self.dims, keepdim=True))
            else:
                result = results[second % len(results)]
                by = result.tanh() if second % 2 else (result * 0.1).abs() + 0.5
                changed = value + by if name == "add" else value * by if name == "mul" else value / (by.abs() + 0.3)
                values.append(torch.tanh(changed * self.weight) if first % 3 == 0 else changed)
        return (values[-1], results[-1]) if self.also else (values[-1] * results[-1].tanh(),)


class Long(Drawn):
    """Steps as in `Drawn` over few long rows."""

    def __init__(self, draw: Random, source: list[str]) -> None:
        super().__init__(draw, source)
        self.shape, self.dims = [draw.choice([1, 2, 7, 33]), draw.choice([2048, 2056, 4097, 6272, 8192])], [1]
        self.order, self.weight = [0, 1], nn.Parameter(torch.randn(self.shape[1]))
        source.append(f"{self.shape}")


def check(backend: Backend, number: int, dtype: str, kind: type[Drawn] = Drawn) -> None:
    source: list[str] = []
    module = kind(Random(number), source)
    torch.manual_seed(number)
    nn.init.normal_(module.weight)
    example = torch.randn(module.shape)
    with torch.no_grad():
        expected = module(example)
    program, results = run_module(backend, module, example, dtype)
    tolerance = 1e-4 if dtype == "float32" else 4e-2
    for result, reference in zip(results, expected, strict=True):
        near = partial(torch.testing.assert_close, atol=tolerance * float(reference.abs().max()), rtol=tolerance)
        near(result, reference, msg=lambda text: f"{source} {[call.kernel for call in program.plan.calls]}\n{text}")


@pytest.mark.parametrize("number", drawn(range(100), 0.1, str))
def test_drawn_reductions_have_pytorchs_results(number: int, tmp_path: Path) -> None:
    check(EmulatedBackend(tmp_path), number, "float32" if number % 2 else "float16")


@pytest.mark.parametrize("number", drawn(range(24), 0.2, str))
def test_long_rows_have_pytorchs_results(number: int, tmp_path: Path) -> None:
    check(EmulatedBackend(tmp_path), number, "float32" if number % 2 else "float16", Long)


@pytest.mark.gpu
@pytest.mark.skipif(bool(cuda_gpu.PROBLEM), reason=cuda_gpu.PROBLEM)
@pytest.mark.parametrize("kind", [Drawn, Long])
@pytest.mark.parametrize("number", range(40))
def test_drawn_reductions_have_pytorchs_results_on_a_gpu(number: int, kind: type[Drawn]) -> None:
    check(cuda_gpu.cuda_backends()[0], number, "float32" if number % 2 else "float16", kind)
