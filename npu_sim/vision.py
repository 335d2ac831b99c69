"""Image classification: a photograph in, ImageNet labels out, with the network run by the NPU runtime."""

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from npu_compiler.errors import InputError, NPUError, WeightError
from npu_sim.cache import compile_cached

if TYPE_CHECKING:
    from torch import Tensor, nn

    from npu_runtime import Device

Triple = tuple[float, float, float]


@dataclass(frozen=True)
class Preprocessing:
    """What a network was trained to see: a centred square, as if the image had been resized until its shorter
    side is `resize` pixels and cut to `size` x `size`; then (x - mean) / std per channel, x in [0, 1]."""

    mean: Triple
    std: Triple
    resample: Image.Resampling
    size: int = 224
    resize: int = 256


@dataclass(frozen=True)
class VisionModel:
    """One classifier: how to build it, what it expects, and where its trained weights lie, if any come with it."""

    name: str
    build: Callable[[], "nn.Module"]
    preprocessing: Preprocessing
    checkpoint: Callable[[], Path] | None = None


@dataclass(frozen=True)
class Prediction:
    """One guess: an ImageNet class name, its probability in [0, 1], and its index in [0, 1000)."""

    label: str
    probability: float
    index: int


def load_image(path: str | os.PathLike[str]) -> Image.Image:
    """The image in a file as 8-bit RGB, upright (its EXIF rotation applied); the first frame of an animation.

    Raises InputError for a file that is missing, empty, not an image, damaged, or beyond Pillow's size limit.
    """
    path = Path(path)
    if not path.exists():
        raise InputError(f"no such image: {path}")
    if not path.is_file():
        raise InputError(f"{path} is not a file; an image file is needed")
    if path.stat().st_size == 0:
        raise InputError(f"{path} is empty (0 bytes)")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with Image.open(path) as image:
                return to_rgb(ImageOps.exif_transpose(image))
        except NPUError as error:
            raise InputError(f"{path}: {error}") from None
        except UnidentifiedImageError:
            raise InputError(f"{path} is not an image in a format that Pillow reads (JPEG, PNG, WebP, ...)") from None
        except Image.DecompressionBombError:
            limit = 2 * (Image.MAX_IMAGE_PIXELS or 0) // 10**6
            raise InputError(f"{path} has more than {limit} million pixels; scale it down first") from None
        except PermissionError:
            raise InputError(f"{path} may not be read: permission denied") from None
        except Exception as error:  # Pillow's decoders raise all sorts of errors on damaged data
            raise InputError(f"{path} is a damaged or truncated image: {error}") from error


def to_rgb(image: Image.Image) -> Image.Image:
    """Any Pillow image as mode RGB: transparency over white, 16-bit greys scaled down rather than clipped.

    Raises InputError for floating-point pixels, whose range is unknown.
    """
    if image.mode == "F":
        raise InputError("floating-point pixels have no known range; convert the image to 8 or 16 bits first")
    if image.mode == "I" or image.mode.startswith("I;16"):
        grey = np.clip(np.asarray(image.convert("I")), 0, 0xFFFF) >> 8
        image = Image.fromarray(grey.astype(np.uint8))
    if image.has_transparency_data:
        layer = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer)
    return image.convert("RGB")


def preprocess(image: Image.Image, spec: Preprocessing) -> NDArray[np.float32]:
    """The network's input [1, 3, size, size] for an image. Raises InputError for an image without pixels.

    The square is cut in the same resampling step that scales it, so a panorama costs no more than a square.
    """
    width, height = image.size
    if not (width and height):
        raise InputError(f"an image of {width} x {height} pixels has nothing to classify")
    shorter = min(width, height)
    side = min(shorter, shorter * spec.size / spec.resize)
    left, top = (width - side) / 2, (height - side) / 2
    square = to_rgb(image).resize((spec.size, spec.size), spec.resample, box=(left, top, left + side, top + side))
    pixels = np.asarray(square, np.float32) / 255
    normalized = (pixels - np.array(spec.mean, np.float32)) / np.array(spec.std, np.float32)
    return np.ascontiguousarray(normalized.transpose(2, 0, 1)[None])


@cache
def imagenet_classes() -> tuple[str, ...]:
    """The 1000 ImageNet-1k class names, by index."""
    text = (files("npu_sim") / "data" / "imagenet_classes.txt").read_text(encoding="utf-8")
    return tuple(text.splitlines())


def _resnet18() -> "nn.Module":
    from npu_sim.models.resnet import resnet18

    return resnet18()


def _resnet50() -> "nn.Module":
    from npu_sim.models.resnet import resnet50

    return resnet50()


def _efficientnet_lite0() -> "nn.Module":
    from npu_sim.models.efficientnet import efficientnet_lite0

    return efficientnet_lite0()


