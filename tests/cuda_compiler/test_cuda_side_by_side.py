"""Element-wise groups that share a launch of the CUDA target, and parts of a concatenation that are stored besides."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cuda_on_cpu import EmulatedBackend
from drawn import drawn
from random_streams import RandomStreams
from torch import Tensor, nn

import npu_compiler
from cuda_compiler import CUDACodegenTarget
from cuda_compiler.elementwise import kernel_source, side_by_side
from npu_runtime import DAGExecutor
from npu_sim.extract import extract_ir


def results(module: nn.Module, inputs: tuple[Tensor, ...], folder: Path, dtype: str = "float32") -> list[Tensor]:
    """Return the outputs of a module, by the CUDA target's kernels as the CPU runs them."""
    with torch.no_grad():
        ir = extract_ir(module, inputs)
    target = CUDACodegenTarget()
    plan = npu_compiler.partition(ir, target=target, compute_dtype=dtype)
    dag = DAGExecutor(plan, EmulatedBackend(folder, target))
    dag.load_weights(module.state_dict())
    names = [each["name"] for each in ir["graph_inputs"]]
    found = dag.execute({name: x.numpy() for name, x in zip(names, inputs, strict=True)})
    return [torch.from_numpy(each) for each in found.values()]


def kernels(module: nn.Module, *inputs: Tensor) -> list[str]:
    program = npu_compiler.compile(extract_ir(module, inputs), target=CUDACodegenTarget())
    return [call.kernel for call in program.plan.calls]


@pytest.mark.parametrize("number", drawn(range(12), 1 / 4))
def test_drawn_streams_have_pytorchs_results(
    number: int, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if number % 2:
        monkeypatch.setattr(kernel_source, "_ENOUGH_THREADS", 1)  # vectors however small a tensor is
    module = RandomStreams(seed + number).eval()
    with torch.no_grad():
        expected = module(module.example)
    for result, reference in zip(results(module, (module.example,), tmp_path), expected, strict=True):
        torch.testing.assert_close(result, reference, atol=1e-4, rtol=1e-4, msg=module.source)


class Pieces(nn.Module):
    """Class tokens in front of two halves, each joined in its own way."""

    def forward(self, x: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
        first, second = x.chunk(2, 1)
        return torch.cat([token, first.exp()], 1), torch.cat([token, second.tanh()], 1)


def test_what_does_not_depend_on_each_other_is_one_launch(tmp_path: Path) -> None:
    inputs = torch.randn(2, 6, 8), torch.randn(2, 1, 8)
    assert len(kernels(Pieces(), *inputs)) == 1
    torch.testing.assert_close(results(Pieces(), inputs, tmp_path), list(Pieces()(*inputs)))


class Chained(nn.Module):
    """Values of different sizes, of which each is computed from the one before."""

    def forward(self, x: Tensor) -> Tensor:
        first = x.relu().sum(0)
        second = torch.stack([first, -first]).exp().sum(1)
        return second.tanh()


def test_what_depends_on_each_other_is_launched_in_turn(tmp_path: Path) -> None:
    x = torch.randn(300, 70)
    torch.testing.assert_close(results(Chained(), (x,), tmp_path), [Chained()(x)])


class Large(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x.exp(), y.tanh()


@pytest.mark.parametrize(("rows", "launches"), [(8, 1), (side_by_side._LITTLE, 2)])
def test_only_little_is_launched_with_others(rows: int, launches: int) -> None:
    assert len(kernels(Large(), torch.empty(rows, 4), torch.empty(rows, 2))) == launches
