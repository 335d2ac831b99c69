"""Squeeze-and-excitation by one kernel on CUDA, whose clusters of blocks run on the CPU."""

from __future__ import annotations

from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from cuda_on_cpu import run_on_cpu

from cuda_compiler.cuda_program import kernel_launch_of
from cuda_compiler.passes.squeeze_excite import KERNEL
from cuda_compiler.rules.table import expand
from cuda_compiler.specialization.specializer import Specializer
from npu_compiler.program.kernels import KernelCall
from npu_compiler.program.plan import BufferAllocation, ExecutionPlan
from npu_compiler.program.views import View, contiguous_strides


def rows(name: str, *shape: int) -> View:
    return View(name, shape, contiguous_strides(shape), 0, "float16")


def taps(name: str, made: int, channels: int) -> View:
    """The weight of a 1 × 1 convolution, channels-last."""
    return View(name, (made, channels, 1, 1), (channels, 1, channels, channels), 0, "float16")


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("gate", ["sigmoid", "hardsigmoid"])
def test_drawn_images_are_gated_as_by_pytorch(gate: str, has_bias: bool, seed: int, tmp_path: Path) -> None:
    draw, generator = Random(seed), np.random.default_rng(seed)
    images, channels, hidden = draw.randint(1, 2), 8 * draw.choice([1, 3, 9, 16, 33, 60]), draw.randint(1, 60)
    height, width = draw.randint(1, 17), draw.randint(1, 17)
    padded = (hidden + 7) // 8 * 8
    x, out = (
        View(
            name,
            (images, channels, height, width),
            (height * width * channels, 1, width * channels, channels),
            0,
            "float16",
        )
        for name in ("x", "out")
    )
    weights = [taps("squeeze", hidden, channels), taps("excite", channels, padded)]
    biases = [rows("squeeze_bias", hidden), rows("excite_bias", channels)]
    inputs = (x, weights[0], *biases[:has_bias], weights[1], *biases[1 : 1 + has_bias])
    params = {"activation": "silu", "gate": gate, "squeeze_bias": has_bias, "excite_bias": has_bias}
    make = Specializer()
    calls = expand(make, KernelCall(KERNEL, "", inputs, (out,), params, "gated", 0, 0))
    assert kernel_launch_of(calls[0]).grid == (images, 1, 8)

    buffers = {view.buffer: BufferAllocation(view.buffer, "arena", (view.numel,), "float16") for view in (*inputs, out)}
    values = {view.buffer: generator.standard_normal(view.numel).astype(np.float16) for view in (x, *weights, *biases)}
    values["x"] = generator.uniform(-1, 3, x.numel).astype(np.float16)
    plan = ExecutionPlan([], calls, buffers, [], [], {"out": out}, {}, {}, {}, sources=make.sources)
    memory = run_on_cpu(plan, {name: values[name] for name in buffers if name != "out"}, tmp_path)

    held = {name: torch.from_numpy(value).float() for name, value in values.items()}
    image = held["x"].reshape(images, height, width, channels)
    squeeze, excite = held["squeeze"].reshape(hidden, channels), held["excite"].reshape(channels, padded)[:, :hidden]
    squeeze_bias, excite_bias = (held[bias.buffer] if has_bias else None for bias in biases)
    inner = F.silu(F.linear(image.mean((1, 2)), squeeze, squeeze_bias))
    factors = getattr(F, gate)(F.linear(inner, excite, excite_bias))
    found = torch.from_numpy(memory["out"]).reshape(image.shape).float()
    torch.testing.assert_close(found, image * factors[:, None, None], atol=2e-3, rtol=2e-3)
