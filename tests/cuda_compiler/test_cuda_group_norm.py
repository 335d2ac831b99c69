"""Group norms of channels-last images on CUDA, by clusters of blocks and by two kernels, run on the CPU."""

from __future__ import annotations

from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from cuda_on_cpu import run_on_cpu

from cuda_compiler.cuda_program import kernel_launch_of
from cuda_compiler.rules import group_norm
from cuda_compiler.rules.table import expand
from cuda_compiler.specialization.gpu import GPU
from cuda_compiler.specialization.specializer import Specializer
from npu_compiler.program.kernels import KernelCall
from npu_compiler.program.plan import BufferAllocation, ExecutionPlan
from npu_compiler.program.views import View


def image(name: str, images: int, channels: int, pixels: int) -> View:
    strides = (pixels * channels, 1, channels, channels)
    return View(name, (images, channels, pixels, 1), strides, 0, "float16")


def plan_of(images: int, channels: int, pixels: int, groups: int) -> ExecutionPlan:
    """Return the plan of a group norm with SiLU behind it."""
    x, out = (image(name, images, channels, pixels) for name in ("x", "out"))
    factors = [View(name, (channels,), (1,), 0, "float16") for name in ("weight", "bias")]
    params = {"groups": groups, "eps": 1e-5, "has_weight": 1, "has_bias": 1, "activation": "silu"}
    make = Specializer()
    call = KernelCall("groupnorm_kernel", "", (x, *factors), (out,), params, "normed", 0, 0)
    calls = expand(make, call)
    views = [view for each in calls for view in (*each.inputs, *each.outputs)]
    buffers = {view.buffer: BufferAllocation(view.buffer, "arena", (view.numel,), view.dtype) for view in views}
    return ExecutionPlan([], calls, buffers, [], [], {"out": out}, {}, {}, {}, sources=make.sources)


@pytest.mark.parametrize("blocks", [None, 1, 2, 4, 8])
def test_drawn_images_are_normalized_as_by_pytorch(
    blocks: int | None, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`blocks` is the size of clusters; None means two kernels."""
    monkeypatch.setattr(group_norm, "CLUSTERS", {} if blocks is None else {blocks: 16})
    monkeypatch.setattr(group_norm, "_APART_TIME", 1.0)
    draw, generator = Random(seed), np.random.default_rng(seed)
    images, groups = draw.randint(1, 3), draw.choice([1, 2, 4, 32])
    channels = groups * draw.choice([width for width in (1, 2, 3, 8, 10, 24, 40) if groups * width % 8 == 0])
    pixels = draw.choice([8, 15, 16, 47, 100, 333])
    plan = plan_of(images, channels, pixels, groups)
    kernels = [call.kernel for call in plan.calls]
    assert kernels == (["groupnorm_cluster"] if blocks else ["groupnorm_chunks", "groupnorm_apply"])
    values = {name: generator.standard_normal(channels).astype(np.float16) for name in ("weight", "bias")}
    values["x"] = (30 + 3 * generator.standard_normal(images * channels * pixels)).astype(np.float16)
    found = torch.from_numpy(run_on_cpu(plan, values, tmp_path)["out"]).reshape(images, pixels, channels)
    x, weight, bias = (torch.from_numpy(values[name]).double() for name in ("x", "weight", "bias"))
    normed = F.group_norm(x.reshape(images, pixels, channels).transpose(1, 2), groups, weight, bias)
    torch.testing.assert_close(found.double(), F.silu(normed).transpose(1, 2), atol=3e-3, rtol=3e-3)


@pytest.mark.parametrize(
    ("images", "channels", "pixels", "groups"),
    [(16, 256, 56 * 56, 32), (16, 64, 56 * 56, 1), (1, 2048, 49, 32), (2, 320, 64 * 64, 32), (16, 320, 64 * 64, 32)],
)
def test_one_kernel_reads_images_of_known_models_once(images: int, channels: int, pixels: int, groups: int) -> None:
    plan = plan_of(images, channels, pixels, groups)
    launch = kernel_launch_of(plan.calls[0])
    assert len(plan.calls) == 1 and launch.shared <= GPU().shared_memory


def test_images_beyond_the_shared_memory_of_a_cluster_take_two_kernels() -> None:
    plan = plan_of(1, 512, 256 * 256, 1)
    assert [call.kernel for call in plan.calls] == ["groupnorm_chunks", "groupnorm_apply"]
