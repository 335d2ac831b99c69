"""Windows of images, shifted or not, as Swin has them, on CUDA: how many kernels they take, and their results."""

from __future__ import annotations

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
from npu_runtime.backend import Backend
from npu_sim.extract import extract_ir


def windows(x: Tensor, size: int) -> Tensor:
    """Windows [N · windows, size · size, C] of images [N, H, W, C]."""
    parts = x.unflatten(1, (-1, size)).unflatten(3, (-1, size))
    return parts.transpose(2, 3).contiguous().view(-1, size * size, x.shape[-1])


def images(x: Tensor, like: Tensor, size: int) -> Tensor:
    """The images whose windows `x` has."""
    count, height, width, _ = like.shape
    return x.view(count, height // size, width // size, size, size, -1).transpose(2, 3).reshape(like.shape)


class Block(nn.Module):
    """A block of Swin without its MLP: norm, shifted windows, attention with a bias and a mask, residual, norm.

    Args:
        shape: Shape of the images, [N, H, W, C].
        size, shift: Sides of the windows, and how far they are shifted.
        applies_masks: Whether the windows have masks.
    """

    def __init__(
        self, shape: tuple[int, ...], size: int, shift: tuple[int, int], heads: int, applies_masks: bool
    ) -> None:
        super().__init__()
        self.size, self.shift, self.heads, width = size, shift, heads, shape[-1]
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.bias = nn.Parameter(torch.randn(heads, size**2, size**2))
        masks = torch.where(torch.rand(shape[1] * shape[2] // size**2, size**2, size**2) < 0.3, -100.0, 0.0)
        self.register_buffer("mask", masks if applies_masks else None)

    def forward(self, x: Tensor) -> Tensor:
        rolled = self.norms[0](x)
        if any(self.shift):
            rolled = torch.roll(rolled, (-self.shift[0], -self.shift[1]), (1, 2))
        q, k, v = self.qkv(windows(rolled, self.size)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1) + self.bias
        if self.mask is not None:
            scores = scores.view(-1, len(self.mask), *scores.shape[1:]) + self.mask[None, :, None]
            scores = scores.flatten(0, 1)
        found = images(self.out((F.softmax(scores, -1) @ v).transpose(1, 2).flatten(2)), x, self.size)
        if any(self.shift):
            found = torch.roll(found, self.shift, (1, 2))
        return self.norms[1](x + found)


def check(backend: Backend, module: nn.Module, example: Tensor, tolerance: float) -> None:
    """Compare a module's result with PyTorch's."""
    with torch.no_grad():
        expected = module(example)
    _, (result,) = run_module(backend, module, example, "float32" if tolerance < 1e-3 else "float16")
    torch.testing.assert_close(result, expected, atol=tolerance, rtol=tolerance)


def block(draw: Random) -> tuple[Block, Tensor]:
    size, heads = draw.choice([2, 4]), draw.choice([1, 2])
    shape = (draw.choice([1, 3]), size * draw.randint(1, 3), size * draw.randint(1, 3), 16 * heads)
    shift = draw.choice([(0, 0), (1, 1), (1, 0), (0, 1), (size - 1, 1)])
    torch.manual_seed(draw.randrange(1000))
    return Block(shape, size, shift, heads, draw.random() < 0.6).eval(), torch.randn(shape)


@pytest.mark.parametrize("number", drawn(range(40), 0.1, str))
def test_drawn_windows_have_pytorchs_results(number: int, tmp_path: Path) -> None:
    check(EmulatedBackend(tmp_path), *block(Random(number)), tolerance=2e-4)


@pytest.mark.gpu
@pytest.mark.skipif(bool(cuda_gpu.PROBLEM), reason=cuda_gpu.PROBLEM)
@pytest.mark.parametrize("number", range(40))
def test_drawn_windows_have_pytorchs_results_on_a_gpu(number: int) -> None:
    check(cuda_gpu.cuda_backends()[0], *block(Random(number)), tolerance=2e-2)


@pytest.mark.parametrize(("shift", "copies"), [(0, 0), (3, 2)])
@pytest.mark.parametrize("count", [1, 2])
def test_windows_take_few_copies_and_one_kernel_for_attention(shift: int, copies: int, count: int) -> None:
    module = Block((count, 28, 28, 64), 7, (shift, shift), 2, applies_masks=shift > 0).half()
    program = npu_compiler.compile(extract_ir(module, (torch.randn(count, 28, 28, 64).half(),)), CUDACodegenTarget())
    found = [call.kernel for call in program.plan.calls]
    assert sum("copy" in name for name in found) == copies
    assert sum("attention" in name for name in found) == 1
    assert len(found) == 5 + copies


@pytest.mark.parametrize("number", drawn(range(40), 0.1, str))
def test_drawn_rolls_are_read_by_what_is_behind_them(number: int, tmp_path: Path) -> None:
    draw = Random(number)
    rank = draw.randint(1, 4)
    shape = [draw.choice([3, 4, 7, 8, 16]) for _ in range(rank)]
    dims = draw.sample(range(rank), draw.randint(1, rank))
    shifts = [draw.randint(-size, size) for size in (shape[dim] for dim in dims)]
    order = draw.sample(range(rank), rank)

    class Rolled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.roll(x * 2, shifts, dims).permute(order).contiguous().relu()

    check(EmulatedBackend(tmp_path), Rolled(), torch.randn(shape), tolerance=1e-6)
