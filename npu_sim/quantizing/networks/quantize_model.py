"""Quantization of a vision model, given by name, with a folder of photographs."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from npu_compiler.errors import InputError
from npu_sim.quantizing.networks.quantize import QuantizedNetwork, quantize_network
from npu_sim.vision.images import load_image, preprocess
from npu_sim.vision.models import extract_model_ir, find_model, model_weights

_MOST_IMAGES = 128
_SUFFIXES = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"})


def quantize_model(
    name: str,
    images: Path,
    output: Path,
    *,
    weights: Path | None = None,
    ranges: str = "mse",
    keep: Collection[str] = (),
    keep_worst: int = 0,
) -> QuantizedNetwork:
    """Quantize a vision model to 8 bits and write it to a folder, which `Classifier` takes as weights.

    Args:
        name: One of `MODELS`.
        images: A folder of photographs, of which 128 are used at most, or one photograph.
        output: The folder to write.
        weights: Weights, as for `model_weights`. Default: the model's own.
        ranges, keep, keep_worst: As in `quantize_network`.

    Raises:
        InputError: there is no such model, there are no images, one cannot be read, or the output cannot be written.
        WeightError: the weights cannot be read or do not fit.
    """
    model = find_model(name)
    calibration = [preprocess(load_image(path), model.preprocessing) for path in find_images(images)]
    state = model_weights(model, weights)
    network = quantize_network(
        extract_model_ir(model), state, calibration, ranges=ranges, keep=keep, keep_worst=keep_worst
    )
    network.save(output)
    return network


def find_images(path: Path) -> list[Path]:
    """Return the image files of a folder, in order and at most 128, or the one file that the path names.

    Raises:
        InputError: there are none.
    """
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise InputError(f"no calibration images at '{path}': give a folder of photographs")
    files = sorted(file for file in path.iterdir() if file.suffix.lower() in _SUFFIXES)
    if not files:
        raise InputError(f"the folder '{path}' holds no images to calibrate with ({', '.join(sorted(_SUFFIXES))})")
    return files[:_MOST_IMAGES]
