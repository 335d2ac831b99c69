"""The zoo's models built, extracted and run, by PyTorch and by a backend, and their results compared."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
import torch_ir
from numerics import MIN_DRAWS, assert_design6
from torch import Tensor, nn
from traces import traced
from zoo import ZOO

import npu_compiler
from npu_compiler import PartitionPlan
from npu_runtime import Backend, DAGExecutor, Executor, NPUBuffer
from npu_runtime.weight_loader import load_weights, to_numpy
from npu_sim.module.substitutes import Substitutes

IN_BFLOAT16 = [
    "ResNet",
    "MobileNet",
    "MobileNetV3",
    "EfficientNet",
    "ShuffleNet",
    "DiffusionTransformer",
    "ShiftedWindows",
    "bert",
    "gpt2",
    "llama",
    "gemma2",
    "t5",
    "vit",
    "convnext",
]

Arrays = list[np.ndarray]
Samples = Sequence[Sequence[Tensor]]


@cache
def build(name: str) -> nn.Module:
    return ZOO[name].build()


@cache
def extracted(name: str) -> Any:
    return traced(name, lambda: extract(build(name), draw(name, 0)[0]).to_dict())


@cache
def extracted_in_bfloat16(name: str) -> Any:
    def extract_it() -> dict[str, Any]:
        inputs = [x.bfloat16() if x.is_floating_point() else x for x in draw(name, 0)[0]]
        return extract(copy.deepcopy(build(name)).to(torch.bfloat16), inputs).to_dict()  # type: ignore[no-any-return]

    return traced(f"{name} in bfloat16", extract_it)


def extract(model: nn.Module, inputs: Sequence[Tensor]) -> Any:
    """The IR of a copy of the model without values, as users are told to extract it.

    Outside `no_grad` some versions of PyTorch keep the regions of a model that have it as nodes; without `Substitutes`
    numbers that some versions of transformers make on the meta device have no values.
    """
    with torch.no_grad(), Substitutes():
        empty = copy.deepcopy(model).to("meta")
        return torch_ir.extract_ir(empty, tuple(torch.empty_like(x, device="meta") for x in inputs), model_name="zoo")


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """The state dict with what it leaves out: buffers that are not persistent, and the second name of a tied weight."""
    both = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return {name: value.detach() for name, value in both}


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
    return [[spec.sample(generator) for spec in ZOO[name].inputs] for _ in range(MIN_DRAWS)]


def check(ours: list[Arrays], reference: list[Arrays], half: list[Arrays], seed: int) -> None:
    """Section 6 of the architecture for each output, over all samples.

    A sample is one row, unless it is a batch of class scores.
    """
    for results in zip(*(zip(*runs, strict=True) for runs in (ours, reference, half)), strict=True):
        a, b, c = (np.stack([_rows(value) for value in values]) for values in results)
        if np.array_equal(b, c):
            np.testing.assert_array_equal(a, b, err_msg=f"seed {seed}")
        else:
            assert_design6(a, b, c, seed=seed)


def _rows(value: np.ndarray) -> np.ndarray:
    value = value.astype(np.float64)
    return value if value.ndim == 2 and value.shape[1] > 1 else value.reshape(1, -1)
