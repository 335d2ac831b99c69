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
    more = [12, 20, 30, 36] if fold == 1 else []
    images, channels, edge = draw.randint(1, 2), draw.choice([1, 3, 4, 9, *more]), draw.choice([1, 2, 4, 8])
    height, width = draw.randint(1, 4) * fold + draw.choice([0, 1]), edge * draw.choice([4, 8, 12])
    shape, last = (images, channels, height, width), draw.random() < 0.3
    top, left = draw.randint(0, fold), draw.choice([0, 0, fold // 2, draw.randint(0, fold)])
    rows, columns = (
        -(-(size + before) // fold) + draw.randint(0, 1) for size, before in ((height, top), (width, left))
    )
    made = -(-channels * fold * fold // 8) * 8
    apart, first = (channels + draw.choice([0, 1, 2, 4]), draw.choice([0, 2, 4])) if last else (channels, 0)
    steps = (height * width * apart, 1, width * apart, apart) if last else contiguous_strides(shape)
    x = View("x", shape, steps, first, "float16")
    out = View("out", (images, made, rows, columns), (rows * columns * made, 1, columns * made, made), 0, "float16")
    params = {"fold": fold, "top": top, "left": left, "fill": draw.choice([0, 2])}
    make = Specializer()
    calls = expand(make, packing(x, out, "packed", params))
    size = first + images * height * width * apart
    sizes = {"x": size, "out": out.numel}
    buffers = {name: BufferAllocation(name, "arena", (numel,), "float16") for name, numel in sizes.items()}
    plan = ExecutionPlan([], calls, buffers, [], [], {"out": out}, {}, {}, {}, sources=make.sources)
    values = np.random.default_rng(seed).standard_normal(size).astype(np.float16)
    found = torch.from_numpy(run_on_cpu(plan, {"x": values}, tmp_path)["out"]).reshape(images, rows, columns, made)

    image = torch.from_numpy(values).as_strided(shape, steps, first)
    padding = (left, columns * fold - width - left, top, rows * fold - height - top)
    squares = F.pixel_unshuffle(F.pad(image, padding, value=params["fill"]), fold).permute(0, 2, 3, 1)
    torch.testing.assert_close(found[..., : squares.shape[3]], squares, atol=0, rtol=0)
    assert (found[..., squares.shape[3] :] == params["fill"]).all()
