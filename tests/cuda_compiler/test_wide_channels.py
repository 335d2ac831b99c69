"""Images whose channels are stored as whole packs of eight, on CUDA."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from cuda_reference import LaidOut, ReferenceBackend
from drawn import drawn
from module_runs import run_module
from torch import Tensor, nn

import npu_compiler
from npu_runtime.backend import DeviceBuffer
from npu_runtime.cpu.backend import CPUBuffer
from npu_sim.extract import extract_ir


class PoisonedBackend(ReferenceBackend):
    """The CUDA target's layout, in memory that holds NaNs before the first run: a channel that nobody writes shows."""

    def allocate_arena(self, size: int) -> DeviceBuffer:
        return CPUBuffer((size,), None, "uint8", np.full(size, 0xFF, np.uint8))


def copies(module: nn.Module, example: Tensor) -> int:
    """Return how many copies to channels-last a module takes."""
    options = npu_compiler.CompileOptions(compute_dtype="float16")
    program = npu_compiler.compile(extract_ir(module.eval(), (example,)), LaidOut(), options)
    return sum(call.kernel == "to_channels_last" for call in program.plan.calls)


class Excited(nn.Module):
    """Squeeze-and-excitation."""

    def __init__(self, channels: int, squeezed: int) -> None:
        super().__init__()
        self.squeeze, self.excite = nn.Conv2d(channels, squeezed, 1), nn.Conv2d(squeezed, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x * self.excite(F.silu(self.squeeze(x.mean((2, 3), keepdim=True)))).sigmoid()
        return result


class Grown(nn.Module):
    """Channels of which the first are added to fewer ones, as in ReXNet."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(before, after, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return torch.cat([y[:, : x.shape[1]] + x, y[:, x.shape[1] :]], dim=1)


class Resampled(nn.Module):
    """A sum of an image and a small copy of it, as in HRNet."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(channels, channels + 3, 3, stride=2, padding=1), nn.ReLU())
        self.back = nn.Conv2d(channels + 3, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + F.interpolate(self.back(self.down(x)), size=x.shape[2:], mode="nearest"))


class Applied(nn.Module):
    """A function as a layer."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Scaled(nn.Module):
    """A factor for each channel, and one more for all."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(channels, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * (x * self.scale) - x


class Branches(nn.Module):
    """The results of two layers, one behind the other."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.first(x), torch.relu(self.second(x))], dim=1)


Layer = tuple[nn.Module, int]  # with the channels of its result


def _dense(channels: int, wider: int, draw: Random) -> Layer:
    return nn.Sequential(nn.Conv2d(channels, wider, 3, padding=1, bias=draw.random() < 0.5), nn.ReLU()), wider


def _depthwise(channels: int, wider: int, draw: Random) -> Layer:
    return nn.Conv2d(channels, channels, 3, padding=1, groups=channels), channels


def _normalized(channels: int, wider: int, draw: Random) -> Layer:
    return nn.Sequential(nn.Conv2d(channels, wider, 1, bias=False), nn.BatchNorm2d(wider), nn.SiLU()), wider


def _grouped(channels: int, wider: int, draw: Random) -> Layer:
    return nn.Conv2d(channels, 2 * channels, 1, groups=channels if channels % 2 else 2), 2 * channels


def _transposed(channels: int, wider: int, draw: Random) -> Layer:
    return nn.ConvTranspose2d(channels, wider, 2, stride=2), wider


def _excited(channels: int, wider: int, draw: Random) -> Layer:
    return Excited(channels, draw.randint(1, 20)), channels


def _grown(channels: int, wider: int, draw: Random) -> Layer:
    return Grown(channels, wider), wider


def _resampled(channels: int, wider: int, draw: Random) -> Layer:
    return Resampled(channels), channels


def _pooled(channels: int, wider: int, draw: Random) -> Layer:
    return draw.choice([nn.MaxPool2d(3, stride=2, padding=1), nn.AvgPool2d(3, stride=1, padding=1)]), channels


def _activated(channels: int, wider: int, draw: Random) -> Layer:
    return draw.choice([nn.Hardswish(), nn.GELU(), nn.PReLU(channels), nn.ReLU6(), nn.Softplus()]), channels


def _divided(channels: int, wider: int, draw: Random) -> Layer:
    return Applied(lambda x: x / (x.abs() + 0.5)), channels


def _scaled(channels: int, wider: int, draw: Random) -> Layer:
    return Scaled(channels), channels


def _turned(channels: int, wider: int, draw: Random) -> Layer:
    return Applied(lambda x: x + x.transpose(1, 2).transpose(1, 3).reshape(x.shape)), channels


def _in_parts(channels: int, wider: int, draw: Random) -> Layer:
    return Applied(lambda x: torch.cat([x[:, ::2].relu(), x[:, 1::2]], dim=1)), channels


def _in_branches(channels: int, wider: int, draw: Random) -> Layer:
    first, second = nn.Conv2d(channels, wider, 1), nn.Conv2d(channels, channels, 3, padding=1)
    return Branches(first, second), wider + channels


LAYERS = (
    _dense,
    _depthwise,
    _normalized,
    _grouped,
    _transposed,
    _excited,
    _grown,
    _resampled,
    _pooled,
    _activated,
    _divided,
    _scaled,
    _turned,
    _in_parts,
    _in_branches,
)


class OddNetwork(nn.Module):
    """Drawn layers over images whose channels are mostly no multiple of eight.

    Args:
        source: A list, to which the layers are added in words.
    """

    def __init__(self, draw: Random, source: list[str]) -> None:
        super().__init__()
        channels = draw.randint(1, 60)
        layers: list[nn.Module] = [nn.Conv2d(3, channels, 3, padding=1)]
        for _ in range(draw.randint(2, 7)):
            make = draw.choice(LAYERS)
            layer, channels = make(channels, channels + draw.randint(1, 20), draw)
            layers.append(layer)
            source.append(f"{make.__name__} {channels}")
        self.layers = nn.Sequential(*layers, nn.Conv2d(channels, draw.randint(3, 30), 1))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layers(x)
        return result


@pytest.mark.parametrize("number", drawn(range(150), 0.25, str))
def test_drawn_networks_have_pytorchs_results(number: int) -> None:
    source: list[str] = []
    torch.manual_seed(number)
    module = OddNetwork(Random(number), source).eval()
    example = torch.randn(2, 3, 12, 10)
    with torch.no_grad():
        expected = module(example)
        _, (found,) = run_module(PoisonedBackend(), module, example, "float16")
    torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-2, msg=lambda text: f"{source}: {text}")


def test_images_between_convolutions_need_no_copies() -> None:
    stem = nn.Conv2d(8, 18, 3, padding=1)
    resampled = nn.Sequential(stem, nn.ReLU(), Resampled(18), Resampled(18), nn.Conv2d(18, 8, 1))
    assert copies(resampled, torch.randn(2, 8, 8, 8)) == copies(stem, torch.randn(2, 8, 8, 8))


def test_blocks_of_growing_channels_need_no_copies() -> None:
    stem = nn.Conv2d(8, 27, 3, padding=1)
    grown = nn.Sequential(stem, Grown(27, 41), Excited(41, 5), Grown(41, 52), nn.Conv2d(52, 8, 1))
    assert copies(grown, torch.randn(2, 8, 8, 8)) == copies(stem, torch.randn(2, 8, 8, 8))


def test_few_channels_of_many_pixels_stay_as_they_are() -> None:
    masks = nn.Sequential(nn.Conv2d(8, 2, 1), nn.Conv2d(2, 8, 1))
    options = npu_compiler.CompileOptions(compute_dtype="float16")
    program = npu_compiler.compile(extract_ir(masks, (torch.randn(1, 8, 8, 8),)), LaidOut(), options)
    assert 2 in {call.outputs[0].shape[1] for call in program.plan.calls if call.kernel == "conv2d_kernel"}
