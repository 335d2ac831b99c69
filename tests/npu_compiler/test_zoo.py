"""Every model of the zoo, from `extract_ir` through partition() and compile(), against PyTorch.

What right means is in docs/architecture.md, section 6.
"""

from __future__ import annotations

import copy
import random
import zlib
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from cuda_gpu import DEVICES
from drawn import drawn
from metal_harness import METAL_DEVICE
from torch import Tensor, nn
from zoo import ZOO
from zoo_runs import (
    IN_BFLOAT16,
    build,
    check,
    draw,
    extract,
    extracted,
    extracted_in_bfloat16,
    run_compiled,
    run_partitioned,
    run_torch,
    weights_of,
)

from npu_compiler import is_op_supported, partition
from npu_runtime import Backend, DAGExecutor, Device

PARTLY_ON_CPU = {"CRNN", "GraphAttention"}
FAMILIES = ["bert", "gpt2", "llama", "vit", "convnext", "mobilenet_v2", "MobileNet"]
SPLIT = ["UNet", "OddConvolutions", "Conformer", "RelativeBuckets", "WritesThroughViews", "UnrolledLSTM", "t5", "llama"]
DEVICE = pytest.mark.parametrize("device", DEVICES)
EVERY_DEVICE = pytest.mark.parametrize("device", [*DEVICES, METAL_DEVICE])


@cache
def opened(device: str) -> Backend:
    return Device(device).backend


@EVERY_DEVICE
@pytest.mark.parametrize("name", drawn(ZOO, 1 / 4))
def test_agrees_with_pytorch(name: str, device: str, seed: int) -> None:
    model, ir, samples = build(name), extracted(name), draw(name, seed)
    reference, half = run_torch(model, torch.float32, samples), run_torch(model, torch.float16, samples)
    ours = run_partitioned(partition(ir), weights_of(model), samples, opened(device))
    check(ours, reference, half, seed)


@DEVICE
@pytest.mark.parametrize("name", drawn([name for name in ZOO if name not in PARTLY_ON_CPU], 1 / 3))
def test_one_program_agrees_with_pytorch(name: str, device: str, seed: int) -> None:
    model, ir, samples = build(name), extracted(name), draw(name, seed)
    reference, half = run_torch(model, torch.float32, samples), run_torch(model, torch.float16, samples)
    check(run_compiled(ir, weights_of(model), samples, opened(device)), reference, half, seed)


@pytest.mark.parametrize("name", FAMILIES)
def test_nine_tenths_of_the_named_families_run_on_the_device(name: str) -> None:
    assert partition(extracted(name)).device_share >= 0.9


@DEVICE
@pytest.mark.parametrize("name", ["ResNet", "SelectiveScan", "llama", "t5"])
def test_extraction_without_gradients_agrees_too(name: str, device: str, seed: int) -> None:
    model, samples = build(name), draw(name, seed)
    with torch.no_grad():
        plan = partition(extract(model, samples[0]))
    reference, half = run_torch(model, torch.float32, samples), run_torch(model, torch.float16, samples)
    check(run_partitioned(plan, weights_of(model), samples, opened(device)), reference, half, seed)


@EVERY_DEVICE
@pytest.mark.parametrize("name", drawn(IN_BFLOAT16, 1 / 6))
def test_bfloat16_models_agree_in_their_own_dtype(name: str, device: str, seed: int) -> None:
    model = copy.deepcopy(build(name)).to(torch.bfloat16)
    samples = [[x.bfloat16() if x.is_floating_point() else x for x in sample] for sample in draw(name, seed)]
    plan = partition(extracted_in_bfloat16(name))
    assert plan.compute_dtype == "bfloat16"
    reference, half = run_torch(model, torch.float32, samples), run_torch(model, torch.bfloat16, samples)
    check(run_partitioned(plan, weights_of(model), samples, opened(device)), reference, half, seed)


@DEVICE
@pytest.mark.parametrize("name", SPLIT)
def test_any_split_between_device_and_cpu_agrees(name: str, device: str, seed: int) -> None:
    model, ir, samples = build(name), extracted(name), draw(name, seed)
    reference, half = run_torch(model, torch.float32, samples), run_torch(model, torch.float16, samples)
    for chance in (0.3, 0.8):
        plan = partition(ir, _coin(seed, chance))
        check(run_partitioned(plan, weights_of(model), samples, opened(device)), reference, half, seed)


def _coin(seed: int, chance: float) -> Callable[[str, dict[str, Any]], bool]:
    """A support function that refuses some ops, always the same for one seed."""

    def is_supported(op_type: str, attrs: dict[str, Any]) -> bool:
        lucky = random.Random(zlib.crc32(f"{seed} {op_type}".encode())).random() < chance
        return lucky and is_op_supported(op_type, attrs)

    return is_supported


@DEVICE
@pytest.mark.parametrize("value", [float("-inf"), float("inf")])
def test_an_infinity_made_an_integer_on_the_cpu_crosses_to_the_device(value: float, device: str) -> None:
    class Clipped(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.to(torch.long).clamp(-5, 5)

    plan = partition(extract(Clipped(), [torch.zeros(3)]), lambda op_type: "clamp" in op_type)
    inputs = {plan.graph.inputs[0]: np.array([1, value, -2], np.float32)}
    (ours,) = DAGExecutor(plan, opened(device)).execute(inputs).values()
    assert abs(ours[1]) == 5
    np.testing.assert_array_equal(ours[[0, 2]], [1, -2])
