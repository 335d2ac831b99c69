"""Small models of many families, written the ways users write them, for `test_zoo.py`.

`ZOO[name]` builds a module in eval mode, with the same random weights every time, and says what its inputs look like.
Our own modules come first; the Hugging Face ones are built from configs, without any download.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WORDS = 97


@dataclass(frozen=True)
class Input:
    """A random input: normal floats, or integers below `below`."""

    shape: tuple[int, ...]
    below: int | None = None

    def sample(self, generator: torch.Generator) -> Tensor:
        if self.below is None:
            return torch.randn(self.shape, generator=generator)
        return torch.randint(3, self.below, self.shape, generator=generator)


@dataclass(frozen=True)
class ZooModel:
    make: Callable[[], nn.Module]
    inputs: tuple[Input, ...]

    def build(self) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(20)
            model = self.make().eval()
            _unsettle(model)
        return model


ZOO: dict[str, ZooModel] = {}


def _unsettle(model: nn.Module) -> None:
    """Move every vector and statistic off the 0 or 1 that it starts with, so that leaving it out shows."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() <= 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if name.endswith("running_mean"):
                buffer.normal_(0, 0.2)
            elif name.endswith("running_var"):
                buffer.uniform_(0.5, 1.5)


def floats(*shape: int) -> Input:
    return Input(shape)


def words(*shape: int, below: int = WORDS) -> Input:
    return Input(shape, below)


def model(*inputs: Input) -> Callable[[type[nn.Module]], type[nn.Module]]:
    """Class decorator: put the module into the zoo under its own name."""

    def add(cls: type[nn.Module]) -> type[nn.Module]:
        ZOO[cls.__name__] = ZooModel(cls, inputs)
        return cls

    return add


def conv_norm(
    inputs: int,
    outputs: int,
    kernel: int = 3,
    stride: int = 1,
    groups: int = 1,
    dilation: int = 1,
    activation: nn.Module | None = None,
) -> nn.Sequential:
    padding = (kernel - 1) // 2 * dilation
    conv = nn.Conv2d(inputs, outputs, kernel, stride, padding, dilation, groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs), activation if activation is not None else nn.ReLU(inplace=True))


class BasicBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = conv_norm(inputs, outputs, stride=stride)
        self.second = conv_norm(outputs, outputs, activation=nn.Identity())
        self.shortcut = conv_norm(inputs, outputs, 1, stride, activation=nn.Identity()) if stride > 1 else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(self.first(x))
        y += x if self.shortcut is None else self.shortcut(x)
        return F.relu_(y)


@model(floats(2, 3, 47, 33))
class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(conv_norm(3, 13, 7, 2), nn.MaxPool2d(3, 2, 1))
        self.blocks = nn.Sequential(BasicBlock(13, 13, 1), BasicBlock(13, 21, 2), BasicBlock(21, 40, 2))
        self.fc = nn.Linear(40, 50)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.flatten(F.adaptive_avg_pool2d(self.blocks(self.stem(x)), (1, 1)), 1))


class InvertedResidual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int, activation: nn.Module, squeeze: bool) -> None:
        super().__init__()
        hidden = 4 * inputs
        self.expand = conv_norm(inputs, hidden, 1, activation=activation)
        self.depthwise = conv_norm(hidden, hidden, 5, stride, hidden, activation=activation)
        self.reduce, self.restore = nn.Conv2d(hidden, 8, 1), nn.Conv2d(8, hidden, 1)
        self.project = conv_norm(hidden, outputs, 1, activation=nn.Identity())
        self.squeeze, self.has_shortcut = squeeze, stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        y = self.depthwise(self.expand(x))
        if self.squeeze:
            y = y * torch.sigmoid(self.restore(F.silu(self.reduce(y.mean((2, 3), keepdim=True)))))
        y = self.project(y)
        return x + y if self.has_shortcut else y


