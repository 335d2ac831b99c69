"""Models that people run, in their real widths, cut in depth and size: for the simulated chips."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from npu_compiler.compiler import normalize
from npu_compiler.fusions.quantization_points import ActivationRange, IntegerWeight, Points, quantized_graph
from npu_compiler.graph.model import IRGraph
from npu_compiler.graph.reader import read_ir
from npu_compiler.graph.weight_recipe import from_key
from npu_compiler.passes.batch_norm import fold_batch_norm
from npu_compiler.passes.dead_code import eliminate_dead_code

IMAGE_NETWORKS = ("resnet18", "resnet50", "mobilenet_v2", "efficientnet_lite0")
WORDS = 256  # of the vocabularies, which are cut too


@dataclass(frozen=True)
class ChipModel:
    """A model and its inputs.

    Attributes:
        build: Makes the module, in eval mode, with random weights under which every part shows in the output.
        sample: Makes a batch of inputs; the argument is its size.
    """

    build: Callable[[], nn.Module]
    sample: Callable[[int, torch.Generator], Tensor]


def images(size: int) -> Callable[[int, torch.Generator], Tensor]:
    """Batches of random images that resemble photographs."""

    def sample(count: int, generator: torch.Generator) -> Tensor:
        blobs = torch.randn(count, 3, 5, 5, generator=generator)
        smooth = F.interpolate(blobs, (size, size), mode="bicubic", align_corners=False)
        return 1.2 * smooth + 0.4 * torch.randn(count, 3, size, size, generator=generator)

    return sample


def words(length: int) -> Callable[[int, torch.Generator], Tensor]:
    """Batches of random tokens."""
    return lambda count, generator: torch.randint(WORDS, (count, length), generator=generator)


def maps(channels: int, size: int) -> Callable[[int, torch.Generator], Tensor]:
    """Batches of random feature maps."""
    return lambda count, generator: torch.randn(count, channels, size, size, generator=generator)


class Field(nn.Module):
    """A transformers model that takes one tensor and returns one field of its result."""

    def __init__(self, inner: nn.Module, field: str, **options: Any) -> None:
        super().__init__()
        self.inner, self.field, self.options = inner, field, options

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = getattr(self.inner(x, **self.options), self.field)
        return result


class UNetBlock(nn.Module):
    """A block of a latent diffusion UNet: a residual block, attention of the pixels, and a half-sized copy."""

    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2, self.norm3 = (nn.GroupNorm(32, channels) for _ in range(3))
        self.conv1, self.conv2 = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))
        self.time = nn.Linear(channels, channels)
        self.qkv, self.out = nn.Linear(channels, 3 * channels), nn.Linear(channels, channels)
        self.down = nn.Conv2d(channels, channels, 3, stride=2, padding=1)
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x)))
        h = h + self.time(F.silu(x.mean((2, 3))))[:, :, None, None]
        x = x + self.conv2(F.silu(self.norm2(h)))
        tokens = self.norm3(x).flatten(2).transpose(1, 2)
        n, length, width = tokens.shape
        q, k, v = self.qkv(tokens).reshape(n, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, length, width)
        x = x + self.out(mixed).transpose(1, 2).reshape(x.shape)
        return self.down(F.interpolate(x, scale_factor=2.0, mode="nearest"))[:, :, ::2, ::2]


@torch.no_grad()
def random_weights(module: nn.Module) -> nn.Module:
    """Give a module weights that keep the magnitude of what goes through, and statistics that are none of 0 and 1."""
    for part in module.modules():
        weight = getattr(part, "weight", None)
        if isinstance(part, nn.modules.batchnorm._BatchNorm):
            part.running_mean.normal_(0, 0.2)  # type: ignore[union-attr]
            part.running_var.uniform_(0.5, 1.5)  # type: ignore[union-attr]
        if isinstance(weight, nn.Parameter) and weight.dim() > 1:
            scattered = isinstance(part, nn.Embedding) or type(part).__name__ == "Conv1D"
            fan_in = weight.shape[0] if type(part).__name__ == "Conv1D" else 1 if scattered else weight[0].numel()
            weight.normal_(0, 1 / math.sqrt(fan_in))
    for parameter in module.parameters():
        if parameter.dim() <= 1:
            parameter.add_(0.1 * torch.randn_like(parameter))
    return module.eval()


def _resnet(depths: tuple[int, ...], bottleneck: bool) -> nn.Module:
    from npu_sim.vision.resnet import BasicBlock, Bottleneck, ResNet

    return ResNet(Bottleneck if bottleneck else BasicBlock, depths)


def _efficientnet() -> nn.Module:
    from npu_sim.vision.efficientnet import efficientnet_lite0

    return efficientnet_lite0()


def _library(cls: str, field: str, options: dict[str, Any], config: dict[str, Any]) -> nn.Module:
    import transformers

    base = cls
    for task in ("ForCausalLM", "LMHead", "ForImageClassification"):
        base = base.replace(task, "")
    made = getattr(transformers, f"{base.removesuffix('Model')}Config")(**config)
    return Field(getattr(transformers, cls)(made), field, **options)


_TEXT = {"vocab_size": WORDS, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_QWEN = {
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "rope_theta": 1e6,
}


def _models(whole: bool) -> dict[str, ChipModel]:
    def layers(cut: int, full: int) -> int:
        return full if whole else cut

    size = 224 if whole else 32
    length = 32 if whole else 6
    return {
        "resnet18": ChipModel(lambda: _resnet((2, 2, 2, 2) if whole else (1, 1, 1, 1), False), images(size)),
        "resnet50": ChipModel(lambda: _resnet((3, 4, 6, 3) if whole else (1, 1, 1, 1), True), images(size)),
        "mobilenet_v2": ChipModel(
            lambda: _library("MobileNetV2ForImageClassification", "logits", {}, {"num_labels": 100}), images(size)
        ),
        "efficientnet_lite0": ChipModel(_efficientnet, images(size)),
        "bert": ChipModel(
            lambda: _library("BertModel", "last_hidden_state", {}, {**_TEXT, "num_hidden_layers": layers(1, 12)}),
            words(length),
        ),
        "vit": ChipModel(
            lambda: _library(
                "ViTForImageClassification",
                "logits",
                {},
                {"num_hidden_layers": layers(1, 12), "image_size": size, "num_labels": 100},
            ),
            images(size),
        ),
        "gpt2": ChipModel(
            lambda: _library("GPT2LMHeadModel", "logits", {"use_cache": False}, {**_TEXT, "n_layer": layers(1, 12)}),
            words(length),
        ),
        "unet_block": ChipModel(lambda: UNetBlock(320, 8), maps(320, 32 if whole else 4)),
        "qwen2": ChipModel(
            lambda: _library(
                "Qwen2ForCausalLM",
                "logits",
                {"use_cache": False},
                {**_TEXT, **_QWEN, "num_hidden_layers": layers(1, 4)},
            ),
            words(length),
        ),
    }


CUT, WHOLE = _models(whole=False), _models(whole=True)


def in_integers(ir: Any, rng: np.random.Generator) -> tuple[IRGraph, dict[str, np.ndarray]]:
    """A network whose layers all read and make integers, with random weights.

    Returns:
        Its graph, and the weights that it has instead of the network's own.
    """
    graph = eliminate_dead_code(fold_batch_norm(normalize(read_ir(ir))))
    layers = {layer.weight for layer in Points(graph).layers}
    graph = replace(graph, weights={**graph.weights, **{name: from_key(name) for name in layers}})
    weights = {}
    for name in sorted(layers):
        shape = graph.tensors[name].shape
        codes = np.clip(np.rint(40 * rng.standard_normal(shape)), -127, 127).astype(np.int8)
        scales = rng.uniform(0.5, 1.5, shape[0]) / (40 * math.sqrt(math.prod(shape[1:])))
        weights[name] = IntegerWeight(codes, scales.astype(np.float32))
    ranges = {name: ActivationRange(0.04, int(rng.integers(100, 150))) for name in Points(graph).tensors}
    return quantized_graph(graph, ranges, weights)
