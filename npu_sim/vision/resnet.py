"""ResNet-18/34/50 (He et al., https://arxiv.org/abs/1512.03385) with torchvision's parameter names and graph.

torchvision's checkpoints load, and `extract_ir` sees the same graph, in-place ReLUs and additions included.
`seed_weights` makes random weights where there is no checkpoint.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def _conv_bn(in_channels: int, out_channels: int, stride: int) -> nn.Sequential:
    conv = nn.Conv2d(in_channels, out_channels, 1, stride, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(out_channels))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with a shortcut: [N, C, H, W] -> [N, channels, H/stride, W/stride]."""

    expansion = 1

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        same = stride == 1 and in_channels == channels
        self.downsample = None if same else _conv_bn(in_channels, channels, stride)

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += shortcut
        return self.relu(out)  # type: ignore[no-any-return]


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions with a shortcut: [N, C, H, W] -> [N, 4*channels, H/stride, W/stride]."""

    expansion = 4

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.conv3 = nn.Conv2d(channels, 4 * channels, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * channels)
        self.relu = nn.ReLU(inplace=True)
        same = stride == 1 and in_channels == 4 * channels
        self.downsample = None if same else _conv_bn(in_channels, 4 * channels, stride)

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += shortcut
        return self.relu(out)  # type: ignore[no-any-return]


def _stage(
    block: type[BasicBlock | Bottleneck], in_channels: int, channels: int, depth: int, stride: int
) -> nn.Sequential:
    first = block(in_channels, channels, stride)
    return nn.Sequential(first, *(block(channels * block.expansion, channels, 1) for _ in range(depth - 1)))


class ResNet(nn.Module):
    """A residual network that maps normalized images [N, 3, H, W] to logits [N, classes]."""

    def __init__(self, block: type[BasicBlock | Bottleneck], depths: tuple[int, ...], classes: int = 1000) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        expansion = block.expansion
        self.layer1 = _stage(block, 64, 64, depths[0], stride=1)
        self.layer2 = _stage(block, 64 * expansion, 128, depths[1], stride=2)
        self.layer3 = _stage(block, 128 * expansion, 256, depths[2], stride=2)
        self.layer4 = _stage(block, 256 * expansion, 512, depths[3], stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(512 * expansion, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(torch.flatten(self.avgpool(x), 1))  # type: ignore[no-any-return]


def resnet18() -> ResNet:
    """Return a ResNet-18 (11,689,512 parameters) with PyTorch's initial weights."""
    return ResNet(BasicBlock, (2, 2, 2, 2))


def resnet34() -> ResNet:
    """Return a ResNet-34 (21,797,672 parameters) with PyTorch's initial weights."""
    return ResNet(BasicBlock, (3, 4, 6, 3))


def resnet50() -> ResNet:
    """Return a ResNet-50 (25,557,032 parameters) with PyTorch's initial weights."""
    return ResNet(Bottleneck, (3, 4, 6, 3))


def random_images(count: int, seed: int, size: int = 224) -> Tensor:
    """Return random normalized images [count, 3, size, size] that resemble photographs.

    They are smooth blobs with fine noise, and their variance is near 1.
    """
    rng = torch.Generator().manual_seed(seed)
    blobs = F.interpolate(torch.randn(count, 3, 7, 7, generator=rng), (size, size), mode="bicubic", align_corners=False)
    return 1.2 * blobs + 0.4 * torch.randn(count, 3, size, size, generator=rng)


@torch.no_grad()
def seed_weights(model: nn.Module, seed: int) -> None:
    """Give `model` random weights that behave like trained ones; the same seed gives the same weights.

    Convolutions are initialized as in He et al., https://arxiv.org/abs/1502.01852 (fan-out), BatchNorms with varied
    scales and shifts. The running statistics are those of a calibration batch, so that activations neither vanish nor
    explode and folding a BatchNorm into its convolution changes the numbers.
    """
    rng = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            fan_out = module.weight.shape[0] * module.weight[0, 0].numel()
            module.weight.normal_(0.0, (2.0 / fan_out) ** 0.5, generator=rng)
        elif isinstance(module, nn.BatchNorm2d):
            module.weight.uniform_(0.5, 1.5, generator=rng)
            module.bias.normal_(0.0, 0.2, generator=rng)
        elif isinstance(module, nn.Linear):
            module.weight.normal_(0.0, 3.0 / module.in_features**0.5, generator=rng)
            module.bias.normal_(0.0, 0.1, generator=rng)
    for module in model.modules():
        if isinstance(module, BasicBlock | Bottleneck):
            last = module.bn2 if isinstance(module, BasicBlock) else module.bn3
            last.weight.mul_(0.5)  # as after training, the branch contributes less than the shortcut
    _calibrate(model, random_images(4, seed))


def _calibrate(model: nn.Module, images: Tensor) -> None:
    """Set every BatchNorm's running statistics to the mean and variance of its input for `images`."""
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    momenta = [norm.momentum for norm in norms]
    training = model.training
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # means a plain average over all batches
    model.train()
    model(images)
    model.train(training)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