class Inverted(nn.Module):
    def __init__(self, activation: type[nn.Module], squeeze: bool) -> None:
        super().__init__()
        sizes = [(16, 16, 1), (16, 24, 2), (24, 24, 1), (24, 40, 2)]
        self.stem = conv_norm(3, 16, 3, 2, activation=activation())
        self.blocks = nn.Sequential(*(InvertedResidual(i, o, s, activation(), squeeze) for i, o, s in sizes))
        self.head = nn.Sequential(nn.Dropout(0.2), nn.Linear(40, 50))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean([2, 3]))


ZOO["MobileNet"] = ZooModel(lambda: Inverted(nn.ReLU6, squeeze=False), (floats(2, 3, 48, 48),))
ZOO["MobileNetV3"] = ZooModel(lambda: Inverted(nn.Hardswish, squeeze=True), (floats(2, 3, 48, 48),))
ZOO["EfficientNet"] = ZooModel(lambda: Inverted(nn.SiLU, squeeze=True), (floats(1, 3, 48, 48),))


@model(floats(2, 3, 40, 40))
class DenseNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 24, 3, 2, 1)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.BatchNorm2d(24 + 12 * i), nn.ReLU(True), nn.Conv2d(24 + 12 * i, 12, 3, padding=1))
            for i in range(3)
        )
        self.transition = nn.Sequential(nn.BatchNorm2d(60), nn.ReLU(True), nn.Conv2d(60, 30, 1), nn.AvgPool2d(2, 2))
        self.fc = nn.Linear(30, 20)

    def forward(self, x: Tensor) -> Tensor:
        features = [self.stem(x)]
        for layer in self.layers:
            features.append(layer(torch.cat(features, 1)))
        return self.fc(self.transition(torch.cat(features, 1)).mean((-2, -1)))


