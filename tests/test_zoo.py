"""Every model of the zoo against PyTorch: from `extract_ir` through partition() and compile() to design, section 6."""

from __future__ import annotations

import copy
import random
import zlib
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torch_ir
from torch import Tensor, nn

import npu_compiler
from npu_compiler import PartitionPlan, is_op_supported, partition
from npu_runtime import Backend, DAGExecutor, Device, Executor, NPUBuffer
from npu_runtime.weight_loader import load_weights, to_numpy
from tests.cuda_gpu import DEVICES
from tests.metal_harness import METAL_DEVICE
from tests.numerics import assert_design6
from tests.zoo import ZOO

SAMPLES = 5
PARTLY_ON_CPU = {"CRNN", "GraphAttention"}
FAMILIES = ["bert", "gpt2", "llama", "vit", "convnext", "mobilenet_v2", "MobileNet"]
IN_BFLOAT16 = [
    "ResNet", "MobileNet", "MobileNetV3", "EfficientNet", "ShuffleNet", "DiffusionTransformer", "ShiftedWindows",
    "bert", "gpt2", "llama", "gemma2", "t5", "vit", "convnext",
]  # fmt: skip
SPLIT = ["UNet", "OddConvolutions", "Conformer", "RelativeBuckets", "WritesThroughViews", "UnrolledLSTM", "t5", "llama"]
DEVICE = pytest.mark.parametrize("device", DEVICES)
EVERY_DEVICE = pytest.mark.parametrize("device", [*DEVICES, METAL_DEVICE])

Arrays = list[np.ndarray]
Samples = Sequence[Sequence[Tensor]]


@cache
def build(name: str) -> nn.Module:
    return ZOO[name].build()


@cache
def extracted(name: str) -> Any:
    return extract(build(name), draw(name, 0)[0])


def extract(model: nn.Module, inputs: Sequence[Tensor]) -> Any:
    """The IR of a copy of the model without values, as users are told to extract it."""
    with torch.no_grad():
        empty = copy.deepcopy(model).to("meta")
    return torch_ir.extract_ir(empty, tuple(torch.empty_like(x, device="meta") for x in inputs), model_name="zoo")


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """The state dict with what it leaves out: buffers that are not persistent, and the second name of a tied weight."""
    both = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return {name: value.detach() for name, value in both}


@cache
def opened(device: str) -> Backend:
    return Device(device).backend


def run_partitioned(
    plan: PartitionPlan, weights: dict[str, Tensor], samples: Samples, backend: Backend
) -> list[Arrays]:
    executor = DAGExecutor(plan, backend)
    executor.load_weights(weights)
    names = plan.graph.inputs
    return [list(executor.execute(dict(zip(names, map(to_numpy, sample), strict=True))).values()) for sample in samples]


def run_compiled(ir: Any, weights: dict[str, Tensor], samples: Samples, backend: Backend) -> list[Arrays]:
    program = npu_compiler.compile(ir, backend.target)
    executor, loaded = Executor(program, backend), load_weights(weights, program, backend, strict=False)
    results = []
    for sample in samples:
        named = zip(program.input_specs, sample, strict=True)
        inputs = {spec.name: NPUBuffer.from_numpy(to_numpy(x), backend, spec) for spec, x in named}
        outputs = executor.run(inputs, loaded)
        results.append([outputs[spec.name].to_numpy(spec) for spec in program.output_specs])
    return results


def run_torch(model: nn.Module, dtype: torch.dtype, samples: Samples) -> list[Arrays]:
    model = copy.deepcopy(model).to(dtype)
    results = []
    for sample in samples:
        with torch.no_grad():
            outputs = model(*(x.to(dtype) if x.is_floating_point() else x for x in sample))
        results.append([x.double().numpy() for x in ([outputs] if isinstance(outputs, Tensor) else outputs)])
    return results


def draw(name: str, seed: int) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [[spec.sample(generator) for spec in ZOO[name].inputs] for _ in range(SAMPLES)]


def check(ours: list[Arrays], reference: list[Arrays], half: list[Arrays], seed: int) -> None:
    """Design 6 for each output, over all samples at once; a sample is a row, unless it is a batch of class scores."""
    for results in zip(*(zip(*runs, strict=True) for runs in (ours, reference, half)), strict=True):
        a, b, c = (np.concatenate([_rows(value) for value in values]) for values in results)
        if np.array_equal(b, c):
            np.testing.assert_array_equal(a, b, err_msg=f"seed {seed}")
        else:
            assert_design6(a, b, c, seed=seed)


def _rows(value: np.ndarray) -> np.ndarray:
    value = value.astype(np.float64)
    return value if value.ndim == 2 and value.shape[1] > 1 else value.reshape(1, -1)


@EVERY_DEVICE
@pytest.mark.parametrize("name", ZOO)
def test_agrees_with_pytorch(name: str, device: str, seed: int) -> None:
    model, ir, samples = build(name), extracted(name), draw(name, seed)
    reference, half = run_torch(model, torch.float32, samples), run_torch(model, torch.float16, samples)
    ours = run_partitioned(partition(ir), weights_of(model), samples, opened(device))
    check(ours, reference, half, seed)


@DEVICE
@pytest.mark.parametrize("name", [name for name in ZOO if name not in PARTLY_ON_CPU])
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
@pytest.mark.parametrize("name", IN_BFLOAT16)
def test_bfloat16_models_agree_in_their_own_dtype(name: str, device: str, seed: int) -> None:
    model = copy.deepcopy(build(name)).to(torch.bfloat16)
    samples = [[x.bfloat16() if x.is_floating_point() else x for x in sample] for sample in draw(name, seed)]
    plan = partition(extract(model, samples[0]))
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
