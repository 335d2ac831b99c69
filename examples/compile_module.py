"""One line from a PyTorch module to a faster one: EfficientNet-Lite0 on a photograph.

    python examples/compile_module.py [--device cpu] [--dtype float16]

Compiles the module, compares it with PyTorch, prints what runs where, saves it to one file, and loads that again.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import skimage.data
import torch
from PIL import Image

import npu_sim
from npu_runtime.torch_arrays import numpy_to_tensor
from npu_sim.vision.images import preprocess
from npu_sim.vision.models import find_model, model_weights


def milliseconds(call: Callable[[], Any]) -> float:
    """The median of several calls."""
    times = []
    for _ in range(9):
        start = time.perf_counter()
        call()
        times.append(1000 * (time.perf_counter() - start))
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", help="Device name. Default: the CPU, where the module is.")
    parser.add_argument("--dtype", help="Compute dtype. Default: the module's, float32.")
    args = parser.parse_args()

    known = find_model("efficientnet-lite0")
    model = known.build().eval()
    model.load_state_dict(model_weights(known))
    photograph: Any = skimage.data
    image = numpy_to_tensor(preprocess(Image.fromarray(photograph.cat()), known.preprocessing))

    compiled = npu_sim.compile(model, (image,), device=args.device, dtype=args.dtype)

    with torch.no_grad():
        ours, theirs = compiled(image), model(image)
        print(compiled.report())
        print(f"same five first: {ours.topk(5).indices.tolist() == theirs.topk(5).indices.tolist()}")
        print(f"PyTorch {milliseconds(partial(model, image)):.1f} ms, ", end="")
        print(f"compiled {milliseconds(partial(compiled, image)):.1f} ms")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "efficientnet.npumod")
        compiled.save(path)
        loaded = npu_sim.load(path, device=args.device)
        again = loaded(image.numpy())
        print(
            f"loaded from {path.stat().st_size / 1e6:.1f} MB, largest difference {abs(again - ours.numpy()).max():.1e}"
        )


if __name__ == "__main__":
    main()