def _efficientnet_lite0_checkpoint() -> Path:
    from npu_sim.models.efficientnet import efficientnet_lite0_checkpoint

    return efficientnet_lite0_checkpoint()


TORCHVISION = Preprocessing((0.485, 0.456, 0.406), (0.229, 0.224, 0.225), Image.Resampling.BILINEAR)

# The checkpoint's package shows ImageNet's mean and std, but its weights are TensorFlow's, trained on
# (x - 127) / 128: with that, what photographs produce at every BatchNorm fits the running statistics.
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
    """The registered model of that name. Raises InputError that lists the names there are."""
    if name not in MODELS:
        raise InputError(f"no vision model named {name!r}; there are {', '.join(MODELS)}")
    return MODELS[name]


def extract_model_ir(model: VisionModel) -> dict[str, Any]:
    """IR of the model for one image, traced on the meta device: no weights are touched."""
    import torch
    from torch_ir import extract_ir

    size = model.preprocessing.size
    with torch.device("meta"):
        module, image = model.build().eval(), torch.empty(1, 3, size, size)
    ir: dict[str, Any] = extract_ir(module, (image,), model_name=model.name).to_dict()
    return ir


def model_weights(model: VisionModel, path: str | os.PathLike[str] | None = None) -> dict[str, "Tensor"]:
    """The model's state dict in float32: from `path`, else from its own checkpoint, else seeded and random.

    A file is any that `read_weights` reads. Random weights come with a UserWarning. Raises WeightError for a file that
    cannot be read or does not fit.
    """
    import torch

    from npu_runtime.cpu.backend import numpy_to_tensor
    from npu_sim.arrays import read_weights

    if path is None and model.checkpoint is None:
        from npu_sim.models.resnet import seed_weights

        warnings.warn(f"{model.name} runs on random weights: its labels mean nothing (pass weights=...)", stacklevel=2)
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
        raise WeightError(f"{checkpoint} holds an array that PyTorch cannot: {error}") from error
    with torch.device("meta"):
        module = model.build()
    try:
        module.load_state_dict(state, strict=True, assign=True)
    except RuntimeError as error:
        raise WeightError(f"{checkpoint} does not fit {model.name}: {error}") from None
    return {key: value.float() if value.is_floating_point() else value for key, value in state.items()}


class Classifier:
    """A classifier compiled for a device and ready to run.

    The program is cached as .npubin in $NPU_SIM_CACHE, else ~/.cache/npu-simulation, under a hash of all that
    went into it. `weights` is a .safetensors, .npz or .pth with torchvision's parameter names.
    """

    def __init__(
        self,
        name: str,
        *,
        device: "Device | str | None" = None,
        weights: str | os.PathLike[str] | None = None,
        compute_dtype: str | None = None,
    ) -> None:
        from npu_runtime import Device, Executor, load_weights

        self.model = find_model(name)
        state = model_weights(self.model, weights)
        self._device = device if isinstance(device, Device) else Device(device) if device else Device()
        self.program = compile_cached(extract_model_ir(self.model), compute_dtype, self._device.backend.target)
        self._executor = Executor(self.program, self._device)
        self._weights = load_weights(state, self.program, self._device)

    def logits(self, inputs: NDArray[np.float32]) -> NDArray[np.float32]:
        """Logits [1, 1000] of a preprocessed image [1, 3, size, size]."""
        from npu_runtime import NPUBuffer

        source, result = self.program.input_specs[0], self.program.output_specs[0]
        buffer = NPUBuffer.from_numpy(inputs, self._device, spec=source)
        outputs = self._executor.run(inputs={source.name: buffer}, weights=self._weights)
        return np.asarray(outputs[result.name].to_numpy(spec=result), np.float32)

    def classify(self, image: Image.Image | str | os.PathLike[str], top: int = 5) -> list[Prediction]:
        """The `top` likeliest classes of an image (or image file), best first.

        Raises InputError for an unusable image or `top`, NPUError where the logits are not finite.
        """
        classes = imagenet_classes()
        if not 1 <= top <= len(classes):
            raise InputError(f"top must be from 1 to {len(classes)}, not {top}")
        picture = image if isinstance(image, Image.Image) else load_image(image)
        logits = self.logits(preprocess(picture, self.model.preprocessing))[0]
        if not np.isfinite(logits).all():
            raise NPUError(f"{self.model.name} gave logits that are not finite; its weights overflow the compute dtype")
        exponentials = np.exp(logits - logits.max(), dtype=np.float64)
        probabilities = exponentials / exponentials.sum()
        best = np.argsort(-probabilities, kind="stable")[:top]
        return [Prediction(classes[index], float(probabilities[index]), int(index)) for index in best]
