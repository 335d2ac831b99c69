"""Copies to channels-last on CUDA in which squares of pixels become channels, against PyTorch, compiled for the CPU."""

from __future__ import annotations

from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from cuda_on_cpu import run_on_cpu
from drawn import drawn

from cuda_compiler.passes.packed_operands import packing
from cuda_compiler.rules.table import expand
from cuda_compiler.specialization.specializer import Specializer
from npu_compiler.program.plan import BufferAllocation, ExecutionPlan
from npu_compiler.program.views import View, contiguous_strides


@pytest.mark.parametrize("fold", drawn([1, 2, 3, 4, 8, 16], 1 / 2, str))
def test_squares_of_pixels_become_channels(fold: int, seed: int, tmp_path: Path) -> None:
    draw = Random(seed)
    images, channels, edge = draw.randint(1, 2), draw.choice([1, 3, 4, 9]), draw.choice([1, 2, 4, 8])
    height, width = draw.randint(1, 4) * fold + draw.choice([0, 1]), edge * draw.choice([4, 8, 12])
    shape, last = (images, channels, height, width), draw.random() < 0.3
    top, left = draw.randint(0, fold), draw.choice([0, 0, fold // 2, draw.randint(0, fold)])
    rows, columns = (
        -(-(size + before) // fold) + draw.randint(0, 1) for size, before in ((height, top), (width, left))
    )
    made = -(-channels * fold * fold // 8) * 8
    steps = (height * width * channels, 1, width * channels, channels) if last else contiguous_strides(shape)
    x = View("x", shape, steps, 0, "float16")
    out = View("out", (images, made, rows, columns), (rows * columns * made, 1, columns * made, made), 0, "float16")
    params = {"fold": fold, "top": top, "left": left, "fill": draw.choice([0, 2])}
    make = Specializer()
    calls = expand(make, packing(x, out, "packed", params))
    buffers = {view.buffer: BufferAllocation(view.buffer, "arena", (view.numel,), "float16") for view in (x, out)}
    plan = ExecutionPlan([], calls, buffers, [], [], {"out": out}, {}, {}, {}, sources=make.sources)
    values = np.random.default_rng(seed).standard_normal(x.numel).astype(np.float16)
    found = torch.from_numpy(run_on_cpu(plan, {"x": values}, tmp_path)["out"]).reshape(images, rows, columns, made)

    image = torch.from_numpy(values)
    image = image.reshape(images, height, width, channels).permute(0, 3, 1, 2) if last else image.reshape(shape)
    padding = (left, columns * fold - width - left, top, rows * fold - height - top)
    squares = F.pixel_unshuffle(F.pad(image, padding, value=params["fill"]), fold).permute(0, 2, 3, 1)
    torch.testing.assert_close(found[..., : squares.shape[3]], squares, atol=0, rtol=0)
    assert (found[..., squares.shape[3] :] == params["fill"]).all()
