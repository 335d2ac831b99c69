"""Convolutions of volumes that are computed plane by plane, drawn at random, against PyTorch."""

from __future__ import annotations

from random import Random

import pytest
import torch
from torch import Tensor, nn

import npu_compiler
import npu_sim
from npu_compiler.ops import conv3d
from npu_sim.extract import extract_ir


class Layers(nn.Module):
    """Drawn convolutions of volumes, one after the other, with activations, batch norms and residuals between them."""

    def __init__(self, draw: Random) -> None:
        super().__init__()
        self.layers, channels = nn.ModuleList(), 4
        for _ in range(3):
            groups, outputs = draw.choice([1, 1, 2, channels]), draw.choice([4, 8, 12])
            outputs = -(-outputs // groups) * groups
            window = draw.choice([(1, 3, 3), (3, 1, 1), (3, 3, 3), (2, 3, 1), (1, 1, 1)])
            dilation = draw.choice([1, 1, 2])
            padding = tuple(dilation * (size // 2) for size in window)
            stride = draw.choice([1, 1, (2, 1, 1), (1, 2, 2), 2])
            self.layers += [
                nn.Conv3d(channels, outputs, window, stride, padding, dilation, groups, bias=draw.random() < 0.5),
                nn.BatchNorm3d(outputs) if draw.random() < 0.5 else nn.Identity(),
            ]
            channels = outputs
        self.up = nn.ConvTranspose3d(channels, 6, 2, 2)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            y = torch.relu(layer(x))
            x = y + x if y.shape == x.shape else y
        return self.up(x)


@pytest.mark.parametrize("number", range(10))
@pytest.mark.parametrize("gathered", [1, 500, conv3d.MOST_GATHERED])
def test_drawn_layers_have_pytorchs_results(
    number: int, gathered: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conv3d, "MOST_GATHERED", gathered)
    draw = Random(f"{seed} {number}")
    torch.manual_seed(draw.randrange(2**30))
    module = Layers(draw).eval()
    x = torch.randn(draw.choice([1, 3]), 4, draw.choice([4, 5, 7]), draw.choice([5, 6]), draw.choice([4, 7]))
    with torch.no_grad():
        torch.testing.assert_close(npu_sim.compile(module, (x,))(x), module(x), atol=1e-4, rtol=1e-4)
    kernels = {call.kernel for call in npu_compiler.compile(extract_ir(module, (x,))).plan.calls}
    assert kernels >= {"conv2d_kernel", "conv_transpose2d_kernel"}
