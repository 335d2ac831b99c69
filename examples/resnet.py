"""A ResNet from PyTorch to the device, step by step: extract, compile, save, load, run, compare.

    python examples/resnet.py [--model resnet50] [--size 224] [--device cpu]

The weights are random, from a fixed seed, so the labels mean nothing, but the numbers can be compared. Prints a summary
of the compiled program, and how its output agrees with PyTorch's in float32.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

import npu_compiler
from npu_compiler import CompiledProgram
from npu_runtime import Device, Executor, NPUBuffer, load_weights
from npu_sim.extract import extract_ir
from npu_sim.vision.resnet import random_images, resnet18, resnet50, seed_weights

MODELS = {"resnet18": resnet18, "resnet50": resnet50}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="resnet18")
    parser.add_argument("--size", type=int, default=224, help="Height and width of the image.")
    parser.add_argument("--device", help="Device name. Default: the best one on this machine.")
    args = parser.parse_args()

    model = MODELS[args.model]().eval()
    seed_weights(model, seed=0)
    image = random_images(1, seed=1, size=args.size)
    device = Device(args.device)

    with tempfile.TemporaryDirectory() as folder:
        save_file(model.state_dict(), Path(folder, "model.safetensors"))
        ir = extract_ir(model, (image,), name=args.model)
        npu_compiler.compile(ir, device.backend.target).save(Path(folder, "model.npubin"))

        program = CompiledProgram.load(Path(folder, "model.npubin"))
        weights = load_weights(Path(folder, "model.safetensors"), program, device)
    print(program.describe(kernels=False))

    executor = Executor(program, device)
    source, result = program.input_specs[0], program.output_specs[0]
    buffer = NPUBuffer.from_numpy(image.numpy(), device, spec=source)
    executor.run({source.name: buffer}, weights)  # the first run prepares everything
    start = time.perf_counter()
    logits = executor.run({source.name: buffer}, weights)[result.name].to_numpy(spec=result)
    seconds = time.perf_counter() - start

    with torch.no_grad():
        reference = model(image).numpy()
    ours, theirs = (set(np.argsort(array[0])[-5:].tolist()) for array in (logits, reference))
    print(f"\n{args.model} on {device}: {seconds * 1e3:.1f} ms in {program.compute_dtype}")
    print(f"Pearson r with PyTorch in float32: {np.corrcoef(logits.ravel(), reference.ravel())[0, 1]:.6f}")
    print(f"top five in common: {len(ours & theirs)}, same first: {logits.argmax() == reference.argmax()}")


if __name__ == "__main__":
    main()
