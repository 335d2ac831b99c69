"""The networks of the CPU benchmark, at their published sizes, and inputs for them.

EfficientNet-Lite0 has its trained weights; the others have seeded random ones that keep activations in range.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

TOKENS = 128


@dataclass(frozen=True)
class Network:
    """A network with one input and one output.

    Attributes:
        name: The network's name.
        build: Creates the module in float32 for inference, with its weights.
        inputs: Batch size → the input.
    """

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[int], Tensor]


class HuggingFace(nn.Module):
    """A transformers model that returns one named output for one positional input."""

    def __init__(self, model: nn.Module, output: str) -> None:
        super().__init__()
        self.model = model
        self.output = output

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = getattr(self.model(x), self.output)
        return output


def _images(batch: int) -> Tensor:
    from npu_sim.vision.resnet import random_images

    return random_images(batch, seed=0)


def _token_ids(batch: int) -> Tensor:
    return torch.randint(0, 30000, (batch, TOKENS), generator=torch.Generator().manual_seed(0))


def _resnet50() -> nn.Module:
    from npu_sim.vision.resnet import resnet50, seed_weights

    model = resnet50().eval()
    seed_weights(model, seed=0)
    return model


def _efficientnet_lite0() -> nn.Module:
    from npu_sim.vision import find_model
    from npu_sim.vision.models import model_weights

    entry = find_model("efficientnet-lite0")
    model = entry.build()
    model.load_state_dict(model_weights(entry))
    return model.eval()


def _transformers(architecture: str, config: str, output: str, **settings: Any) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    model = getattr(transformers, architecture)(getattr(transformers, config)(**settings))
    return HuggingFace(model, output).eval()


def _bert() -> nn.Module:
    return _transformers("BertModel", "BertConfig", "last_hidden_state")


def _vit() -> nn.Module:
    return _transformers("ViTForImageClassification", "ViTConfig", "logits", num_labels=1000)


def _mobilenet_v2() -> nn.Module:
    from npu_sim.vision.resnet import seed_weights

    model = _transformers("MobileNetV2ForImageClassification", "MobileNetV2Config", "logits", num_labels=1000)
    seed_weights(model, seed=0)
    blocks: Any = [module for module in model.modules() if getattr(module, "use_residual", False)]
    for block in blocks:
        # As after training, the branch contributes less than the shortcut; else 16 bits cost a tenth of the result.
        block.reduce_1x1.normalization.weight.data.mul_(0.5)
    return model


def _convnext() -> nn.Module:
    """Return a ConvNeXt-T with layer scales of 1, since their usual start, 1e-6, would hide every block's errors."""
    settings = {"num_labels": 1000, "layer_scale_init_value": 1.0}
    return _transformers("ConvNextForImageClassification", "ConvNextConfig", "logits", **settings)


NETWORKS = {
    "resnet50": Network("ResNet-50", _resnet50, _images),
    "bert": Network(f"BERT-base, {TOKENS} tokens", _bert, _token_ids),
    "vit": Network("ViT-B/16", _vit, _images),
    "mobilenet-v2": Network("MobileNetV2", _mobilenet_v2, _images),
    "efficientnet-lite0": Network("EfficientNet-Lite0", _efficientnet_lite0, _images),
    "convnext": Network("ConvNeXt-T", _convnext, _images),
}
