"""Conversion of photographs to a network's input: decoding, colours, resizing, cropping and normalization."""

import os
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from npu_compiler.errors import InputError, NPUError

Triple = tuple[float, float, float]


@dataclass(frozen=True)
class Preprocessing:
    """The preprocessing of images with which a network was trained.

    The image is resized until its shorter side has `resize` pixels, cropped to the centred `size` x `size` square, and
    normalized per channel: (x - mean) / std with x in [0, 1].

    Attributes:
        mean, std: Values for red, green and blue.
        resample: The filter to resize with.
        size: Pixels of the square's side.
        resize: Pixels of the shorter side before cropping.
    """

    mean: Triple
    std: Triple
    resample: Image.Resampling
    size: int = 224
    resize: int = 256


def load_image(path: str | os.PathLike[str]) -> Image.Image:
    """Read an image file as 8-bit RGB with its EXIF rotation applied; of an animation, the first frame.

    Raises:
        InputError: the file is missing, empty, damaged, not an image, or larger than Pillow's pixel limit.
    """
    path = Path(path)
    if not path.exists():
        raise InputError(f"no such image: {path}")
    if not path.is_file():
        raise InputError(f"{path} is not a file; give an image file")
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
            raise InputError(f"{path} has more than {limit} million pixels; resize it first") from None
        except PermissionError:
            raise InputError(f"cannot read {path}: permission denied") from None
        except Exception as error:  # Pillow's decoders raise errors of many types on damaged data
            raise InputError(f"{path} is a damaged or truncated image: {error}") from error


def to_rgb(image: Image.Image) -> Image.Image:
    """Convert any Pillow image to mode RGB; transparency is blended over white, 16-bit grey scaled to 8 bits.

    Raises:
        InputError: the pixels are floating-point numbers, whose range is unknown.
    """
    if image.mode == "F":
        raise InputError("the range of floating-point pixels is unknown; convert the image to 8 or 16 bits first")
    if image.mode == "I" or image.mode.startswith("I;16"):
        grey = np.clip(np.asarray(image.convert("I")), 0, 0xFFFF) >> 8
        image = Image.fromarray(grey.astype(np.uint8))
    if image.has_transparency_data:
        layer = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer)
    return image.convert("RGB")


def preprocess(image: Image.Image, spec: Preprocessing) -> NDArray[np.float32]:
    """Return the network's input [1, 3, size, size] for an image.

    Resizing and cropping are one resampling step, so a panorama costs no more than a square image.

    Raises:
        InputError: the image has no pixels.
    """
    width, height = image.size
    if not (width and height):
        raise InputError(f"the image has no pixels ({width} x {height})")
    shorter = min(width, height)
    side = min(shorter, shorter * spec.size / spec.resize)
    left, top = (width - side) / 2, (height - side) / 2
    square = to_rgb(image).resize((spec.size, spec.size), spec.resample, box=(left, top, left + side, top + side))
    pixels = np.asarray(square, np.float32) / 255
    normalized = (pixels - np.array(spec.mean, np.float32)) / np.array(spec.std, np.float32)
    return np.ascontiguousarray(normalized.transpose(2, 0, 1)[None])