@model(floats(2, 3, 40, 40))
class ShuffleNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = conv_norm(3, 36, 3, 2)
        self.branch = nn.Sequential(
            conv_norm(18, 18, 1), conv_norm(18, 18, 3, 1, 18, activation=nn.Identity()), conv_norm(18, 18, 1)
        )
        self.fc = nn.Linear(36, 20)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for _ in range(2):
            kept, changed = x.chunk(2, dim=1)
            x = torch.cat((kept, self.branch(changed)), dim=1)
            n, c, h, w = x.size()
            x = x.view(n, 2, c // 2, h, w).transpose(1, 2).contiguous().view(n, -1, h, w)
        return self.fc(x.mean([2, 3]))


@model(floats(2, 3, 63, 63))
class SqueezeNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.pool = nn.Conv2d(3, 20, 3, 2), nn.MaxPool2d(3, 2, ceil_mode=True)
        self.squeeze = nn.Conv2d(20, 10, 1)
        self.narrow, self.wide = nn.Conv2d(10, 15, 1), nn.Conv2d(10, 15, (1, 3), padding=(0, 1))
        self.classifier = nn.Conv2d(30, 20, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu_(self.squeeze(self.pool(F.relu_(self.stem(x)))))
        x = self.pool(torch.cat([F.relu(self.narrow(x), inplace=True), F.relu(self.wide(x))], 1))
        return F.adaptive_avg_pool2d(F.relu(self.classifier(x)), 1).flatten(1)


@model(floats(2, 3, 30, 27))
class UNet(nn.Module):
    def __init__(self, width: int = 17) -> None:
        super().__init__()
        self.down = nn.ModuleList([conv_norm(3, width), conv_norm(width, 2 * width)])
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.merge, self.out = conv_norm(2 * width, width), nn.Conv2d(width, 5, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        a = self.down[0](x)
        b = self.down[1](F.max_pool2d(a, 2))
        y = self.up(b)
        rows, columns = a.size(2) - y.size(2), a.size(3) - y.size(3)
        y = F.pad(y, [columns // 2, columns - columns // 2, rows // 2, rows - rows // 2])
        return self.out(self.merge(torch.cat([a, y], dim=1))), F.pad(b, [0, 0, 0, 0])


@model(floats(1, 3, 33, 33))
class DeepLab(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = conv_norm(3, 32, 3, 2)
        self.branches = nn.ModuleList([conv_norm(32, 16, 1), *(conv_norm(32, 16, dilation=d) for d in (2, 4))])
        self.pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), conv_norm(32, 16, 1))
        self.head = nn.Conv2d(64, 7, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.backbone(x)
        pooled = F.interpolate(self.pool(y), size=y.shape[-2:], mode="bilinear", align_corners=False)
        y = self.head(torch.cat([*(branch(y) for branch in self.branches), pooled], dim=1))
        return F.interpolate(y, size=x.shape[-2:], mode="bilinear", align_corners=False)


@model(floats(2, 3, 32, 32))
class YoloHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = conv_norm(3, 24, 3, 4, activation=nn.SiLU()), nn.Conv2d(96, 27, 1)
        self.register_buffer("anchors", torch.tensor([[10.0, 13], [16, 30], [33, 23]]))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        pools = [x]
        for _ in range(3):
            pools.append(F.max_pool2d(pools[-1], 5, 1, 2))
        y = self.head(torch.cat(pools, 1))
        n, _, height, width = y.shape
        y = y.view(n, 3, 9, height, width).permute(0, 1, 3, 4, 2).sigmoid()
        rows, columns = torch.meshgrid(
            torch.arange(height, device=x.device), torch.arange(width, device=x.device), indexing="ij"
        )
        centre = (y[..., 0:2] * 2.0 - 0.5 + torch.stack((columns, rows), 2).to(y.dtype)) / width
        size = (y[..., 2:4] * 2) ** 2 * self.anchors.view(1, 3, 1, 1, 2) / 64
        return torch.cat((centre, size, y[..., 4:]), -1).view(n, -1, 9)


@model(floats(2, 5, 13, 11))
class OddConvolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(5, 7, 3, (2, 1), (0, 2), dilation=(1, 2))
        self.grouped, self.norm = nn.Conv2d(7, 21, 3, padding=1, groups=7), nn.BatchNorm2d(21)
        self.up, self.slope, self.groups = nn.ConvTranspose2d(21, 9, 3, 2, 1, groups=3), nn.PReLU(9), nn.GroupNorm(3, 9)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.norm(self.grouped(F.relu6(self.first(x))))
        z = self.groups(self.slope(self.up(y)))
        gated = y + y.mean((2, 3), keepdim=True) * torch.sigmoid(y[:, :1])
        shuffled = gated.view(2, 3, 7, *gated.shape[2:]).transpose(1, 2).reshape(gated.shape)
        return F.pixel_shuffle(z, 3), shuffled, x.flip(-1).roll(2, -2), F.pad(x, (1, -1, 2, 0), value=0.5)


@model(floats(2, 1, 100))
class WaveNet(nn.Module):
    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.inlet = nn.Conv1d(1, width, 1)
        self.filters = nn.ModuleList(nn.Conv1d(width, 2 * width, 2, dilation=2**i) for i in range(4))
        self.mixers = nn.ModuleList(nn.Conv1d(width, width, 1) for _ in range(4))
        self.outlet = nn.Conv1d(width, 32, 1)

    def forward(self, x: Tensor) -> Tensor:
        x, skipped = self.inlet(x), 0
        for i, (gate, mixer) in enumerate(zip(self.filters, self.mixers, strict=True)):
            a, b = torch.split(gate(F.pad(x, (2**i, 0))), x.size(1), dim=1)
            y = mixer(torch.tanh(a) * torch.sigmoid(b))
            skipped = skipped + y
            x = (x + y) * math.sqrt(0.5)
        return self.outlet(F.relu(skipped))


@model(floats(1, 1, 400))
class ConvTasNet(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.encoder = nn.Conv1d(1, width, 16, 8, bias=False)
        self.block = nn.Sequential(
            nn.GroupNorm(1, width, eps=1e-8),
            nn.Conv1d(width, 48, 1),
            nn.PReLU(),
            nn.Conv1d(48, 48, 3, padding=2, dilation=2, groups=48),
            nn.PReLU(),
            nn.Conv1d(48, 2 * width, 1),
        )
        self.decoder = nn.ConvTranspose1d(width, 1, 16, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        encoded = F.relu(self.encoder(x))
        masks = torch.sigmoid(self.block(encoded)).view(x.shape[0], 2, -1, encoded.shape[-1])
        return self.decoder((masks * encoded.unsqueeze(1)).flatten(0, 1)).view(x.shape[0], 2, -1)


@model(floats(2, 1, 16, 32))
class CRNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(conv_norm(1, 16), nn.MaxPool2d((2, 1)), nn.Conv2d(16, 24, (8, 3), padding=(0, 1)))
        self.rnn, self.fc = nn.LSTM(24, 16, bidirectional=True), nn.Linear(32, 20)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.rnn(self.features(x).squeeze(2).permute(2, 0, 1))
        return F.log_softmax(self.fc(y), dim=2)


@model(floats(2, 8, 12))
class UnrolledLSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input, self.hidden = nn.Linear(12, 64), nn.Linear(16, 64, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = x.new_zeros(x.size(0), 16)
        c = torch.zeros_like(h)
        out = torch.empty(x.size(0), x.size(1), 16, device=x.device, dtype=x.dtype)
        for t in range(x.size(1)):
            i, f, g, o = (self.input(x[:, t]) + self.hidden(h)).chunk(4, 1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
            out[:, t] = h
        return out, c


@model(floats(64, 3), floats(64, 3))
class NeRF(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(39, 64), nn.Linear(64 + 39, 64)
        self.density, self.colour = nn.Linear(64, 1), nn.Linear(64 + 39, 3)
        self.register_buffer("frequencies", 2.0 ** torch.arange(6))

    def encode(self, x: Tensor) -> Tensor:
        angles = x[..., None, :] * self.frequencies[:, None]
        return torch.cat([x, torch.cat([angles.sin(), angles.cos()], -1).flatten(-2)], -1)

    def forward(self, x: Tensor, direction: Tensor) -> tuple[Tensor, Tensor]:
        point, view = self.encode(0.1 * torch.tanh(x)), self.encode(F.normalize(direction, dim=-1))
        h = F.relu(self.second(torch.cat([point, F.relu(self.first(point))], -1)))
        return torch.sigmoid(self.colour(torch.cat([h, view], -1))), F.softplus(self.density(h))


@model(floats(8, 13), words(8, 6))
class DLRM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(WORDS, 16) for _ in range(6))
        self.bottom = nn.Sequential(nn.Linear(13, 32), nn.ReLU(), nn.BatchNorm1d(32), nn.Linear(32, 16))
        self.top = nn.Linear(16 + 49, 8)

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        x = self.bottom(dense)
        rows = torch.stack([x, *(table(sparse[:, i]) for i, table in enumerate(self.tables))], 1)
        return self.top(torch.cat([x, torch.tril(torch.bmm(rows, rows.mT), -1).flatten(1)], 1))


@model(floats(2, 3, 40))
class PointNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.local = nn.Sequential(nn.Conv1d(3, 32, 1), nn.BatchNorm1d(32), nn.ReLU())
        self.transform = nn.Linear(32, 9)
        self.segment = nn.Conv1d(64, 6, 1)
        self.register_buffer("identity", torch.eye(3).flatten().view(1, 9))

    def forward(self, x: Tensor) -> Tensor:
        pooled = torch.max(self.local(x), 2, keepdim=True)[0].view(-1, 32)
        matrix = (self.transform(pooled) + self.identity.repeat(x.size(0), 1)).view(-1, 3, 3)
        local = self.local(torch.bmm(x.transpose(2, 1), matrix).transpose(2, 1))
        joined = torch.cat([local, local.max(dim=-1).values.unsqueeze(-1).repeat(1, 1, x.size(2))], 1)
        return F.log_softmax(self.segment(joined).transpose(2, 1).contiguous(), dim=-1)


@model(floats(20, 8), words(20, 20, below=4))
class GraphAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.3 * torch.randn(8, 16))
        self.score, self.out = nn.Linear(32, 1), nn.Linear(16, 5)

    def forward(self, x: Tensor, scores: Tensor) -> Tensor:
        # Of integers: rounded to 16 bits, a sum of floats near the threshold would link other nodes.
        linked = (scores + scores.t() > 3).to(x.dtype) + torch.eye(20, device=x.device, dtype=x.dtype)
        degree = linked.sum(1).pow(-0.5)
        h = F.elu((degree[:, None] * linked * degree[None, :]) @ (x @ self.weight))
        pairs = torch.cat([h.unsqueeze(1).expand(-1, 20, -1), h.unsqueeze(0).expand(20, -1, -1)], -1)
        attention = F.leaky_relu(self.score(pairs).squeeze(-1), 0.2).masked_fill(linked == 0, float("-inf")).softmax(1)
        return self.out(attention @ h)


def heads(x: Tensor, count: int) -> Tensor:
    return x.view(*x.shape[:2], count, -1).transpose(1, 2)


def timestep_embedding(t: Tensor, width: int) -> Tensor:
    half = width // 2
    frequencies = torch.exp(-math.log(10000) * torch.arange(half, dtype=torch.float32, device=t.device) / half)
    angles = t[:, None].float() * frequencies[None]
    return torch.cat([torch.cos(angles), torch.sin(angles)], dim=-1)


@model(floats(2, 4, 8, 8), words(2, below=1000))
class DiffusionTransformer(nn.Module):
    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.patch, self.norm = nn.Conv2d(4, width, 2, 2), nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.time = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 6 * width))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width))
        self.last = nn.Linear(width, 16)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        b, n, c = x.shape
        shift1, scale1, gate1, shift2, scale2, gate2 = (
            self.time(timestep_embedding(t, c).to(x.dtype)).unsqueeze(1).chunk(6, dim=-1)
        )
        y = self.norm(x) * (1 + scale1) + shift1
        q, k, v = self.qkv(y).reshape(b, n, 3, 4, c // 4).permute(2, 0, 3, 1, 4).unbind(0)
        x = x + gate1 * self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, c))
        x = x + gate2 * self.mlp(self.norm(x) * (1 + scale2) + shift2)
        return torch.einsum("nhwpqc->nchpwq", self.last(x).reshape(b, 4, 4, 2, 2, 4)).reshape(b, 4, 8, 8)


@model(floats(2, 3, 32, 32))
class MLPMixer(nn.Module):
    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.patch, self.norm, self.head = nn.Conv2d(3, width, 8, 8), nn.LayerNorm(width), nn.Linear(width, 30)
        self.tokens = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.channels = nn.Sequential(nn.Linear(width, 96), nn.GELU(), nn.Linear(96, width))

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).mT
        x = x + self.tokens(self.norm(x).transpose(1, 2)).transpose(1, 2)
        return self.head((x + self.channels(self.norm(x))).mean(dim=1))


@model(floats(2, 20, 32))
class Conformer(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.bias = nn.Parameter(torch.randn(4, 8))
        self.positions = nn.Parameter(torch.randn(4, 39, 8) * 0.3)
        self.wide, self.narrow = nn.Conv1d(width, 2 * width, 1), nn.Conv1d(width, width, 1)
        self.depthwise, self.batch_norm = nn.Conv1d(width, width, 7, padding=3, groups=width), nn.BatchNorm1d(width)

    def relative_shift(self, x: Tensor) -> Tensor:
        b, h, t, length = x.size()
        padded = torch.cat([x.new_zeros((b, h, t, 1)), x], -1).view(b, h, length + 1, t)
        return padded[:, :, 1:].view_as(x)[..., : length // 2 + 1]

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (heads(part, 4) for part in self.qkv(self.norm(x)).chunk(3, -1))
        content = (q + self.bias[:, None]) @ k.transpose(-2, -1)
        scores = (content + self.relative_shift(q @ self.positions.transpose(-2, -1))) / math.sqrt(8)
        x = x + (scores.softmax(-1) @ v).transpose(1, 2).reshape(x.shape)
        y = self.depthwise(F.glu(self.wide(self.norm(x).transpose(1, 2)), dim=1))
        return x + self.narrow(F.silu(self.batch_norm(y))).transpose(1, 2)


@model(floats(2, 10, 16))
class SelectiveScan(nn.Module):
    def __init__(self, width: int = 16, state: int = 8) -> None:
        super().__init__()
        self.inlet, self.outlet = nn.Linear(width, 2 * width, bias=False), nn.Linear(width, width, bias=False)
        self.conv = nn.Conv1d(width, width, 4, groups=width, padding=3)
        self.project, self.step, self.state = nn.Linear(width, 2 * state + 4), nn.Linear(4, width), state
        self.log_decay = nn.Parameter(torch.log(torch.arange(1, state + 1).float()).repeat(width, 1))

    def forward(self, x: Tensor) -> Tensor:
        u, gate = self.inlet(x).chunk(2, -1)
        u = F.silu(self.conv(u.transpose(1, 2))[..., : x.shape[1]]).transpose(1, 2)
        step, b, c = torch.split(self.project(u), [4, self.state, self.state], -1)
        step = F.softplus(self.step(step))
        decay = torch.exp(torch.einsum("bld,dn->bldn", step, -torch.exp(self.log_decay)))
        drive = step[..., None] * b[:, :, None] * u[..., None]
        h, ys = torch.zeros_like(decay[:, 0]), []
        for t in range(x.shape[1]):
            h = decay[:, t] * h + drive[:, t]
            ys.append(torch.einsum("bdn,bn->bd", h, c[:, t]))
        return self.outlet((torch.stack(ys, 1) + u) * F.silu(gate))


@model(floats(2, 8, 8, 24))
class ShiftedWindows(nn.Module):
    def __init__(self, width: int = 24, window: int = 4) -> None:
        super().__init__()
        self.window, self.norm = window, nn.LayerNorm(width)
        self.qkv, self.out, self.merge = nn.Linear(width, 3 * width), nn.Linear(width, width), nn.Linear(4 * width, 48)
        self.table = nn.Parameter(torch.randn((2 * window - 1) ** 2, 3) * 0.3)
        cells = torch.stack(torch.meshgrid(torch.arange(window), torch.arange(window), indexing="ij")).flatten(1)
        offsets = (cells[:, :, None] - cells[:, None, :]).permute(1, 2, 0) + window - 1
        self.register_buffer("offsets", offsets[..., 0] * (2 * window - 1) + offsets[..., 1])

    def forward(self, x: Tensor) -> Tensor:
        b, h, w, c = x.shape
        size = self.window
        y = torch.roll(self.norm(x), shifts=(-2, -2), dims=(1, 2))
        y = y.view(b, h // size, size, w // size, size, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, size * size, c)
        q, k, v = self.qkv(y).reshape(-1, size * size, 3, 3, c // 3).permute(2, 0, 3, 1, 4)
        bias = self.table[self.offsets.view(-1)].view(size * size, size * size, -1).permute(2, 0, 1)
        y = (q * (c // 3) ** -0.5 @ k.transpose(-2, -1) + bias.unsqueeze(0)).softmax(-1) @ v
        y = self.out(y.transpose(1, 2).reshape(-1, size * size, c))
        y = y.view(b, h // size, w // size, size, size, c).permute(0, 1, 3, 2, 4, 5).reshape(b, h, w, c)
        x = x + torch.roll(y, (2, 2), (1, 2))
        return self.merge(torch.cat([x[:, 0::2, 0::2], x[:, 1::2, 0::2], x[:, 0::2, 1::2], x[:, 1::2, 1::2]], -1))


@model(words(2, 14))
class RelativeBuckets(nn.Module):
    """T5's logarithmic position buckets, ALiBi's slopes, RMSNorm by hand, and an output tied to the embedding."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embedding, self.bias = nn.Embedding(WORDS, width), nn.Embedding(16, 4)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.scale = nn.Parameter(torch.ones(width))

    def bucket(self, distance: Tensor) -> Tensor:
        side, distance = (distance > 0).to(torch.long) * 8, torch.abs(distance)
        far = 4 + (torch.log(distance.float() / 4) / math.log(8) * 4).to(torch.long)
        return side + torch.where(distance < 4, distance, torch.min(far, torch.full_like(far, 7)))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        y = x * torch.rsqrt(x.to(torch.float32).pow(2).mean(-1, keepdim=True) + 1e-6).to(x.dtype) * self.scale
        q, k, v = (heads(layer(y), 4) for layer in (self.q, self.k, self.v))
        place = torch.arange(ids.size(1), device=ids.device)
        distance = place[None, :] - place[:, None]
        slopes = torch.pow(2.0, -torch.arange(1, 5, device=ids.device) * 2.0)
        bias = self.bias(self.bucket(distance)).permute(2, 0, 1) - distance.abs() * slopes[:, None, None].to(x.dtype)
        future = torch.triu(torch.ones(ids.size(1), ids.size(1), dtype=torch.bool, device=ids.device), diagonal=1)
        scores = (torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(8) + bias).masked_fill(future, float("-inf"))
        x = x + self.o((F.softmax(scores, dim=-1) @ v).transpose(1, 2).flatten(2))
        return F.linear(x, self.embedding.weight)


@model(words(2, 1), floats(2, 4, 7, 8), floats(2, 4, 7, 8))
class CachedDecoder(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, ids: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = self.embedding(ids)
        q, k, v = (heads(layer(x), 4) for layer in (self.q, self.k, self.v))
        keys, values = torch.cat([keys, k], dim=-2), torch.cat([values, v], dim=-2)
        y = F.scaled_dot_product_attention(q, keys, values).transpose(1, 2).reshape(x.shape)
        return self.o(x + y)[:, -1], keys, values


@model(floats(16, 6))
class KAN(nn.Module):
    """B-spline activations, by the Cox-de Boor recursion."""

    def __init__(self, degree: int = 3) -> None:
        super().__init__()
        self.degree = degree
        self.register_buffer("knots", (torch.arange(-degree, 6 + degree) * 0.4 - 1).expand(6, -1).contiguous())
        self.base, self.spline = nn.Parameter(torch.randn(5, 6)), nn.Parameter(torch.randn(5, 6, 5 + degree))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(x)
        y, t = x.unsqueeze(-1), self.knots
        basis = ((y >= t[:, :-1]) & (y < t[:, 1:])).to(x.dtype)
        for k in range(1, self.degree + 1):
            left = (y - t[:, : -(k + 1)]) / (t[:, k:-1] - t[:, : -(k + 1)])
            right = (t[:, k + 1 :] - y) / (t[:, k + 1 :] - t[:, 1:-k])
            basis = left * basis[..., :-1] + right * basis[..., 1:]
        return F.linear(F.silu(x), self.base) + F.linear(basis.view(x.size(0), -1), self.spline.view(5, -1))


@model(floats(3, 8, 10))
class WritesThroughViews(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = x.clone()
        y[:, ::2] *= 2
        y[..., -3:] = 0.5
        y[:, 1:-1:3].sub_(1).clamp_(-1, 1)
        z = y.transpose(1, 2)
        z[:, 0] += x[:, :, 1]
        a, b = y.split([3, 5], dim=-2)
        a.mul_(b[:, :3])
        y.view(3, -1)[:, 5] = 7.0
        y.unflatten(-1, (2, 5))[:, :, 1, -1] = -2.0
        return y, z, x[..., None, ::3].expand(-1, -1, 4, -1)


def _hugging_face(
    name: str, cls: str, field: str, inputs: dict[str, Input], fixed: dict[str, Any] | None = None, **config: Any
) -> None:
    """Add a Hugging Face model whose output is one field of what its forward returns."""

    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            import transformers

            base = cls.removesuffix("Model")
            for task in ("ForCausalLM", "LMHead", "ForImageClassification", "ForConditionalGeneration"):
                base = base.removesuffix(task)
            self.inner = getattr(transformers, cls)(getattr(transformers, f"{base}Config")(**config))

        def forward(self, *tensors: Tensor) -> Tensor:
            named = dict(zip(inputs, tensors, strict=True))
            return getattr(self.inner(**named, **(fixed or {})), field)

    ZOO[name] = ZooModel(Wrapper, tuple(inputs.values()))


_TEXT = {
    "vocab_size": WORDS,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GPT = {
    "vocab_size": WORDS,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_VISION = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "image_size": 32,
    "patch_size": 8,
}
_GROUPED = {**_TEXT, "num_key_value_heads": 2}
_IDS, _NO_CACHE = {"input_ids": words(2, 12)}, {"use_cache": False}

_hugging_face("bert", "BertModel", "last_hidden_state", {**_IDS, "attention_mask": words(2, 12, below=4)}, **_TEXT)
_hugging_face("gpt2", "GPT2LMHeadModel", "logits", _IDS, _NO_CACHE, **_GPT)
_hugging_face("llama", "LlamaForCausalLM", "logits", _IDS, _NO_CACHE, **_GROUPED)
_hugging_face("qwen2", "Qwen2ForCausalLM", "logits", _IDS, _NO_CACHE, **_GROUPED)
_hugging_face("qwen3", "Qwen3ForCausalLM", "logits", _IDS, _NO_CACHE, head_dim=16, **_GROUPED)
_hugging_face("gemma2", "Gemma2ForCausalLM", "logits", _IDS, _NO_CACHE, head_dim=16, sliding_window=4, **_GROUPED)
_hugging_face("phi3", "Phi3ForCausalLM", "logits", _IDS, _NO_CACHE, **_GROUPED)
_hugging_face(
    "bloom", "BloomForCausalLM", "logits", _IDS, _NO_CACHE, vocab_size=WORDS, hidden_size=64, n_layer=2, n_head=4
)
_hugging_face(
    "t5",
    "T5ForConditionalGeneration",
    "logits",
    {"input_ids": words(2, 10), "decoder_input_ids": words(2, 6)},
    _NO_CACHE,
    vocab_size=WORDS,
    d_model=64,
    d_kv=16,
    d_ff=128,
    num_layers=2,
    num_heads=4,
    decoder_start_token_id=0,
)
_hugging_face(
    "vit", "ViTForImageClassification", "logits", {"pixel_values": floats(2, 3, 32, 32)}, num_labels=50, **_VISION
)
_hugging_face("dinov2", "Dinov2Model", "last_hidden_state", {"pixel_values": floats(1, 3, 32, 32)}, **_VISION)
_hugging_face(
    "convnext",
    "ConvNextForImageClassification",
    "logits",
    {"pixel_values": floats(1, 3, 64, 64)},
    hidden_sizes=[16, 24, 32, 40],
    depths=[1, 1, 2, 1],
    num_labels=50,
)
_hugging_face(
    "mobilenet_v2",
    "MobileNetV2ForImageClassification",
    "logits",
    {"pixel_values": floats(1, 3, 64, 64)},
    image_size=64,
    depth_multiplier=0.25,
    num_labels=50,
)
_hugging_face(
    "whisper",
    "WhisperForConditionalGeneration",
    "logits",
    {"input_features": floats(1, 16, 40), "decoder_input_ids": words(1, 6)},
    _NO_CACHE,
    vocab_size=WORDS,
    num_mel_bins=16,
    max_source_positions=20,
    max_target_positions=32,
    d_model=64,
    encoder_layers=1,
    decoder_layers=1,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    encoder_ffn_dim=128,
    decoder_ffn_dim=128,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    decoder_start_token_id=2,
)
