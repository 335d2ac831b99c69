"""Writes the samples for release/check.py: a saved module, a compiled program, an input and the expected output.

    python -m release.samples build/samples

They are made here because the checks run where PyTorch is not installed.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn

import npu_compiler
import npu_sim
from npu_sim.extract import extract_ir


def write_samples(folder: Path) -> None:
    """Write a small convolutional network (`model.npumod`, `model.npubin`), its input and its expected output."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 64, 10)).eval()
    x = torch.randn(1, 3, 8, 8)
    npu_sim.compile(model, (x,)).save(folder / "model.npumod")
    npu_compiler.compile(extract_ir(model, (x,))).save(folder / "model.npubin")
    np.save(folder / "x.npy", x.numpy())
    np.save(folder / "expected.npy", model(x).detach().numpy())


if __name__ == "__main__":
    write_samples(Path(sys.argv[1]))
