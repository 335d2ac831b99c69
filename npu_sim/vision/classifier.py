"""`Classifier`: a network compiled for a device that assigns an ImageNet class to an image."""

import os
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from npu_compiler import CompileOptions
from npu_compiler.errors import InputError, NPUError
from npu_sim.arrays import read_weights
from npu_sim.cache import compile_cached
from npu_sim.vision.images import load_image, preprocess
from npu_sim.vision.models import extract_model_ir, find_model, model_weights, quantized_files

if TYPE_CHECKING:
    from npu_runtime import Device


@dataclass(frozen=True)
class Prediction:
    """An ImageNet class name, its probability in [0, 1], and its index in [0, 1000)."""

    label: str
    probability: float
    index: int


@cache
def imagenet_classes() -> tuple[str, ...]:
    """Return the 1000 ImageNet-1k class names, by index."""
    text = (files("npu_sim") / "data" / "imagenet_classes.txt").read_text(encoding="utf-8")
    return tuple(text.splitlines())


class Classifier:
    """A classifier compiled for a device and ready to run. The compiled program is cached (see `compile_cached`)."""

    def __init__(
        self,
        name: str,
        *,
        device: "Device | str | None" = None,
        weights: str | os.PathLike[str] | None = None,
        compute_dtype: str | None = None,
    ) -> None:
        """Compile the model, or find its program in the cache, and upload the weights.

        Args:
            name: One of `MODELS`.
            device: A device or its name. Default: the best one on this machine.
            weights: A .safetensors, .npz or .pth file with torchvision's parameter names, or the folder that
                `quantize_model` has written. Default: see `model_weights`.
            compute_dtype: `float16`, `bfloat16` or `float32`. Default: the compiler's choice for this model.

        Raises:
            InputError: there is no such model, or a package that it needs is not installed.
            WeightError: the weights cannot be read or do not fit.
            DeviceError: the device is unknown or cannot be used.
        """
        from npu_runtime import Device, Executor, load_weights

        self.model = find_model(name)
        quantized = None if weights is None else quantized_files(Path(weights))
        state: Any = model_weights(self.model, weights) if quantized is None else read_weights(quantized[1])
        ir = extract_model_ir(self.model) if quantized is None else quantized[0]
        self._device = device if isinstance(device, Device) else Device(device) if device else Device()
        self.program = compile_cached(ir, self._device.backend.target, CompileOptions(compute_dtype))
        self._executor = Executor(self.program, self._device)
        self._weights = load_weights(state, self.program, self._device)

    def logits(self, inputs: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the logits [1, 1000] of a preprocessed image [1, 3, size, size]."""
        from npu_runtime import NPUBuffer

        source, result = self.program.input_specs[0], self.program.output_specs[0]
        buffer = NPUBuffer.from_numpy(inputs, self._device, spec=source)
        outputs = self._executor.run(inputs={source.name: buffer}, weights=self._weights)
        return np.asarray(outputs[result.name].to_numpy(spec=result), np.float32)

    def classify(self, image: Image.Image | str | os.PathLike[str], top: int = 5) -> list[Prediction]:
        """Return the `top` most probable classes of an image or image file, in descending order.

        Raises:
            InputError: the image cannot be used, or `top` is out of range.
            NPUError: the logits are not finite.
        """
        classes = imagenet_classes()
        if not 1 <= top <= len(classes):
            raise InputError(f"top must be from 1 to {len(classes)}, not {top}")
        picture = image if isinstance(image, Image.Image) else load_image(image)
        logits = self.logits(preprocess(picture, self.model.preprocessing))[0]
        if not np.isfinite(logits).all():
            raise NPUError(f"the logits of {self.model.name} are not finite; try --dtype float32")
        exponentials = np.exp(logits - logits.max(), dtype=np.float64)
        probabilities = exponentials / exponentials.sum()
        best = np.argsort(-probabilities, kind="stable")[:top]
        return [Prediction(classes[index], float(probabilities[index]), int(index)) for index in best]
