"""Few elements that element-wise calls compute again where they read them often, on CUDA."""

from __future__ import annotations

from itertools import takewhile
from random import Random

import pytest
import torch
import torch.nn.functional as F
from cuda_reference import LaidOut, ReferenceBackend
from drawn import drawn
from torch import nn

import npu_compiler
from cuda_compiler import GPU, CUDACodegenTarget
from cuda_compiler.pipeline import cuda_stages
from npu_compiler.program.target import CodegenTarget, PlanStage
from npu_runtime import DAGExecutor
from npu_sim.extract import extract_ir


class Recomputed(LaidOut):
    """The layout of the CUDA target, with few elements computed where they are read."""

    def stages(self) -> list[PlanStage]:
        all_stages = cuda_stages(GPU())
        before = list(takewhile(lambda stage: stage[0] != "lay_integers", all_stages))
        return [*before, *(stage for stage in all_stages if stage[0] == "compute_where_read")]


class RecomputingBackend(ReferenceBackend):
    """Runs what `Recomputed` makes."""

    @property
    def target(self) -> CodegenTarget:
        return Recomputed()


def kernels(module: nn.Module, example: torch.Tensor) -> list[str]:
    program = npu_compiler.compile(extract_ir(module.half().eval(), (example.half(),)), CUDACodegenTarget())
    return [call.kernel for call in program.kernels]


class Normalized(nn.Module):
    """Vectors of length 1."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.normalize(x, dim=-1)


class ResponseNormalized(nn.Module):
    """Global response normalization, as ConvNeXt V2 has it."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.gain, self.bias = (nn.Parameter(torch.randn(channels)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = x.norm(p=2, dim=(1, 2), keepdim=True)
        return x + x * (found / (found.mean(dim=-1, keepdim=True) + 1e-6)) * self.gain + self.bias


def test_the_clamp_of_a_norm_needs_no_kernel() -> None:
    assert kernels(Normalized(), torch.randn(64, 49, 32)) == ["fused_norm_clamp_min_true_divide"]


def test_a_ratio_of_statistics_needs_no_kernel() -> None:
    found = kernels(ResponseNormalized(64), torch.randn(2, 14, 14, 64))
    assert [name.split("_")[0] for name in found] == ["norm", "mean", "fused"]


class Statistics(nn.Module):
    """Tensors changed by drawn functions of their statistics.

    Args:
        source: A list, to which the steps are added in words.
    """

    def __init__(self, draw: Random, source: list[str]) -> None:
        super().__init__()
        self.shape = [draw.choice([1, 2, 3]), *(draw.choice([1, 2, 4, 5, 16]) for _ in range(draw.randint(1, 3)))]
        rank = len(self.shape)
        self.dims = sorted(draw.sample(range(rank), draw.randint(1, rank)))
        self.statistic = draw.choice(["mean", "amax", "var", "sum"])
        self.steps = [draw.choice(["add", "root", "sigmoid", "weighted", "turned"]) for _ in range(draw.randint(1, 4))]
        self.readers = draw.randint(1, 3)
        self.returned, self.grouped = draw.random() < 0.2, draw.random() < 0.4 and self.shape[1] % 2 == 0
        kept = [1 if dim in self.dims else size for dim, size in enumerate(self.shape)]
        self.weight = nn.Parameter(torch.randn(kept))
        source.append(f"{self.shape} {self.dims} {self.statistic} {self.steps} {self.readers} {self.grouped}")

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        found = getattr(x, self.statistic)(
            dim=self.dims, keepdim=True, **({"correction": 0} if self.statistic == "var" else {})
        )
        for step in self.steps:
            match step:
                case "add":
                    found = found + 0.5
                case "root":
                    found = (found.abs() + 0.1).sqrt()
                case "sigmoid":
                    found = found.sigmoid()
                case "weighted":
                    found = found * self.weight
                case "turned":
                    found = found.transpose(-1, -2).contiguous().transpose(-1, -2) * 1.5
        results = []
        for number in range(self.readers):
            if self.grouped:
                parts = x.unflatten(1, (2, -1))
                results.append((parts + number) * found.expand(x.shape).unflatten(1, (2, -1)))
            else:
                results.append((x + number) * found)
            x = torch.relu(results[-1])
        return [*results, found] if self.returned else results


@pytest.mark.parametrize("number", drawn(range(120), 0.2, str))
def test_drawn_statistics_have_pytorchs_results(number: int) -> None:
    source: list[str] = []
    draw = Random(number)
    module = Statistics(draw, source)
    if module.grouped:
        module.readers = 1
    torch.manual_seed(number)
    example = torch.randn(module.shape)
    with torch.no_grad():
        ir, expected = extract_ir(module, (example,)), module(example)
    dag = DAGExecutor(npu_compiler.partition(ir, target=Recomputed(), compute_dtype="float32"), RecomputingBackend())
    dag.load_weights(module.state_dict())
    results = dag.execute({ir["graph_inputs"][0]["name"]: example.numpy()})
    for result, reference in zip(results.values(), expected, strict=True):
        torch.testing.assert_close(torch.from_numpy(result), reference, atol=1e-4, rtol=1e-4, msg=source[0])
