"""The networks of the CPU benchmark, at their published sizes, and inputs for them.

EfficientNet-Lite0 has its trained weights; the others have seeded random ones that keep activations in range.
"""

from __future__ import annotations

import re
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


def _seeded(architecture: str, config: str, last_norms: str, **settings: Any) -> nn.Module:
    """Return an image classifier with seeded weights.

    Args:
        last_norms: Pattern of the names of the normalizations that end a residual branch. As after training, a branch
            contributes less than its shortcut; else 16 bits cost a tenth of the result.
    """
    from npu_sim.vision.resnet import seed_weights

    model = _transformers(architecture, config, "logits", num_labels=1000, **settings)
    seed_weights(model, seed=0)
    norms: Any = [module for name, module in model.named_modules() if re.fullmatch(last_norms, name)]
    for norm in norms:
        norm.weight.data.mul_(0.5)
    return model


def _mobilenet_v2() -> nn.Module:
    residual = r".*layer\.(1|3|4|6|7|8|10|11|13|14)\.reduce_1x1\.normalization"
    return _seeded("MobileNetV2ForImageClassification", "MobileNetV2Config", residual)


def _efficientnet_b0() -> nn.Module:
    """Return an EfficientNet-B0 that ends in an average of all pixels: OpenVINO refuses its wide window."""
    settings = {"image_size": 224, "width_coefficient": 1.0, "depth_coefficient": 1.0, "hidden_dim": 1280}
    residual = r".*blocks\.(2|4|6|7|9|10|12|13|14)\.projection\.project_bn"
    model = _seeded("EfficientNetForImageClassification", "EfficientNetConfig", residual, **settings)
    network: Any = model
    network.model.efficientnet.pooler = nn.AdaptiveAvgPool2d(1)
    return model


def _regnety() -> nn.Module:
    """Return a RegNetY-1.6GF: https://arxiv.org/abs/2003.13678, table 9."""
    settings = {"embedding_size": 32, "hidden_sizes": [48, 120, 336, 888], "depths": [2, 6, 17, 2], "groups_width": 24}
    residual = r".*layers\.\d+\.layer\.3\.normalization"
    return _seeded("RegNetForImageClassification", "RegNetConfig", residual, layer_type="y", **settings)


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
    "efficientnet-b0": Network("EfficientNet-B0", _efficientnet_b0, _images),
    "regnety": Network("RegNetY-1.6GF", _regnety, _images),
    "convnext": Network("ConvNeXt-T", _convnext, _images),
}


def network_of(name: str) -> Network:
    """Return the network of this name, or one with random weights for a model of timm or transformers.MODEL_TYPE.

    Raises:
        ValueError: the model type accepts no input that the rules give.
        RuntimeError: timm has no such model.
    """
    if name in NETWORKS:
        return NETWORKS[name]
    from benchmarks.draws import entry_of
    from benchmarks.zoo import seeded

    entry = entry_of(name)
    return Network(entry.title, lambda: seeded(entry), lambda batch: entry.inputs(batch, seed=0)[0])
