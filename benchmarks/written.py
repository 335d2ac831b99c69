"""Networks of layers that timm and transformers hardly have, written out: volumes, sound, images to images, tables.

Their layers are those of the papers that they are named after, with random weights; some are shortened.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.zoo import Entry


class Factorized(nn.Module):
    """Two convolutions of volumes with batch norms, each within planes and then along the depth, and a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(*self._layer(inputs, outputs, stride), nn.ReLU(), *self._layer(outputs, outputs, 1))
        shortcut = nn.Sequential(nn.Conv3d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm3d(outputs))
        self.shortcut = shortcut if stride > 1 else nn.Identity()

    @staticmethod
    def _layer(inputs: int, outputs: int, stride: int) -> list[nn.Module]:
        between = inputs * outputs * 27 // (inputs * 9 + 3 * outputs)
        return [
            nn.Conv3d(inputs, between, (1, 3, 3), (1, stride, stride), (0, 1, 1), bias=False),
            nn.BatchNorm3d(between),
            nn.ReLU(),
            nn.Conv3d(between, outputs, (3, 1, 1), (stride, 1, 1), (1, 0, 0), bias=False),
            nn.BatchNorm3d(outputs),
        ]

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


class Cubic(Factorized):
    """Two convolutions of volumes by windows of 3 × 3 × 3 with batch norms, and a shortcut."""

    @staticmethod
    def _layer(inputs: int, outputs: int, stride: int) -> list[nn.Module]:
        return [nn.Conv3d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm3d(outputs)]


