"""The vision models: their architectures, preprocessing, IR and weights."""

import json
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image

from npu_compiler.errors import InputError, WeightError
from npu_runtime.pytorch import require_torch
from npu_sim.vision.images import Preprocessing

if TYPE_CHECKING:
    from torch import Tensor, nn

QUANTIZED_IR, QUANTIZED_WEIGHTS = "model.json", "model.safetensors"  # in the folder of a quantized model


@dataclass(frozen=True)
class VisionModel:
    """An image classifier that can be chosen by name.

    Attributes:
        name: The model's name.
        build: Creates the module, with untrained weights.
        preprocessing: The preprocessing of its images.
        checkpoint: Returns the path of the trained weights; None for a model that comes without any.
    """

    name: str
    build: Callable[[], "nn.Module"]
    preprocessing: Preprocessing
    checkpoint: Callable[[], Path] | None = None


def _resnet18() -> "nn.Module":
    from npu_sim.vision.resnet import resnet18

    return resnet18()


def _resnet50() -> "nn.Module":
    from npu_sim.vision.resnet import resnet50

    return resnet50()


def _efficientnet_lite0() -> "nn.Module":
    from npu_sim.vision.efficientnet import efficientnet_lite0

    return efficientnet_lite0()


def _efficientnet_lite0_checkpoint() -> Path:
    from npu_sim.vision.efficientnet import efficientnet_lite0_checkpoint

    return efficientnet_lite0_checkpoint()


TORCHVISION = Preprocessing((0.485, 0.456, 0.406), (0.229, 0.224, 0.225), Image.Resampling.BILINEAR)

# The checkpoint's package documents ImageNet's mean and std, but its weights come from TensorFlow and were trained on
# (x - 127) / 128. Only with the latter do activations of photographs match the running statistics of the BatchNorms.
EFFICIENTNET_LITE = Preprocessing((127 / 255,) * 3, (128 / 255,) * 3, Image.Resampling.BICUBIC)

MODELS = {
    model.name: model
    for model in (
        VisionModel("efficientnet-lite0", _efficientnet_lite0, EFFICIENTNET_LITE, _efficientnet_lite0_checkpoint),
        VisionModel("resnet18", _resnet18, TORCHVISION),
        VisionModel("resnet50", _resnet50, TORCHVISION),
    )
}


def find_model(name: str) -> VisionModel:
    """Return the model of that name.

    Raises:
        InputError: there is no model of that name; the message lists the names.
    """
    if name not in MODELS:
        raise InputError(f"no vision model named {name!r}; choose one of {', '.join(MODELS)}")
    return MODELS[name]


def extract_model_ir(model: VisionModel) -> dict[str, Any]:
    """Return the model's IR for an input [1, 3, size, size], traced on the meta device without memory for weights."""
    require_torch("tracing a model")
    import torch

    from npu_sim.extract import extract_ir

    size = model.preprocessing.size
    with torch.device("meta"):
        module, image = model.build().eval(), torch.empty(1, 3, size, size)
    return extract_ir(module, (image,), name=model.name)


def model_weights(model: VisionModel, path: str | os.PathLike[str] | None = None) -> dict[str, "Tensor"]:
    """Return the model's state dict in float32.

    Args:
        path: A file or folder that `read_weights` reads. Default: the model's own checkpoint or, if it has none, random
            weights from a fixed seed, with a UserWarning.

    Raises:
        WeightError: the file cannot be read or does not fit the model.
    """
    require_torch("loading the weights of a vision model")
    import torch

    from npu_runtime.torch_arrays import numpy_to_tensor
    from npu_sim.arrays import read_weights

    if path is None and model.checkpoint is None:
        from npu_sim.vision.resnet import seed_weights

        warnings.warn(
            f"{model.name} has random weights, so its labels mean nothing; "
            "give a file of trained ones (weights=..., --weights)",
            stacklevel=2,
        )
        module = model.build().eval()
        seed_weights(module, seed=0)
        return module.state_dict()
    checkpoint = Path(path) if path is not None else model.checkpoint()  # type: ignore[misc]
    try:
        state = {
            key: value if isinstance(value, torch.Tensor) else numpy_to_tensor(value)
            for key, value in read_weights(checkpoint).items()
        }
    except TypeError as error:
        raise WeightError(f"{checkpoint} has an array that PyTorch cannot hold: {error}") from error
    with torch.device("meta"):
        module = model.build()
    try:
        module.load_state_dict(state, strict=True, assign=True)
    except RuntimeError as error:
        raise WeightError(f"{checkpoint} does not fit {model.name}: {error}") from None
    return {key: value.float() if value.is_floating_point() else value for key, value in state.items()}


def quantized_files(folder: Path) -> tuple[dict[str, Any], Path] | None:
    """Return the IR and the path of the weights that `quantize_model` wrote to a folder.

    None if the path is not such a folder.

    Raises:
        InputError: the IR cannot be read.
    """
    ir, weights = folder / QUANTIZED_IR, folder / QUANTIZED_WEIGHTS
    if not (ir.is_file() and weights.is_file()):
        return None
    try:
        stored: dict[str, Any] = json.loads(ir.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read '{ir}': {error}") from error
    return stored, weights
