"""Effect of 8-bit quantization on EfficientNet-Lite0's answers for photographs outside its calibration set.

    python -m benchmarks.quality.vision [--keep _blocks.0._depthwise_conv.weight]

The photographs are those of `skimage.data`. Half of them give calibration images, random crops; the others are judged,
each whole and in four quarters, mirrored too. Then the halves change places. PyTorch computes both networks.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import skimage
from PIL import Image

from npu_compiler import read_ir
from npu_runtime.cpu_fallback import CPUPartition
from npu_sim.quantizing.networks.quantize import quantize_network
from npu_sim.vision import find_model, preprocess
from npu_sim.vision.models import extract_model_ir, model_weights

PHOTOGRAPHS = (
    "astronaut.png",
    "brick.png",
    "camera.png",
    "cell.png",
    "chelsea.png",
    "coffee.png",
    "coins.png",
    "grass.png",
    "gravel.png",
    "hubble_deep_field.jpg",
    "ihc.png",
    "moon.png",
    "motorcycle_left.png",
    "retina.jpg",
    "rocket.jpg",
)
CROPS = 4  # of each photograph to calibrate with
MODEL = find_model("efficientnet-lite0")


def photograph(name: str) -> Image.Image:
    return Image.open(Path(skimage.__file__).parent / "data" / name).convert("RGB")


def views(image: Image.Image) -> Iterator[np.ndarray]:
    """Yield inputs of the network from an image and its four quarters, each as it is and mirrored."""
    width, height = image.size
    corners = [(x, y) for x in (0, width - width // 2) for y in (0, height - height // 2)]
    boxes = [(0, 0, width, height), *((x, y, x + width // 2, y + height // 2) for x, y in corners)]
    for part in (image.crop(box) for box in boxes):
        yield preprocess(part, MODEL.preprocessing)
        yield preprocess(part.transpose(Image.Transpose.FLIP_LEFT_RIGHT), MODEL.preprocessing)


def random_crops(image: Image.Image, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """Yield inputs of the network from random parts with 40 to 100 % of the image's width and height."""
    for _ in range(CROPS):
        share = rng.uniform(0.4, 1.0)
        width, height = (int(side * share) for side in image.size)
        x, y = int(rng.integers(0, image.width - width + 1)), int(rng.integers(0, image.height - height + 1))
        yield preprocess(image.crop((x, y, x + width, y + height)), MODEL.preprocessing)


def judge(keep: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return the logits [views, classes] of the float network and of the quantized one, for all photographs.

    Each photograph is judged by the network that was calibrated without it.
    """
    ir, state = extract_model_ir(MODEL), model_weights(MODEL)
    exact = CPUPartition(read_ir(ir), state)
    rng = np.random.default_rng(0)
    logits: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
    for half in (0, 1):
        calibration = [x for name in PHOTOGRAPHS[half::2] for x in random_crops(photograph(name), rng)]
        network = quantize_network(ir, state, calibration, keep=keep)
        rounded = CPUPartition(read_ir(network.ir), network.weights)
        for name in PHOTOGRAPHS[1 - half :: 2]:
            for x in views(photograph(name)):
                for outputs, part in zip(logits, (exact, rounded), strict=True):
                    outputs.append(next(iter(part.run({part.graph.inputs[0]: x}).values())).ravel())
    return np.stack(logits[0]), np.stack(logits[1])


def summary(exact: np.ndarray, rounded: np.ndarray) -> str:
    """Return the share of equal top classes and the RMS difference of the logits, without their means, as text."""
    same = int((exact.argmax(1) == rounded.argmax(1)).sum())
    lost = rounded - exact
    error = float(np.sqrt(np.square(lost - lost.mean(1, keepdims=True)).mean()))
    return f"same class: {same} of {len(exact)} ({same / len(exact):.1%}); logits differ by {error:.3f} (RMS)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", nargs="*", default=[], help="weights whose layers stay in floats")
    print(summary(*judge(parser.parse_args().keep)))


if __name__ == "__main__":
    main()