class VideoResNet(nn.Module):
    """A network of four blocks for the class of a film [N, 3, T, H, W]."""

    def __init__(self, block: type[Factorized], depth: int) -> None:
        super().__init__()
        stem = nn.Conv3d(3, 64, (depth, 7, 7), (1, 2, 2), (depth // 2, 3, 3), bias=False)
        widths = [(64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2)]
        self.body = nn.Sequential(stem, nn.BatchNorm3d(64), nn.ReLU(), *(block(*width) for width in widths))
        self.head = nn.Linear(512, 400)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.body(x).mean((2, 3, 4)))
        return result


class UNet(nn.Module):
    """A U-Net for images or volumes, with skip connections to transposed convolutions."""

    def __init__(self, rank: int, inputs: int, widths: list[int], outputs: int) -> None:
        super().__init__()
        self.pool = (F.max_pool2d, F.max_pool3d)[rank - 2]
        convolution, norm, up = (
            (nn.Conv2d, nn.BatchNorm2d, nn.ConvTranspose2d),
            (nn.Conv3d, nn.InstanceNorm3d, nn.ConvTranspose3d),
        )[rank - 2]

        def pair(before: int, after: int) -> nn.Sequential:
            layers = [(convolution(size, after, 3, padding=1), norm(after), nn.ReLU()) for size in (before, after)]
            return nn.Sequential(*layers[0], *layers[1])

        self.down = nn.ModuleList(pair(*sizes) for sizes in pairwise([inputs, *widths]))
        steps = list(zip(widths[:0:-1], widths[-2::-1], strict=True))
        self.ups = nn.ModuleList(up(*sizes, 2, 2) for sizes in steps)
        self.after = nn.ModuleList(pair(2 * width, width) for _, width in steps)
        self.out = convolution(widths[0], outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = list[Tensor]()
        for layer in self.down:
            x = layer(self.pool(x, 2) if kept else x)
            kept.append(x)
        for up, layer, skipped in zip(self.ups, self.after, kept[-2::-1], strict=True):
            x = layer(torch.cat([skipped, up(x)], 1))
        result: Tensor = self.out(x)
        return result


class DilatedResidual(nn.Module):
    """Three residual pairs of 1-D convolutions, the first of each dilated."""

    def __init__(self, channels: int, size: int) -> None:
        super().__init__()

        def convolution(dilation: int) -> nn.Conv1d:
            return nn.Conv1d(channels, channels, size, padding=dilation * (size // 2), dilation=dilation)

        self.layers = nn.ModuleList(
            nn.Sequential(nn.LeakyReLU(0.1), convolution(dilation), nn.LeakyReLU(0.1), convolution(1))
            for dilation in (1, 3, 5)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


class Mean(nn.Module):
    """The mean of what three modules make of one input."""

    def __init__(self, *modules: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(modules)

    def forward(self, x: Tensor) -> Tensor:
        first, second, third = (part(x) for part in self.parts)
        result: Tensor = (first + second + third) / 3
        return result


class HiFiGAN(nn.Module):
    """A vocoder: from a mel spectrogram [N, 80, T] to 256 samples of sound for each of its frames."""

    def __init__(self, channels: int = 512) -> None:
        super().__init__()
        self.first, self.ups, self.residuals = nn.Conv1d(80, channels, 7, padding=3), nn.ModuleList(), nn.ModuleList()
        for rate in (8, 8, 2, 2):
            self.ups.append(nn.ConvTranspose1d(channels, channels := channels // 2, 2 * rate, rate, rate // 2))
            self.residuals.append(Mean(*(DilatedResidual(channels, size) for size in (3, 7, 11))))
        self.last = nn.Conv1d(channels, 1, 7, padding=3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for up, residuals in zip(self.ups, self.residuals, strict=True):
            x = residuals(up(F.leaky_relu(x, 0.1)))
        return torch.tanh(self.last(F.leaky_relu(x, 0.1)))


class DenseBlock(nn.Module):
    """Five convolutions, each of which reads the results of all before it."""

    def __init__(self, channels: int, growth: int) -> None:
        super().__init__()
        sizes = [(channels + i * growth, growth if i < 4 else channels) for i in range(5)]
        self.layers = nn.ModuleList(nn.Conv2d(*size, 3, padding=1) for size in sizes)

    def forward(self, x: Tensor) -> Tensor:
        found = [x]
        for layer in self.layers:
            y = layer(torch.cat(found, 1))
            found.append(F.leaky_relu(y, 0.2) if len(found) < 5 else y)
        return x + 0.2 * found[-1]


class ESRGAN(nn.Module):
    """An image four times as large, by dense blocks and two enlargements."""

    def __init__(self, channels: int = 64, blocks: int = 9) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, channels, 3, padding=1)
        self.blocks = nn.Sequential(*(DenseBlock(channels, 32) for _ in range(blocks)))
        self.ups = nn.ModuleList(nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))
        self.last = nn.Conv2d(channels, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = x + self.blocks(x)
        for up in self.ups:
            x = F.leaky_relu(up(F.interpolate(x, scale_factor=2.0)), 0.2)
        result: Tensor = self.last(x)
        return result


class ChannelNorm(nn.Module):
    """A layer norm over the channels of images."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight, self.bias = (nn.Parameter(value(channels, 1, 1)) for value in (torch.ones, torch.zeros))

    def forward(self, x: Tensor) -> Tensor:
        centred = x - x.mean(1, keepdim=True)
        return self.weight * (centred / (centred.pow(2).mean(1, keepdim=True) + 1e-6).sqrt()) + self.bias


class GatedBlock(nn.Module):
    """A block of NAFNet, whose only nonlinear functions are products of halves and norms."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(ChannelNorm(channels) for _ in range(2))
        self.wide = nn.ModuleList(nn.Conv2d(channels, 2 * channels, 1) for _ in range(2))
        self.near = nn.Conv2d(2 * channels, 2 * channels, 3, padding=1, groups=2 * channels)
        self.attention, *out = (nn.Conv2d(channels, channels, 1) for _ in range(3))
        self.out = nn.ModuleList(out)
        self.scales = nn.ParameterList(torch.full((1, channels, 1, 1), 0.1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.near(self.wide[0](self.norms[0](x))).chunk(2, 1)
        y = left * right
        y = y * self.attention(y.mean((2, 3), keepdim=True))
        x = x + self.out[0](y) * self.scales[0]
        left, right = self.wide[1](self.norms[1](x)).chunk(2, 1)
        result: Tensor = x + self.out[1](left * right) * self.scales[1]
        return result


class NAFNet(nn.Module):
    """A network that restores images, of three levels."""

    def __init__(self, channels: int = 32, blocks: tuple[int, ...] = (1, 1, 4)) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, channels, 3, padding=1), nn.Conv2d(channels, 3, 3, padding=1)
        self.levels, self.down, self.up, self.after = (nn.ModuleList() for _ in range(4))
        for count in blocks:
            self.levels.append(nn.Sequential(*(GatedBlock(channels) for _ in range(count))))
            self.down.append(nn.Conv2d(channels, channels := 2 * channels, 2, 2))
        self.middle = GatedBlock(channels)
        for _ in blocks:
            self.up.append(nn.Sequential(nn.Conv2d(channels, 2 * channels, 1, bias=False), nn.PixelShuffle(2)))
            self.after.append(GatedBlock(channels := channels // 2))

    def forward(self, x: Tensor) -> Tensor:
        y, kept = self.first(x), list[Tensor]()
        for level, down in zip(self.levels, self.down, strict=True):
            kept.append(level(y))
            y = down(kept[-1])
        y = self.middle(y)
        for up, layer, skipped in zip(self.up, self.after, reversed(kept), strict=True):
            y = layer(up(y) + skipped)
        result: Tensor = self.last(y) + x
        return result


class Enlarging(nn.Module):
    """Two convolutions with group norms and a shortcut, then twice the height and width."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.GroupNorm(32, inputs),
            nn.SiLU(),
            nn.Conv2d(inputs, outputs, 3, padding=1),
            nn.GroupNorm(32, outputs),
            nn.SiLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1),
        )
        self.shortcut = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()
        self.up = nn.Conv2d(outputs, outputs, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.up(F.interpolate(self.shortcut(x) + self.body(x), scale_factor=2.0))
        return result


def latent_decoder(widths: tuple[int, ...] = (512, 512, 256, 128)) -> nn.Module:
    """Return the decoder of a latent diffusion model, shortened: from [N, 4, H, W] to an image eight times as large."""
    return nn.Sequential(
        nn.Conv2d(4, widths[0], 3, padding=1),
        *(Enlarging(*pair) for pair in pairwise(widths)),
        nn.GroupNorm(32, widths[-1]),
        nn.SiLU(),
        nn.Conv2d(widths[-1], 3, 3, padding=1),
    )


class ConformerBlock(nn.Module):
    """Attention and a long depthwise convolution between two halves of a feed-forward layer, over [N, T, channels]."""

    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.halves = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(channels), nn.Linear(channels, 4 * channels), nn.SiLU(), nn.Linear(4 * channels, channels)
            )
            for _ in range(2)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(channels) for _ in range(3))
        self.qkv, self.out = nn.Linear(channels, 3 * channels), nn.Linear(channels, channels)
        self.convolution = nn.Sequential(
            nn.Conv1d(channels, 2 * channels, 1),
            nn.GLU(1),
            nn.Conv1d(channels, channels, 31, padding=15, groups=channels),
            nn.BatchNorm1d(channels),
            nn.SiLU(),
            nn.Conv1d(channels, channels, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, channels = x.shape
        x = x + 0.5 * self.halves[0](x)
        q, k, v = self.qkv(self.norms[0](x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, length, channels)
        x = x + self.out(attended)
        x = x + self.convolution(self.norms[1](x).transpose(1, 2)).transpose(1, 2)
        result: Tensor = self.norms[2](x + 0.5 * self.halves[1](x))
        return result


class TemporalBlock(nn.Module):
    """Two causal dilated convolutions over time with a shortcut."""

    def __init__(self, inputs: int, outputs: int, dilation: int) -> None:
        super().__init__()
        self.past = 4 * dilation
        sizes = (inputs, outputs)
        self.layers = nn.ModuleList(nn.Conv1d(size, outputs, 5, dilation=dilation) for size in sizes)
        self.shortcut = nn.Conv1d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for layer in self.layers:
            y = F.relu(layer(F.pad(y, (self.past, 0))))
        return F.relu(y + self.shortcut(x))


class PointNet(nn.Module):
    """The class of a cloud of points [N, 3, points], without its transforms."""

    def __init__(self, widths: tuple[int, ...] = (3, 64, 64, 64, 128, 1024)) -> None:
        super().__init__()
        layers = [(nn.Conv1d(*pair, 1), nn.BatchNorm1d(pair[1]), nn.ReLU()) for pair in pairwise(widths)]
        self.points = nn.Sequential(*(each for layer in layers for each in layer))
        self.head = nn.Sequential(nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 40))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.points(x).amax(2))
        return result


class DLRM(nn.Module):
    """A recommender: products of all pairs of 27 vectors, one of which is made of 13 numbers."""

    pairs: Tensor

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        bottom, top = (13, 512, 256, width), (width + 27 * 13, 512, 256)
        self.bottom, self.top = (nn.Sequential(*self._layers(sizes)) for sizes in (bottom, top))
        self.vectors, self.last = nn.Parameter(torch.randn(26, width)), nn.Linear(256, 1)
        self.register_buffer("pairs", torch.tril_indices(27, 27, -1))

    @staticmethod
    def _layers(sizes: tuple[int, ...]) -> list[nn.Module]:
        return [layer for pair in pairwise(sizes) for layer in (nn.Linear(*pair), nn.ReLU())]

    def forward(self, x: Tensor) -> Tensor:
        dense = self.bottom(x)
        vectors = torch.cat([dense[:, None], self.vectors * dense[:, :1, None]], 1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        result: Tensor = self.last(self.top(torch.cat([dense, products], 1)))
        return result


class Tabular(nn.Module):
    """A residual perceptron for rows of 100 numbers, whose widths are no multiples of eight."""

    def __init__(self, width: int = 300, hidden: int = 450, blocks: int = 6) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(100, width), nn.Linear(width, 10)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, hidden), nn.SiLU(), nn.Linear(hidden, width))
            for _ in range(blocks)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        result: Tensor = self.last(F.relu(x))
        return result


class Recurrent(nn.Module):
    """Two bidirectional GRU layers over [N, T, 80] and a product for each frame."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.GRU(80, 256, 2, batch_first=True, bidirectional=True)
        self.out = nn.Linear(512, 40)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.out(self.layers(x)[0])
        return result


def _temporal() -> nn.Module:
    blocks = [TemporalBlock(60 if dilation == 1 else 150, 150, dilation) for dilation in (1, 2, 4, 8, 16, 32)]
    return nn.Sequential(*blocks, nn.Conv1d(150, 60, 1))


_FILM = (3, 16, 112, 112)
WRITTEN = {
    "r2plus1d": Entry("R(2+1)D, 16 frames of 112²", lambda: VideoResNet(Factorized, 1), (_FILM,), 16),
    "resnet3d": Entry("3-D ResNet, 16 frames of 112²", lambda: VideoResNet(Cubic, 3), (_FILM,), 8),
    "unet3d": Entry("3-D U-Net, 32 × 64 × 64", lambda: UNet(3, 1, [32, 64, 128], 3), ((1, 32, 64, 64),), 2),
    "unet2d": Entry("U-Net, 128²", lambda: UNet(2, 3, [64, 128, 256, 512, 1024], 2), ((3, 128, 128),), 16),
    "hifigan": Entry("HiFi-GAN, 128 frames", HiFiGAN, ((80, 128),), 16),
    "esrgan": Entry("ESRGAN of 9 blocks, 64²", ESRGAN, ((3, 64, 64),), 16),
    "nafnet": Entry("NAFNet, 128²", NAFNet, ((3, 128, 128),), 16),
    "decoder": Entry("Latent decoder, 32²", latent_decoder, ((4, 32, 32),), 16),
    "conformer": Entry(
        "Conformer, 6 blocks, 300 frames",
        lambda: nn.Sequential(*(ConformerBlock(256, 4) for _ in range(6))),
        ((300, 256),),
        16,
    ),
    "tcn": Entry("Temporal convolutions, 400 frames", _temporal, ((60, 400),), 16),
    "pointnet": Entry("PointNet, 1,024 points", PointNet, ((3, 1024),), 16),
    "dlrm": Entry("DLRM", DLRM, ((13,),), 1024),
    "tabular": Entry("Perceptron of widths 300 and 450", Tabular, ((100,),), 1024),
    "gru": Entry("Two bidirectional GRU layers, 200 frames", Recurrent, ((200, 80),), 16),
}
